"""Render a report as one self-contained HTML page: no script, no other file, no network. All text is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from html import escape
from importlib.resources import files
from urllib.parse import quote

from bayeslora.figures.table import DAGGER, Cell, Column, has_dagger, is_best
from bayeslora.report.blocks import (
    Block,
    Cards,
    Columns,
    Drawing,
    Fact,
    Facts,
    Gallery,
    Links,
    Methods,
    Note,
    Plain,
    Report,
    Section,
)
from bayeslora.report.svg import to_inline


def to_html(report: Report, figures: Mapping[str, str]) -> str:
    """Render the page; ``figures`` are the SVGs by name."""
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    sections = [section for section in report.sections if section.blocks]
    contents = "".join(f'<li><a href="#part-{k}">{escape(it.title)}</a></li>' for k, it in enumerate(sections))
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark"><meta name="generator" content="bayeslora report">',
        f"<title>{escape(report.title)}</title>",
        f"<style>\n{style}</style></head>",
        "<body><header>",
        f'<p class="kind">{escape(report.kind)}</p><h1>{escape(report.title)}</h1>',
        f'<p class="subtitle">{escape(report.subtitle)}</p>',
        f'<nav aria-label="Contents"><ul>{contents}</ul></nav></header><main>',
        *(_section(f"part-{k}", section, figures) for k, section in enumerate(sections)),
        "</main><footer><p>Made by <code>bayeslora report</code> from the files that were saved; no model was run. "
        "Figures (PNG, SVG) and tables (LaTeX, Markdown) lie beside this page.</p></footer></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _section(anchor: str, section: Section, figures: Mapping[str, str]) -> str:
    blocks = "\n".join(_gallery(it, figures) if isinstance(it, Gallery) else _html(it) for it in section.blocks)
    return f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{escape(section.title)}</h2>\n{blocks}\n</section>'


def _gallery(gallery: Gallery, figures: Mapping[str, str]) -> str:
    return f'<div class="gallery">{"".join(_figure(it, figures[it.name]) for it in gallery.drawings)}</div>'


def _figure(drawing: Drawing, svg: str) -> str:
    kind = ' class="wide"' if drawing.wide else ""
    label = escape(f"Figure {drawing.name}; scrolls sideways")
    scroll = f' tabindex="0" role="group" aria-label="{label}"' if drawing.wide else ""
    picture = to_inline(svg, drawing.name, drawing.alt)
    return (
        f'<figure{kind}><div class="scroll"{scroll}>{picture}</div>'
        f"<figcaption>{escape(drawing.caption)}</figcaption></figure>"
    )


@singledispatch
def _html(block: Block) -> str:
    raise TypeError(f"no HTML for {type(block).__name__}")


@_html.register
def _(block: Note) -> str:
    return f'<p class="warning">{escape(block.text)}</p>' if block.warning else f"<p>{escape(block.text)}</p>"


@_html.register
def _(block: Links) -> str:
    items = (f'<li><a href="{escape(quote(to))}">{escape(text)}</a></li>' for to, text in block.links.items())
    return f'<ul class="links">{"".join(items)}</ul>'


@_html.register
def _(block: Cards) -> str:
    return f'<dl class="cards">{"".join(map(_fact, block.facts))}</dl>'


@_html.register
def _(block: Columns) -> str:
    return f'<div class="columns">{"".join(map(_facts, block.groups))}</div>'


def _facts(group: Facts) -> str:
    rows = "".join(map(_fact, group.facts))
    return f'<section class="facts"><h3>{escape(group.title)}</h3><dl>{rows}</dl></section>'


def _fact(fact: Fact) -> str:
    note = f" <small>{escape(fact.note)}</small>" if fact.note else ""
    mark = ' class="marked"' if fact.marked else ""
    return f"<div{mark}><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}{note}</dd></div>"


@_html.register
def _(block: Plain) -> str:
    def kind(k: int) -> str:
        return ' class="number"' if k in block.numeric else ""

    head = "".join(f'<th scope="col"{kind(k)}>{escape(text)}</th>' for k, text in enumerate(block.head))
    lines = []
    for number, (first, *others) in enumerate(block.rows):
        cells = "".join(f"<td{kind(k)}>{escape(text)}</td>" for k, text in enumerate(others, 1))
        mark = ' class="marked"' if number in block.marked else ""
        lines.append(f'<tr{mark}><th scope="row"{kind(0)}>{escape(first)}</th>{cells}</tr>')
    return _table(block.name, block.caption, head, "".join(lines))


@_html.register
def _(block: Methods) -> str:
    titles = "".join(f'<th scope="col" class="number">{escape(column.title)}</th>' for column in block.columns)
    lines = []
    for name, row in block.rows.items():
        bounds = block.bounds.get(name, {})
        cells = "".join(
            _cell(
                row.get(it.metric),
                it,
                bounds.get(it.metric),
                bold=is_best(block.rows, it, name),
                dagger=has_dagger(block.rows, it, name),
            )
            for it in block.columns
        )
        lines.append(f'<tr><th scope="row" class="name">{escape(name)}</th>{cells}</tr>')
    return _table(block.name, block.caption, f'<th scope="col">{escape(block.what)}</th>{titles}', "".join(lines))


def _cell(cell: Cell | None, column: Column, bounds: tuple[float, float] | None, *, bold: bool, dagger: bool) -> str:
    if cell is None:
        return '<td class="number gap">—</td>'
    text = _number(cell.mean, column)
    if len(cell.values) > 1:
        text += f" ± {_number(cell.sd, column)}"
    text = f"<strong>{text}</strong>" if bold else text + (DAGGER if dagger else "")
    interval = "" if bounds is None else f"<small>{_number(bounds[0], column)} – {_number(bounds[1], column)}</small>"
    return f'<td class="number">{text}{interval}</td>'


def _number(value: float, column: Column) -> str:
    return f"{value * column.factor:.{column.digits}f}"


def _table(name: str, caption: str, head: str, body: str) -> str:
    """Render a table with its caption outside the scrolling area, so that it can be read on a phone."""
    return (
        f'<p class="caption" id="caption-{name}">{escape(caption)}</p>'
        f'<div class="scroll" tabindex="0" role="group" aria-labelledby="caption-{name}">'
        f'<table id="table-{name}" aria-labelledby="caption-{name}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
