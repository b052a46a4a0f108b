"""A table of methods in Markdown and LaTeX: mean and standard deviation over seeds, the best in bold."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

DAGGER = "†"


@dataclass(frozen=True)
class Column:
    """How a metric is shown.

    Attributes:
        metric: its name in results.
        title: heading of the column.
        factor: 100 for per cent.
        digits: decimal places.
        largest: whether larger is better.
        ranked: whether values are ranked; numbers of parameters are not.
    """

    metric: str
    title: str
    factor: float = 1.0
    digits: int = 3
    largest: bool = False
    ranked: bool = True

    def better(self, a: float, b: float) -> bool:
        """Whether ``a`` is better than ``b``."""
        return a > b if self.largest else a < b


COLUMNS: tuple[Column, ...] = (
    Column("acc", "ACC ↑", 100.0, 1, largest=True),
    Column("nll", "NLL ↓"),
    Column("ece", "ECE ↓", 100.0, 1),
)
"""The main metrics; accuracy and calibration error in per cent."""

CALIBRATED = "calibrated_"
"""Prefix of metrics after calibration."""

CALIBRATED_COLUMNS: tuple[Column, ...] = (
    Column(f"{CALIBRATED}nll", "NLL, calibrated ↓"),
    Column(f"{CALIBRATED}ece", "ECE, calibrated ↓", 100.0, 1),
)
"""The main metrics after scale and temperature were chosen on validation questions."""


@dataclass(frozen=True)
class Cell:
    """A metric of one method over its seeds.

    Attributes:
        values: one for each seed.
        ties_best: whether the paired bootstrap finds no difference from the best.
        ranked: whether it may be the best; a mere reference may not.
    """

    values: tuple[float, ...]
    ties_best: bool = False
    ranked: bool = True

    @property
    def mean(self) -> float:
        """Mean over the seeds, without digits that depend on the order of adding them up."""
        return round(sum(self.values) / len(self.values), 12)

    @property
    def sd(self) -> float:
        """Sample standard deviation over the seeds; NaN for a single seed."""
        if len(self.values) < 2:
            return math.nan
        return math.sqrt(sum((v - self.mean) ** 2 for v in self.values) / (len(self.values) - 1))


Row = Mapping[str, Cell]
"""The cells of one method by metric; missing metrics are left blank."""


def best_of(rows: Mapping[str, Row], column: Column) -> str | None:
    """The method with the best mean, or ``None`` if the column has none."""
    found: str | None = None
    if not column.ranked:
        return None
    for method, row in rows.items():
        cell = row.get(column.metric)
        if cell is None or not cell.ranked:
            continue
        if found is None or column.better(cell.mean, rows[found][column.metric].mean):
            found = method
    return found


def is_best(rows: Mapping[str, Row], column: Column, method: str) -> bool:
    """Whether no method has a better mean than this one. Several methods may tie for the best, but not all of them."""
    best, mine = best_of(rows, column), rows[method].get(column.metric)
    if best is None or mine is None or not mine.ranked:
        return False
    means = [cell.mean for row in rows.values() if (cell := row.get(column.metric)) is not None and cell.ranked]
    equal = means.count(rows[best][column.metric].mean)
    return mine.mean == rows[best][column.metric].mean and (equal < len(means) or equal == 1)


def has_dagger(rows: Mapping[str, Row], column: Column, method: str) -> bool:
    """Whether a method cannot be told from the best, and has another mean."""
    best, cell = best_of(rows, column), rows[method].get(column.metric)
    return best is not None and cell is not None and cell.ties_best and cell.mean != rows[best][column.metric].mean


def markdown(rows: Mapping[str, Row], columns: Sequence[Column] = COLUMNS, what: str = "method") -> str:
    """A table in Markdown; ``what`` heads the column of row names. † marks values not distinguishable from the best."""
    lines = [
        f"| {what} | " + " | ".join(column.title for column in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    return "\n".join(lines + _body(rows, columns, "| {} | {} |", " | ", "**{}**".format, "{} ± {}".format, DAGGER))


def latex(rows: Mapping[str, Row], columns: Sequence[Column] = COLUMNS, what: str = "method") -> str:
    """A table as a LaTeX ``tabular`` (needs the package booktabs)."""
    titles = [escape_latex(column.title) for column in columns]
    lines = [
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join([escape_latex(what), *titles]) + r" \\",
        r"\midrule",
    ]
    body = _body(
        rows,
        columns,
        r"{} & {} \\",
        " & ",
        r"\textbf{{{}}}".format,
        r"{} $\pm$ {}".format,
        r"$^\dagger$",
        escape=escape_latex,
    )
    return "\n".join([*lines, *body, r"\bottomrule", r"\end{tabular}"])


def _body(
    rows: Mapping[str, Row],
    columns: Sequence[Column],
    line: str,
    between: str,
    bold: Callable[[str], str],
    spread: Callable[[str, str], str],
    dagger: str,
    escape: Callable[[str], str] = lambda text: text,
) -> list[str]:
    def shown(method: str, column: Column) -> str:
        cell = rows[method].get(column.metric)
        if cell is None:
            return "—"
        text = f"{cell.mean * column.factor:.{column.digits}f}"
        if len(cell.values) > 1:
            text = spread(text, f"{cell.sd * column.factor:.{column.digits}f}")
        if is_best(rows, column, method):
            return bold(text)
        return text + dagger if has_dagger(rows, column, method) else text

    return [line.format(escape(method), between.join(shown(method, column) for column in columns)) for method in rows]


_SPECIAL = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "_&%$#{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "→": r"$\rightarrow$",
        "↑": r"$\uparrow$",
        "↓": r"$\downarrow$",
        "×": r"$\times$",
    }
)


def escape_latex(text: str) -> str:
    """Escape special characters of LaTeX."""
    return " ".join(text.translate(_SPECIAL).split())
