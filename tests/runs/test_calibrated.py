"""Runs are calibrated when they are done: what is chosen on which questions, what is kept, and what is told."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayeslora.atomic_files import write_json
from bayeslora.errors import InputError
from bayeslora.predict.calibrate import PRIOR_SD, Calibration, choose_scale, fit_temperature
from bayeslora.predict.calibrate.fit import FEW_SCALES
from bayeslora.predict.questions.predictions import read_predictions
from bayeslora.predict.questions.predictor import Predictor
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.evaluation import evaluate
from bayeslora.runs.load import load_run
from bayeslora.tasks import load_task, require_gold
from bayeslora.train import PredictionConfig, train
from train.tiny import SIZES, bayeslora, finished, options, question, read_json, run_config, task_directory, write_task

CALIBRATED = PredictionConfig(samples=3)
METHODS = ("bayesian-lora", "lora", "laplace")


def calibrated_run(method: str = "bayesian-lora") -> RunDirectory:
    return RunDirectory(finished(method, prediction=CALIBRATED))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """One that may be changed."""
    return RunDirectory(Path(shutil.copytree(calibrated_run().path, tmp_path / "run")))


def items(split: str) -> Any:
    return load_task(task_directory()).load(split).items


@pytest.mark.parametrize("method", METHODS)
def test_scale_and_temperature_are_those_of_the_validation_questions(method: str) -> None:
    directory = calibrated_run(method)
    found = Calibration.load(directory.calibration)
    trained = load_run(directory.path, raw=True)
    gold = np.array(require_gold(items("validation")))

    def scores(scale: float) -> Any:
        trained.set_posterior_scale(scale)
        predictor = trained.predictor()
        return predictor.score(predictor.encode(items("validation"))).predictive

    scales = (1.0,) if method == "lora" else FEW_SCALES
    scale = choose_scale(scores, gold, scales).scale
    assert found.posterior_scale == scale
    assert found.temperature == pytest.approx(fit_temperature(scores(scale), gold, PRIOR_SD))
    assert found.automatic and (found.task, found.split) == (task_directory(), "validation")
    assert (found.questions, found.samples) == (SIZES["validation"], 3)


@pytest.mark.parametrize("method", METHODS)
def test_both_predictions_are_kept_and_are_those_of_the_run_when_it_is_loaded(method: str) -> None:
    directory = calibrated_run(method)
    for path, raw in ((directory.predictions, True), (directory.calibrated, False)):
        ids, probabilities, _ = read_predictions(path)
        predicted = load_run(directory.path, raw=raw).predict(items("test"))
        assert ids == [item.id for item in predicted.items]
        np.testing.assert_allclose(predicted.probabilities, probabilities, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_the_result_and_an_evaluation_tell_both(method: str, tmp_path: Path) -> None:
    directory = calibrated_run(method)
    result, found = directory.read_result(), Calibration.load(directory.calibration)
    after = result["calibrated"]
    assert after["predictions"] == "calibrated.jsonl.gz" and result["timing"]["calibrate_seconds"] > 0
    assert (after["temperature"], after["posterior_scale"]) == (found.temperature, found.posterior_scale)
    assert set(after["metrics"]) == set(result["metrics"]) and after["metrics"]["nll"] != result["metrics"]["nll"]
    again = evaluate(load_run(directory.path), None, "test", out=tmp_path)
    for one, other in ((again, result), (again["calibrated"], after)):
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-5)
    assert RunDirectory(tmp_path).calibrated.exists()
    assert "calibrated" not in evaluate(load_run(directory.path, raw=True), None, "test")


def test_what_belongs_to_the_method_is_not_what_was_chosen_later(tmp_path: Path) -> None:
    """The temperature of ``temperature`` is part of it, so calibration finds nothing to change."""
    path = finished("temperature", prediction=CALIBRATED)
    result = read_json(path / "result.json")
    assert result["found"]["temperature"] == result["calibrated"]["temperature"] != 1
    assert result["calibrated"]["metrics"] == result["metrics"]
    again = evaluate(load_run(path), None, "test")
    assert again["metrics"] == pytest.approx(result["metrics"]) == again["calibrated"]["metrics"]


def few(tmp_path: Path) -> dict[str, Any]:
    return {"task": str(write_task(tmp_path / "few", validation=[question(k) for k in range(9)]))}


def never(tmp_path: Path) -> dict[str, Any]:
    return {"prediction": PredictionConfig(samples=3, calibrate="none")}


def on_validation(tmp_path: Path) -> dict[str, Any]:
    return {"report_split": "validation"}


@pytest.mark.parametrize("changes", [few, never, on_validation])
def test_a_run_that_cannot_be_calibrated_or_must_not_be_is_not(changes: Any, tmp_path: Path) -> None:
    """Nine questions are too few, and those that a run is reported on would flatter it."""
    config = run_config("lora", **({"prediction": CALIBRATED} | changes(tmp_path)))
    result = train(config, tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    assert "calibrated" not in result and not directory.calibrated.exists() and not directory.calibration.exists()


@pytest.mark.parametrize(("scale", "passes"), [(1.0, 1), (2.0, 2)])
def test_the_same_draws_are_scored_once(scale: float, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = load_run(calibrated_run().path)
    trained.calibration = replace(trained.calibration, posterior_scale=scale)
    scored, score = [], Predictor.score
    monkeypatch.setattr(Predictor, "score", lambda *args: scored.append(1) or score(*args))
    trained.predict_both(items("test"))
    assert len(scored) == passes


def test_only_what_was_chosen_by_hand_is_protected(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("calibrate", run.path, "--coverage", 0.5, "--quiet") == 0
    chosen = Calibration.load(run.calibration)
    assert not chosen.automatic and chosen.threshold is not None
    assert bayeslora("calibrate", run.path, "--quiet") == 2
    assert "calibrated already; use --force" in capsys.readouterr().err
    assert Calibration.load(run.calibration) == chosen


def test_the_command_line_shows_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora(*options(tmp_path / "run", "--method", "lora", "--calibrate", "validation")) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["as", "trained", "calibrated"]
    result = read_json(tmp_path / "run" / "result.json")
    nll = next(line for line in lines if line.startswith("nll "))
    shown = [f"{it['metrics']['nll']:.4f}" for it in (result, result["calibrated"])]
    assert nll.split()[1] == shown[0] and nll.split()[4] == shown[1]
    assert nll.index(shown[1], nll.index("]")) == head.index("calibrated")


def test_force_leaves_nothing_of_a_calibration_behind(run: RunDirectory) -> None:
    train(run_config(), run.path, force=True)
    assert not run.calibrated.exists() and not run.calibration.exists() and "calibrated" not in run.read_result()


def test_what_a_result_says_that_was_found_is_checked(run: RunDirectory) -> None:
    result = dict(run.read_result())
    for found in (None, {}):
        write_json(run.result, result | {"found": found})
        assert load_run(run.path).own == Calibration()
    for damaged, message in (({"temperature": "warm"}, "temperature is 'warm'"), (3, "wrote it .found is 3.")):
        write_json(run.result, result | {"found": damaged})
        with pytest.raises(InputError, match=message):
            load_run(run.path)
