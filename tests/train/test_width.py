"""How wide the posterior is after training: which scales are tried, and what a run keeps of the best."""

import math
from pathlib import Path
from typing import Any

import pytest

from bayeslora import load_run
from bayeslora.predict.predictor import Predictor
from bayeslora.train import PredictionConfig, TrainingConfig, train
from bayeslora.train.width import best_scale, try_scales
from train.tiny import read_json, run_config, without_intervals

SCALED = TrainingConfig(epochs=2, batch_size=4, learning_rate=0.01, posterior_scale="validation")


@pytest.mark.parametrize(
    ("least", "tried", "best"),
    [
        (1.0, [0.5, 1, 2], 1.0),
        (3.0, [1, 2, 4, 8], 4.0),
        (100.0, [1, 2, 4, 8, 16], 16.0),
        (0.5, [0.25, 0.5, 1, 2], 0.5),
        (0.01, [0.25, 0.5, 1, 2], 0.25),
    ],
)
def test_scales_are_tried_for_as_long_as_the_nll_falls(least: float, tried: list[float], best: float) -> None:
    found = try_scales(lambda scale: abs(math.log(scale / least)))
    assert sorted(found) == tried
    assert best_scale(found) == best
    assert found == {scale: abs(math.log(scale / least)) for scale in tried}


def test_a_scale_at_which_nothing_is_finite_is_not_chosen() -> None:
    found = try_scales(lambda scale: math.inf if scale > 2 else -scale)
    assert sorted(found) == [1, 2, 4] and best_scale(found) == 2.0


def test_of_equal_scales_that_nearest_to_1_is_taken() -> None:
    assert best_scale(try_scales(lambda scale: 0.7)) == 1.0


def scaled(out: Path, method: str = "bayesian-lora", **changes: Any) -> dict[str, Any]:
    with without_intervals():
        return train(run_config(method, **({"training": SCALED} | changes)), out)


@pytest.mark.parametrize("method", ["bayesian-lora", "blob", "bbb", "c-lora"])
def test_a_run_keeps_the_scale_of_least_validation_nll(method: str, tmp_path: Path) -> None:
    result = scaled(tmp_path / "run", method)
    scale, nlls = result["found"]["posterior_scale"], result["found"]["scale_nll"]
    assert nlls[f"{scale:g}"] == min(nlls.values()) < nlls["1"]
    assert nlls["1"] == pytest.approx(min(epoch["validation"]["nll"] for epoch in result["history"]))
    assert read_json(tmp_path / "run/adapter/adapter_config.json")["posterior_scale"] == scale
    run = load_run(tmp_path / "run")
    assert (run.calibration.posterior_scale, run.calibration.split) == (scale, "validation")
    assert run.evaluate(split="validation").metrics()["nll"] == pytest.approx(min(nlls.values()), abs=1e-6)
    assert run.evaluate().metrics() == pytest.approx(result["metrics"], abs=1e-6)
    raw = load_run(tmp_path / "run", raw=True).evaluate(split="validation")
    assert raw.metrics()["nll"] == pytest.approx(nlls["1"], abs=1e-6)


@pytest.mark.parametrize(
    ("method", "samples"),
    [("lora", 3), ("mc-dropout", 3), ("checkpoint-ensemble", 3), ("tfb", 3), ("bayesian-lora", 0)],
)
def test_what_has_no_width_to_change_is_left_as_it_is(method: str, samples: int, tmp_path: Path) -> None:
    prediction = PredictionConfig(samples=samples)
    plain = TrainingConfig(epochs=2, batch_size=4, learning_rate=0.01)
    result = scaled(tmp_path / "scaled", method, prediction=prediction)
    assert result["metrics"] == scaled(tmp_path / "plain", method, training=plain, prediction=prediction)["metrics"]
    assert "posterior_scale" not in result.get("found", {})
    assert not (tmp_path / "scaled/adapter/calibration.json").exists()


def test_a_scale_that_cannot_be_evaluated_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = Predictor.score

    def fails_if_narrow(self: Predictor, *given: Any, **more: Any) -> Any:
        if self.scorer.model.base_model.posterior_scale < 0.5:
            raise ArithmeticError("not finite")
        return score(self, *given, **more)

    monkeypatch.setattr(Predictor, "score", fails_if_narrow)
    found = scaled(tmp_path / "run")["found"]
    assert found["posterior_scale"] == 0.5 and found["scale_nll"]["0.25"] is None
