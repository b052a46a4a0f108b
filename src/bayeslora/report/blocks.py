"""What a report consists of, before it becomes HTML and files."""

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
        name: of its files.
        figure: the thing itself.
        caption: what it shows, below it.
        alt: the same for those who cannot see it, with the numbers that matter.
        wide: whether it takes the whole width of the page.
    """

    name: str
    figure: Figure
    caption: str
    alt: str
    wide: bool = False


@dataclass(frozen=True)
class Gallery:
    """Figures side by side, as far as there is room."""

    drawings: Sequence[Drawing]


@dataclass(frozen=True)
class Plain:
    """A table of texts; the first column says what a row is about.

    Attributes:
        name: of its files.
        head: above the columns.
        rows: the texts.
        caption: what it shows.
        numeric: columns that are aligned to the right.
        marked: rows to be seen first.
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
        name: of its files.
        rows: by name; a row without cells is a gap.
        columns: what is shown.
        caption: what it shows.
        what: above the names of the rows.
        bounds: intervals, where there are any.
    """

    name: str
    rows: Mapping[str, Row]
    columns: Sequence[Column]
    caption: str
    what: str = "method"
    bounds: Bounds = field(default_factory=dict)


@dataclass(frozen=True)
class Fact:
    """A setting or a figure with its name; ``note`` is what else is to be known, ``marked`` that it is not as usual."""

    name: str
    value: str
    note: str = ""
    marked: bool = False


@dataclass(frozen=True)
class Facts:
    """Many of them, close together, under a small heading."""

    title: str
    facts: Sequence[Fact]


@dataclass(frozen=True)
class Columns:
    """Groups of facts that flow into columns."""

    groups: Sequence[Facts]


@dataclass(frozen=True)
class Cards:
    """The few figures that matter most, large."""

    facts: Sequence[Fact]


@dataclass(frozen=True)
class Note:
    """A paragraph; ``warning`` if something is missing."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Links:
    """Pages elsewhere: text by address, relative to the report."""

    links: Mapping[str, str]


Block = Gallery | Plain | Methods | Columns | Cards | Note | Links


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """All of it.

    Attributes:
        kind: what it is about: a run, a comparison, ...
        title: in a few words.
        subtitle: in a line.
        sections: in order; one without blocks is left out.
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
