"""The reliability diagram of a model card, as SVG text.

It shows what :mod:`bayeslora.figures.reliability` shows, but takes a millisecond, so that every run can have one: matplotlib
would take most of a second. Lengths are pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from bayeslora.metrics import ReliabilityBins

FIGURE = "reliability.svg"
"""Name of the file beside the card."""

FEW = 10
"""Bins with fewer predictions than this are drawn lighter."""

_SIDE, _HISTOGRAM = 210, 44  # of a diagram, and height of the histogram below it
_LEFT, _RIGHT, _TOP, _BETWEEN, _STEP, _BOTTOM = 52, 12, 44, 30, 10, 74
_BLUE, _VERMILION, _TINT, _GREY = "#0072B2", "#D55E00", "#F7DFCC", "#7F7F7F"  # of Okabe and Ito, as in other figures
_LIGHT = 0.35
_TICKS = ((0.0, "0"), (0.5, "0.5"), (1.0, "1"))


def reliability_svg(sides: Mapping[str, ReliabilityBins]) -> str:
    """Accuracy against confidence for each side, such as before and after calibration, and how many predictions there are.

    A bar is the accuracy of a bin, and the box at its end the gap to the mean confidence.
    """
    width = _LEFT + len(sides) * (_SIDE + _BETWEEN) - _BETWEEN + _RIGHT
    height = _TOP + _SIDE + _STEP + _HISTOGRAM + _BOTTOM
    most = max(float((bins.count / bins.count.sum()).max()) for bins in sides.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">',
        _box(0, 0, width, height, fill="white"),
    ]
    for number, (name, bins) in enumerate(sides.items()):
        left = _LEFT + number * (_SIDE + _BETWEEN)
        parts += _panel(name, bins, left, most, first=number == 0)
    parts += _legend(width, height - 32)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, bins: ReliabilityBins, left: float, most: float, *, first: bool) -> Iterator[str]:
    base, floor = _TOP + _SIDE, _TOP + _SIDE + _STEP + _HISTOGRAM
    yield _text(left + _SIDE / 2, _TOP - 24, name, size=13, bold=True)
    yield _text(left + _SIDE / 2, _TOP - 9, f"calibration error (ECE) {bins.ece:.3f}")
    shares = bins.count / bins.count.sum()
    for low, high, count, confidence, accuracy, share in zip(
        bins.edges[:-1], bins.edges[1:], bins.count, bins.confidence, bins.accuracy, shares, strict=True
    ):
        if count == 0:
            continue
        x, wide = left + _SIDE * low, _SIDE * (high - low)
        strength = 1.0 if count >= FEW else _LIGHT
        ends = sorted((float(accuracy), float(confidence)))
        yield _box(x, base - _SIDE * accuracy, wide, _SIDE * accuracy, fill=_BLUE, stroke="white", opacity=strength)
        gap = (x + 0.5, base - _SIDE * ends[1], wide - 1, _SIDE * (ends[1] - ends[0]))
        yield _box(*gap, fill=_TINT, stroke=_VERMILION, opacity=max(strength, 0.6))
        yield _box(x, floor - _HISTOGRAM * share / most, wide, _HISTOGRAM * share / most, fill=_GREY)
    yield f'<path d="M{left} {base}L{left + _SIDE} {_TOP}" stroke="black" stroke-dasharray="5 3"/>'
    yield _box(left, _TOP, _SIDE, _SIDE, stroke="black")
    yield _box(left, floor - _HISTOGRAM, _SIDE, _HISTOGRAM, stroke="black")
    for value, label in _TICKS:
        yield _text(left + _SIDE * value, floor + 13, label)
        if first:
            yield _text(left - 6, base - _SIDE * value + 4, label, anchor="end")
    yield _text(left + _SIDE / 2, floor + 28, "confidence")
    if first:
        yield _text(left - 6, floor - _HISTOGRAM + 9, f"{most:.0%}", anchor="end")
        yield _upright(14, _TOP + _SIDE / 2, "accuracy")
        yield _upright(14, floor - _HISTOGRAM / 2, "share")


def _legend(width: float, top: float) -> Iterator[str]:
    """The keys, from left to right, and below each other where they do not fit."""
    x = float(_LEFT)
    for label, wide, colours, strength in _KEYS:
        if x > _LEFT and x + wide > width:
            x, top = float(_LEFT), top + 16
        yield _box(x + 0.5, top + 0.5, 11, 9, **colours, opacity=strength)
        yield _text(x + 17, top + 9, label, anchor="start")
        x += wide


_KEYS: tuple[tuple[str, float, dict[str, str], float], ...] = (
    ("accuracy", 76, {"fill": _BLUE}, 1.0),
    ("gap to confidence", 122, {"fill": _TINT, "stroke": _VERMILION}, 1.0),
    (f"fewer than {FEW} predictions", 160, {"fill": _BLUE}, _LIGHT),
)
"""Label, width, colours and strength of the keys."""


def _box(
    x: float, y: float, width: float, height: float, *, fill: str = "none", stroke: str = "none", opacity: float = 1.0
) -> str:
    strength = f' opacity="{opacity:g}"' if opacity < 1.0 else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" stroke="{stroke}"{strength}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 11, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight}>{escape(text)}</text>'


def _upright(x: float, y: float, text: str) -> str:
    return f'<text transform="translate({x:.1f} {y:.1f}) rotate(-90)" text-anchor="middle">{escape(text)}</text>'
