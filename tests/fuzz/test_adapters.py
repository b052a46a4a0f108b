"""Directories of runs that somebody has damaged or forged: loaded as they are, or refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from fuzz.outcomes import fuzzed, names, require_clear, run
from train.tiny import bayeslora, options

pytestmark = pytest.mark.system

FILES = (
    "config.json",
    "result.json",
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "adapter/calibration.json",
)
ASK = ("--question", "Is 3 even?", "--choice", "yes", "--choice", "no", "--quiet")
TRICKS = (
    "../../outside",
    "/etc/passwd",
    "a/../../b",
    "..",
    "",
    "\x00",
    "C:\\x",
    "aux" * 100,
    "~/x",
    "file:///etc/passwd",
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(TRICKS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    assert bayeslora(*options(out)) == 0
    assert bayeslora("calibrate", out, "--error-rate", "0.5", "--quiet") == 0
    return out


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


def damaged(trained: Path, place: Path, damage: Callable[[Path], None]) -> None:
    """Ask a damaged copy of the run; nothing may appear beside it."""
    copy = place / "run"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(trained, copy)
    damage(copy)
    before = names(place)
    require_clear(*run("predict", copy, *ASK))
    assert names(place) <= before | {"run/.lock"}


@fuzzed
@given(file=st.sampled_from(FILES), data=st.data())
def test_bytes(trained: Path, place: Path, file: str, data: st.DataObject) -> None:
    """Bits flipped, files cut off, replaced by rubbish, emptied, removed."""

    def damage(copy: Path) -> None:
        path = copy / file
        content = bytearray(path.read_bytes())
        how = data.draw(st.sampled_from(["flip", "cut", "rubbish", "empty", "remove", "directory", "insert"]))
        at = data.draw(st.integers(0, len(content) - 1))
        if how == "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif how == "cut":
            content = content[:at]
        elif how == "insert":
            content[at:at] = data.draw(st.binary(max_size=9))
        elif how != "remove":
            content = bytearray(data.draw(st.binary(max_size=64)) if how == "rubbish" else b"")
        path.unlink()
        if how == "directory":
            path.mkdir()
        elif how != "remove":
            path.write_bytes(content)

    damaged(trained, place, damage)


@fuzzed
@given(data=st.data())
def test_tensors(trained: Path, place: Path, data: st.DataObject) -> None:
    """Tensors of another shape or type, missing, too many, not numbers, under forged names."""

    def damage(copy: Path) -> None:
        path = copy / "adapter" / "adapter_model.safetensors"
        tensors = load_file(path)
        name = data.draw(st.sampled_from(sorted(tensors)))
        value = tensors[name]
        how = data.draw(st.sampled_from(["shape", "dtype", "missing", "extra", "nan", "inf", "rename", "huge", "none"]))
        if how == "shape":
            tensors[name] = torch.zeros(data.draw(st.lists(st.integers(0, 5), max_size=4)))
        elif how == "dtype":
            kinds = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8]
            tensors[name] = value.to(data.draw(st.sampled_from(kinds)))
        elif how in ("nan", "inf", "huge"):
            tensors[name] = torch.full_like(value, {"nan": torch.nan, "inf": torch.inf, "huge": 1e30}[how])
        elif how == "extra":
            tensors[data.draw(st.text(max_size=12) | st.sampled_from(TRICKS))] = torch.zeros(2)
        elif how == "none":
            tensors = {}
        else:
            del tensors[name]
            if how == "rename":
                tensors[data.draw(st.text(max_size=12) | st.sampled_from(TRICKS))] = value
        save_file(tensors, path)

    damaged(trained, place, damage)


@fuzzed
@given(file=st.sampled_from([name for name in FILES if name.endswith("json")]), data=st.data())
def test_settings(trained: Path, place: Path, file: str, data: st.DataObject) -> None:
    """Settings of other kinds, other methods, names with path tricks; missing ones and ones that nobody knows."""

    def damage(copy: Path) -> None:
        path = copy / file
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        inside, key = _pick(content, data)
        how = data.draw(st.sampled_from(["value", "method", "remove", "add", "whole"]))
        if how == "value":
            inside[key] = data.draw(json_values)
        elif how == "method":
            known = ["lora", "laplace", "deep-ensemble", "pvera", "inducing", "point", "LORA", "nothing"]
            inside[key] = data.draw(st.sampled_from(known))
        elif how == "remove":
            del inside[key]
        elif how == "add":
            inside[data.draw(st.text(max_size=8))] = data.draw(json_values)
        else:
            content = data.draw(json_values)
        path.write_text(json.dumps(content), encoding="utf-8")

    damaged(trained, place, damage)


def _pick(content: dict[str, Any], data: st.DataObject) -> tuple[dict[str, Any], str]:
    """A setting at any depth: the dictionary that it is in, and its name."""
    found = [(content, key) for key in content]
    for inside, key in found:
        if isinstance(inside[key], dict):
            found.extend((inside[key], name) for name in inside[key])
    return data.draw(st.sampled_from(found))
