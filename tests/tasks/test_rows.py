"""Normalisation, leaving out, and division into splits."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayeslora.errors import InputError
from bayeslora.tasks.boolq import read_boolq
from bayeslora.tasks.choices import read_choices
from bayeslora.tasks.rows import Malformed, Row, clean, divide, normalise, row_id
from bayeslora.tasks.winogrande import read_winogrande, word_pair

from .cases import boolq_row, choice_row, winogrande_row

quick = settings(deadline=None, max_examples=100)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("‘a’ ‚b‛", "'a' 'b'"),
        ("“a” „b‟", '"a" "b"'),
        ("1‐2‑3‒4–5—6―7−8", "1-2-3-4-5-6-7-8"),
        ("a\u00a0b\u2009c\u3000d\u202fe", "a b c d e"),
        ("  a \t b\r\n\n c  ", "a b c"),
        ("wait…", "wait..."),
        ("zero\u200bwidth\ufeff soft\u00adhyphen", "zerowidth softhyphen"),
        ("5 °C → 9′ é 中文 $x_1$", "5 °C → 9′ é 中文 $x_1$"),
        (" \ufeff ", ""),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalise(text) == expected


@quick
@given(st.text())
def test_normalisation_is_done_once_and_for_all(text: str) -> None:
    once = normalise(text)
    assert normalise(once) == once
    assert once == once.strip() and "  " not in once and "\n" not in once


MALFORMED: list[tuple[Any, dict[str, Any], str]] = [
    (read_choices, choice_row(question=None), "no question"),
    (read_choices, choice_row(question=7), "question is no text: 7"),
    (read_choices, choice_row(question="a\ud800"), "question is no valid Unicode: 'a\\ud800'"),
    (read_choices, choice_row(choices=[], labels=[]), "answer is not among the labels: 'A' of "),
    (read_choices, choice_row(choices=[]), "no choices"),
    (read_choices, choice_row(choices=None), "no choices"),
    (read_choices, choice_row(choices="abc"), "choices is no list: 'abc'"),
    (read_choices, choice_row(choices=["a", 2, "c"]), "choices is no text: 2"),
    (read_choices, choice_row(choices=["a", "b"]), "labels and choices differ in number: 3 and 2"),
    (read_choices, choice_row(labels=["A", "A", "B"]), "a label is repeated: A, A, B"),
    (read_choices, choice_row(labels=None), "no labels"),
    (read_choices, choice_row(answer="D"), "answer is not among the labels: 'D' of A, B, C"),
    (read_choices, choice_row(answer=None), "no answer"),
    (read_boolq, boolq_row(answer="true"), "answer is neither true nor false: 'true'"),
    (read_boolq, boolq_row(answer=1), "answer is neither true nor false: 1"),
    (read_boolq, boolq_row(passage=None), "no passage"),
    (read_boolq, boolq_row(question=None), "no question"),
    (
        read_winogrande,
        winogrande_row(sentence="Nothing to fill in."),
        "no blank '_' in the sentence: Nothing to fill in.",
    ),
    (read_winogrande, winogrande_row(answer=""), "answer is neither 1 nor 2: ''"),
    (read_winogrande, winogrande_row(option2=None), "no option2"),
]

FLAWED: list[tuple[Any, dict[str, Any], str]] = [
    (read_choices, choice_row(question=" "), "empty question"),
    (read_choices, choice_row(choices=["1"], labels=["A"]), "fewer than 2 choices"),
    (read_choices, choice_row(choices=["1", " ", "b"]), "empty choice"),
    (read_boolq, boolq_row(passage=""), "empty passage or question"),
    (read_boolq, boolq_row(question=""), "empty passage or question"),
    (read_winogrande, winogrande_row(option1=""), "empty choice"),
    (read_winogrande, winogrande_row(sentence="_ fell."), "nothing before the blank"),
    (read_winogrande, winogrande_row(sentence="The _ and the _ fell."), "more than one blank"),
]


@pytest.mark.parametrize("read, row, problem", MALFORMED)
def test_malformed_rows_are_left_out_of_train_and_refused_elsewhere(read: Any, row: Any, problem: str) -> None:
    split = clean([Row(row, "file, line 1")], read, "task train", drop=True)
    assert split.items == () and split.counts == {problem.partition(":")[0]: 1}
    with pytest.raises(InputError) as error:
        clean([Row(row, "file, line 1")], read, "task test", drop=False)
    assert str(error.value) == f"file, line 1: {problem}; correct or remove it"


@pytest.mark.parametrize("read, row, flaw", FLAWED)
def test_flawed_rows_are_left_out_of_train_and_kept_elsewhere(read: Any, row: Any, flaw: str) -> None:
    rows = [Row(row, "file, line 1")]
    assert clean(rows, read, "task train", drop=True).counts == {flaw: 1}
    kept = clean(rows, read, "task test", drop=False)
    assert len(kept) == 1 and kept.counts == {}


def test_duplicates_are_those_after_normalisation_whatever_their_answers() -> None:
    twins = [choice_row(1), choice_row(1, id="other", question=" What  is 1\u00a0plus 1? ", answer="B")]
    near = choice_row(1, choices=["a fish", "2", "blue"])
    rows = [Row(row, "") for row in [*twins, near]]
    train = clean(rows, read_choices, "t", drop=True)
    assert [item.id for item in train] == ["q1", "q1"] and train.counts == {"duplicate": 1}
    assert len(clean(rows, read_choices, "t", drop=False)) == 3


def test_each_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rows = [choice_row(), choice_row(), choice_row(), choice_row(1, question=None), choice_row(2, answer="Z")]
    with caplog.at_level(logging.WARNING, "bayeslora.tasks"):
        clean([Row(row, "") for row in rows], read_choices, "arc-easy train", drop=True)
    assert [record.getMessage() for record in caplog.records] == [
        "arc-easy train: left out 2 of its rows (duplicate)",
        "arc-easy train: left out 1 of its rows (no question)",
        "arc-easy train: left out 1 of its rows (answer is not among the labels)",
    ]


def test_malformed_needs_no_detail() -> None:
    assert str(Malformed("no choices")) == "no choices"


def test_ids_are_given_or_follow_from_the_fields() -> None:
    assert row_id({"id": "x", "a": 1}) == "x" and row_id({"id": 0}) == "0"
    first, second = row_id({"a": 1, "b": [2]}), row_id({"b": [2], "a": 1})
    assert first == second != row_id({"a": 2, "b": [2]}) and len(first) == 12


@quick
@given(st.lists(st.text(max_size=4), max_size=40), st.randoms(use_true_random=False))
def test_division_covers_all_keeps_equal_keys_together_and_ignores_order(names: list[str], rng: random.Random) -> None:
    parts = divide(names, (0.6, 0.2, 0.2), key=lambda name: name)
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert all(not set(a) & set(b) for a, b in zip(parts, parts[1:] + parts[:1], strict=True))
    shuffled = rng.sample(names, len(names))
    assert [set(part) for part in divide(shuffled, (0.6, 0.2, 0.2), key=lambda name: name)] == [set(p) for p in parts]


@pytest.mark.parametrize("n, sizes", [(5, [3, 1, 1]), (10, [6, 2, 2]), (1000, [600, 200, 200])])
def test_division_of_different_keys_has_the_shares_asked_for(n: int, sizes: list[int]) -> None:
    assert [len(part) for part in divide([str(k) for k in range(n)], (0.6, 0.2, 0.2), key=str)] == sizes


def test_division_is_pinned() -> None:
    held_out, _ = divide([f"train-{k}" for k in range(10)], (0.2, 0.8), key=str)
    assert held_out == ("train-0", "train-1")


def test_twins_have_one_key() -> None:
    one = winogrande_row(
        3, sentence="The cup was left near the fan because the _ was warm.", option1="Fan", option2="Can"
    )
    two = one | {"sentence": "The cup was left near the fan because the _ was cold, and wet.", "answer": "1"}
    turned = one | {"option1": "can", "option2": "fan"}
    keys = {word_pair(read_winogrande(row).item) for row in (one, two, turned)}
    assert len(keys) == 1 and keys != {word_pair(read_winogrande(winogrande_row(4)).item)}
