"""Export and merge from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bayeslora import load_model, load_run
from bayeslora.errors import InputError
from bayeslora.export.adapters import merge_run
from bayeslora.train import train
from train import tiny
from train.tiny import bayeslora, run_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("verbs") / "run"
    train(run_config(), directory)
    return directory


def test_draws_are_exported_with_what_serves_them(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert bayeslora("export", trained, "--samples", "2", "--out", out, "--quiet") == 0
    told = capsys.readouterr().out
    assert f"{out}: 2 adapters and their mean" in told and "vllm serve" in told and "RemoteModel" in told
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "mean", "sample-000", "sample-001"]
    assert PeftModel.from_pretrained(load_model(tiny.model_directory()).model, str(out / "sample-001")) is not None
    assert bayeslora("export", trained, "--out", out) == 2
    assert "is not empty; choose another directory" in capsys.readouterr().err
    assert bayeslora("export", trained, "--samples", "0", "--out", tmp_path / "mean", "--json", "--quiet") == 0
    assert [it["name"] for it in json.loads(capsys.readouterr().out)["adapters"]] == ["mean"]


@pytest.mark.parametrize("verb", ["export", "merge"])
def test_a_directory_in_use_is_told_before_anything_is_loaded(
    verb: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bayeslora.runs.load.load_run", None)
    (tmp_path / "file").write_text("mine")
    for place, reason in ((trained, "is not empty"), (tmp_path / "file", "is a file")):
        assert bayeslora(verb, trained, "--out", place) == 2
        assert capsys.readouterr().err == f"bayeslora: {place}: {reason}; choose another directory\n"


def test_a_merged_model_is_an_ordinary_one(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "merged"
    assert bayeslora("merge", trained, "--out", out, "--quiet") == 0
    assert capsys.readouterr().out == f"{out}: the merged model\n"
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert type(merged).__name__ == "LlamaForCausalLM" and len(AutoTokenizer.from_pretrained(out)) > 0
    ids, run = torch.tensor([[5, 6, 7]]), load_run(trained)
    with torch.no_grad(), run.model.deterministic():
        torch.testing.assert_close(merged(ids).logits, run.model(input_ids=ids).logits, atol=1e-5, rtol=1e-4)
    assert bayeslora("merge", trained, "--out", out) == 2
    assert "is not empty; choose another directory" in capsys.readouterr().err


def test_what_cannot_be_merged_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(run_config("c-lora"), tmp_path / "run")
    assert bayeslora("merge", tmp_path / "run", "--out", tmp_path / "merged", "--quiet") == 2
    assert "a run of 'c-lora' cannot be merged: the update of adapter" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob(".merged*"))


def spoil(file: Path, name: str) -> None:
    """Put NaN into one tensor of a file."""
    tensors = load_file(file)
    tensors[name].view(-1)[3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("verb", ["export", "merge"])
def test_a_broken_adapter_is_not_carried_on(
    verb: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    file = run / "adapter" / "adapter_model.safetensors"
    name = min(load_file(file))
    spoil(file, name)
    assert bayeslora(verb, run, "--out", tmp_path / "out", "--quiet") == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"{file}: tensor {name!r} holds NaN or infinity" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["export", "merge"])
def test_nothing_is_carried_on_over_a_broken_base(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run, name = tmp_path / "model", tmp_path / "run", "model.layers.0.mlp.down_proj.weight"
    shutil.copytree(tiny.model_directory(), base)
    with tiny.without_intervals():
        train(run_config(model=str(base)), run)
    spoil(base / "model.safetensors", name)
    assert bayeslora(verb, run, "--out", tmp_path / "out", "--quiet") == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"{base}: its weights hold NaN or infinity, in {name!r}" in line
    assert not (tmp_path / "out").exists()


def test_what_broke_in_memory_is_not_written(trained: Path, tmp_path: Path) -> None:
    run = load_run(trained)
    with torch.no_grad():
        run.model.get_base_model().model.norm.weight[0] = torch.inf
    with pytest.raises(InputError, match=r"its weights hold NaN or infinity, in 'model\.norm\.weight'"):
        merge_run(run, tmp_path / "merged")
    assert not list(tmp_path.iterdir())
