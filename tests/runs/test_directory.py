"""The directory of a run: what is left of it where nothing was done, and how another run's settings are told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bayeslora.errors import InputError
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.saved_config import differences


def fail(place: Path, written: str | None) -> None:
    with RunDirectory(place).locked():
        if written is not None:
            (place / written).touch()
        raise InputError("bad")


def refused(place: Path, *, written: str | None = None, why: str = "bad") -> None:
    with pytest.raises(InputError, match=why):
        fail(place, written)


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    refused(Path("/proc/run"), why="/proc/run: cannot be made .*; choose another directory")


def test_a_directory_in_which_nothing_was_done_is_removed_with_those_made_for_it(tmp_path: Path) -> None:
    refused(tmp_path / "new" / "deep" / "run")
    assert not list(tmp_path.iterdir())


def test_one_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    refused(tmp_path / "here")
    refused(tmp_path / "here" / "run")
    assert [path.name for path in tmp_path.rglob("*") if path.name != ".lock"] == ["here"]


def test_so_does_one_with_something_in_it(tmp_path: Path) -> None:
    refused(tmp_path / "run", written="config.json")
    assert (tmp_path / "run" / "config.json").exists()


def fail_without_directory(place: Path) -> None:
    with RunDirectory(place).locked():
        shutil.rmtree(place)
        raise InputError("bad")


def test_an_error_is_told_though_the_directory_is_gone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="bad"):
        fail_without_directory(tmp_path / "run")


def test_it_can_be_locked_again_after_it_was_removed(tmp_path: Path) -> None:
    for _ in range(2):
        refused(tmp_path / "run")
    with RunDirectory(tmp_path / "run").locked():
        refused(tmp_path / "run", why="another process")
    assert not list(tmp_path.iterdir())


def test_settings_of_another_run_are_told_in_words() -> None:
    mine = {"method": "lora", "data": {"max_train": None}, "seed": 0}
    other = {"method": "tfb", "data": {"max_train": 32}, "seed": 0}
    assert differences(mine, other) == [
        "method is 'tfb' there and 'lora' here",
        "max_train is 32 there and not set here",
    ]
