"""Run one benchmark, format it as a table and save it with device and versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bayeslora.atomic_files import write_json
from bayeslora.bench.config import BenchConfig
from bayeslora.bench.growth import GROWTH, draw_growth
from bayeslora.bench.measures import MEASURES
from bayeslora.bench.rows import Row
from bayeslora.bench.subjects import Subjects
from bayeslora.bench.tables import by_method, line_by_line
from bayeslora.errors import InputError
from bayeslora.progress import Reporter, Silent
from bayeslora.runs.environment import describe_environment
from bayeslora.runs.saved_config import to_dict

SCHEMA = 1


@dataclass(frozen=True)
class Benchmark:
    """Results of a benchmark, as a record and as Markdown tables."""

    record: dict[str, Any]
    text: str


def bench(
    what: Sequence[str],
    config: BenchConfig,
    *,
    device: str = "auto",
    out: Path | None = None,
    figures: Path | None = None,
    report: Reporter | None = None,
) -> Benchmark:
    """Run the measurements; writes the record to ``out`` row by row, and figures of growth to a directory, if given."""
    if not what:
        raise InputError(f"there is nothing to measure; choose among {', '.join(MEASURES)}")
    for name in what:
        if name not in MEASURES:
            raise InputError(f"cannot measure {name!r}; choose among {', '.join(MEASURES)}")
    if figures is not None and "growth" not in what:
        raise InputError("figures are of growth, which is not measured; leave them out, or measure growth")
    _require_places(out, figures)
    report = report or Silent()
    subjects = Subjects(config, device)
    record = {
        "schema": SCHEMA,
        "config": to_dict(config),
        "dtype": str(subjects.dtype).removeprefix("torch."),
        "environment": describe_environment(subjects.device),
    }
    rows: list[Row] = []
    for name in what:
        for row in MEASURES[name](subjects, report):
            rows.append(row)
            record["rows"] = [asdict(it) for it in rows]
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                write_json(out, record)
    if figures is not None:
        draw_growth(rows, figures)
    text = line_by_line(rows) if len(what) == 1 else f"{line_by_line(rows)}\n\n{by_method(rows)}"
    return Benchmark(record, text)


def _require_places(out: Path | None, figures: Path | None) -> None:
    """Refuse places where results cannot be written, or would replace others."""
    if out is not None and out.exists():
        raise InputError(f"{out}: is there already; choose another file")
    if figures is not None and (found := sorted(figures.glob(f"{GROWTH}-*.svg"))):
        raise InputError(f"{figures}: holds figures already ({found[0].name}); choose another directory")
    above = [*(out.parents if out else ()), *((figures, *figures.parents) if figures else ())]
    for place in above:
        if place.is_file():
            raise InputError(f"{place}: is a file, and a directory is needed there; choose another place")
