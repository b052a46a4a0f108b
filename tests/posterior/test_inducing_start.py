"""How Bayesian-LoRA's posterior begins to move: means tied to their inducing points, and points aimed at a slope."""

import dataclasses

import pytest
import torch

from bayeslora.posterior import InducingConfig, InducingPosterior, LayerShape
from posterior.test_inducing import LAYERS, build, perturb

# Means that are tied to the inducing points ---------------------------------------------------------------------------


def pieces(posterior, block):
    """Both sides' inducing points and the core of one block."""
    z_row, z_col = (posterior.get_parameter(f"z_{side}_{block.key}") for side in ("row", "col"))
    return z_row, posterior.get_parameter(f"core_{block.size[0]}x{block.size[1]}")[block.rows], z_col


@pytest.mark.parametrize("whitened", [True, False])
@pytest.mark.parametrize("size", [(2, 2), (3, 2), (1, 4)])
def test_a_tied_mean_is_the_core_between_the_points(whitened, size):
    settings = {"whitened": whitened, "inducing_rows": size[0], "inducing_cols": size[1], "prior_sd": 0.7}
    posterior = perturb(build(flow_depth=0, tied_mean=True, **settings))
    means = iter(posterior.mean().B)
    for block in posterior._blocks:
        if block.factor == "B":
            z_row, core, z_col = pieces(posterior, block)
            torch.testing.assert_close(next(means)[:, 0], 0.7 * z_row.mT @ core @ z_col)


def test_a_tied_mean_starts_as_an_untied_one_but_for_where_its_zero_is():
    settings = {"flow_depth": 0, "init_d": 0.3}
    tied, free = build(**settings, tied_mean=True), build(**settings)
    for layer in LAYERS:
        torch.testing.assert_close(tied.mean()[layer.name].A, free.mean()[layer.name].A, atol=1e-5, rtol=0)
    for block in tied._blocks:
        if block.factor == "B":
            z_row, core, _ = pieces(tied, block)
            assert not z_row.any() and core.any()


def test_tied_points_of_a_zero_factor_feel_the_slope_as_the_weights_of_a_lora_do():
    """All of it, where free ones feel nothing at all."""
    layer = [LayerShape("q", 40, 30, rank=3)]
    slope = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for tied in (True, False):
        posterior = build(layers=layer, flow_depth=0, tied_mean=tied)
        (posterior.mean()["q"].B[0] * slope).sum().backward()
        block = posterior._blocks[1]
        felt = posterior.get_parameter(f"z_row_{block.key}").grad
        if tied:
            _, core, z_col = pieces(posterior, block)
            torch.testing.assert_close(felt, core @ z_col @ slope.T)
        else:
            assert not felt.any()


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
