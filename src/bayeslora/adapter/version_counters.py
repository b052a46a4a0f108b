"""Increments the version counters of our parameters after every optimiser step.

Autograd and our caches notice changes by these counters. Many optimisers change parameters without incrementing them: fused
ones, those of bitsandbytes, and all that write to ``parameter.data``. So a hook does it after every step of any optimiser,
in our training, in a trainer of transformers or in a loop of the user's. Other parameters are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

_watched: WeakSet[nn.Module] = WeakSet()


def watch(module: nn.Module) -> None:
    """Track every step on the parameters of this module."""
    _watched.add(module)


def raise_versions(parameters: Iterable[torch.Tensor]) -> None:
    """Increment the version counters of these parameters."""
    torch.autograd.graph.increment_version([p for p in parameters if not p.is_inference()])


def _after_step(optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    moved = {id(parameter) for group in optimiser.param_groups for parameter in group["params"]}
    raise_versions(p for module in _watched for p in module.parameters() if id(p) in moved)


register_optimizer_step_post_hook(_after_step)
