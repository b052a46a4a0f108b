"""What comparisons and ablations have in common: which results are finished, and the files of a study.

Both keep runs and evaluations in directories of their own, and write ``table.md``, ``table.tex`` and ``table.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bayeslora.atomic_files import write_json
from bayeslora.models.device import resolve_device
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.environment import describe_environment
from bayeslora.runs.saved_config import to_dict
from bayeslora.studies.evaluated import Places
from bayeslora.studies.question_sections import QuestionSection
from bayeslora.studies.study import Study
from bayeslora.studies.tables import StudyOutcome, Tables
from bayeslora.studies.token_sections import TokenSection

Sections = Mapping[str, QuestionSection | TokenSection]
"""Parts of a study's table, by title."""


def finished(places: Places) -> Places:
    """Of the directories of a study, those that have a result."""
    return {
        row: {seed: path for seed, path in paths.items() if RunDirectory(path).result.exists()}
        for row, paths in places.items()
    }


def make_record(
    study: Study, device: str, sections: Sections, failures: Mapping[str, str], **more: Any
) -> dict[str, Any]:
    """Everything that the tables are made from, without the predictions."""
    return {
        "schema": 1,
        "study": to_dict(study),
        "environment": describe_environment(resolve_device(device)),
        **more,
        "sections": {title: section.record for title, section in sections.items()},
        "failures": dict(failures),
    }


def write_study(tables: Tables, sections: Sections, record: Mapping[str, Any], out: Path) -> StudyOutcome:
    """Write what the tables are made from, which tells whose they are, and then the tables."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "table.json", record)
    tables.write(out)
    rows = {title: section.rows for title, section in sections.items()}
    return StudyOutcome(rows, tables.text, tables.failures, out)
