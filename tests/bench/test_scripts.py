"""Small scripts beside the benchmarks: curves of a comparison, and training beside TRL."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from bayeslora import metrics

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    """A script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        return importlib.import_module(name)


def test_curves_are_those_of_all_answers() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.25, 1.0, 400)
    right = rng.random(400) < confidence
    found = script("curves").curves(confidence, right)
    assert found["answers"] == 400 and found["aurc"] == metrics.aurc(confidence, right)
    assert found["risk"][-1] == pytest.approx(1 - right.mean(), abs=1e-5)
    surest = np.argsort(-confidence)[:200]
    assert found["risk"][24] == pytest.approx(1 - right[surest].mean(), abs=1e-5) and found["coverage"][24] == 0.5
    bins = found["bins"]
    assert sum(bins["count"]) == 400 and bins["accuracy"][0] is None and json.dumps(found)
    inside = (confidence > 0.9) & (confidence <= 1.0)
    assert bins["accuracy"][9] == pytest.approx(right[inside].mean(), abs=1e-5)


def test_options_are_left_out_with_their_values() -> None:
    words = ["--model", "tiny", "--batches", "1x8", "2x8", "--ragged", "--out", "x.json", "--steps", "3"]
    assert script("against_trl")._without(words, ("--batches", "--out")) == [
        "--model",
        "tiny",
        "--ragged",
        "--steps",
        "3",
    ]


def test_ratios_are_those_of_the_same_round() -> None:
    runs = [
        {
            "batch": "b",
            "round": k,
            "contestant": name,
            "tokens_per_second": speed,
            "peak_bytes": size,
            "losses": [2.0, 1.0],
        }
        for k, (trl, ours) in enumerate([(10.0, 20.0), (20.0, 30.0), (10.0, 11.0)])
        for name, speed, size in (("trl", trl, 2**31), ("lora", ours, 2**30))
    ]
    first, second = script("against_trl").summary(runs)
    assert (first["speed"], first["memory"]) == (1.0, 1.0)
    assert (second["speed"], second["memory"], second["peak_gib"]) == (1.5, 0.5, 1.0)


@pytest.mark.system
@pytest.mark.parametrize("ragged", [False, True])
def test_all_contestants_learn_from_the_same_texts(tmp_path: Path, ragged: bool) -> None:
    pytest.importorskip("trl")
    against = script("against_trl")
    given = [
        "--batches",
        "4x16",
        "--steps",
        "2",
        "--warmup",
        "1",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "out.json"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["against_trl.py", *["--ragged"][: int(ragged)], *given])
        against.main()
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [row["contestant"] for row in record["rows"]] == list(against.CONTESTANTS)
    assert all(len(run["losses"]) == 3 for run in record["runs"])
    tokens = {run["contestant"]: run["tokens"] for run in record["runs"]}
    if ragged:  # two batches of four, each with 2 to 16 tokens a row
        assert all(16 <= count <= 128 for count in tokens.values())
    else:
        assert set(tokens.values()) == {128}
        # before the first step all are the base model, and all but one have the same first batch
        firsts = [run["losses"][0] for run in record["runs"] if run["contestant"] != "trl-by-length"]
        assert firsts == pytest.approx([firsts[0]] * len(firsts), rel=1e-4)
