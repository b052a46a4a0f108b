"""Tables of a report in Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence

from bayeslora.figures.table import escape_latex, latex, markdown
from bayeslora.report.blocks import Methods, Plain


def to_markdown(table: Plain | Methods) -> str:
    """A Markdown table with its caption above."""
    if isinstance(table, Methods):
        body = markdown(table.rows, table.columns, table.what)
    else:
        rule = "".join("---:|" if k in table.numeric else "---|" for k in range(len(table.head)))
        body = "\n".join([_line(table.head), f"|{rule}", *map(_line, table.rows)])
    return f"{_cell(table.caption)}\n\n{body}\n"


def to_latex(table: Plain | Methods) -> str:
    """A ``tabular`` with its caption as a comment (needs the package booktabs)."""
    caption = f"% {' '.join(table.caption.split())}\n"
    if isinstance(table, Methods):
        return f"{caption}{latex(table.rows, table.columns, table.what)}\n"
    places = "".join("r" if k in table.numeric else "l" for k in range(len(table.head)))
    lines = [" & ".join(map(escape_latex, row)) + r" \\" for row in (table.head, *table.rows)]
    body = [rf"\begin{{tabular}}{{{places}}}", r"\toprule", lines[0], r"\midrule", *lines[1:]]
    return "\n".join([caption + body[0], *body[1:], r"\bottomrule", r"\end{tabular}"]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Escape text for a cell."""
    for sign in "\\|<>*_`[]":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
