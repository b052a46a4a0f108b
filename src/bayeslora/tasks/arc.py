"""ARC: grade-school science questions, easy and hard. Labels are ``A``-``E`` or, in a few exams, ``1``-``4``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bayeslora.tasks.benchmark import Benchmark
from bayeslora.tasks.choices import read_choices
from bayeslora.tasks.sources import HubPlace, Source


def hub_row(row: Mapping[str, Any], place: HubPlace) -> dict[str, Any]:
    """A row of ``allenai/ai2_arc``."""
    choices = row["choices"]
    return {
        "id": row["id"],
        "question": row["question"],
        "choices": list(choices["text"]),
        "labels": list(choices["label"]),
        "answer": row["answerKey"],
    }


def _benchmark(name: str, folder: str, config: str, description: str) -> Benchmark:
    train, validation, test = (
        Source(f"{folder}/{split}", "allenai/ai2_arc", (config,), split) for split in ("train", "validation", "test")
    )
    return Benchmark(name, description, read_choices, hub_row, train, validation, test)


BENCHMARKS = (
    _benchmark("arc-easy", "arc_easy", "ARC-Easy", "ARC-Easy: grade-school science, 2,251 training questions"),
    _benchmark(
        "arc-challenge", "arc_challenge", "ARC-Challenge", "ARC-Challenge: harder science, 1,119 training questions"
    ),
)
