"""BoolQ: yes/no questions about a Wikipedia passage. The labels of its test split are hidden."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bayeslora.tasks.base import Item, Prompt
from bayeslora.tasks.benchmark import Benchmark
from bayeslora.tasks.choices import choice_prompt
from bayeslora.tasks.rows import Candidate, Malformed, row_id, text_field
from bayeslora.tasks.sources import HubPlace, Source

YES_NO = ("Yes", "No")
LABELS = ("A", "B")


def read_boolq(values: Mapping[str, Any]) -> Candidate[Item]:
    """A row ``{"id", "passage", "question", "answer": true or false}``."""
    passage, question = text_field(values, "passage"), text_field(values, "question")
    answer = values.get("answer")
    if not isinstance(answer, bool):
        raise Malformed("answer is neither true nor false", repr(answer)[:60])
    prompt = Prompt("Passage:", f" {passage}", f"\nQuestion: {question}\nAnswer:")
    asked = choice_prompt(question, YES_NO, LABELS, passage)
    gold = YES_NO.index("Yes" if answer else "No")
    options = tuple(f" {word}" for word in YES_NO)
    item = Item(row_id(values), prompt, options, LABELS, gold, letter_prompt=asked)
    return Candidate(item, None if passage and question else "empty passage or question")


def hub_row(row: Mapping[str, Any], place: HubPlace) -> dict[str, Any]:
    """A row of ``google/boolq``, which has no ids; they are generated as in the local files."""
    return {
        "id": f"{place.split}-{place.index}",
        "passage": row["passage"],
        "question": row["question"],
        "answer": row["answer"],
    }


BENCHMARKS = (
    Benchmark(
        "boolq",
        "BoolQ: yes/no questions about a passage, 9,427 training questions of which 20 % are held out",
        read_boolq,
        hub_row,
        train=Source("boolq/train", "google/boolq", (None,), "train"),
        validation=None,
        test=Source("boolq/validation", "google/boolq", (None,), "validation"),
    ),
)
