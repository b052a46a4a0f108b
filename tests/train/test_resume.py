"""A run that is interrupted at any moment and started again ends as if nothing had happened, to the byte."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from bayeslora import atomic_files as files
from bayeslora.predict.questions.predictions import Predictions
from bayeslora.predict.questions.predictor import Predictor
from bayeslora.runs import result
from bayeslora.train import checkpoint, fit, run
from faults.processes import Forked, Started
from tasks.cases import write_lines
from tiers import some
from train.tiny import bayeslora, contents, finished, options, outcome, read_json, without_intervals, write_task

KEPT = ["--checkpoint-seconds", 0]  # six steps, each of them kept


# Killed at random moments ---------------------------------------------------------------------------------------------


def kill_at_random(start: Callable[[Sequence[str]], Any], folder: Path, kills: int) -> None:
    """Kill runs, twice each, at moments spread over the time that an undisturbed one takes, and finish them."""
    start(["--version"]).wait()  # so that what is done once is not measured
    began = time.monotonic()
    assert start(options(folder / "undisturbed", *KEPT)).wait() == 0
    whole = time.monotonic() - began
    rng = random.Random()
    landed = 0
    for number in range(100):
        directory = folder / f"run{number}"
        for half in range(2):
            process = start(options(directory, *KEPT))
            if process.wait(whole * ((number + half / 2) % 5 + rng.random()) / 5) is None:
                process.kill()
                landed += 1
        assert start(options(directory, *KEPT)).wait() == 0
        assert outcome(directory) == outcome(folder / "undisturbed")
        assert contents(directory).keys() == contents(folder / "undisturbed").keys()
        if landed >= kills:
            return
    pytest.fail(f"only {landed} kills came in time")


@pytest.mark.system
def test_a_run_killed_at_random_moments_ends_as_if_undisturbed(tmp_path: Path) -> None:
    kill_at_random(Forked, tmp_path, kills=10)


@pytest.mark.slow
def test_a_command_killed_at_random_moments_ends_as_if_undisturbed(tmp_path: Path) -> None:
    """Moments in imports included."""
    kill_at_random(Started, tmp_path, kills=12)


# Interrupted at every boundary ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with without_intervals():
        yield


@pytest.fixture(scope="module")
def undisturbed() -> Path:
    """Made in one go, with the settings of :func:`train.tiny.options`."""
    return finished()


def interrupting(call: Callable[..., Any], at: int, after: bool) -> Callable[..., Any]:
    """The same function, but that Ctrl-C is pressed at the given call of it, before or after it has done its work."""
    calls = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not after:
            raise KeyboardInterrupt
        value = call(*args, **kwargs)
        if calls == at:
            raise KeyboardInterrupt
        return value

    return interrupted


BEFORE, AFTER = False, True
BOUNDARIES = {
    "the settings are written": (os, "replace", 1, BEFORE),
    "the first step": (fit.Fit, "_step", 1, BEFORE),
    "a step, which is not saved": (fit.Fit, "_step", 2, AFTER),
    "tensors of a checkpoint": (checkpoint, "save_file", 2, AFTER),
    "a checkpoint takes its place": (os, "replace", 3, BEFORE),
    "a checkpoint has taken its place": (os, "replace", 3, AFTER),
    "names are flushed to the disk": (files, "_flush", 6, BEFORE),
    "an evaluation": (Predictor, "__call__", 1, BEFORE),
    "an evaluation, which is not saved": (Predictor, "__call__", 2, AFTER),
    "the end of an epoch": (fit.Fit, "_note_best", 1, AFTER),
    "the last checkpoint": (fit, "save_checkpoint", 6, AFTER),
    "the prediction": (Predictor, "score", 3, AFTER),
    "the adapter moves to its place": (Path, "rename", 1, BEFORE),
    "the adapter": (run, "_save_adapter", 1, AFTER),
    "the predictions": (Predictions, "write", 1, AFTER),
    "the result": (result, "write_json", 1, BEFORE),
    "the checkpoint is removed": (Path, "unlink", 1, BEFORE),
}


KEPT_BOUNDARIES = (
    "a checkpoint takes its place",
    "the adapter moves to its place",
)
"""One while a run goes on, and one when it ends."""


@pytest.mark.parametrize("boundary", some(BOUNDARIES, KEPT_BOUNDARIES))
def test_ctrl_c_at_any_boundary_costs_nothing(
    boundary: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, at, after = BOUNDARIES[boundary]
    with monkeypatch.context() as disturbed:
        disturbed.setattr(owner, name, interrupting(getattr(owner, name), at, after))
        assert bayeslora(*options(tmp_path, *KEPT)) == 130
    assert bayeslora(*options(tmp_path, *KEPT)) == 0
    assert outcome(tmp_path) == outcome(undisturbed)
    assert contents(tmp_path).keys() == contents(undisturbed).keys()


OTHER_WAYS: dict[str, list[object]] = {
    "schedules": ["--schedule", "cosine", "--warmup", "0.3", "--draws", 2, "--kl-warmup", "0.5", "--micro-batch", 3],
    "early stopping": [
        "--patience",
        1,
        "--epochs",
        30,
        "--learning-rate",
        "1",
    ],  # so large that none gets better 30 times
    "kept trunk": ["--layers", "last:1", "--cache-trunk", "--patience", 0],
    "lora": [
        *("--method", "lora", "--layers", "last:2", "--cache-trunk"),
        *("--label-smoothing", "0.1", "--weight-decay", "0.1"),
    ],
    "monteclora": ["--method", "monteclora", "--draws", 2, "--micro-batch", 3, "--settings", "use_entropy=true"],
    "pvera": ["--method", "pvera", "--layers", "last:1", "--cache-trunk", "--settings", "dropout=0.2", "r=16"],
}


@pytest.mark.parametrize("way", some(OTHER_WAYS, ["kept trunk"]))
def test_other_ways_to_train_resume_exactly_too(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = OTHER_WAYS[way]
    assert bayeslora(*options(tmp_path / "undisturbed", *KEPT, *more)) == 0
    assert read_json(tmp_path / "undisturbed" / "result.json")["stopped_early"] == ("--epochs" in more)
    for at in (3, 2):
        with monkeypatch.context() as disturbed:
            disturbed.setattr(fit.Fit, "_step", interrupting(fit.Fit._step, at, BEFORE))
            assert bayeslora(*options(tmp_path / "run", *KEPT, *more)) == 130
    assert bayeslora(*options(tmp_path / "run", *KEPT, *more)) == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "undisturbed")


def test_a_resumed_run_says_from_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as disturbed:
        disturbed.setattr(fit.Fit, "_step", interrupting(fit.Fit._step, 5, BEFORE))
        assert bayeslora(*options(tmp_path, *KEPT)) == 130
    assert capsys.readouterr().err == "bayeslora: interrupted; the same command resumes\n"
    assert bayeslora(*(word for word in options(tmp_path, *KEPT) if word != "--quiet")) == 0
    out, err = capsys.readouterr()
    assert "going on from step 4 of 6" in err.splitlines()
    assert "epoch 2/2" in err and "epoch 1/2" not in err and "nll" in out


@pytest.mark.parametrize("damage", some(["cut", "another run's"], ["another run's"]))
def test_a_checkpoint_that_is_not_this_runs_is_refused(
    damage: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in {"run": 0, **({} if damage == "cut" else {"other": 1})}.items():
        with monkeypatch.context() as disturbed:
            disturbed.setattr(fit.Fit, "_step", interrupting(fit.Fit._step, 3, BEFORE))
            assert bayeslora(*options(tmp_path / name, *KEPT, "--seed", seed)) == 130
    path = tmp_path / "run" / "checkpoint.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        shutil.copy(tmp_path / "other" / path.name, path)
    capsys.readouterr()
    assert bayeslora(*options(tmp_path / "run", *KEPT)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(path) in err and "--force" in err
    assert bayeslora(*options(tmp_path / "run", *KEPT, "--force")) == 0
    assert outcome(tmp_path / "run") == outcome(undisturbed)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_checkpoint_of_other_questions_is_refused(
    split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is learnt from, and what decides which state is kept."""
    task = write_task(tmp_path / "task")
    words = options(tmp_path / "run", *KEPT, "--task", task)
    with monkeypatch.context() as disturbed:
        disturbed.setattr(fit.Fit, "_step", interrupting(fit.Fit._step, 3, BEFORE))
        assert bayeslora(*words) == 130
    path = task / f"{split}.jsonl"
    first, *rest = (json.loads(line) for line in path.read_text().splitlines())
    write_lines(path, [{**first, "answer": 1 - first["answer"]}, *rest])
    capsys.readouterr()
    assert bayeslora(*words) == 2
    assert "checkpoint.safetensors" in capsys.readouterr().err


# Two at once ----------------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_second_process_on_the_same_run_is_refused(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = options(tmp_path, *KEPT)
    process = Forked(words)
    while not (tmp_path / "config.json").exists():
        assert process.wait(0.005) is None
    assert bayeslora(*words) == 2
    assert "another process is at work here" in capsys.readouterr().err
    assert process.wait() == 0
    adapter = "adapter/adapter_model.safetensors"
    assert outcome(tmp_path)[adapter] == outcome(undisturbed)[adapter]


@pytest.mark.system
def test_a_lock_that_a_killed_process_left_does_not_hold(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / ".lock")
    lock.acquire()
    assert bayeslora(*options(tmp_path)) == 2
    lock.release()
    assert (tmp_path / ".lock").exists()
    assert bayeslora(*options(tmp_path)) == 0
