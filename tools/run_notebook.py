"""Run the code of a notebook from its first cell to its last, and print what each cell shows.

    python tools/run_notebook.py examples/quickstart.ipynb

It needs no Jupyter: cells are plain Python, without magics, and share one namespace. The first error ends it.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def code_cells(path: Path) -> Iterator[tuple[str, str]]:
    """Name and source of every cell of code."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield f"{path.name}:{cell['id']}", "".join(cell["source"])


def run_cell(name: str, source: str, names: dict[str, Any]) -> Any:
    """Run a cell; returns the value of its last line if that is an expression, as notebooks show it."""
    body = ast.parse(source, name).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), name, "exec"), names)
    return eval(compile(ast.Expression(last.value), name, "eval"), names) if isinstance(last, ast.Expr) else None


def main(arguments: Sequence[str]) -> int:
    """Run all notebooks that are named."""
    for path in map(Path, arguments):
        names: dict[str, Any] = {"__name__": "__main__"}
        for name, source in code_cells(path):
            print(f"-- {name}", flush=True)
            if (shown := run_cell(name, source, names)) is not None:
                print(shown, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
