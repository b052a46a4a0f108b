"""Tables of a study in Markdown and LaTeX, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bayeslora.atomic_files import replacing
from bayeslora.figures.table import DAGGER, Column, Row, latex, markdown
from bayeslora.studies.evaluated import SIGNIFICANT

HOW_TO_READ = "ACC and ECE in per cent; mean ± standard deviation over seeds."
ABOUT_TIES = (
    f"{DAGGER}: the paired bootstrap over questions and seeds cannot tell it from the best (p ≥ {SIGNIFICANT})."
)
ABOUT_SHIFT = (
    "A → B: learnt on A, evaluated on B. AUROC: how well the uncertainty tells questions of B from those of A (0.5 is not at "
    f"all); it has no {DAGGER}."
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
        out.mkdir(parents=True, exist_ok=True)
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


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
