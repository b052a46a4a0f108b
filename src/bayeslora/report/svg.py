"""Figures as SVG: reproducible byte for byte, and with the page's colours when inline."""

from __future__ import annotations

import re
from html import escape
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

_SETTINGS: dict[Any, Any] = {"svg.hashsalt": "bayeslora", "svg.fonttype": "none"}
_NOT_SAID = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_ROLES = {
    "#000000": "currentColor",
    "#ffffff": "var(--paper)",
    "#0072b2": "var(--blue)",
    "#d55e00": "var(--vermilion)",
    "#f7dfcc": "var(--tint)",
    "#009e73": "var(--green)",
    "#cc79a7": "var(--pink)",
    "#e69f00": "var(--orange)",
    "#56b4e9": "var(--sky)",
    "#7f7f7f": "var(--grey)",
    "#b0b0b0": "var(--grid)",
}
"""CSS variables for colours that differ in dark mode."""


def to_svg(figure: Figure) -> str:
    """Render a figure as an SVG file."""
    out = StringIO()
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(out, format="svg", metadata=_NOT_SAID)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def to_inline(svg: str, name: str, alt: str) -> str:
    """Convert an SVG file to an inline element. Ids are made unique, since a page has many figures."""
    body = svg[svg.index("<svg ") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r' xmlns(:\w+)?="[^"]*"', "", body).replace("xlink:href=", "href=")
    body = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', body)
    body = re.sub(r'href="#([^"]*)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", body)
    for colour, role in _ROLES.items():
        body = body.replace(colour, role)
    width = re.search(r'\bwidth="([\d.]+)pt"', body)
    assert width is not None
    body = re.sub(r'\b(width|height)="[\d.]+pt"', "", body, count=2)
    label = f'role="img" aria-label="{escape(alt)}" style="--width: {float(width[1]) / 72:.3g}in"'
    return body.replace("<svg ", f"<svg {label} ", 1)
