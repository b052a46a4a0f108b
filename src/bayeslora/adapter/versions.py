"""Fused optimisers change parameters without raising their version, by which autograd and our caches notice a change.

So it is raised after every step of theirs, whoever takes it: our training, a trainer of transformers, or a loop of the user's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def watch_fused_optimisers() -> None:
    """To be called once in a process."""
    register_optimizer_step_post_hook(_raise_versions)


def _raise_versions(optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    changed = [p for group in optimiser.param_groups if group.get("fused") for p in group["params"]]
    if changed:
        torch.autograd.graph.increment_version(changed)
