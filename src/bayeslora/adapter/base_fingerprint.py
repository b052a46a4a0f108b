"""Fingerprints that distinguish base models of the same shape, from a few numbers of every weight.

Numbers are rounded to bfloat16 first, so that a model is the same in float32 and in bfloat16, on every device. Rounding through
float16 gives other numbers, so float16 models are compared only with each other. Quantised models have no fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

NUMBERS = 8
"""Numbers taken from every weight."""

VERSION = 1
"""Increase it when the computation changes: fingerprints of different versions are not compared."""


def fingerprint_of(base: nn.Module) -> str | None:
    """The fingerprint of a model without adapters, such as ``1:exact:6f0c...``; ``None`` if its weights cannot be read."""
    weights = dict(base.named_parameters())
    half = any(weight.dtype == torch.float16 for weight in weights.values())
    return _fingerprint(weights, "half" if half else "exact")


def fingerprint_of_files(directory: Path) -> str | None:
    """The fingerprint that the model in a directory has in float32 and bfloat16; its weights are not read as a whole."""
    files = sorted(directory.glob("*.safetensors"))
    return _fingerprint({name: weight for file in files for name, weight in load_file(file).items()}, "exact")


def _fingerprint(weights: Mapping[str, Tensor], rounding: str) -> str | None:
    if not weights or not all(_readable(weight) for weight in weights.values()):
        return None
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {tuple(weight.shape)};".encode())
    device = next(iter(weights.values())).device
    numbers = torch.cat([_some(weight).to(device, non_blocking=True) for _, weight in sorted(weights.items())])
    digest.update(numbers.cpu().view(torch.int16).numpy().tobytes())
    return f"{VERSION}:{rounding}:{digest.hexdigest()[:32]}"


def differ(one: str, other: str) -> bool:
    """Whether two fingerprints are of different models; false if they are not comparable."""
    (*way, digest), (*other_way, other_digest) = one.split(":"), other.split(":")
    return way == other_way and digest != other_digest


def _readable(weight: Tensor) -> bool:
    """Whether a weight is complete in this process and not quantised."""
    whole = type(weight.data) is Tensor and not weight.is_meta and weight.numel() > 0
    return whole and weight.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _some(weight: Tensor) -> Tensor:
    """Numbers spread evenly over a weight, as bfloat16."""
    count = min(NUMBERS, weight.numel())
    places = torch.linspace(0, weight.numel() - 1, count, dtype=torch.float64).round().long()
    return weight.detach().flatten()[places.to(weight.device)].to(torch.bfloat16)
