"""Options that the pages recommend, two at a time: each pair works, or is refused in one line."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from bayeslora.methods import METHODS
from tiers import some
from train.tiny import bayeslora, options

OPTIONS: dict[str, tuple[Any, ...]] = {
    "upper layers": ("--layers", "last:1"),
    "kept trunk": ("--layers", "last:1", "--cache-trunk"),
    "targets": ("--targets", "q_proj", "up_proj"),
    "checkpointing": ("--gradient-checkpointing",),
    "micro-batches": ("--micro-batch", 2),
    "half precision": ("--dtype", "bfloat16"),
    "letters": ("--scoring", "letter"),
    "late draws": ("--draw-layers", 0.5),
    "upper posterior": ("--stochastic-layers", "last:1"),
    "draws": ("--draws", 2),
    "no stopping": ("--patience", 0),
    "paper": ("--preset", "paper", "--epochs", 1),
    "smoothing": ("--label-smoothing", 0.1),
    "mean only": ("--samples", 0),
}
PAIRS = list(itertools.combinations(OPTIONS, 2))
KEPT = [("kept trunk", name) for name in ("half precision", "late draws", "upper posterior")]
DRY = [pair if pair in KEPT else pytest.param(pair, marks=pytest.mark.system) for pair in PAIRS]


def outcome(capsys: pytest.CaptureFixture[str], *words: Any) -> None:
    """Done, or refused in one line that says what to do."""
    code, said = bayeslora(*words), capsys.readouterr().err
    assert code in (0, 2), said
    if code == 2:
        assert said.startswith("bayeslora: ") and said.count("\n") == 1 and ";" in said


@pytest.mark.parametrize("pair", DRY, ids=" and ".join)
def test_a_dry_run_takes_any_pair(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = options(tmp_path / "run", *OPTIONS[pair[0]], *OPTIONS[pair[1]], "--dry-run", "--device", "cpu")
    assert bayeslora(*words) == 0
    assert "TFLOP/s" in capsys.readouterr().out and not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", some(METHODS, ["laplace", "monteclora"]))
@pytest.mark.parametrize("name", ["kept trunk", "upper posterior"])
def test_so_it_does_with_any_method(name: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome(capsys, *options(tmp_path / "run", "--method", method, *OPTIONS[name], "--dry-run", "--device", "cpu"))


@pytest.mark.system
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_so_does_a_run(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome(capsys, *options(tmp_path / "run", *OPTIONS[pair[0]], *OPTIONS[pair[1]], "--epochs", 1))
