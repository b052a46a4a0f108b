"""Many optimisers change parameters without raising their version, by which autograd and our caches notice a change: fused ones,
those of bitsandbytes, and all that write to ``parameter.data``.

So it is raised after every step, whoever takes it: our training, a trainer of transformers, or a loop of the user's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def watch_optimisers() -> None:
    """To be called once in a process."""
    register_optimizer_step_post_hook(_raise_versions)


def _raise_versions(optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    raise_versions(p for group in optimiser.param_groups for p in group["params"])


def raise_versions(parameters: Iterable[torch.Tensor]) -> None:
    """Let everybody know that these have changed."""
    torch.autograd.graph.increment_version([p for p in parameters if not p.is_inference()])
