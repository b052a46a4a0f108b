"""What a run will take, against runs that are really made."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bayeslora.adapter import lean_layers
from bayeslora.models import load_model
from bayeslora.runs.config import AdapterConfig, ModelConfig, RunConfig, TrainingConfig, resolve
from bayeslora.train.estimate import _idle_parameters, _kept, _lean_attention, estimate, product_speed
from bayeslora.train.run import adapt, open_task, train
from bayeslora.train.task_runner import TaskRunner
from tiers import some
from train import tiny
from train.tiny import bayeslora

TRAINING = TrainingConfig(epochs=2, batch_size=4, patience=0)


def run(**changes):
    return RunConfig(model=str(tiny.model_directory()), task=str(tiny.task_directory()), training=TRAINING, **changes)


@pytest.mark.parametrize("method", some(["lora", "bayesian-lora", "blob", "c-lora"], ["bayesian-lora"]))
def test_figures_are_those_of_the_run(method, tmp_path):
    found, result = estimate(run(method=method), device="cpu"), train(run(method=method), tmp_path / "run")
    assert found.trainable == result["parameters"]["trainable"]
    assert found.parameters + found.trainable == result["parameters"]["total"]
    assert found.steps == result["timing"]["steps"]
    assert found.base_bytes == 4 * found.parameters and found.trained_bytes == 16 * found.trainable


def test_methods_that_stand_on_loras_take_what_those_take():
    lora = estimate(run(method="lora"), device="cpu")
    for method, start_from, times in (
        ("deep-ensemble", (), 3),
        ("tfb", (), 1),
        ("tfb", ("trained",), 0),
        ("zero-shot", (), 0),
    ):
        found = estimate(run(method=method, start_from=start_from), device="cpu")
        assert (found.steps, found.tokens, found.flops) == (times * lora.steps, times * lora.tokens, times * lora.flops)


@pytest.mark.parametrize("checkpointing, lean", [(False, False), (True, False), (False, True)])
def test_what_is_kept_is_what_a_real_step_keeps(checkpointing, lean, monkeypatch):
    """The same batch on a model with weights: within 2 % with the same attention, within 8 % with that of a CPU, which has no
    lean layers."""
    plain = estimate(run(adapter=AdapterConfig(targets=("q_proj", "up_proj"))), device="cpu") if lean else None
    monkeypatch.setattr(lean_layers, "LEAN", ("cpu",) if lean else ())
    config = resolve(run(adapter=AdapterConfig(targets=("q_proj", "up_proj"))))
    config = replace(config, training=replace(config.training, gradient_checkpointing=checkpointing))
    found = estimate(config, device="cpu")
    work, loaded = open_task(config, None), load_model(config.model, device="cpu")
    work.encode(loaded)
    model = adapt(loaded, config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    work.bind(model, None)
    batch = work.largest_batch(4)
    with lean_layers.lean_layers(model, torch.device("cpu")):
        kept = _kept(model, work, batch)
        assert lean or found.activation_bytes == pytest.approx(kept, rel=0.08)
        with _lean_attention():
            assert found.activation_bytes == pytest.approx(_kept(model, work, batch), rel=0.02)
    if plain is not None:
        assert found.activation_bytes < 0.8 * plain.activation_bytes
    whole = estimate(replace(config, training=replace(config.training, gradient_checkpointing=False)), device="cpu")
    assert (found.activation_bytes < 0.7 * whole.activation_bytes) == checkpointing
    assert (found.flops > whole.flops) == checkpointing


def test_quantised_bases_and_experts():
    whole, four = estimate(run(), device="cpu"), estimate(run(loading=ModelConfig(bits=4)), device="cpu")
    assert four.base_bytes == whole.base_bytes // 8
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    config = Qwen3MoeConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=8, num_experts_per_tok=2
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert _idle_parameters(model) == 2 * 6 * 3 * 16 * 8  # layers, idle experts, three matrices each


def test_on_the_command_line_nothing_is_written(tmp_path, capsys):
    given = ["train", "--model", str(tiny.model_directory()), "--task", str(tiny.task_directory()), "--device", "cpu"]
    given += ["--out", str(tmp_path / "run"), "--dry-run"]
    assert bayeslora(*given) == 0
    told = capsys.readouterr().out
    assert "GiB" in told and "steps" in told and "TFLOP/s" in told
    assert bayeslora(*given, "--json", "--tflops", "0.5") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["seconds"] == pytest.approx(figures["flops"] / 0.5e12)
    assert not (tmp_path / "run").exists()
    assert bayeslora(*given, "--tflops", "0") == 2
    assert "tflops is 0.0; give a finite number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["bayesian-lora", "lora"])
def test_a_kept_trunk_is_computed_once_and_takes_no_more_memory(method):
    adapter = AdapterConfig(layers="last:1")
    plain = estimate(run(method=method, adapter=adapter), device="cpu", tflops=1.0)
    kept = run(method=method, adapter=adapter)
    found = estimate(replace(kept, training=replace(TRAINING, cache_trunk=True)), device="cpu", tflops=1.0)
    whole = estimate(run(method=method), device="cpu", tflops=1.0)
    assert found.activation_bytes == plain.activation_bytes < whole.activation_bytes
    assert found.flops < plain.flops < whole.flops
    layer = sum(p.numel() for p in load_model(tiny.model_directory(), device="cpu").model.model.layers[0].parameters())
    below, epochs = (tiny.LAYERS - 1) * layer, TRAINING.epochs
    # below the cut: forward and back in the whole model, forward alone with a cut, once instead of in every epoch if kept
    assert whole.flops - plain.flops == pytest.approx(2 * below * plain.tokens)
    assert plain.flops - found.flops == pytest.approx(2 * below * plain.tokens * (epochs - 1) / epochs)


def test_the_speed_is_that_of_this_machine_unless_it_is_given():
    found = estimate(run(), device="cpu")
    assert 1e-4 < found.tflops < 50  # of a CPU
    assert found.seconds == pytest.approx(found.flops / found.tflops / 1e12)
    given = estimate(run(), device="cpu", tflops=1e-6)
    assert given.tflops == 1e-6 and (" min " in str(given) or " h " in str(given))
    assert "about 1 s of training" in str(estimate(run(), device="cpu", tflops=300))


def test_the_best_of_some_products_is_the_speed(monkeypatch):
    """The first one starts libraries, and any may be disturbed."""
    took = iter([0.0, 5.0, 5.0, 6.0, 6.0, 8.0, 8.0, 11.0])
    monkeypatch.setattr("bayeslora.train.estimate.time.perf_counter", lambda: next(took))
    assert product_speed(torch.device("cpu"), torch.float32, size=10) == pytest.approx(2 * 10**3 / 1.0 / 1e12)


def test_the_longest_examples_are_what_memory_is_reckoned_with():
    work = SimpleNamespace(examples=["aa", "aaaa", "a", "aaa"], length=len)
    assert TaskRunner.largest_batch(work, 2) == ["aaaa", "aaa"]
