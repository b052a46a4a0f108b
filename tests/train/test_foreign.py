"""Runs of PEFT's own adapters: the same road as ours, and an adapter that needs nothing of this package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from adapter.cases import foreign_model
from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.foreign import FOREIGN
from bayeslora.errors import InputError
from bayeslora.models import load_model
from bayeslora.predict.questions.predictions import read_predictions
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.runs.load import load_run
from bayeslora.train import AdapterConfig, RunContext, TrainingConfig, train
from bayeslora.train.checkpoint import TrainingState
from bayeslora.train.fit import Fit
from bayeslora.train.objective import QuestionObjective
from tiers import some
from train.test_fit import BATCH, examples, settings
from train.tiny import bayeslora, model_directory, options, outcome, read_json, run_config, without_intervals

IDS = torch.arange(1, 25).reshape(2, 12)
SETTINGS = {"monteclora": {"sample_scaler": 0.1}, "pvera": {"d_initial": 1.0, "r": 32}}  # so that draws differ much
ALL = pytest.mark.parametrize("method", FOREIGN)
ONE = pytest.mark.parametrize("method", some(FOREIGN, ["monteclora"]))


def config(method: str, **changes: Any):
    adapter = AdapterConfig(rank=2, targets=("q_proj", "v_proj"), settings=SETTINGS[method])
    return replace(run_config(method, adapter=adapter), **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run of each; not to be changed."""
    root = tmp_path_factory.mktemp("foreign")
    with without_intervals():
        for method in FOREIGN:
            train(config(method), root / method)
    return {method: root / method for method in FOREIGN}


@ALL
def test_the_run_learns_and_its_draws_differ(method, runs):
    result = read_json(runs[method] / "result.json")
    first, last = (record["train_nll"] for record in result["history"])
    assert last < first and result["metrics"]["epistemic"] > 1e-4


@pytest.mark.system
@ALL
def test_the_adapter_in_stock_peft_is_the_model_that_was_trained(method, runs):
    """Without this package, in a process of its own."""
    code = (
        "import sys, torch\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n"
        "base = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)\n"
        "model = PeftModel.from_pretrained(base, sys.argv[2]).eval()\n"
        "ids = torch.arange(1, 25).reshape(2, 12)\n"
        "torch.save(model(ids).logits.detach(), sys.argv[3])\n"
        "assert not any(name.startswith('bayeslora') for name in sys.modules)\n"
    )
    out = runs[method].parent / f"{method}.pt"
    subprocess.run([sys.executable, "-c", code, model_directory(), runs[method] / "adapter", out], check=True)
    model = load_run(runs[method]).model
    base = AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.float32)
    with torch.no_grad():
        find_any_holder(model).deterministic()
        torch.testing.assert_close(torch.load(out), model(IDS).logits)
        assert not torch.allclose(base(IDS).logits, torch.load(out), atol=1e-3)


@ALL
def test_a_loaded_run_predicts_as_it_did_and_can_be_repeated(method, runs):
    kept = read_predictions(runs[method] / "predictions.jsonl.gz")[1]
    model = load_run(runs[method])
    for _ in range(2):
        np.testing.assert_allclose(model.evaluate().probabilities, kept, atol=1e-6)
    mean = load_run(runs[method], samples=0).evaluate()
    assert len(mean.draws) == 1 and not np.allclose(mean.probabilities, kept, atol=1e-4)
    many = load_run(runs[method], samples=5).evaluate().draws
    np.testing.assert_allclose(many[:3], model.evaluate().draws, atol=1e-6)


def test_nothing_of_the_last_draw_is_saved(runs):
    tensors = load_file(runs["monteclora"] / "adapter" / "adapter_model.safetensors")
    for name, value in tensors.items():
        if name.endswith("gaussian_var_prior"):
            assert torch.equal(value, torch.eye(2))
        if name.endswith("expert_weights"):
            assert torch.equal(value, torch.full((8,), 0.125))
    assert any(name.endswith("std_prior") for name in tensors)


@ALL
def test_a_run_is_a_function_of_its_settings_and_gives_the_base_model_back(method, runs, tmp_path):
    place = RunContext(loaded=load_model(model_directory()))
    names = [name for name, _ in place.loaded.model.named_modules()]
    with without_intervals():
        train(config(method), tmp_path / "same", place)
        assert [name for name, _ in place.loaded.model.named_modules()] == names
        train(config(method, seed=1), tmp_path / "other", place)
    assert outcome(tmp_path / "same") == outcome(runs[method])
    file = "adapter/adapter_model.safetensors"
    assert outcome(tmp_path / "other")[file] != outcome(runs[method])[file]
    load_run(tmp_path / "same", loaded=place.loaded).model.unload()
    assert [name for name, _ in place.loaded.model.named_modules()] == names


@pytest.mark.parametrize(
    "at", some(["before the first step", "between checkpoints", "after the last step"], ["between checkpoints"])
)
@ALL
def test_an_interrupted_run_ends_as_if_undisturbed(method, at, runs, tmp_path, monkeypatch):
    step, calls = Fit._step, []
    last = {"before the first step": 0, "between checkpoints": 4, "after the last step": 6}[at]

    def interrupted(self, state):
        if len(calls) == last:
            raise KeyboardInterrupt
        calls.append(state.step)
        step(self, state)
        if len(calls) == last == 6:
            self._note_last(state)
            self._end_epoch(state)
            self._save(state)
            raise KeyboardInterrupt

    place = RunContext(checkpoint_seconds=0)
    with without_intervals(), monkeypatch.context() as disturbed:
        disturbed.setattr(Fit, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config(method), tmp_path / "run", place)
    with without_intervals():
        train(config(method), tmp_path / "run", place)
    assert outcome(tmp_path / "run") == outcome(runs[method])


@ONE
def test_calibration_has_a_temperature_and_no_scale(method, runs, tmp_path, capsys):
    shutil.copytree(runs[method], tmp_path / "run")
    before = (tmp_path / "run" / "adapter" / "adapter_config.json").read_bytes()
    assert bayeslora("calibrate", tmp_path / "run", "--coverage", 0.5, "--quiet") == 0
    assert "posterior scale 1, temperature" in capsys.readouterr().out
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").read_bytes() == before
    kept = load_run(tmp_path / "run")
    assert kept.calibration.temperature != 1.0 and kept.calibration.posterior_scale == 1.0
    raw, calibrated = (load_run(tmp_path / "run", raw=it).evaluate().probabilities for it in (True, False))
    scaled = raw ** (1 / kept.calibration.temperature)
    np.testing.assert_allclose(calibrated, scaled / scaled.sum(1, keepdims=True), atol=1e-5)


@ONE
def test_the_command_line_takes_settings_and_refuses_unknown_ones(method, tmp_path, capsys):
    words = options(tmp_path / "run", "--method", method, "--settings")
    assert bayeslora(*words, "colour=3") == 2
    assert f"settings of method '{method}'" in capsys.readouterr().err
    name, value = {"monteclora": ("num_samples", 2), "pvera": ("r", 8)}[method]
    with without_intervals():
        assert bayeslora(*words, f"{name}={value}") == 0
    adapter = read_json(tmp_path / "run" / "adapter" / "adapter_config.json")
    assert (adapter.get("monteclora_config") or adapter)[name] == value
    assert "bayeslora" not in adapter["peft_type"].lower()


@ALL
def test_they_start_from_no_lora(method, tmp_path):
    with pytest.raises(InputError, match="starts from no LoRA"):
        train(config(method, start_from=(str(tmp_path),)), tmp_path / "run")


def test_splitting_the_optimiser_is_refused(tmp_path):
    split = TrainingConfig(optimiser="split")
    with pytest.raises(InputError, match="'pvera' has no parts to split"):
        train(config("pvera", training=split), tmp_path / "run")


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_the_penalty_enters_the_loss_once(micro_batch):
    """The gradient with a penalty whose gradient is known, less the one without."""
    found = []
    for strength in (0.0, 3.0):
        model = foreign_model(FOREIGN["monteclora"])
        [name] = [key for key, _ in model.named_parameters() if ".0.self_attn.q_proj" in key and "std_prior" in key]
        parameter, holder = model.get_parameter(name), find_any_holder(model)
        holder.penalty = lambda p=parameter, strength=strength: strength * p.sum()
        values = settings(micro_batch=micro_batch, clip=1e9)
        fit = Fit(QuestionObjective(Scorer(model)), examples(BATCH), values, 0, lambda: {"nll": 0.0})
        fit._step(TrainingState())
        found.append(parameter.grad.clone())
    torch.testing.assert_close(found[1] - found[0], torch.full_like(found[0], 3.0))


def test_the_loss_is_likelihood_and_pefts_own_loss():
    """One step by hand, with PEFT alone but for the draws."""
    model = foreign_model(FOREIGN["monteclora"], {"kl_loss_weight": 0.1, "use_entropy": True})
    expected, found = [], []

    class Watched(QuestionObjective):
        def losses(self, part, draws):
            value = super().losses(part, draws)
            expected.append(value.mean().item() + model.base_model._get_monteclora_loss().item())
            assert expected[0] - value.mean().item() > 0.1
            return value

    fit = Fit(Watched(Scorer(model)), examples(BATCH), settings(clip=1e9), 0, lambda: {"nll": 0.0})
    backward = fit._steps.backward

    def take(loss, kl):
        found.append((loss.item(), kl.item()))
        backward(loss, kl)

    fit._steps.backward = take
    fit._step(TrainingState())
    assert found == [(pytest.approx(expected[0]), 0.0)]


def test_a_run_of_a_method_that_peft_lacks_is_refused_before_anything_is_loaded(runs, monkeypatch):
    from bayeslora.methods import registry

    monkeypatch.setattr(registry, "METHODS", registry.offered("0.18.0"))
    monkeypatch.setattr(PeftModel, "from_pretrained", None)
    with pytest.raises(InputError, match=r"method 'pvera' is an adapter of PEFT's own, from PEFT 0\.19 on"):
        load_run(runs["pvera"])
