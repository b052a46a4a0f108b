"""The badges of the README: what ``pyproject.toml`` says, as small pictures."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

BADGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{left}: {right}">
<title>{left}: {right}</title>
<rect width="{width}" height="20" rx="3" fill="#0b5c8f"/>
<path d="M3 0h{middle}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#4a4f55"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{left_at}" y="14" textLength="{left_text}">{left}</text>
<text x="{right_at}" y="14" textLength="{right_text}">{right}</text>
</g></svg>
"""
LETTER, MARGIN = 6.6, 12
"""Width of a letter, and of the space around a text, in pixels."""


def badges(project: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What each badge says, by name."""
    status = next(it for it in project["classifiers"] if it.startswith("Development Status"))
    return {
        "python": ("python", project["requires-python"].replace(">=", "") + " or newer"),
        "licence": ("licence", project["license"]),
        "status": ("status", status.rpartition(" - ")[2].lower()),
        "notebook": ("try", "notebook"),
    }


def draw_badge(left: str, right: str) -> str:
    """A badge with two texts."""
    left_text, right_text = round(LETTER * len(left)), round(LETTER * len(right))
    split, width = left_text + MARGIN, left_text + right_text + 2 * MARGIN
    return BADGE.format(
        left=left,
        right=right,
        left_text=left_text,
        right_text=right_text,
        left_at=split / 2,
        right_at=split + (width - split) / 2,
        middle=split - 3,
        width=width,
    )


def draw_badges(folder: Path) -> None:
    """Write all badges."""
    settings = (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    for name, (left, right) in badges(tomllib.loads(settings)["project"]).items():
        (folder / f"badge-{name}.svg").write_text(draw_badge(left, right), encoding="utf-8")
