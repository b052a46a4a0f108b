"""Building blocks of a report, independent of HTML and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bayeslora.figures.table import Column, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Bounds = Mapping[str, Mapping[str, tuple[float, float]]]
"""Intervals by the name of a row and metric."""


@dataclass(frozen=True)
class Drawing:
    """A figure.

    Attributes:
        name: base name of its files.
        figure: the figure.
        caption: caption below it.
        alt: alternative text, with the main numbers.
        wide: whether it spans the width of the page.
    """

    name: str
    figure: Figure
    caption: str
    alt: str
    wide: bool = False


@dataclass(frozen=True)
class Gallery:
    """Figures side by side, if there is room."""

    drawings: Sequence[Drawing]


@dataclass(frozen=True)
class Plain:
    """A table of texts; the first column labels the rows.

    Attributes:
        name: base name of its files.
        head: headings of the columns.
        rows: the texts.
        caption: caption of the table.
        numeric: right-aligned columns.
        marked: highlighted rows.
    """

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    numeric: frozenset[int] = frozenset()
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Methods:
    """A table of methods (or of values of a setting) by metrics, the best of each in bold.

    Attributes:
        name: base name of its files.
        rows: by name; a row without cells is blank.
        columns: columns to show.
        caption: caption of the table.
        what: heading of the column of row names.
        bounds: intervals, if any.
    """

    name: str
    rows: Mapping[str, Row]
    columns: Sequence[Column]
    caption: str
    what: str = "method"
    bounds: Bounds = field(default_factory=dict)


@dataclass(frozen=True)
class Fact:
    """A named setting or number; ``note`` is additional text, ``marked`` means that it is not the default."""

    name: str
    value: str
    note: str = ""
    marked: bool = False


@dataclass(frozen=True)
class Facts:
    """A compact list of facts under a small heading."""

    title: str
    facts: Sequence[Fact]


@dataclass(frozen=True)
class Columns:
    """Groups of facts that flow into columns."""

    groups: Sequence[Facts]


@dataclass(frozen=True)
class Cards:
    """The main numbers, shown large."""

    facts: Sequence[Fact]


@dataclass(frozen=True)
class Note:
    """A paragraph; ``warning`` if something is missing."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Links:
    """Links to other pages: text by address, relative to the report."""

    links: Mapping[str, str]


Block = Gallery | Plain | Methods | Columns | Cards | Note | Links


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes:
        kind: its subject: a run, a comparison, ...
        title: short title.
        subtitle: one line.
        sections: in order; sections without blocks are left out.
    """

    kind: str
    title: str
    subtitle: str
    sections: Sequence[Section]

    @property
    def drawings(self) -> list[Drawing]:
        """All figures."""
        blocks = (block for section in self.sections for block in section.blocks)
        return [drawing for block in blocks if isinstance(block, Gallery) for drawing in block.drawings]

    @property
    def tables(self) -> list[Plain | Methods]:
        """All tables."""
        blocks = (block for section in self.sections for block in section.blocks)
        return [block for block in blocks if isinstance(block, Plain | Methods)]
