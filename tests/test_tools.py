"""What the tools check: kept figures, locked packages."""

from __future__ import annotations

import copy
import json
import re
import runpy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
QUICKSTART = runpy.run_path(str(ROOT / "tools/check_quickstart.py"))
LOCK = runpy.run_path(str(ROOT / "tools/lock.py"))
MUTANTS = runpy.run_path(str(ROOT / "tools/mutants.py"))


def test_every_mutant_can_be_planted() -> None:
    """Its line is in the code as it is, once, and its tests are there."""
    mutants = MUTANTS["read_mutants"]()
    assert len(mutants) > 300 and MUTANTS["find_mistakes"](mutants, ROOT) == []


@pytest.fixture(params=[0, 1, 2])
def kept(request: pytest.FixtureRequest) -> Any:
    return json.loads((ROOT / f"benchmarks/results/quickstart/seed-{request.param}.json").read_text(encoding="utf-8"))


def test_a_record_is_as_it_says(kept: Any) -> None:
    assert QUICKSTART["differences"](kept, kept) == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_figures_may_differ_between_platforms_and_not_on_one(kept: Any, elsewhere: bool) -> None:
    found = copy.deepcopy(kept)
    for result in found.values():
        result["metrics"]["nll"] += 0.01
        if elsewhere:
            result["environment"]["platform"] = "Linux riscv64"
    lines = QUICKSTART["differences"](found, kept)
    assert len(lines) == (0 if elsewhere else 2)
    found["lora"]["metrics"]["ece"] += 0.2
    assert any(line.startswith("lora: ece is") for line in QUICKSTART["differences"](found, kept))


def test_bayesian_lora_must_be_better_everywhere(kept: Any) -> None:
    found = copy.deepcopy(kept)
    found["bayesian-lora"]["metrics"] = dict(found["lora"]["metrics"])
    assert sum("is not below" in line for line in QUICKSTART["differences"](found, kept)) == 2


@pytest.mark.parametrize(
    "file, x86, arm",
    [
        ("a-1.0-py3-none-any.whl", True, True),
        ("a-1.0.tar.gz", True, True),
        ("a-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True, False),
        ("a-1.0-cp39-abi3-manylinux_2_28_aarch64.whl", False, True),
        ("a-1.0-cp312-cp312-manylinux_2_28_aarch64.whl", False, False),
        ("a-1.0-cp311-cp311-macosx_11_0_arm64.whl", False, False),
        ("a-1.0-cp311-cp311-musllinux_1_2_x86_64.whl", False, False),
    ],
)
def test_which_files_a_machine_can_install(file: str, x86: bool, arm: bool) -> None:
    assert LOCK["installs"](file, "x86_64", "cp311") == x86 and LOCK["installs"](file, "aarch64", "cp311") == arm


def test_the_lock_has_the_versions_that_are_tested() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    locked = dict(re.findall(r"^([\w.-]+)==([\w.+]+) \\$", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    assert len(locked) > 100 and "torch" not in locked
    for name, version in pinned.items():
        if name != "torch":
            assert locked[name.replace("_", "-").lower()] == version, name


@pytest.mark.parametrize(("deadline", "runs"), [(None, True), ("1e12", True), ("1e9", False)])
def test_what_would_begin_after_the_deadline_is_skipped(
    deadline: str | None, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = runpy.run_path(str(ROOT / "tests/conftest.py"))["pytest_runtest_setup"]
    if deadline is None:
        monkeypatch.delenv("BAYESLORA_TEST_DEADLINE", raising=False)
    else:
        monkeypatch.setenv("BAYESLORA_TEST_DEADLINE", deadline)
    with nullcontext() if runs else pytest.raises(pytest.skip.Exception, match="no time is left"):
        begin()


def test_what_the_makefile_names_is_there() -> None:
    named = re.compile(r"(?<![\w./-])(?:tests|tools|benchmarks|examples)/[\w/]+\.py")
    words = named.findall((ROOT / "Makefile").read_text(encoding="utf-8"))
    assert len(words) > 5
    assert [word for word in words if not (ROOT / word).exists()] == []
