"""Tables of a study in Markdown and LaTeX, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bayeslora.atomic_files import replacing
from bayeslora.data_frames import make_frame
from bayeslora.figures.table import DAGGER, Column, Row, latex, markdown
from bayeslora.studies.evaluated import SIGNIFICANT

if TYPE_CHECKING:
    from pandas import DataFrame

HOW_TO_READ = "ACC and ECE in per cent; mean ± standard deviation over seeds."
ABOUT_TIES = (
    f"{DAGGER}: the paired bootstrap over questions and seeds cannot tell it from the best (p ≥ {SIGNIFICANT})."
)
ABOUT_SHIFT = (
    "A → B: learnt on A, evaluated on B. AUROC: how well the uncertainty tells questions of B from those of A (0.5 means not "
    f"at all); it has no {DAGGER}."
)


@dataclass(frozen=True)
class Tables:
    """Tables under one heading.

    Attributes:
        head: introduction to all of them.
        sections: rows and columns by title.
        failures: reasons of failed runs, by label.
        what: heading of the column of row names.
    """

    head: str
    sections: Mapping[str, tuple[Mapping[str, Row], Sequence[Column]]]
    failures: Mapping[str, str]
    what: str = "method"

    @property
    def text(self) -> str:
        """All tables in Markdown."""
        tables = (f"## {title}\n\n{markdown(*table, self.what)}" for title, table in self.sections.items())
        parts = [self.head, *tables]
        if self.failures:
            parts.append("## Failed\n\n" + "\n".join(f"- {what}: {why}" for what, why in self.failures.items()))
        return "\n\n".join(parts) + "\n"

    def write(self, out: Path) -> None:
        """Write ``table.md`` and ``table.tex``."""
        _write_text(out / "table.md", self.text)
        tables = (f"% {title}\n{latex(*table, self.what)}" for title, table in self.sections.items())
        _write_text(out / "table.tex", "\n\n".join(tables) + "\n")


@dataclass(frozen=True)
class StudyOutcome:
    """Outcome of a study.

    Attributes:
        sections: rows of each part of its table, by title: a method or variant to metric to cell.
        text: the whole table in Markdown.
        failures: reasons of failed runs, by label.
        out: directory of tables and figures.
    """

    sections: Mapping[str, Mapping[str, Row]]
    text: str
    failures: Mapping[str, str]
    out: Path

    def __repr__(self) -> str:
        names = dict.fromkeys(name for rows in self.sections.values() for name in rows)
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"StudyOutcome({len(self.sections)} sections, {len(names)} rows{failed}, in {str(self.out)!r})"

    def to_pandas(self) -> DataFrame:
        """A table with one row per section, method (or variant) and metric: ``mean`` and ``sd`` over the ``seeds``, and
        ``ties_best``, whether the paired bootstrap finds no difference from the best.

        ``frame.pivot(index=["section", "name"], columns="metric", values="mean")`` has metrics as columns.
        """
        return make_frame(
            {
                "section": section,
                "name": name,
                "metric": metric,
                "mean": cell.mean,
                "sd": cell.sd,
                "seeds": len(cell.values),
                "ties_best": cell.ties_best,
            }
            for section, rows in self.sections.items()
            for name, row in rows.items()
            for metric, cell in row.items()
            if cell.values
        )


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
