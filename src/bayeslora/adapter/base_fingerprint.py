"""Tells one base model from another of the same shape by a few numbers of every weight.

Numbers are rounded to bfloat16 first, so that a model is the same in float32 and in bfloat16, on every device. Rounding through
float16 gives other numbers, so what was loaded as float16 is compared with the same only. Of a quantised model there is none.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

NUMBERS = 8
"""How many of every weight."""

VERSION = 1
"""Raise it when what is computed changes: fingerprints of other versions are not compared."""


def fingerprint_of(base: nn.Module) -> str | None:
    """The fingerprint of a model without adapters, such as ``1:exact:6f0c...``; nothing if it cannot be told."""
    weights = dict(sorted(base.named_parameters()))
    if not weights or not all(_readable(weight) for weight in weights.values()):
        return None
    digest = hashlib.sha256()
    for name, weight in weights.items():
        digest.update(f"{name} {tuple(weight.shape)};".encode())
    device = next(iter(weights.values())).device
    numbers = torch.cat([_some(weight).to(device, non_blocking=True) for weight in weights.values()])
    digest.update(numbers.cpu().view(torch.int16).numpy().tobytes())
    rounding = "half" if any(weight.dtype == torch.float16 for weight in weights.values()) else "exact"
    return f"{VERSION}:{rounding}:{digest.hexdigest()[:32]}"


def differ(one: str, other: str) -> bool:
    """Whether two fingerprints are of different models; not if they were made in ways that cannot be compared."""
    (*way, digest), (*other_way, other_digest) = one.split(":"), other.split(":")
    return way == other_way and digest != other_digest


def _readable(weight: Tensor) -> bool:
    """Whether a weight is all there, in this process, and not quantised."""
    whole = type(weight.data) is Tensor and not weight.is_meta and weight.numel() > 0
    return whole and weight.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _some(weight: Tensor) -> Tensor:
    """Numbers from the beginning to the end of a weight, as bfloat16."""
    count = min(NUMBERS, weight.numel())
    places = torch.linspace(0, weight.numel() - 1, count, dtype=torch.float64).round().long()
    return weight.detach().flatten()[places.to(weight.device)].to(torch.bfloat16)
