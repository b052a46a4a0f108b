"""The script that makes the figures of a GPU: its commands are ones that bayeslora and the scripts understand."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest

from bayeslora.cli import parse

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parents[2] / "benchmarks/on_gpu.sh"
RECORD = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["TOLD"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(os.environ.get("FAIL", "") in sys.argv and bool(os.environ.get("FAIL")))
"""


def run(tmp_path: Path, *jobs: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script with a Python that writes down what it is told."""
    python = tmp_path / "python"
    python.write_text(RECORD, encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / "data/wikitext2").mkdir(parents=True, exist_ok=True)
    (tmp_path / "data/wikitext2/train.txt.gz").write_bytes(gzip.compress(b"text"))
    (tmp_path / "out/main/runs/arc-challenge/bayesian-lora/rate-1/seed-0").mkdir(parents=True, exist_ok=True)
    given = {**os.environ, "PYTHON": str(python), "TOLD": str(tmp_path / "told"), **environment}
    words = [str(SCRIPT), "org/model", str(tmp_path / "data"), str(tmp_path / "out"), *jobs]
    return subprocess.run(words, env=given, capture_output=True, text=True, check=False)


def told(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "told").read_text(encoding="utf-8").splitlines()]


def test_all_its_commands_are_understood(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    commands = told(tmp_path)
    ours = [words[2:] for words in commands if words[:2] == ["-m", "bayeslora"]]
    assert [words[0] for words in ours] == [*["bench"] * 6, *["compare"] * 9, "train"]
    for words in ours:
        parse(words)
    scripts = [Path(words[0]) for words in commands if words[0] != "-m"]
    assert len(scripts) == 10 and all(path.exists() for path in scripts)
    assert any(str(tmp_path / "out/main/runs/arc-challenge/bayesian-lora/rate-1/seed-0") in words for words in commands)


def test_what_has_ended_is_not_run_again_and_what_failed_is(tmp_path: Path) -> None:
    failing = run(tmp_path, "questions", "rivals", FAIL="compare")
    assert failing.returncode == 1 and "rivals failed" in failing.stderr
    assert run(tmp_path, "questions", "rivals").returncode == 0
    assert [words[2] for words in told(tmp_path)] == ["bench", "compare", "compare", "compare"]


def test_bad_input_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "everything")
    assert done.returncode == 2 and "no job everything; jobs: tests trl" in done.stderr
    assert not (tmp_path / "told").exists()
