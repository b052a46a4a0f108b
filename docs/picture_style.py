"""One style for the pictures of the documentation, for light and dark pages."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

INK, PAPER = "#1f2328", "#ffffff"
BLUE, VERMILION, GREY = "#0072b2", "#d55e00", "#7f7f7f"
BLACK = "#000000"  # of figures that the library draws
DARK = {INK: "#e6e8eb", BLACK: "#e6e8eb", PAPER: "#14181d", BLUE: "#56b4e9", VERMILION: "#f0803c", GREY: "#9aa1a9"}
"""What each colour becomes on a dark page."""

STYLE = {
    "svg.hashsalt": "bayeslora",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def save(figure: Figure, path: Path) -> None:
    """Write a picture whose colours follow the reader's light or dark scheme."""
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    drawn = path.read_text(encoding="utf-8")
    for number, light in enumerate(DARK):
        drawn = drawn.replace(light, f"var(--c{number})")
    light, dark = (
        "".join(f"--c{number}:{colour};" for number, colour in enumerate(colours)) for colours in (DARK, DARK.values())
    )
    style = f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    path.write_text(drawn.replace("</style>", f"{style}</style>", 1), encoding="utf-8")
