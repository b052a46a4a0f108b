"""A model that predicts no numbers is not served, and not called healthy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from bayeslora import load_run
from bayeslora.atomic_files import write_json
from bayeslora.errors import InputError
from bayeslora.runs.trained import TrainedModel
from bayeslora.server.trial import require_sound
from server.live import ASKED, held_up, wait_for
from train.tiny import bayeslora, model_directory, read_json


@pytest.fixture(scope="module")
def own(run: Path) -> TrainedModel:
    """A run of this module's own, whose weights may be changed as long as they are changed back."""
    return load_run(run)


@contextmanager
def broken(trained: TrainedModel) -> Iterator[None]:
    """Inside the block the model's last norm is so large that everything overflows behind it."""
    weight: Tensor = trained.loaded.model.model.norm.weight.detach()
    kept = weight.clone()
    weight.fill_(3e38)
    try:
        yield
    finally:
        weight.copy_(kept)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_base_model_with_a_weight_that_is_no_number_is_not_served(
    run: Path, tmp_path: Path, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even if hardly any text uses it."""
    model = shutil.copytree(model_directory(), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "embed_tokens" in name)
    weights[name][-1, 0] = value
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    copy = shutil.copytree(run, tmp_path / "run")
    write_json(copy / "config.json", read_json(copy / "config.json") | {"model": str(model)})
    assert bayeslora("serve", copy, "--port", 0, "--quiet") == 2
    told = capsys.readouterr().err
    assert "embed_tokens" in told and "get the model again" in told and told.count("\n") == 1


def test_an_adapter_that_overflows_is_not_served(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of its weights is a number, and no prediction is."""
    copy = shutil.copytree(run, tmp_path / "run")
    file = copy / "adapter" / "adapter_model.safetensors"
    huge = {name: tensor.fill_(1e30) if "mean" in name else tensor for name, tensor in load_file(file).items()}
    save_file(huge, file, metadata={"format": "pt"})
    assert bayeslora("serve", copy, "--port", 0, "--quiet") == 2
    told = capsys.readouterr().err
    assert "run: cannot be served: the model's scores are not numbers" in told and told.count("\n") == 1


def test_the_trial_leaves_the_model_as_it_was(own: TrainedModel) -> None:
    before = own.ask("Is it?", ["yes", "no"])
    require_sound(own)
    with broken(own), pytest.raises(InputError, match="cannot be served"):
        require_sound(own)
    require_sound(own)
    assert own.ask("Is it?", ["yes", "no"]) == before


def test_probabilities_that_are_no_numbers_are_noticed_though_nothing_was_raised(
    own: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(probabilities=np.array([[0.5, np.nan]]))
    monkeypatch.setattr(TrainedModel, "predictor", lambda self: lambda items: found)
    with pytest.raises(InputError, match="cannot be served: the model's probabilities are not finite"):
        require_sound(own)


def test_health_is_that_of_the_predictions(own: TrainedModel) -> None:
    with held_up(own) as (engine, _, client):
        engine.go.set()
        assert client.get("/healthz").status_code == 200
        with broken(own):
            for path, body in (("/v1/choices", ASKED), ("/v1/completions", {"prompt": "red", "max_tokens": 2})):
                assert client.post(path, json=body).status_code == 500
                wait_for(lambda: client.get("/healthz").status_code == 503)
            sick = client.get("/healthz").json()["error"]
            assert sick["message"] == "the model's predictions are not finite" and sick["type"] == "server_error"
        assert client.post("/v1/choices", json=ASKED).status_code == 200
        wait_for(lambda: client.get("/healthz").status_code == 200)


def test_one_request_without_numbers_is_no_reason(own: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_up(own) as (engine, _, client):
        engine.go.set()
        answer = engine.answer

        def overflowing(questions: object, encoded: object) -> object:
            raise ArithmeticError("this question overflows")

        monkeypatch.setattr(engine, "answer", overflowing)
        assert client.post("/v1/choices", json=ASKED).status_code == 500
        monkeypatch.setattr(engine, "answer", answer)
        assert client.post("/v1/choices", json=ASKED).status_code == 200
        assert client.get("/healthz").status_code == 200
