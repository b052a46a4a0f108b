"""Colours, markers and lines that stay distinct in greyscale and for any colour vision."""

from __future__ import annotations

from typing import Literal

Line = Literal["-", "--", "-.", ":"]

# From the palette of Okabe and Ito; with the markers, up to 49 series get distinct pairs.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_LINES: tuple[Line, ...] = ("-", "--", "-.", ":")


def colour_and_marker(number: int) -> tuple[str, str]:
    """Colour and marker of the series with this number; neighbours differ in both."""
    return _COLOURS[number % len(_COLOURS)], _MARKERS[(number + number // len(_COLOURS)) % len(_MARKERS)]


def line_style(number: int) -> Line:
    """Line style of the curve with this number."""
    return _LINES[number % len(_LINES)]
