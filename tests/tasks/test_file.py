"""Own data: files, directories and every way to spell an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bayeslora.tasks import Item, Prompt, load_task, make_item, read_items, require_gold
from bayeslora.tasks.file import read_own
from bayeslora.tasks.rows import Malformed
from bayeslora.wording import counted

from .cases import failure, own_row, write_lines

Q = {"question": "Which?", "choices": ["red", "green", "blue"]}


def test_the_least_and_the_most_a_line_can_say() -> None:
    item = read_own(Q).item
    assert item.prompt == Prompt("Question: Which?\nOptions:\nA. red\nB. green\nC. blue\nAnswer:")
    assert (item.options, item.labels, item.gold) == ((" red", " green", " blue"), ("A", "B", "C"), None)
    full = read_own(Q | {"id": 7, "passage": "A  wall.", "labels": ["x", "y", "z"], "answer": "y", "source": "me"}).item
    assert full == Item(
        "7",
        Prompt("Passage:", " A wall.", "\nQuestion: Which?\nOptions:\nx. red\ny. green\nz. blue\nAnswer:"),
        (" red", " green", " blue"),
        ("x", "y", "z"),
        1,
    )


@pytest.mark.parametrize(
    "row, gold",
    [
        ({"answer": "B"}, 1),
        ({"answer": "blue"}, 2),
        ({"answer": " blue "}, 2),
        ({"answer": 0}, 0),
        ({"answer": 2}, 2),
        ({"answer": "2"}, 2),
        ({"answer": None}, None),
        ({"labels": ["1", "2", "3"], "answer": "1"}, 0),
        ({"labels": ["0", "1", "2"], "answer": 1}, 1),
        ({"choices": ["10", "20", "0"], "answer": "20"}, 1),
        ({"choices": ["10", "20", "0"], "answer": 0}, 0),
        ({"choices": ["A", "B"], "answer": "A"}, 0),
    ],
)
def test_answers(row: dict[str, Any], gold: int | None) -> None:
    assert read_own(Q | row).item.gold == gold


ERRORS: list[tuple[Any, str]] = [
    (
        Q | {"answer": "D"},
        "answer is not among the choices: 'D'; give one of A, B, C, an index from 0 to 2, or the text of",
    ),
    (Q | {"answer": 3}, "answer is not among the choices: 3; give one of A, B, C, an index from 0 to 2"),
    (Q | {"answer": -1}, "answer is not among the choices: -1"),
    (Q | {"answer": "3"}, "answer is not among the choices: '3'"),
    (Q | {"answer": "9" * 5000}, f"answer is not among the choices: '{'9' * 59}; give one of A, B, C"),
    (Q | {"answer": True}, "answer is no label, index or text: True"),
    (Q | {"answer": 1.0}, "answer is no label, index or text: 1.0"),
    (Q | {"answer": ["A"]}, "answer is no label, index or text: ['A']"),
    (Q | {"labels": ["1", "2", "3"], "answer": 1}, "answer can mean several choices: 1; give the label as text"),
    (Q | {"choices": ["B", "A"], "answer": "A"}, "answer can mean several choices: 'A'; give the index"),
    (Q | {"choices": ["x", "x"], "answer": "x"}, "answer can mean several choices: 'x'; give the index"),
    (Q | {"labels": ["A"], "answer": "A"}, "labels and choices differ in number: 1 and 3"),
    (Q | {"anwser": "A"}, "unknown field: 'anwser' (did you mean 'answer'?)"),
    ({"question": "Q", "choice": ["a", "b"]}, "unknown field: 'choice' (did you mean 'choices'?)"),
    ({"question": "Q"}, "no choices"),
    ({"question": "Q", "choices": []}, "no choices"),
    ({"question": "Q", "choices": [], "answer": 0}, "no choices"),
    ({"choices": ["a", "b"]}, "no question"),
    (Q | {"passage": 3}, "passage is no text: 3"),
    (Q | {"choices": [str(k) for k in range(27)]}, "more than 26 choices need 'labels': 27 choices"),
]


@pytest.mark.parametrize("row, message", ERRORS)
def test_malformed_lines_name_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    path = write_lines(tmp_path / "mine.jsonl", [Q, "", row])
    assert failure(lambda: read_items(path)).startswith(f"{path}, line 3: {message}")
    assert failure(lambda: load_task(path).test).startswith(f"{path}, line 3: {message}")


@pytest.mark.parametrize("name", ["qid", "uid", "idx", "_id", "pages", "message", "source", "label_names"])
def test_other_fields_are_of_no_concern(name: str) -> None:
    assert read_own(Q | {"answer": "A", name: "anything"}).item.gold == 0


@pytest.mark.parametrize("name, meant", [("pasage", "passage"), ("label", "labels")])
def test_fields_that_may_be_missing_are_taken_for_misspelt_if_they_are_very_close(name: str, meant: str) -> None:
    with pytest.raises(Malformed, match=rf"unknown field.*{name}.*did you mean '{meant}'"):
        read_own(Q | {"answer": "A", name: ["x", "y", "z"]})


def test_many_choices_with_labels() -> None:
    names = [str(k) for k in range(27)]
    assert len(read_own(Q | {"choices": names, "labels": [f"L{name}" for name in names]}).item.options) == 27


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.jsonl.gz"])
def test_a_file_is_divided_and_can_be_read_whole(tmp_path: Path, name: str) -> None:
    rows = [own_row(k) for k in range(50)]
    path = write_lines(tmp_path / name, [*rows, *rows[:5]])
    task = load_task(str(path))
    texts = {split: [item.prompt.text for item in task.load(split)] for split in ("train", "validation", "test")}
    sets = [set(part) for part in texts.values()]
    assert len(set.union(*sets)) == sum(map(len, sets)) == 50
    assert 26 <= len(sets[0]) <= 34 and 6 <= len(sets[1]) <= 14
    assert len(texts["train"]) == len(sets[0])
    assert len(task.load("train").counts) <= 1
    whole = read_items(path)
    assert [item.gold for item in whole] == [row["answer"] for row in [*rows, *rows[:5]]]
    write_lines(path, reversed([*rows, *rows[:5]]))
    assert {item.prompt.text for item in load_task(path).test} == sets[2]


def test_repeated_lines_are_left_out_of_train_only(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mine.jsonl", [own_row(k) for k in range(20)] * 2)
    task = load_task(path)
    assert len(task.train) == 12 and task.load("train").counts == {"duplicate": 12}
    assert len(task.validation) == len(task.test) == 8


def test_a_directory_has_splits(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [own_row(1), own_row(1), own_row(2, choices=["yes", ""]), {"question": "?"}])
    write_lines(tmp_path / "test.jsonl.gz", [own_row(1), own_row(1)])
    task = load_task(tmp_path)
    assert len(task.train) == 1
    assert task.load("train").counts == {"duplicate": 1, "empty choice": 1, "no choices": 1}
    assert len(task.test) == 2
    assert failure(lambda: task.validation) == (
        f"{tmp_path}: has no validation.jsonl (or .csv, .parquet); add it, or use another split"
    )


def test_a_directory_with_the_name_of_a_task_is_given_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "boolq/test.jsonl", [own_row()])
    monkeypatch.chdir(tmp_path)
    assert load_task("boolq").name == "boolq" and load_task("boolq").description.startswith("BoolQ")
    assert len(load_task("./boolq").test) == 1


def test_answers_may_be_missing_until_they_are_needed(tmp_path: Path) -> None:
    items = read_items(write_lines(tmp_path / "mine.jsonl", [own_row(), Q | {"id": "open"}])).items
    assert items[1].gold is None
    told = failure(lambda: require_gold(items))
    assert told.startswith(f"{tmp_path}/mine.jsonl, line 2: item 'open' has no answer")


@pytest.mark.parametrize(("number", "said"), [(0, "0 questions"), (1, "1 question"), (2, "2 questions")])
def test_numbers_of_things(number: int, said: str) -> None:
    assert counted(number, "question") == said


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    missing = "no such file or directory; pass a file of rows or a directory with splits"
    assert failure(lambda: load_task(tmp_path / "no.jsonl")) == f"{tmp_path}/no.jsonl: {missing}"
    assert failure(lambda: load_task(f"{tmp_path}/no/thing")) == f"{tmp_path}/no/thing: {missing}"
    formats = "pass a file of rows (.jsonl, .csv, .parquet)"
    assert failure(lambda: read_items(tmp_path)) == f"{tmp_path}: is no file; {formats}"
    assert failure(lambda: read_items(tmp_path / "no.jsonl")) == f"{tmp_path}/no.jsonl: no such file; {formats}"
    (tmp_path / "x.xls").touch()
    assert failure(lambda: load_task(tmp_path / "x.xls")) == (
        f"{tmp_path}/x.xls: is not named .jsonl.gz, .jsonl, .csv.gz, .csv, .parquet; pass a file of rows with such a name"
    )
    (tmp_path / "empty").mkdir()
    assert failure(lambda: load_task(tmp_path / "empty")) == (
        f"{tmp_path}/empty: holds none of train.jsonl, validation.jsonl, test.jsonl (or .csv, .parquet); add them, or pass a file"
    )


def test_files_with_too_little(tmp_path: Path) -> None:
    empty = write_lines(tmp_path / "empty.jsonl", [])
    assert failure(lambda: read_items(empty)) == (
        f"{empty}: has no questions that can be used; give one JSON object per line"
    )
    few = write_lines(tmp_path / "few.jsonl", [own_row(), own_row(1)])
    assert failure(lambda: load_task(few).test) == (
        f"{few}: has 2 questions, too few to divide: test would be empty; "
        "give at least 5 different ones, or a directory with one file per split"
    )


def test_a_question_asked_by_itself_is_that_of_a_line_without_answer(tmp_path: Path) -> None:
    asked = make_item("Which?", ["red", "green", "blue"])
    (read,) = read_items(write_lines(tmp_path / "mine.jsonl", [Q])).items
    assert (asked.prompt, asked.options, asked.labels, asked.gold) == (read.prompt, read.options, read.labels, None)
    assert make_item("Which?", ("red", "green", "blue")) == asked
    assert asked.id != make_item("Which?", ["red", "green"]).id


def test_a_question_about_a_passage() -> None:
    line = read_own(Q | {"passage": "A  “wall”."}).item
    asked = make_item("Which?", ["red", "green", "blue"], "A  “wall”.")
    assert asked.prompt == line.prompt and asked.prompt.passage == ' A "wall".'


@pytest.mark.parametrize(
    "question, choices, message",
    [
        ("", ["a", "b"], "the question cannot be used: empty question; give a question and two choices or more"),
        (" \u200b ", ["a", "b"], "the question cannot be used: empty question; "),
        ("Which?", ["a"], "the question cannot be used: fewer than 2 choices; "),
        ("Which?", [], "the question cannot be used: no choices"),
        ("Which?", ["a", " "], "the question cannot be used: empty choice; "),
        ("Which?", ["a", 1], "the question cannot be used: choices is no text: 1"),
        ("Which?", "yes", "choices is one text, 'yes'; give a list of two choices or more"),
        ("Which?", ["a", "b", "a "], "two choices are equal: 'a'; give each once"),
        ("Which?", ["\ud800", "b"], "the question cannot be used: choices is no valid Unicode: "),
        ("Which?", [str(k) for k in range(27)], "the question cannot be used: more than 26 choices need 'labels': "),
    ],
)
def test_questions_that_cannot_be_asked(question: str, choices: Any, message: str) -> None:
    assert failure(lambda: make_item(question, choices)).startswith(message)


def test_an_id_must_be_text_that_can_be_written(tmp_path: Path) -> None:
    """Half a character would be found out when the predictions are written, after everything else."""
    path = write_lines(tmp_path / "mine.jsonl", [Q | {"id": "\ud800"}])
    assert failure(lambda: read_items(path)).startswith(f"{path}, line 1: id is no valid Unicode: ")
