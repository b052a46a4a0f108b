"""Many optimisers change parameters without raising their version, by which autograd and our caches notice a change: fused ones,
those of bitsandbytes, and all that write to ``parameter.data``.

So it is raised after every step on parameters of ours, whoever takes it: our training, a trainer of transformers, or a loop of
the user's. Other parameters are none of our business.
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
    """Notice every step on the parameters of this module."""
    _watched.add(module)


def raise_versions(parameters: Iterable[torch.Tensor]) -> None:
    """Let everybody know that these have changed."""
    torch.autograd.graph.increment_version([p for p in parameters if not p.is_inference()])


def _after_step(optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    moved = {id(parameter) for group in optimiser.param_groups for parameter in group["params"]}
    raise_versions(p for module in _watched for p in module.parameters() if id(p) in moved)


register_optimizer_step_post_hook(_after_step)
