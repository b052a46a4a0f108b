"""Files that are whole or not there, and telling how long work goes."""

import io
import json
import math
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bayeslora import atomic_files as files
from bayeslora.atomic_files import new_directory, replacing, replacing_directory, tensor_failures, write_json
from bayeslora.errors import InputError
from bayeslora.progress import PlainLines, Silent, reporter


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old" and partial.parent == path.parent
    assert path.read_text() == "new" and names(tmp_path) == ["a.txt"]


def test_a_new_file_is_made(tmp_path):
    with replacing(tmp_path / "a.tar.gz") as partial:
        partial.write_text("new")
        assert not (tmp_path / "a.tar.gz").exists()
    assert names(tmp_path) == ["a.tar.gz"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("there", [True, False])
def test_a_block_that_fails_leaves_everything_as_it_was(tmp_path, error, there):
    path = tmp_path / "a.txt"
    if there:
        path.write_text("old")
    before = names(tmp_path)

    def write():
        with replacing(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert names(tmp_path) == before
    assert not there or path.read_text() == "old"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_weights_may_be_read_by_whom_other_files_may_be(tmp_path, mask):
    """safetensors writes them for their owner alone."""
    before = os.umask(mask)
    try:
        with replacing(tmp_path / "a.safetensors") as partial:
            save_file({"x": torch.zeros(1)}, partial)
        for make, name in ((replacing_directory, "b"), (new_directory, "c")):
            with make(tmp_path / name) as directory:
                (directory / "inner").mkdir()
                save_file({"x": torch.zeros(1)}, directory / "inner" / "x.safetensors")
        write_json(tmp_path / "secret.json", {}, 0o600)
    finally:
        os.umask(before)
    files = [tmp_path / "a.safetensors", *tmp_path.glob("*/*/x.safetensors")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o666 & ~mask] * 3
    assert stat.S_IMODE((tmp_path / "secret.json").stat().st_mode) == 0o600


def test_what_an_earlier_process_left_is_written_over(tmp_path):
    (tmp_path / "a.txt.partial").write_text("a very long rest of a process that was killed")
    with replacing(tmp_path / "a.txt") as partial:
        partial.write_text("new")
    assert (tmp_path / "a.txt").read_text() == "new" and names(tmp_path) == ["a.txt"]


def test_a_link_that_somebody_has_planted_is_not_followed(tmp_path):
    """Names of what is written beside a place can be guessed, and the place may be open to others."""
    target = tmp_path / "of somebody else"
    target.write_text("precious")
    (tmp_path / "a.json.partial").symlink_to(target)
    write_json(tmp_path / "a.json", {"b": 1})
    assert target.read_text() == "precious" and not (tmp_path / "a.json").is_symlink()
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": 1}


@pytest.mark.parametrize("made", ["replaced", "new"])
def test_nor_is_a_link_to_a_directory(tmp_path, made):
    target = tmp_path / "of somebody else"
    target.mkdir()
    (target / "precious").touch()
    (tmp_path / ("d.partial" if made == "replaced" else ".d.partial")).symlink_to(target)
    with (replacing_directory if made == "replaced" else new_directory)(tmp_path / "d") as partial:
        (partial / "own").touch()
    assert names(target) == ["precious"] and names(tmp_path / "d") == ["own"]


def test_a_directory_is_replaced_when_the_block_ends(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").touch()
    (tmp_path / "d.partial").mkdir()
    (tmp_path / "d.partial" / "of a killed process").touch()
    with replacing_directory(tmp_path / "d") as partial:
        (partial / "new").touch()
        assert names(tmp_path / "d") == ["old"]
    assert names(tmp_path / "d") == ["new"] and names(tmp_path) == ["d"]


def test_a_file_that_appears_while_the_name_is_free_is_not_written_into(tmp_path, monkeypatch):
    target = tmp_path / "of somebody else"
    target.write_text("precious")
    remove = files._remove

    def slow(path):
        remove(path)
        path.symlink_to(target)

    monkeypatch.setattr(files, "_remove", slow)
    with pytest.raises(FileExistsError):
        write_json(tmp_path / "a.json", {"b": 1})
    assert target.read_text() == "precious"


def test_a_block_that_writes_nothing_is_an_error_and_not_an_empty_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_text() == "old"


def test_the_content_is_flushed_before_it_gets_its_name_and_the_name_after(tmp_path, monkeypatch):
    """A machine that loses power must not find a file that is named but empty."""
    events = []
    sync, replace = os.fsync, os.replace

    def kind(descriptor):
        return "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"

    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append(kind(descriptor)), sync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("rename"), replace(*paths))[1])
    with replacing(tmp_path / "a.txt") as partial:
        partial.write_text("new")
    assert events == (["file", "rename"] if os.name == "nt" else ["file", "rename", "directory"])


def test_json_is_written_for_people_too(tmp_path):
    value = {"name": "naïve 中", "figures": [1, 0.1 + 0.2], "none": None}
    write_json(tmp_path / "a.json", value)
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == value and "naïve 中" in text and text.endswith("}\n")


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), "\ud800"])
def test_what_json_cannot_hold_leaves_the_old_file(tmp_path, value):
    write_json(tmp_path / "a.json", 1)
    with pytest.raises((ValueError, TypeError)):
        write_json(tmp_path / "a.json", {"value": value})
    assert (tmp_path / "a.json").read_text() == "1\n" and names(tmp_path) == ["a.json"]


def test_what_safetensors_cannot_write_is_an_error_of_the_system(tmp_path):
    path = tmp_path / "none" / "a.safetensors"
    with pytest.raises(OSError, match=r"a\.safetensors: cannot be written"), tensor_failures(path):
        save_file({"a": torch.zeros(1)}, path)


# Directories ----------------------------------------------------------------------------------------------------------


def fill(place, text="new", **told):
    with new_directory(place, **told) as directory:
        (directory / "a.txt").write_text(text)
        assert not place.exists() or not (place / "a.txt").exists() or (place / "a.txt").read_text() == "old"


@pytest.mark.parametrize("there", ["nothing", "empty", "parent"])
def test_a_directory_appears_when_the_block_ends(tmp_path, there):
    place = tmp_path / "b" / "c" if there == "parent" else tmp_path / "b"
    if there == "empty":
        place.mkdir()
    fill(place)
    assert names(place) == ["a.txt"] and names(place.parent) == [place.name]


def test_a_directory_that_holds_something_is_replaced_only_by_force(tmp_path):
    fill(tmp_path / "b", "old")
    with pytest.raises(InputError, match="is not empty; choose another"):
        fill(tmp_path / "b")
    fill(tmp_path / "b", force=True)
    assert (tmp_path / "b" / "a.txt").read_text() == "new" and names(tmp_path) == ["b"]
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        fill(tmp_path / "file", force=True)


def test_the_working_directory_does_not_give_way(tmp_path, monkeypatch):
    """The shell would be left in a directory that is gone."""
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(InputError, match=r"\.: is the working directory; choose a directory in it"),
        new_directory(Path()),
    ):
        pytest.fail("begun")
    assert tmp_path.exists() and not list(tmp_path.iterdir())


def test_a_directory_whose_block_fails_is_not_there(tmp_path):
    def fail():
        with new_directory(tmp_path / "b") as directory:
            (directory / "a.txt").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    fill(tmp_path / "b", "old")
    rename = Path.rename

    def failing(self, target):
        if self.name == "new":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="no"):
        fill(tmp_path / "b", force=True)
    assert (tmp_path / "b" / "a.txt").read_text() == "old" and names(tmp_path) == ["b"]


def test_what_a_killed_process_left_of_a_directory_is_removed(tmp_path):
    left = tmp_path / ".b.partial" / "new"
    left.mkdir(parents=True)
    (left / "old.txt").write_text("half")
    (left.parent / "lock").touch()
    fill(tmp_path / "b")
    assert names(tmp_path / "b") == ["a.txt"] and names(tmp_path) == ["b"]


def test_two_cannot_write_one_directory_at_once(tmp_path):
    with new_directory(tmp_path / "b") as first:
        (first / "a.txt").write_text("first")
        with pytest.raises(InputError, match="another process is writing it; wait for it"):
            fill(tmp_path / "b")
    assert (tmp_path / "b" / "a.txt").read_text() == "first" and names(tmp_path) == ["b"]


# Progress -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [1, 3, 4, 100])
def test_plain_lines_tell_of_each_quarter_once(capsys, total):
    advance = PlainLines().stage("training")
    for done in range(total + 1):
        advance(done, total)
    advance(total, total)
    told = capsys.readouterr()
    lines = told.err.splitlines()
    assert told.out == "" and lines == list(dict.fromkeys(lines))
    assert lines[0] == "training: 0 %" and lines[-1] == "training: 100 %"
    assert len(lines) == min(total, 4) + 1
    assert all(int(line.split()[1]) <= 100 for line in lines)


def test_stages_are_counted_apart(capsys):
    plain = PlainLines()
    first, second = plain.stage("one"), plain.stage("two")
    first(1, 1)
    second(0, 1)
    plain.say("done")
    assert capsys.readouterr().err == "one: 100 %\ntwo: 0 %\ndone\n"


def test_nothing_to_do_is_done(capsys):
    PlainLines().stage("training")(0, 0)
    assert capsys.readouterr().err == "training: 0 %\n"


def test_silence(capsys):
    with reporter(quiet=True) as quiet:
        quiet.stage("training")(1, 2)
        quiet.say("a line")
    assert isinstance(quiet, Silent) and capsys.readouterr() == ("", "")


def test_lines_where_stderr_is_no_terminal(capsys):
    with reporter(quiet=False) as lines:
        lines.say("a [line]")
    assert isinstance(lines, PlainLines) and capsys.readouterr() == ("", "a [line]\n")


def test_a_bar_on_a_terminal_and_lines_between(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    with reporter(quiet=False) as bars:
        advance = bars.stage("training")
        for done in range(5):
            advance(done, 4)
        bars.say("epoch 1: [bold] nll 0.5")
    assert "epoch 1: [bold] nll 0.5" in screen.getvalue()  # brackets are text, no mark-up
