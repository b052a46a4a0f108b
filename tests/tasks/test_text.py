"""Running text: blocks that predict every token once, files and directories, WikiText-2 from disk and from the hub."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bayeslora.errors import InputError
from bayeslora.tasks import SPLITS, TextTask, find_task, load_task
from bayeslora.tasks.text import cut_blocks
from train.tiny import make_tokenizer

from .cases import DATA, needs_data

LINES = [f"line {k} of a text that goes on and on .\n" for k in range(50)]


def failure(action: Callable[[], Any]) -> str:
    with pytest.raises(InputError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Blocks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beginning", [[], [7], [7, 8]])
@pytest.mark.parametrize("size", [5, 8, 100])
@pytest.mark.parametrize("count", [2, 3, 7, 29])
def test_every_token_is_predicted_once_from_those_before_it(beginning: list[int], size: int, count: int) -> None:
    ids = list(range(100, 100 + count))
    blocks = list(cut_blocks(ids, beginning, size))
    assert [token for _, target in blocks for token in target] == ids[0 if beginning else 1 :]
    for prompt, target in blocks:
        before = target[0] - 1
        assert prompt == [*beginning, *([before] if before >= 100 else [])]
        assert len(prompt) + len(target) <= size
    assert all(len(target) == len(blocks[0][1]) for _, target in blocks[1:-1])


def test_blocks_that_are_too_small_are_refused() -> None:
    assert failure(lambda: list(cut_blocks([1, 2], [9], 2))) == "max_tokens is 2; blocks of text need at least 3"


def test_a_task_in_blocks(tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text("".join(LINES))
    tokenizer = make_tokenizer()
    blocks = find_task(tmp_path).encode("test", tokenizer, 64)
    ids = tokenizer("".join(LINES)).input_ids
    assert [token for block in blocks for token in block.target_ids] == ids[1:]
    assert [block.id for block in blocks[:2]] == ["test-0", "test-1"]
    assert {len(block) for block in blocks[1:-1]} == {64}


def test_a_text_of_one_token_has_nothing_to_predict(tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text("a")
    assert failure(lambda: find_task(tmp_path).encode("test", make_tokenizer(), 64)) == (
        f"{tmp_path} test: has 1 tokens, which is too short; give a longer text"
    )


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_one_file_is_divided_in_order_at_ends_of_lines(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"own{suffix}"
    path.write_bytes(gzip.compress("".join(LINES).encode()) if suffix.endswith("gz") else "".join(LINES).encode())
    task = find_task(path)
    parts = [task.load(split) for split in SPLITS]
    assert "".join(parts) == "".join(LINES)
    assert [part.count("\n") for part in parts] == [30, 10, 10]


def test_a_directory_of_texts_is_used_as_it_is(tmp_path: Path) -> None:
    for split in SPLITS:
        (tmp_path / f"{split}.txt").write_text(f" \n = {split} = \n")
    task = find_task(tmp_path)
    assert isinstance(task, TextTask)
    assert [task.load(split) for split in SPLITS] == [f" \n = {split} = \n" for split in SPLITS]


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    assert failure(lambda: find_task(tmp_path / "no.txt")) == (
        f"{tmp_path}/no.txt: no such file or directory; pass a file of text or a directory with splits"
    )
    (tmp_path / "blank.txt").write_text(" \n\n")
    assert failure(lambda: find_task(tmp_path / "blank.txt").load("test")) == (
        f"{tmp_path}/blank.txt: holds no text; give a file with some"
    )
    (tmp_path / "short.txt").write_text("one line\n")
    assert "has 1 line, too few to divide: validation would be empty" in failure(
        lambda: find_task(tmp_path / "short.txt").load("validation")
    )
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    assert "is not UTF-8" in failure(lambda: find_task(tmp_path / "bad.txt").load("test"))
    (tmp_path / "torn.txt.gz").write_bytes(gzip.compress(b"text " * 99)[:20])
    assert "is not a complete gzip file" in failure(lambda: find_task(tmp_path / "torn.txt.gz").load("test"))
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "test.txt").write_text("text\n")
    assert failure(lambda: find_task(tmp_path / "part").load("train")) == (
        f"{tmp_path}/part: has no train.txt (or .txt.gz); add it, or use another split"
    )


def test_text_is_refused_where_questions_are_needed() -> None:
    assert failure(lambda: load_task("wikitext2")) == (
        "task 'wikitext2' has no questions with options, which are needed here; choose another task"
    )


# WikiText-2 -----------------------------------------------------------------------------------------------------------


def test_wikitext_from_a_directory_without_it(tmp_path: Path) -> None:
    assert failure(lambda: find_task("wikitext2", tmp_path).load("test")) == (
        f"{tmp_path}: has no wikitext2/test.txt.gz or wikitext2/test.txt; pass the directory that holds it as --data-dir"
    )


def test_wikitext_from_the_hub_is_the_text_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [{"text": ""}, {"text": " = Title = \n"}, {"text": ""}, {"text": " Words . \n"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, __spec__="a module"))
    assert find_task("wikitext2").load("validation") == " \n = Title = \n \n Words . \n"
    assert asked == [("Salesforce/wikitext", "wikitext-2-v1", "validation")]


def test_without_a_network_the_hub_fails_in_one_line() -> None:
    message = failure(lambda: find_task("wikitext2").load("test"))
    assert message.startswith("Salesforce/wikitext wikitext-2-v1: cannot be loaded from the hub (")
    assert message.endswith("; check the network, or pass --data-dir with local copies")


@needs_data
def test_wikitext_has_its_official_numbers() -> None:
    task = find_task("wikitext2", DATA)
    for split, lines, words in (("validation", 3760, 217646), ("test", 4358, 245569)):
        text = task.load(split)
        assert text.count("\n") == lines and len(text.split()) + lines == words
