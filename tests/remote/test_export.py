"""Exported runs: stock PEFT answers with them as the run does, and nothing is written by halves."""

from __future__ import annotations

import errno
import json
import os
import shlex
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import bayeslora
from bayeslora.adapter.lora import SERVED_RANKS
from bayeslora.errors import InputError
from bayeslora.export import Manifest, export_run, read_manifest
from bayeslora.export.engines import Service
from bayeslora.export.manifest import Served
from bayeslora.models import load_model
from bayeslora.predict.mc import average_draws
from bayeslora.predict.questions.options import pack, score_options
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import encode_items, load_task
from bayeslora.train import AdapterConfig, ModelConfig
from remote.conftest import SAMPLES, random_run
from train import tiny
from train.tiny import contents, read_json


def stock_probabilities(export: Path, names: list[str]) -> np.ndarray:
    """What stock PEFT makes of the tiny questions with these adapters, before calibration: ``[n, N, O]``."""
    loaded = load_model(tiny.model_directory(), device="cpu")
    batch = pack(encode_items(load_task(tiny.task_directory()).test, loaded.tokenizer, "text"))
    draws = []
    for name in names:
        base = AutoModelForCausalLM.from_pretrained(tiny.model_directory(), dtype=torch.float32)
        model = PeftModel.from_pretrained(base, export / name).eval()
        assert model.peft_config["default"].peft_type == "LORA"
        with torch.no_grad():
            draws.append(score_options(model, batch).log_probabilities.double())
    return torch.stack(draws).exp().numpy()


def local(trained: TrainedModel) -> Any:
    return trained.predict(load_task(tiny.task_directory()).test)


def names(manifest: Manifest) -> list[str]:
    return [adapter.name for adapter in manifest.adapters]


# Equality -------------------------------------------------------------------------------------------------------------


def test_exported_draws_predict_as_the_run_does(trained: TrainedModel, export: Path) -> None:
    manifest, expected = read_manifest(export), local(trained)
    draws = stock_probabilities(export, names(manifest))
    assert np.abs(draws - expected.draws).max() < 1e-5
    assert np.abs(expected.draws - expected.draws.mean(0)).max() > 0.05  # they are different draws
    averaged = average_draws(torch.from_numpy(draws).log()).numpy() / manifest.temperature
    calibrated = np.exp(averaged) / np.exp(averaged).sum(-1, keepdims=True)
    assert np.abs(calibrated - expected.probabilities).max() < 1e-5


def test_the_mean_is_exported_for_those_who_want_one_adapter(tmp_path: Path) -> None:
    trained = random_run(samples=0)
    out = export_run(trained, 0, tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "mean"]
    manifest = read_manifest(out)
    assert manifest.adapters == (manifest.mean,) == (Served("mean", "mean"),)
    assert np.abs(stock_probabilities(out, ["mean"]) - local(trained).draws).max() < 1e-5


def test_a_point_estimate_is_exported_once(tmp_path: Path) -> None:
    trained = random_run("lora")
    manifest = read_manifest(export_run(trained, 5, tmp_path))
    assert names(manifest) == ["mean"]
    assert np.abs(stock_probabilities(tmp_path, ["mean"]) - local(trained).draws).max() < 1e-5


def test_an_ensemble_exports_every_member_once(tmp_path: Path) -> None:
    adapter = AdapterConfig(rank=4, targets=("q_proj", "v_proj"), settings={"members": 3})
    trained = random_run("deep-ensemble", samples=8, adapter=adapter)
    out = export_run(trained, 8, tmp_path / "out")
    manifest, expected = read_manifest(out), local(trained)
    assert names(manifest) == ["sample-000", "sample-001", "sample-002"]
    assert manifest.rank == 8 < read_json(out / "mean" / "adapter_config.json")["r"]  # the mean is all members in one
    assert np.abs(stock_probabilities(out, names(manifest)) - expected.draws).max() < 1e-5


def test_another_seed_gives_other_draws(trained: TrainedModel, export: Path, tmp_path: Path) -> None:
    file = "sample-000/adapter_model.safetensors"
    same = export_run(trained, SAMPLES, tmp_path / "same", seed=trained.config.seed)
    other = export_run(trained, SAMPLES, tmp_path / "other", seed=1)
    assert (same / file).read_bytes() == (export / file).read_bytes() != (other / file).read_bytes()
    assert read_manifest(other).seed == 1


def test_exporting_leaves_the_run_as_it_was(trained: TrainedModel, tmp_path: Path) -> None:
    before = local(trained)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    export_run(trained, SAMPLES, tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(local(trained).probabilities, before.probabilities)


# The manifest ---------------------------------------------------------------------------------------------------------


def test_the_manifest_says_what_there_is(trained: TrainedModel, export: Path) -> None:
    values = read_json(export / "manifest.json")
    versions = values.pop("versions")
    assert versions["bayeslora"] == bayeslora.__version__ and versions["torch"] == version("torch")
    commands = values.pop("commands")
    assert values == {
        "schema": 1,
        "base_model": tiny.model_directory(),
        "revision": None,
        "method": "bayesian-lora",
        "adapters": [{"name": f"sample-00{k}", "path": f"sample-00{k}"} for k in range(SAMPLES)],
        "mean": {"name": "mean", "path": "mean"},
        "rank": 8,
        "adapts_head": False,
        "scoring": "text",
        "max_tokens": 1024,
        "context": 512,
        "posterior_scale": 2.0,
        "temperature": 1.7,
        "threshold": 0.4,
        "conformal": {"0.9": 0.6},
        "seed": 7,
        "warnings": [],
    }
    for adapter in values["adapters"]:
        assert read_json(export / adapter["path"] / "adapter_config.json")["r"] == 8
    modules = [f"sample-00{k}={export}/sample-00{k}" for k in range(SAMPLES)]
    start = ["vllm", "serve", tiny.model_directory(), "--dtype", "float32", "--enable-lora", "--max-loras", "3"]
    assert shlex.split(commands["vllm"]) == [*start, "--max-lora-rank", "8", "--lora-modules", *modules]
    assert shlex.split(commands["sglang"])[-4:] == ["--lora-paths", *modules]


def test_a_manifest_is_read_as_it_was_written(export: Path, tmp_path: Path) -> None:
    manifest = read_manifest(export)
    manifest.write(tmp_path)
    assert read_manifest(tmp_path) == read_manifest(tmp_path / "manifest.json") == manifest


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"schema": 2}, "schema is 2"),
        ({"adapters": []}, "names no adapters"),
        ({"adapters": [{"name": "a"}]}, "path is None"),
        ({"adapters": ["a"]}, "'a' is no adapter"),
        ({"temperature": "warm"}, "temperature is 'warm'"),
        ({"temperature": 10**400}, "not a manifest: int too large"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"adapts_head": 0}, "adapts_head is 0"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(
    change: dict[str, Any], reason: str, export: Path, tmp_path: Path
) -> None:
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(read_json(export / "manifest.json") | change))
    with pytest.raises(InputError, match=reason) as caught:
        read_manifest(tmp_path)
    assert str(file) in str(caught.value)


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("[1")
    with pytest.raises(InputError, match="not a manifest"):
        read_manifest(tmp_path)


# Engines --------------------------------------------------------------------------------------------------------------


def service(**changes: Any) -> Service:
    settings: dict[str, Any] = {
        "model": "org/model",
        "model_type": "llama",
        "vocabulary": 32000,
        "revision": None,
        "dtype": "bfloat16",
        "own_code": False,
        "adapters": [Served("sample-000", "/some where/sample-000")],
        "rank": 16,
        "adapts_head": False,
    }
    return Service(**(settings | changes))


def test_command_lines_can_be_pasted() -> None:
    for line in service(revision="main").commands().values():
        words = shlex.split(line)
        assert "sample-000=/some where/sample-000" in words
        assert words[words.index("--revision") + 1] == "main"


def test_code_of_a_model_is_the_readers_decision() -> None:
    plain, own = service(), service(own_code=True)
    assert own.commands() == plain.commands() and "trust" not in str(plain.commands())
    assert not plain.doubts() and "read it, and add --trust-remote-code" in own.doubts()[0]


@pytest.mark.parametrize("rank", SERVED_RANKS)
def test_every_rank_of_an_export_can_be_served(rank: int) -> None:
    assert "vllm" in service(rank=rank).commands()


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"rank": 600}, "rank 512 at most, and these have 600"),
        ({"model_type": "qwen2", "adapts_head": True}, "no adapters of the output head"),
        ({"vocabulary": 262144, "adapts_head": True}, "258048 tokens at most"),
    ],
)
def test_what_vllm_refuses_is_told_and_left_to_sglang(changes: dict[str, Any], reason: str) -> None:
    (refusal,) = service(**changes).vllm_refusals()
    assert reason in refusal
    assert service(**changes).commands().keys() == {"sglang"}


def test_heads_of_unknown_models_are_a_matter_of_trying() -> None:
    unknown = service(model_type="newest", adapts_head=True)
    assert "newest" in unknown.doubts()[-1] and "vllm" in unknown.commands()
    for known in ("llama", "qwen3", "qwen3_moe"):
        (note,) = service(model_type=known, adapts_head=True).doubts()
        assert "logprob_token_ids" in note
    assert not service(model_type="newest").doubts()


def test_an_adapted_head_is_noticed(tmp_path: Path) -> None:
    trained = random_run(adapter=AdapterConfig(rank=2, targets=("q_proj", "lm_head")))
    trained.loaded.model.config.model_type = "qwen2"
    manifest = read_manifest(export_run(trained, 1, tmp_path))
    assert manifest.adapts_head and manifest.commands.keys() == {"sglang"}
    assert [it for it in manifest.warnings if "qwen2" in it and "lm_head" in it]


def test_what_makes_a_server_answer_otherwise_is_told(trained: TrainedModel, tmp_path: Path) -> None:
    config = replace(trained.config, loading=ModelConfig(bits=4))
    other = replace(trained, config=config, draw_layers="last:1")
    quantised, partial = read_manifest(export_run(other, 1, tmp_path)).warnings
    assert "quantised to 4 bits" in quantised and "draw_layers is 'last:1'" in partial


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, settings, reason",
    [
        ("laplace", {}, r"linearised model \(predictive='mc'\).*predictive=draws, or export 0 samples"),
        ("c-lora", {}, "depend on the input"),
        ("pvera", {}, "one of PEFT's own"),
    ],
)
def test_predictions_that_no_adapters_make_are_refused(
    method: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    trained = random_run(method, adapter=AdapterConfig(rank=2, targets=("q_proj",), settings=settings))
    with pytest.raises(InputError, match=reason):
        export_run(trained, 2, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_laplace_is_exported_if_it_predicts_by_draws(tmp_path: Path) -> None:
    adapter = AdapterConfig(rank=2, targets=("q_proj",), settings={"predictive": "draws"})
    trained = random_run("laplace", samples=2, adapter=adapter)
    export_run(trained, 2, tmp_path)
    draws = stock_probabilities(tmp_path, ["sample-000", "sample-001"])
    # both factors of a draw are five times as large as those of a trained adapter, and so rounding counts for 25 times as much
    assert np.abs(draws - local(trained).draws).max() < 25 * 1e-5


def test_a_directory_in_use_is_refused(trained: TrainedModel, export: Path, tmp_path: Path) -> None:
    before = contents(export)
    with pytest.raises(InputError, match="is not empty; choose another"):
        export_run(trained, 1, export)
    assert contents(export) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file; choose another"):
        export_run(trained, 1, tmp_path / "file")
    with pytest.raises(InputError, match="samples is -1"):
        export_run(trained, -1, tmp_path / "out")
    with pytest.raises(InputError, match=f"seed is {2**64}; give a number below"):
        export_run(trained, 1, tmp_path / "out", seed=2**64)


def test_an_export_that_fails_leaves_nothing(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_file = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).name == "manifest.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        export_run(trained, 1, tmp_path / "deep" / "out")
    assert not list((tmp_path / "deep").iterdir())
    monkeypatch.undo()
    assert export_run(trained, 1, tmp_path / "deep" / "out").stat().st_mode & 0o077 == tmp_path_mode(tmp_path)


def tmp_path_mode(folder: Path) -> int:
    """Who else may read a directory that was made the usual way."""
    (folder / "usual").mkdir()
    return (folder / "usual").stat().st_mode & 0o077
