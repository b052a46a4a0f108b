"""Aiming inducing points: from the gradient of the first losses at the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bayeslora.adapter.base import AddUp
from bayeslora.errors import InputError
from bayeslora.posterior import Factors

if TYPE_CHECKING:
    from bayeslora.adapter.holder import PosteriorHolder


def aim(holder: PosteriorHolder, losses: Iterable[Callable[[], Tensor]], add_up: AddUp | None = None) -> None:
    """Aim the active posteriors by the gradient of the losses; see :meth:`bayeslora.adapter.base.Holder.aim`."""
    aiming = [name for name in holder.active if holder.posterior(name).aims]
    if not aiming:
        return
    means = {name: holder.posterior(name).mean().detach() for name in holder.bayeslora_posterior}  # losses may switch
    leaves = {name: [B.requires_grad_() for B in means[name].B] for name in aiming}
    slopes = _slopes(holder, means, [B for name in aiming for B in leaves[name]], losses)
    if add_up is not None:
        add_up(slopes)
    if not all(bool(torch.isfinite(slope).all()) for slope in slopes):
        raise InputError(
            "the gradient is NaN or infinite before training has begun: the base model fails on these examples; check its "
            "weights, and use float32 or bfloat16 if it is in float16"
        )
    rest = iter(slopes)
    for name in aiming:
        B = tuple(next(rest) for _ in leaves[name])
        holder.posterior(name).aim(replace(means[name], A=tuple(map(torch.zeros_like, means[name].A)), B=B))


def _slopes(
    holder: PosteriorHolder, means: dict[str, Factors], leaves: list[Tensor], losses: Iterable[Callable[[], Tensor]]
) -> list[Tensor]:
    """Gradients of the sum of the losses with respect to some of the means."""
    slopes = [torch.zeros_like(B) for B in leaves]
    with holder.restoring(), torch.enable_grad():
        holder.use(means)
        for loss in losses:
            for slope, part in zip(slopes, torch.autograd.grad(loss(), leaves, materialize_grads=True), strict=True):
                slope += part
    return slopes
