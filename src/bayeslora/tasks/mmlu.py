"""MMLU: exam questions in four groups of subjects, for evaluation under a shift of subject. They are not used in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bayeslora.tasks.benchmark import Benchmark
from bayeslora.tasks.choices import read_choices
from bayeslora.tasks.sources import HubPlace, Source

LABELS = ("A", "B", "C", "D")

GROUPS = {
    "mmlu-cs": ("college_computer_science", "computer_security", "high_school_computer_science", "machine_learning"),
    "mmlu-eng": ("electrical_engineering",),
    "mmlu-law": ("international_law", "jurisprudence", "professional_law"),
    "mmlu-health": (
        "anatomy",
        "clinical_knowledge",
        "college_medicine",
        "human_aging",
        "nutrition",
        "professional_medicine",
        "virology",
    ),
}
"""Subjects by task."""

_TITLES = {
    "mmlu-cs": "computer science",
    "mmlu-eng": "electrical engineering",
    "mmlu-law": "law",
    "mmlu-health": "medicine and health",
}


def hub_row(row: Mapping[str, Any], place: HubPlace) -> dict[str, Any]:
    """A row of ``cais/mmlu``, whose answer is an index."""
    return {
        "id": f"{place.config}/{place.split}/{place.index}",
        "subject": place.config,
        "question": row["question"],
        "choices": list(row["choices"]),
        "labels": list(LABELS),
        "answer": LABELS[row["answer"]],
    }


def _benchmark(name: str) -> Benchmark:
    validation, test = (
        Source(f"mmlu/{split}", "cais/mmlu", GROUPS[name], split, config_field="subject")
        for split in ("validation", "test")
    )
    description = f"MMLU {_TITLES[name]}: exam questions, for evaluation only"
    return Benchmark(name, description, read_choices, hub_row, None, validation, test)


BENCHMARKS = tuple(_benchmark(name) for name in GROUPS)
