"""OpenBookQA, main configuration: elementary science questions with four choices, without the book's facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bayeslora.tasks.benchmark import Benchmark
from bayeslora.tasks.choices import read_choices
from bayeslora.tasks.sources import HubPlace, Source


def hub_row(row: Mapping[str, Any], place: HubPlace) -> dict[str, Any]:
    """A row of ``allenai/openbookqa``."""
    choices = row["choices"]
    return {
        "id": row["id"],
        "question": row["question_stem"],
        "choices": list(choices["text"]),
        "labels": list(choices["label"]),
        "answer": row["answerKey"],
    }


def _source(split: str) -> Source:
    return Source(f"openbookqa/{split}", "allenai/openbookqa", ("main",), split)


BENCHMARKS = (
    Benchmark(
        "openbookqa",
        "OpenBookQA: elementary science, 4,957 training questions",
        read_choices,
        hub_row,
        _source("train"),
        _source("validation"),
        _source("test"),
    ),
)
