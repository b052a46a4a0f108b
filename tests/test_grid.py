"""The script that holds settings against each other on validation questions."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from bayeslora.runs.directory import RunDirectory
from train import tiny

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "grid.py"


@pytest.mark.system
def test_settings_are_held_against_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = f"--model {tiny.model_directory()} --rank 2 --targets q_proj --epochs 1 --calibrate none"
    variants = {"lora": "--method lora", "one mean": "--settings components=1", "four means": ""}
    words = ["--device", "cpu", "--tasks", tiny.task_directory(), "--seeds", "0", "--common", common]
    words += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out.json")]
    words += [word for name, more in variants.items() for word in ("--variant", f"{name}: {more}")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    monkeypatch.syspath_prepend(SCRIPT.parent)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [row["variant"] for row in record["rows"]] == list(variants) and not record["failures"]
    assert record["split"] == "validation" and record["variants"] == variants
    means = capsys.readouterr().out
    for name, row in zip(variants, record["rows"], strict=True):
        directory = RunDirectory(tmp_path / "runs" / "task" / name / "seed-0")
        assert (
            row["nll"] == round(directory.read_result().metrics["nll"], 4) and f"| {name} | {row['nll']:.3f}" in means
        )
    components = [directory.read_result().config["adapter"]["settings"].get("components") for directory in
                  (RunDirectory(tmp_path / "runs" / "task" / name / "seed-0") for name in variants)]  # fmt: skip
    assert components == [None, 1, 4]
