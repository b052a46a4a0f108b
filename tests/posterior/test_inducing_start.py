"""How Bayesian-LoRA's posterior begins to move: inducing points aimed at a slope."""

import dataclasses

import pytest
import torch

from bayeslora.posterior import InducingConfig, InducingPosterior, LayerShape
from posterior.test_inducing import LAYERS, build, perturb

# Aiming ---------------------------------------------------------------------------------------------------------------


def reach(posterior, slope):
    """Share of a slope of ``B`` that is left when it is projected onto where ``B`` can move, by layer."""
    shares = {}
    for block, (row, col) in posterior._projections():
        if block.factor == "B":
            for name, P_r, P_c in zip(block.group.names, row.p, col.p, strict=True):
                left, right = torch.linalg.pinv(P_r) @ P_r, torch.linalg.pinv(P_c) @ P_c
                target = slope[name].B[0]
                shares[name] = float((left @ target @ right).norm() / target.norm())
    return shares


@pytest.mark.parametrize(
    "settings", [{}, {"inducing_rows": 3, "inducing_cols": 3}, {"whitened": False}, {"flow_depth": 0}]
)
def test_all_of_the_slope_is_in_reach_once_it_was_aimed_at(settings):
    layers = [LayerShape(f"block{k}.q", 64, 48, rank=2) for k in range(3)]
    posterior = build(layers=layers, **settings)
    before = posterior.mean()
    generator = torch.Generator().manual_seed(0)
    B = tuple(torch.randn(b.shape, generator=generator, dtype=b.dtype) for b in before.B)
    slope = dataclasses.replace(before, B=B)
    assert max(reach(posterior, slope).values()) < 0.6
    posterior.aim(slope)
    assert min(reach(posterior, slope).values()) > 0.999
    for name in before:
        assert not posterior.mean()[name].B.any()  # only directions have changed
        torch.testing.assert_close(posterior.mean()[name].A, before[name].A)


def test_a_layer_without_a_slope_stays_and_so_do_trained_ones():
    posterior = build()
    start = {name: p.detach().clone() for name, p in posterior.named_parameters()}
    flat = posterior.mean()
    posterior.aim(dataclasses.replace(flat, B=tuple(map(torch.zeros_like, flat.B))))
    assert all(torch.equal(p, start[name]) for name, p in posterior.named_parameters())
    perturb(posterior)
    moved = {name: p.detach().clone() for name, p in posterior.named_parameters()}
    posterior.aim(dataclasses.replace(flat, B=tuple(map(torch.ones_like, flat.B))))
    assert all(torch.equal(p, moved[name]) for name, p in posterior.named_parameters())


def test_layers_with_a_point_need_no_aim():
    posterior = InducingPosterior(LAYERS, InducingConfig(), points=["block0.k"])
    mean = posterior.mean()
    posterior.aim(dataclasses.replace(mean, B=tuple(map(torch.ones_like, mean.B))))
    assert not any(stack.any() for stack in posterior.mean().B)
