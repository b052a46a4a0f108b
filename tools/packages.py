"""The packages of bayeslora and what each imports of the others, drawn from the imports themselves.

    python tools/packages.py           # write docs/pictures/packages.svg
    python tools/packages.py --check   # exit code 1 if that picture is out of date, or imports run in a circle

A package stands above all that it imports. An arrow that follows from others (a imports b, b imports c, a imports c) is left
out of the picture, and so are modules at the top, which are small helpers. Imports within functions count, those for types
alone do not. The picture is narrow, so that it can be read on a phone.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "bayeslora"
PICTURE = ROOT / "docs" / "pictures" / "packages.svg"

Graph = Mapping[str, frozenset[str]]
"""What every package imports."""

LIGHT = ".paper{fill:#fff}text{fill:#12202e}.box{fill:#e8f0f7;stroke:#0072b2}.tip{fill:#5b6b7b}.arrow{stroke:#5b6b7b}"
DARK = ".paper{fill:#14181d}text{fill:#e6e8eb}.box{fill:#1d2a36;stroke:#56b4e9}.tip{fill:#9aa1a9}.arrow{stroke:#9aa1a9}"
STYLE = f".arrow{{fill:none;stroke-opacity:.55}}{LIGHT}@media(prefers-color-scheme:dark){{{DARK}}}"
"""Colours, for light and dark pages."""

PLACES, STEP = 7, 48
"""Where the middle of a box can be, and how far apart; boxes next to each other leave one place between them."""

WIDTH, BOX, HEIGHT, GAP, MARGIN = STEP * (PLACES + 1) + 8, 78, 28, 34, 12

Place = tuple[float, float]


def read_graph(source: Path = SOURCE) -> dict[str, frozenset[str]]:
    """The packages and modules at the top, but for those that only start it (``__init__`` and such)."""
    found: dict[str, set[str]] = {}
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).parts[0].removesuffix(".py")
        if not name.startswith("_"):
            found.setdefault(name, set()).update(_imported(ast.parse(path.read_text(encoding="utf-8"))))
    return {name: frozenset(others & found.keys()) - {name} for name, others in found.items()}


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names below ``bayeslora`` that a module imports when it runs."""
    types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "bayeslora":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bayeslora."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (it.name.split(".")[1] for it in node.names if it.name.startswith("bayeslora."))


def find_circle(graph: Graph) -> list[str]:
    """Packages that import each other round in a circle; none if there is no such."""
    done: set[str] = set()

    def follow(path: list[str]) -> list[str]:
        for other in sorted(graph[path[-1]]):
            if other in path:
                return [*path[path.index(other) :], other]
            if other not in done and (circle := follow([*path, other])):
                return circle
        done.add(path[-1])
        return []

    return next((circle for name in sorted(graph) if name not in done and (circle := follow([name]))), [])


def levels(graph: Graph) -> list[list[str]]:
    """From the bottom up: each stands just above the highest of those that it imports."""
    height: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in height:
            height[name] = 1 + max(map(of, graph[name]), default=-1)
        return height[name]

    rows: list[list[str]] = [[] for _ in range(1 + max(map(of, graph)))]
    for name in sorted(graph):
        rows[of(name)].append(name)
    return rows


def arrows(graph: Graph) -> list[tuple[str, str]]:
    """What is imported and not to be had by way of another."""

    def reached(name: str) -> set[str]:
        return set(graph[name]).union(*map(reached, graph[name]))

    return [
        (name, other)
        for name in sorted(graph)
        for other in sorted(graph[name])
        if not any(other in reached(between) for between in graph[name] - {other})
    ]


def packages(graph: Graph, source: Path = SOURCE) -> dict[str, frozenset[str]]:
    """Those that are directories, and what they import of each other."""
    kept = {name for name in graph if (source / name).is_dir()}
    return {name: graph[name] & kept for name in graph if name in kept}


def across(down: float) -> float:
    """How far an arrow has come to the side where it has come this far down, as shares of its way."""
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if middle * (1.5 - 1.5 * middle + middle**2) < down:
            low = middle
        else:
            high = middle
    return low**2 * (3 - 2 * low)


def arrange(rows: Sequence[Sequence[str]], arrows: Sequence[tuple[str, str]]) -> dict[str, Place]:
    """Upper middle of every box: row by row, where arrows keep clear of boxes, and are short."""
    level = {name: k for k, row in enumerate(rows) for name in row}
    top = {name: MARGIN + (len(rows) - 1 - k) * (HEIGHT + GAP) for name, k in level.items()}
    column = {name: (PLACES - 1) // 2 + 2 * k - (len(row) - 1) for row in rows for k, name in enumerate(row)}
    passings = []
    for name, other in arrows:
        start, end = top[name] + HEIGHT, top[other]
        for between in rows[level[other] + 1 : level[name]]:
            ways = [across((y - start) / (end - start)) for y in (top[between[0]], top[between[0]] + HEIGHT)]
            passings += [(name, other, passed, way) for passed in between for way in ways]

    def cost() -> float:
        inside = (
            BOX / 2 + 4 - STEP * abs(column[name] + way * (column[other] - column[name]) - column[passed])
            for name, other, passed, way in passings
        )
        return WIDTH * sum(max(0, depth) for depth in inside) + sum(
            (column[name] - column[other]) ** 2 for name, other in arrows
        )

    best, before = cost(), None
    while best != before:
        before = best
        for row in rows:
            kept = [column[name] for name in row]
            for tried in permutations(range(PLACES), len(row)):
                if all(b - a > 1 for a, b in pairwise(sorted(tried))):
                    column.update(zip(row, tried, strict=True))
                    if (found := cost()) < best:
                        best, kept = found, list(tried)
            column.update(zip(row, kept, strict=True))
    return {name: (4 + STEP * (column[name] + 1), top[name]) for name in level}


def draw(graph: Graph) -> str:
    """The picture as SVG."""
    shown = packages(graph)
    rows, drawn = levels(shown), arrows(shown)
    tall = 2 * MARGIN + len(rows) * HEIGHT + (len(rows) - 1) * GAP
    place = arrange(rows, drawn)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{tall}" viewBox="0 0 {WIDTH} {tall}" '
        'font-family="sans-serif" font-size="13">',
        "<title>Packages of bayeslora; each stands above what it imports</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{tall}"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>',
    ]
    for name, other in drawn:
        (x1, y1), (x2, y2) = place[name], place[other]
        y1, middle = y1 + HEIGHT, (y1 + HEIGHT + y2) / 2
        lines.append(
            f'<path d="M{x1:.0f} {y1:.0f}C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}" '
            'class="arrow" marker-end="url(#tip)"/>'
        )
    for name, (x, y) in place.items():
        lines.append(
            f'<rect x="{x - BOX / 2:.0f}" y="{y:.0f}" width="{BOX}" height="{HEIGHT}" rx="5" class="box"/>'
            f'<text x="{x:.0f}" y="{y + 18.5:.1f}" text-anchor="middle">{name}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def main(words: list[str]) -> int:
    """Write the picture, or look whether it is right."""
    graph = read_graph()
    if circle := find_circle(graph):
        print(f"imports run in a circle: {' → '.join(circle)}", file=sys.stderr)
        return 1
    if words == ["--check"]:
        if PICTURE.read_text(encoding="utf-8") == draw(graph):
            return 0
        print(f"{PICTURE}: is out of date; run python tools/packages.py", file=sys.stderr)
        return 1
    if words:
        print(__doc__, file=sys.stderr)
        return 2
    PICTURE.write_text(draw(graph), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
