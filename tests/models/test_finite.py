"""Weights that are not finite: found whatever their type, named, and refused where a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bayeslora.errors import InputError
from bayeslora.models.finite import first_not_finite, require_finite_weights
from train import tiny
from train.tiny import bayeslora

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_first_is_named(dtype: torch.dtype, value: float) -> None:
    good = torch.tensor([1.0, -3e4, 0.0]).to(dtype)
    bad = torch.tensor([1.0, value, 2.0]).to(dtype)
    assert first_not_finite([("a", good), ("b", bad), ("c", bad)]) == "b"
    assert first_not_finite([("a", good), ("none", torch.zeros(0, dtype=dtype))]) is None


def test_large_numbers_are_numbers() -> None:
    assert first_not_finite([("a", torch.full((9,), torch.finfo(torch.float32).max))]) is None


def test_what_is_no_float_is_left_out() -> None:
    assert first_not_finite([("a", torch.tensor([1])), ("b", torch.zeros(2, device="meta"))]) is None
    assert first_not_finite([]) is None


def test_a_model_is_refused_by_its_name() -> None:
    model = nn.Linear(2, 2)
    require_finite_weights(model, "good")
    with torch.no_grad():
        model.bias[1] = torch.nan
    with pytest.raises(InputError, match="bad: its weights hold NaN or infinity, in 'bias'; get the model again"):
        require_finite_weights(model, "bad")


@pytest.mark.parametrize("method", ["bayesian-lora", "lora"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_training_on_broken_weights_ends_in_one_line(
    method: str, value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = broken_model(tmp_path / "model", "model.layers.1.mlp.up_proj.weight", value)
    words = ["--model", broken, "--method", method]
    assert bayeslora(*tiny.options(tmp_path / "run", *words)) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"{broken}: its weights hold NaN or infinity" in line
    assert "'model.layers.1.mlp.up_proj.weight'" in line
    assert not (tmp_path / "run" / "config.json").exists()


def broken_model(place: Path, name: str, value: float) -> Path:
    """The tiny model with one number that is none."""
    place.mkdir()
    for file in Path(tiny.model_directory()).iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    tensors = load_file(place / "model.safetensors")
    tensors[name].view(-1)[7] = value
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place
