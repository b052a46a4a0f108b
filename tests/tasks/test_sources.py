"""Rows from a directory and from the hub, and everything that can be wrong with them."""

from __future__ import annotations

import gzip
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bayeslora.errors import InputError
from bayeslora.tasks import arc, boolq, load_task, mmlu, openbookqa, sources, winogrande
from bayeslora.tasks.sources import HubPlace, read_json_lines

from .cases import boolq_row, choice_row, failure, winogrande_row, write_lines


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_official_splits(tmp_path: Path, suffix: str) -> None:
    for start, split in enumerate(("train", "validation", "test")):
        write_lines(tmp_path / f"arc_easy/{split}.{suffix}", [choice_row(start), choice_row(start), choice_row(9)])
    task = load_task("arc-easy", tmp_path)
    assert [item.id for item in task.train] == ["q0", "q9"] and task.load("train").counts == {"duplicate": 1}
    assert [item.id for item in task.validation] == ["q1", "q1", "q9"]
    assert [item.id for item in task.test] == ["q2", "q2", "q9"] and task.load("test").counts == {}


@pytest.mark.parametrize(
    "name, train, test, make",
    [
        ("boolq", "boolq/train", "boolq/validation", boolq_row),
        ("winogrande-s", "winogrande/train_s", "winogrande/validation", winogrande_row),
        ("winogrande-m", "winogrande/train_m", "winogrande/validation", winogrande_row),
    ],
)
def test_a_fifth_of_train_is_held_out(tmp_path: Path, name: str, train: str, test: str, make: Any) -> None:
    rows = [make(k) for k in range(50)]
    write_lines(tmp_path / f"{train}.jsonl.gz", [*rows, rows[0]])
    write_lines(tmp_path / f"{test}.jsonl.gz", [make(k) for k in (100, 101, 101)])
    task = load_task(name, str(tmp_path))
    train_ids, held_out = ({item.id for item in task.load(split)} for split in ("train", "validation"))
    assert len(task.train) == 40 and len(task.validation) == 10
    assert not train_ids & held_out and train_ids | held_out == {row["id"] for row in rows}
    assert task.load("train").counts == task.load("validation").counts == {"duplicate": 1}
    assert len(task.test) == 3
    write_lines(tmp_path / f"{train}.jsonl.gz", reversed(rows))
    assert {item.id for item in load_task(name, tmp_path).validation} == held_out


def test_train_is_read_once_for_both_its_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_lines(tmp_path / "boolq/train.jsonl", [boolq_row(k % 20) for k in range(21)])
    task = load_task("boolq", tmp_path)
    assert len(task.train) + len(task.validation) == 20
    assert len(caplog.records) == 1


def test_mmlu_groups_are_told_apart_by_subject(tmp_path: Path) -> None:
    subjects = [subject for group in mmlu.GROUPS.values() for subject in group]
    rows = [choice_row(k, subject=subject) for k, subject in enumerate(subjects)]
    for split in ("validation", "test"):
        write_lines(tmp_path / f"mmlu/{split}.jsonl.gz", rows)
    for name, group in mmlu.GROUPS.items():
        task = load_task(name, tmp_path)
        assert [item.id for item in task.test] == [f"q{subjects.index(subject)}" for subject in group]
        assert len(task.validation) == len(group)
        assert failure(lambda task=task: task.train) == (
            f"{name} is for evaluation only and has no train split; train on another task"
        )


def test_rows_of_no_subject_of_the_group(tmp_path: Path) -> None:
    write_lines(tmp_path / "mmlu/test.jsonl", [choice_row(subject="astrology")])
    assert failure(lambda: load_task("mmlu-eng", tmp_path).test) == (
        f"{tmp_path}/mmlu/test: split 'test' has no rows of electrical_engineering; get the data again"
    )


def test_blank_lines_byte_order_marks_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": "\xe2\x80\xa8"}')
    rows = read_json_lines(path)
    assert [row.values for row in rows] == [{"a": 1}, {"a": "\u2028"}]
    assert [row.origin for row in rows] == [f"{path}, line 1", f"{path}, line 4"]


FILES: list[tuple[str, bytes, str]] = [
    (
        "test.jsonl",
        b'{"a": 1}\n{"a": \n',
        "test.jsonl, line 2: is not valid JSON (Expecting value: line 2 column 1 (char 7))",
    ),
    ("test.jsonl", b"[1, 2]\n", "test.jsonl, line 1: is a JSON list; give one JSON object per line"),
    ("test.jsonl", b"[" * 100_000, "test.jsonl, line 1: is not valid JSON"),
    ("test.jsonl", b'{"a": "\xff"}\n', "test.jsonl: is not UTF-8 (invalid start byte); save it as UTF-8"),
    ("test.jsonl", b"", "test: split 'test' has no rows; get the data again"),
    ("test.jsonl.gz", gzip.compress(b"", mtime=0), "test: split 'test' has no rows; get the data again"),
    (
        "test.jsonl.gz",
        b'{"a": 1}\n',
        "test.jsonl.gz: is not a complete gzip file (Not a gzipped file (b'{\"')); get it again",
    ),
    (
        "test.jsonl.gz",
        gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-12],
        "test.jsonl.gz: is not a complete gzip file (Compressed file",
    ),
    (
        "test.jsonl.gz",
        gzip.compress(b"abc" * 99, mtime=0)[:10] + b"\xff" * 40,
        "test.jsonl.gz: is not a complete gzip file (Error -3",
    ),
]


@pytest.mark.parametrize("name, data, message", FILES)
def test_damaged_files(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / "arc_easy").mkdir()
    (tmp_path / "arc_easy" / name).write_bytes(data)
    assert failure(lambda: load_task("arc-easy", tmp_path).test).startswith(f"{tmp_path}/arc_easy/{message}")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    path = write_lines(tmp_path / "x.jsonl", [{}])
    monkeypatch.setattr(Path, "open", refuse)
    assert failure(lambda: read_json_lines(path)) == (
        f"{path}: cannot be read (Permission denied); check the file and its permissions"
    )


def test_a_row_that_cannot_be_represented_names_file_and_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "boolq/validation.jsonl", [boolq_row(), boolq_row(answer="yes")])
    assert failure(lambda: load_task("boolq", tmp_path).test) == (
        f"{path}, line 2: answer is neither true nor false: 'yes'; correct or remove it"
    )


def test_train_of_which_nothing_is_left(tmp_path: Path) -> None:
    write_lines(tmp_path / "arc_easy/train.jsonl", [choice_row(answer="Z"), choice_row(question=None)])
    assert failure(lambda: load_task("arc-easy", tmp_path).train) == (
        "arc-easy train: none of its 2 rows can be used; get the data again"
    )


def test_no_such_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    advice = "pass the directory with the data sets as --data-dir, or leave it out"
    assert failure(lambda: load_task("boolq", tmp_path / "no")) == f"{tmp_path}/no: no such directory; {advice}"
    assert failure(lambda: load_task("boolq", tmp_path / "file")) == f"{tmp_path}/file: is not a directory; {advice}"


@pytest.mark.parametrize("present, hint", [("other", ""), ("boolq", ""), ("bool_q", " (did you mean 'bool_q'?)")])
def test_missing_files_are_named(tmp_path: Path, present: str, hint: str) -> None:
    (tmp_path / present).mkdir()
    assert failure(lambda: load_task("boolq", tmp_path).test) == (
        f"{tmp_path}: has no boolq/validation.jsonl.gz or boolq/validation.jsonl; "
        f"pass the directory that holds it as --data-dir{hint}"
    )


CHOICES = {"text": ["a", "b"], "label": ["1", "2"]}

HUB_ROWS: list[tuple[Any, dict[str, Any], HubPlace, dict[str, Any]]] = [
    (
        arc.hub_row,
        {"id": "M1", "question": "Q?", "choices": CHOICES, "answerKey": "2"},
        HubPlace("ARC-Easy", "train", 0),
        {"id": "M1", "question": "Q?", "choices": ["a", "b"], "labels": ["1", "2"], "answer": "2"},
    ),
    (
        openbookqa.hub_row,
        {"id": "7-980", "question_stem": "Q", "choices": CHOICES, "answerKey": "1"},
        HubPlace("main", "train", 0),
        {"id": "7-980", "question": "Q", "choices": ["a", "b"], "labels": ["1", "2"], "answer": "1"},
    ),
    (
        boolq.hub_row,
        {"question": "is it", "passage": "It is.", "answer": True},
        HubPlace(None, "train", 3),
        {"id": "train-3", "passage": "It is.", "question": "is it", "answer": True},
    ),
    (
        winogrande.hub_row,
        {"sentence": "a _ b", "option1": "x", "option2": "y", "answer": "1"},
        HubPlace("winogrande_s", "train", 0),
        {"sentence": "a _ b", "option1": "x", "option2": "y", "answer": "1"},
    ),
    (
        mmlu.hub_row,
        {"question": "Q", "subject": "anatomy", "choices": ["a", "b", "c", "d"], "answer": 2},
        HubPlace("anatomy", "test", 7),
        {
            "id": "anatomy/test/7",
            "subject": "anatomy",
            "question": "Q",
            "choices": ["a", "b", "c", "d"],
            "labels": ["A", "B", "C", "D"],
            "answer": "C",
        },
    ),
]


@pytest.mark.parametrize("convert, row, place, expected", HUB_ROWS)
def test_rows_of_the_hub(convert: Any, row: dict[str, Any], place: HubPlace, expected: dict[str, Any]) -> None:
    assert convert(row, place) == expected


class Hub(ModuleType):
    """Stands for the package ``datasets``: serves the same rows whatever is asked for, and remembers what was."""

    def __init__(self, rows: list[dict[str, Any]] | Exception) -> None:
        super().__init__("datasets")
        self.__spec__ = importlib.util.spec_from_loader("datasets", None)
        self.rows, self.asked = rows, list[tuple[str, str | None, str]]()

    def load_dataset(self, name: str, config: str | None, *, split: str) -> list[dict[str, Any]]:
        self.asked.append((name, config, split))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


@pytest.mark.parametrize(
    "name, row, split, asked",
    [
        ("arc-easy", 0, "train", [("allenai/ai2_arc", "ARC-Easy", "train")]),
        ("arc-challenge", 0, "test", [("allenai/ai2_arc", "ARC-Challenge", "test")]),
        ("openbookqa", 1, "validation", [("allenai/openbookqa", "main", "validation")]),
        ("boolq", 2, "test", [("google/boolq", None, "validation")]),
        ("boolq", 2, "train", [("google/boolq", None, "train")]),
        ("winogrande-s", 3, "test", [("allenai/winogrande", "winogrande_s", "validation")]),
        ("winogrande-m", 3, "train", [("allenai/winogrande", "winogrande_m", "train")]),
        ("mmlu-eng", 4, "validation", [("cais/mmlu", "electrical_engineering", "validation")]),
        ("mmlu-law", 4, "test", [("cais/mmlu", subject, "test") for subject in mmlu.GROUPS["mmlu-law"]]),
    ],
)
def test_what_is_asked_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, name: str, row: int, split: str, asked: list[tuple[str, str | None, str]]
) -> None:
    hub = Hub([HUB_ROWS[row][1]])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    items = load_task(name).load(split).items
    assert hub.asked == asked
    assert len(items) == len(asked) and all(item.gold is not None for item in items)


def test_failures_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", Hub(ConnectionError("Couldn't reach it\nsecond line")))
    assert failure(lambda: load_task("arc-easy").test) == (
        "allenai/ai2_arc ARC-Easy: cannot be loaded from the hub (Couldn't reach it); check the network, "
        "or pass --data-dir with local copies"
    )
    monkeypatch.setitem(sys.modules, "datasets", Hub([]))
    assert (
        failure(lambda: load_task("boolq").test) == "google/boolq: split 'validation' has no rows; get the data again"
    )
    monkeypatch.setitem(sys.modules, "datasets", Hub([{"text": "?"}]))
    assert failure(lambda: load_task("boolq").test) == (
        "google/boolq validation, row 0: does not have the expected fields (KeyError('passage')); "
        "the data set has changed, so pass --data-dir with local copies"
    )


def test_without_the_package_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert failure(lambda: load_task("boolq").test) == (
        "google/boolq: reading the hub needs the package datasets; run: pip install datasets, "
        "or pass --data-dir with local copies"
    )


def test_the_real_package_offline() -> None:
    pytest.importorskip("datasets")
    if importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE is not True:
        pytest.skip("HF_HUB_OFFLINE was not set in time")
    message = failure(lambda: load_task("openbookqa").test)
    assert message.startswith("allenai/openbookqa main: cannot be loaded from the hub (")
    assert message.endswith("; check the network, or pass --data-dir with local copies")


# Bounds ---------------------------------------------------------------------------------------------------------------


def test_a_gzip_file_that_unpacks_to_an_endless_line_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LONGEST_LINE", 1000)
    path = tmp_path / "bomb.jsonl.gz"
    packed = gzip.compress(b'{"question": "why"}\n{"question": "' + b"a" * 10**7)
    assert len(packed) < 20_000
    path.write_bytes(packed[: len(packed) // 2])  # who unpacks all of it finds no end
    read: list[tuple[int, str]] = []
    with pytest.raises(InputError, match="line 2: has more than 1000 characters; give one JSON object per line"):
        read.extend(sources.read_lines(path))


def test_a_line_of_the_longest_length_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LONGEST_LINE", 20)
    (tmp_path / "a.jsonl").write_text('{"a": 1234567890123}')
    assert read_json_lines(tmp_path / "a.jsonl")[0].values == {"a": 1234567890123}
    (tmp_path / "a.jsonl").write_text('{"a": 12345678901234}')
    with pytest.raises(InputError, match="line 1"):
        read_json_lines(tmp_path / "a.jsonl")


def test_what_a_gzip_file_unpacks_to_is_bounded_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGEST_UNPACKED", 100)
    lines = '{"a": 1}\n' * 12
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(InputError, match=r"a.jsonl.gz: unpacks to more than 100 characters; divide it"):
        read_json_lines(tmp_path / "a.jsonl.gz")
    assert len(read_json_lines(tmp_path / "a.jsonl")) == 12
