"""No package imports one that stands above it, and the picture of them is that of today."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

TOOL = runpy.run_path(str(Path(__file__).parent.parent / "tools/packages.py"))


def graph(**imports: str) -> dict[str, frozenset[str]]:
    return {name: frozenset(others.split()) for name, others in imports.items()}


def test_nothing_is_imported_in_a_circle_and_the_picture_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert TOOL["main"](["--check"]) == 0, capsys.readouterr().err


def test_what_stands_on_torch_or_numpy_alone() -> None:
    found = TOOL["read_graph"]()
    assert found["posterior"] == {"errors", "type_checks"} and found["metrics"] == frozenset()


@pytest.mark.parametrize(
    ("imports", "circle"),
    [
        ({"a": "b", "b": "c", "c": ""}, []),
        ({"a": "b", "b": "c", "c": "b"}, ["b", "c", "b"]),
        ({"a": "b", "b": "c", "c": "a"}, ["a", "b", "c", "a"]),
    ],
)
def test_circles_are_found(imports: dict[str, str], circle: list[str]) -> None:
    assert TOOL["find_circle"](graph(**imports)) == circle


def test_arrows_that_follow_from_others_are_left_out() -> None:
    given = graph(a="b c d", b="c", c="d", d="", e="d")
    assert TOOL["arrows"](given) == [("a", "b"), ("b", "c"), ("c", "d"), ("e", "d")]
    assert TOOL["levels"](given) == [["d"], ["c", "e"], ["b"], ["a"]]


def test_imports_are_read_as_they_run(tmp_path: Path) -> None:
    """Those within functions count, and those for types do not."""
    source = """
from typing import TYPE_CHECKING
from bayeslora import lower
from bayeslora.deep.inside import thing
if TYPE_CHECKING:
    from bayeslora.types_only import Type

def late():
    import bayeslora.later.on
"""
    files = {"upper/part.py": source, "lower.py": "", "deep/inside.py": "", "types_only.py": "", "later/on.py": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found: Any = TOOL["read_graph"](tmp_path)
    assert found["upper"] == {"lower", "deep", "later"} and found["lower"] == frozenset()


def test_the_walks_through_the_code_lead_to_what_is_there() -> None:
    """Every ``file.py`: `name`` of the page is a function, method or class of that file."""
    root = Path(__file__).parent.parent
    text = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    steps = re.findall(r"`([a-z_/]+\.py)`: `([A-Za-z_.]+)`", text)
    assert len(steps) > 12
    for file, name in steps:
        place: Any = ast.parse((root / "src" / "bayeslora" / file).read_text(encoding="utf-8"))
        for part in name.split("."):
            found = [it for it in place.body if getattr(it, "name", None) == part]
            assert found, f"{file} has no {name}"
            place = found[0]
