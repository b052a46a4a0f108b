"""The real data, where they are: sizes as published, splits that do not touch, and everything encodes."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from functools import cache
from typing import Any, get_args

import pytest

from bayeslora.errors import InputError
from bayeslora.tasks import TASKS, Scoring, Split, Task, encode_item, load_task
from bayeslora.tasks.encode import prompt_of
from bayeslora.tasks.rows import content_key

from .cases import DATA, needs_data
from .test_golden import ARC_EASY, ARC_NUMBERS, BOOLQ, MMLU, OPENBOOKQA, WINOGRANDE

pytestmark = [needs_data, pytest.mark.system]

BENCHMARKS = [name for name in TASKS if name not in ("urns", "wikitext2", "math", "aime")]


@cache
def task(name: str) -> Task:
    return load_task(name, DATA)


@pytest.mark.parametrize(
    "name, train, validation, test, duplicates",
    [
        ("arc-easy", 2251, 570, 2376, 0),
        ("arc-challenge", 1118, 299, 1172, 1),
        ("openbookqa", 4952, 500, 500, 5),
        ("boolq", 7542, 1885, 3270, 0),
        ("winogrande-s", 510, 128, 1267, 2),
        ("winogrande-m", 2044, 512, 1267, 2),
    ],
)
def test_sizes(name: str, train: int, validation: int, test: int, duplicates: int) -> None:
    loaded = task(name)
    assert (len(loaded.train), len(loaded.validation), len(loaded.test)) == (train, validation, test)
    assert loaded.load("train").counts == ({"duplicate": duplicates} if duplicates else {})
    assert loaded.load("test").counts == {}


@pytest.mark.parametrize(
    "name, validation, test",
    [("mmlu-cs", 42, 412), ("mmlu-eng", 16, 145), ("mmlu-law", 194, 1763), ("mmlu-health", 170, 1540)],
)
def test_mmlu(name: str, validation: int, test: int) -> None:
    assert (len(task(name).validation), len(task(name).test)) == (validation, test)
    with pytest.raises(InputError, match="for evaluation only"):
        _ = task(name).train


@pytest.mark.parametrize("name, numbered, odd", [("arc-easy", [102, 21, 97], 24), ("arc-challenge", [23, 4, 22], 13)])
def test_arc_labels_and_option_counts(name: str, numbered: list[int], odd: int) -> None:
    splits = [task(name).train, task(name).validation, task(name).test]
    assert [sum(item.labels[0] == "1" for item in split) for split in splits] == numbered
    counts = Counter(len(item.options) for split in splits for item in split)
    assert set(counts) == {3, 4, 5} and counts[3] + counts[5] == odd


def test_boolq_answers() -> None:
    train = [*task("boolq").train, *task("boolq").validation]
    assert sum(item.gold == item.options.index(" Yes") for item in train) == 5874
    assert sum(item.gold == item.options.index(" Yes") for item in task("boolq").test) == 2033


@pytest.mark.parametrize("name", ["boolq", "winogrande-s", "winogrande-m"])
def test_held_out_rows_are_not_trained_on(name: str) -> None:
    train, validation, test = (
        {content_key(item) for item in task(name).load(s)} for s in ("train", "validation", "test")
    )
    assert not train & validation and not train & test and not validation & test


@pytest.mark.parametrize("name", ["winogrande-s", "winogrande-m"])
def test_twins_stay_together(name: str) -> None:
    train, validation = ({item.id.rpartition("-")[0] for item in task(name).load(s)} for s in ("train", "validation"))
    assert not train & validation


@pytest.mark.parametrize(
    "file, row",
    [
        ("arc_easy/train", ARC_EASY),
        ("arc_easy/train", ARC_NUMBERS),
        ("openbookqa/train", OPENBOOKQA),
        ("mmlu/test", MMLU),
        ("boolq/train", BOOLQ),
        ("winogrande/train_s", WINOGRANDE),
    ],
)
def test_the_golden_rows_are_real(file: str, row: dict[str, Any]) -> None:
    with gzip.open(DATA / f"{file}.jsonl.gz", "rt", encoding="utf-8") as lines:
        assert row in map(json.loads, lines)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_test_items_are_well_formed_and_normalised(name: str) -> None:
    split: Split = task(name).load("test")
    assert len({item.id for item in split}) == len(split)
    for item in split:
        assert item.gold is not None and all(option.strip() for option in item.options)
        text = "".join((item.prompt.text, *item.options))
        assert not set(text) & set("‘’“”–—−\u00a0\u200b\ufeff\t") and "  " not in text
        assert item.prompt.text == item.prompt.text.strip()
        assert prompt_of(item, "letter").text.endswith("Answer:")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_everything_encodes(smollm2: Any, name: str) -> None:
    items = task(name).validation[:300]
    for scoring in get_args(Scoring):
        for item in items:
            encoded = encode_item(item, smollm2, scoring)
            assert len(encoded.option_ids) == len(item.options)
            assert len(encoded.prompt_ids) + max(map(len, encoded.option_ids)) <= 1024


def test_the_one_passage_of_boolq_that_is_too_long(smollm2: Any) -> None:
    item = next(item for item in task("boolq").test if item.id == "validation-3154")
    encoded = encode_item(item, smollm2, "text")
    assert len(encoded.prompt_ids) == 1023
    text = smollm2.decode(encoded.prompt_ids)
    assert text.startswith("Passage: departure from the hostile fire pay area") and text.endswith(item.prompt.tail)
