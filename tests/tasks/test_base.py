"""Items, splits and tasks, and names that are wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bayeslora.errors import InputError
from bayeslora.tasks import TASKS, Item, Prompt, Split, SplitName, Task, find_task, load_task, require_gold

NAMES = [
    *("arc-easy", "arc-challenge", "openbookqa", "boolq", "winogrande-s", "winogrande-m"),
    *("mmlu-cs", "mmlu-eng", "mmlu-law", "mmlu-health", "urns", "wikitext2", "math", "aime"),
]


def item(**changes: Any) -> Item:
    fields: dict[str, Any] = {
        "id": "x",
        "prompt": Prompt("Q"),
        "options": (" a", " b"),
        "labels": ("A", "B"),
        "gold": 0,
    }
    return Item(**(fields | changes))


def test_a_prompt_is_its_pieces() -> None:
    assert Prompt("a", "b", "c").text == "abc"
    assert Prompt("a").text == "a"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"options": (), "labels": ()}, "item 'x': 0 options and 0 labels; give one label per option"),
        ({"labels": ("A",)}, "item 'x': 2 options and 1 labels; give one label per option"),
        ({"gold": 2}, "item 'x': gold is 2; give an index from 0 to 1, or none"),
        ({"gold": -1}, "item 'x': gold is -1; give an index from 0 to 1, or none"),
        ({"probabilities": (1.0,)}, "item 'x': 2 options and 1 probabilities; give one each"),
    ],
)
def test_items_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        item(**changes)
    assert str(error.value) == message


def test_gold_is_required_where_it_is_needed() -> None:
    assert require_gold([item(gold=1), item()]) == [1, 0]
    with pytest.raises(InputError, match=r"^item 'y' has no answer; training and evaluation need one"):
        require_gold([item(), item(id="y", gold=None)])


def test_splits_are_read_when_asked_for_and_once() -> None:
    asked: list[SplitName] = []

    def read(split: SplitName) -> Split:
        asked.append(split)
        return Split((item(id=split),))

    task = Task("t", "a task", read)
    assert asked == []
    assert [i.id for i in task.train] == ["train"] and task.load("train") is task.load("train")
    assert len(task.load("test")) == 1 and [i.id for i in task.load("test")] == ["test"]
    assert [i.id for i in task.validation] == ["validation"] and [i.id for i in task.test] == ["test"]
    assert asked == ["train", "test", "validation"]


@pytest.mark.parametrize(
    "split, message",
    [
        ("tset", "unknown split 'tset'; choose train, validation, test (did you mean 'test'?)"),
        ("dev", "unknown split 'dev'; choose train, validation, test"),
    ],
)
def test_unknown_split(split: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        load_task("urns").load(split)
    assert str(error.value) == message


def test_the_names_are_those_of_the_contract() -> None:
    assert sorted(TASKS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_task_is_described_in_one_line_without_reading_it(name: str) -> None:
    task = find_task(name)
    assert task.name == name
    assert 20 < len(task.description) < 110 and "\n" not in task.description


@pytest.mark.parametrize(
    "name, hint",
    [
        ("arc_easy", " (did you mean 'arc-easy'?)"),
        ("BoolQ", " (did you mean 'boolq'?)"),
        ("winogrande", " (did you mean 'winogrande-s'?)"),
        ("squad-xyz", ""),
        ("", ""),
    ],
)
def test_unknown_task(name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        load_task(name)
    message = str(error.value)
    assert message.startswith(f"unknown task {name!r}{hint}; choose arc-easy, ") and "\n" not in message
    assert all(known in message for known in NAMES)


def test_importing_is_cheap() -> None:
    code = "import sys, bayeslora.tasks; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
