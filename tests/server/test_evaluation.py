"""Figures that the server tells are of the model that it serves, or it says that they are not."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bayeslora import load_run
from bayeslora.atomic_files import write_json
from bayeslora.errors import InputError
from bayeslora.predict.calibrate import Calibration
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.evaluation import evaluate
from bayeslora.runs.trained import TrainedModel
from bayeslora.server.evaluation import evaluate_run
from bayeslora.train import PredictionConfig, train
from tasks.cases import write_lines
from train import tiny


@pytest.fixture(scope="module")
def raw(run: Path) -> TrainedModel:
    """The run as it was before it was calibrated."""
    return load_run(run, raw=True)


@pytest.fixture(scope="module")
def evaluation(trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the calibrated run."""
    place = tmp_path_factory.mktemp("serve") / "evaluation"
    with tiny.without_intervals():
        evaluate(trained, None, "test", out=place)
    return place


def test_a_run_that_was_not_calibrated_is_as_it_was_measured(raw: TrainedModel) -> None:
    seen = evaluate_run(raw, "tiny", 16)
    assert seen.as_served and seen.metrics == raw.directory.read_result()["metrics"]


def test_a_run_that_training_has_calibrated_is_as_it_was_measured_after_that() -> None:
    """And as it was measured before, if that is what is served."""
    path = tiny.finished(prediction=PredictionConfig(samples=3))
    result = RunDirectory(path).read_result()
    for raw, want in ((False, result["calibrated"]), (True, result)):
        trained = load_run(path, raw=raw)
        seen = evaluate_run(trained, "tiny", 16)
        assert seen.as_served and seen.metrics == want["metrics"] and seen.risk_coverage is not None
        assert seen.risk_coverage[0].threshold == pytest.approx(trained.evaluate().probabilities.max(), abs=1e-6)
    wider = replace(load_run(path), calibration=Calibration(temperature=2.0, posterior_scale=3.0))
    assert not evaluate_run(wider, "tiny", 16).as_served


def test_a_temperature_is_brought_to_what_was_measured(raw: TrainedModel) -> None:
    """As if the run had been evaluated again at it."""
    softened = replace(raw, calibration=Calibration(temperature=2.5, task="tiny"))
    seen, want = evaluate_run(softened, "tiny", 16), softened.evaluate()
    assert seen.as_served and seen.metrics is not None and seen.intervals is not None
    for name in ("acc", "nll", "ece", "brier"):
        assert seen.metrics[name] == pytest.approx(want.metrics()[name], abs=1e-6)
    low, high = seen.intervals["nll"].low, seen.intervals["nll"].high
    assert low is not None and high is not None and low < want.metrics()["nll"] < high
    assert seen.risk_coverage is not None
    assert seen.risk_coverage[0].threshold == pytest.approx(want.probabilities.max(), abs=1e-6)


def test_a_low_temperature_leaves_the_figures_finite(raw: TrainedModel) -> None:
    cold = evaluate_run(replace(raw, calibration=Calibration(temperature=1e-4, task="tiny")), "tiny", 16)
    assert cold.metrics is not None and math.isfinite(cold.metrics["nll"])


def test_a_temperature_of_the_method_itself_is_taken_out_first(raw: TrainedModel, tmp_path: Path) -> None:
    """Predictions of such a run are at its temperature already."""
    for name in ("config.json", "predictions.jsonl.gz"):
        (tmp_path / name).write_bytes((raw.directory.path / name).read_bytes())
    write_json(tmp_path / "result.json", dict(raw.directory.read_result()) | {"found": {"temperature": 2.0}})
    made = replace(raw, directory=RunDirectory(tmp_path))
    for temperature, same_as in ((2.0, None), (4.0, 2.0), (1.0, 0.5)):
        seen = evaluate_run(replace(made, calibration=Calibration(temperature=temperature)), "tiny", 16)
        want = raw if same_as is None else replace(raw, calibration=Calibration(temperature=same_as))
        assert seen.as_served and seen.risk_coverage == evaluate_run(want, "tiny", 16).risk_coverage


@pytest.mark.parametrize("change", [{"samples": 5}, {"draw_layers": "last:1"}])
def test_other_draws_are_not_what_was_measured(raw: TrainedModel, change: dict[str, Any]) -> None:
    seen = evaluate_run(replace(raw, **change), "tiny", 16)
    assert not seen.as_served and seen.metrics == raw.directory.read_result()["metrics"]


def test_a_wider_posterior_needs_an_evaluation_of_its_own(trained: TrainedModel, evaluation: Path) -> None:
    assert trained.calibration.posterior_scale != 1
    own, later = evaluate_run(trained, "tiny", 16), evaluate_run(trained, "tiny", 16, evaluation)
    assert not own.as_served and own.metrics == trained.directory.read_result()["metrics"]
    assert later.as_served and later.metrics == pytest.approx(trained.evaluate().metrics())
    assert later.questions == 8 and later.split == "test" and later.risk_coverage != own.risk_coverage
    for change in ({"samples": 5}, {"draw_layers": "last:1"}):
        assert not evaluate_run(replace(trained, **change), "tiny", 16, evaluation).as_served


def test_free_answers_are_measured_at_the_confidence_that_is_served(tmp_path: Path) -> None:
    """As training has calibrated it, as another calibration has it, and as trained."""
    start = 0
    for split, count in (("train", 8), ("validation", 10), ("test", 6)):
        rows = [{"question": f"Is {k} even?", "answer": ["yes", "no"][k % 2]} for k in range(start, start + count)]
        write_lines(tmp_path / "task" / f"{split}.jsonl", rows)
        start += count
    answers = PredictionConfig(samples=2, max_new_tokens=2)
    result = train(tiny.run_config(task=str(tmp_path / "task"), prediction=answers), tmp_path / "run")
    trained = load_run(tmp_path / "run")
    seen, raw = (evaluate_run(it, "tiny", 16) for it in (trained, load_run(tmp_path / "run", raw=True)))
    assert result.calibrated is not None and trained.calibration.confidence is not None
    assert seen.as_served and seen.metrics == pytest.approx(result.calibrated["metrics"])
    assert raw.as_served and raw.metrics == pytest.approx(result.metrics) != seen.metrics

    surer = replace(trained.calibration, confidence=replace(trained.calibration.confidence, bias=9.0))
    other = replace(trained, calibration=surer)
    with tiny.without_intervals():
        again = evaluate(other, None, "test", out=tmp_path / "evaluation")
    assert again.calibrated is not None and again.calibrated["metrics"]["confidence"] > 0.9
    for place in (None, tmp_path / "evaluation"):
        seen = evaluate_run(other, "tiny", 16, place)
        assert seen.as_served and seen.metrics == pytest.approx(again.calibrated["metrics"], abs=1e-6)
        assert not evaluate_run(replace(other, samples=3), "tiny", 16, place).as_served


def test_what_is_no_evaluation_of_the_run_is_refused(
    run: Path, evaluation: Path, trained: TrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = RunDirectory(evaluation).read_result()
    write_json(tmp_path / "result.json", dict(result) | {"config": {**result.config, "seed": 9}})
    for place in (tmp_path / "nothing", tmp_path, run):
        with pytest.raises(InputError, match="evaluat"):
            evaluate_run(trained, "tiny", 16, place)
    assert tiny.bayeslora("serve", run, "--port", 0, "--evaluation", tmp_path, "--quiet") == 2
    assert "is not an evaluation of" in capsys.readouterr().err
