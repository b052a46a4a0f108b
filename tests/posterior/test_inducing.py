"""Bayesian-LoRA's posterior as a whole: KLs, mean, gradients, counts and settings (methods entry 13 and section 16)."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from bayeslora.posterior import InducingConfig, InducingPosterior, LayerShape, PointPosterior
from bayeslora.posterior.projection import Side, project

LAYERS = [
    LayerShape("block0.q", 7, 6, rank=2),
    LayerShape("block0.k", 5, 6, rank=2),
    LayerShape("block1.q", 7, 6, rank=2),
]


def build(seed=0, layers=LAYERS, **settings):
    return InducingPosterior(layers, InducingConfig(**settings), seed=seed).double()


@torch.no_grad()
def perturb(posterior, sd=0.3, seed=1):
    """Move every parameter away from its start, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in posterior.parameters():
        parameter += sd * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return posterior


def dense_sides(posterior, factor, shape_key, row):
    """Cholesky factors of K_r and K_c of one layer's factor, computed apart from the posterior."""
    sides = []
    for side in ("row", "col"):
        z = posterior.get_parameter(f"z_{side}_{factor}_{shape_key}")[row : row + 1]
        d = posterior.get_parameter(f"log_d_{side}_{factor}_{shape_key}")[row : row + 1].exp()
        sides.append(Side(z.detach(), d.detach()))
    return [projection.chol[0] for projection in project(sides)]


# KL terms -------------------------------------------------------------------------------------------------------


def gaussian_blocks(posterior, size):
    """For every inducing matrix: mean, sd and the dense map vec V -> vec U (row-major)."""
    for block in posterior._blocks:
        for k in range(len(block.group)):
            chol_r, chol_c = dense_sides(posterior, block.factor, block.group.key, k)
            index = block.rows.start + k
            mean = posterior.inducing_mean(size)[index].detach().flatten()
            sd = posterior.inducing_sd(size)[index].detach().flatten()
            yield mean, sd, torch.kron(chol_r, chol_c)


@pytest.mark.parametrize("size", [(2, 2), (3, 2), (1, 4), (4, 3)])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_whitened_kl_is_the_same_in_both_spaces(size, scale):
    posterior = perturb(build(flow_depth=0, inducing_rows=size[0], inducing_cols=size[1], init_d=0.5))
    posterior.scale = scale
    in_v, in_u = 0.0, 0.0
    for mean, sd, chol in gaussian_blocks(posterior, size):
        eye = torch.eye(mean.numel(), dtype=torch.float64)
        zero = torch.zeros_like(mean)
        in_v += kl_divergence(MultivariateNormal(mean, scale_tril=sd.diag()), MultivariateNormal(zero, scale_tril=eye))
        in_u += kl_divergence(
            MultivariateNormal(chol @ mean, scale_tril=chol @ sd.diag()),
            MultivariateNormal(zero, scale_tril=chol),
        )
    torch.testing.assert_close(posterior.kl()["inducing"].detach(), in_v)
    torch.testing.assert_close(in_u, in_v)


@pytest.mark.parametrize("size", [(2, 2), (3, 2), (1, 4), (4, 3)])
def test_unwhitened_kl_is_the_same_in_both_spaces(size):
    posterior = perturb(build(flow_depth=0, whitened=False, inducing_rows=size[0], inducing_cols=size[1], init_d=0.5))
    in_u, in_v = 0.0, 0.0
    for mean, sd, chol in gaussian_blocks(posterior, size):
        eye = torch.eye(mean.numel(), dtype=torch.float64)
        zero = torch.zeros_like(mean)
        in_u += kl_divergence(MultivariateNormal(mean, scale_tril=sd.diag()), MultivariateNormal(zero, scale_tril=chol))
        inverse = torch.linalg.inv(chol)
        covariance = inverse @ sd.square().diag() @ inverse.T
        in_v += kl_divergence(MultivariateNormal(inverse @ mean, covariance), MultivariateNormal(zero, scale_tril=eye))
    torch.testing.assert_close(posterior.kl()["inducing"].detach(), in_u)
    torch.testing.assert_close(in_v, in_u, rtol=1e-6, atol=1e-6)


def test_both_parametrisations_start_at_the_same_mean():
    """U = 𝓛_r V 𝓛_cᵀ describes the same factors as V (initial values are float32)."""
    settings = {"flow_depth": 0, "zero_start": False, "init_d": 0.3}
    whitened, unwhitened = build(**settings), build(**settings, whitened=False)
    assert (whitened.inducing_mean((2, 2)) - unwhitened.inducing_mean((2, 2))).abs().max() > 0.1
    for layer in LAYERS:
        for a, b in zip(whitened.mean()[layer.name], unwhitened.mean()[layer.name], strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("whitened", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_sampled_kl_is_unbiased(whitened, depth):
    """One sample with analytic entropy against a long average of log q − log p, computed densely."""
    posterior = perturb(build(flow_depth=depth, whitened=whitened, init_d=0.5, layers=LAYERS[:1]))
    generator = torch.Generator().manual_seed(3)
    n = 4_000
    with torch.no_grad():
        factors = posterior.draw(n, generator)
        latent = factors.latents[(2, 2)]
        ours = posterior.kl(factors)["inducing"]
    log_ratio = torch.zeros(n, dtype=torch.float64)
    noise_generator = torch.Generator().manual_seed(3)
    base_noise = torch.randn((2, n, 2, 2), generator=noise_generator, dtype=torch.float64)
    for index, (_, sd, chol) in enumerate(gaussian_blocks(posterior, (2, 2))):
        log_q0 = torch.distributions.Normal(0.0, 1.0).log_prob(base_noise[index]).sum((-1, -2)) - sd.log().sum()
        log_q = log_q0 - latent.log_det[index]
        scale_tril = torch.eye(4, dtype=torch.float64) if whitened else chol
        prior = MultivariateNormal(torch.zeros(4, dtype=torch.float64), scale_tril=scale_tril)
        log_ratio += log_q - prior.log_prob(latent.value[index].flatten(1))
    error = log_ratio.std() / n**0.5
    assert abs(ours - log_ratio.mean()) < 4 * error + 1e-9
    with torch.no_grad():
        single = torch.stack([posterior.kl(generator=generator)["inducing"] for _ in range(200)])
    assert abs(single.mean() - log_ratio.mean()) < 4 * single.std() / 200**0.5 + 4 * error


def test_conditional_kl_counts_the_entries_of_both_factors():
    posterior = build(init_lambda=0.01)
    entries = sum(la.rank * (la.in_features + la.out_features) for la in LAYERS)
    lam = torch.tensor(0.01, dtype=torch.float64)
    want = entries / 2 * (lam**2 - 1 - 2 * lam.log())
    torch.testing.assert_close(posterior.kl()["conditional"].detach(), want)
    fixed = build(init_lambda=0.01, learn_lambda=False)
    torch.testing.assert_close(fixed.kl()["conditional"], want)


@pytest.mark.parametrize("learnt", [True, False])
def test_noise_scale_of_a_draw_is_lambda(learnt):
    """Entries of A have variance λ² Σ_X diag around the mean when s → 0; the posterior scale multiplies it."""
    settings = {"flow_depth": 0, "init_sd_u": 1e-9, "max_sd_u": 1e-8, "init_lambda": 0.2, "max_lambda": 1.0}
    posterior = build(**settings, learn_lambda=learnt, init_d=100.0)  # a large D makes Σ_X the identity
    for scale in (1.0, 3.0):
        posterior.scale = scale
        with torch.no_grad():
            draws = posterior.draw(4000, torch.Generator().manual_seed(0))["block0.q"].A
            spread = (draws - posterior.mean()["block0.q"].A).std()
        assert abs(spread / (0.2 * scale) - 1) < 0.02


# Mean -----------------------------------------------------------------------------------------------------------


def test_mean_update_is_zero_at_the_start_by_default():
    for settings in ({}, {"whitened": False}, {"flow_depth": 0}, {"flow_depth": 3}):
        mean = build(**settings).mean()
        for name in mean:
            assert mean.product(name).abs().max() == 0
            assert mean[name].A.abs().max() > 0


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_mean_is_the_mean_of_the_product(share, depth):
    posterior = build(
        share_inducing=share,
        flow_depth=depth,
        inducing_rows=3,
        inducing_cols=4,
        init_sd_u=0.8,
        max_sd_u=1.0,
        init_d=0.3,
        zero_start=False,
    )
    perturb(posterior, sd=0.1)
    with torch.no_grad():
        mean = posterior.mean()
        draws = posterior.draw(20_000, torch.Generator().manual_seed(0))
        for name in mean:
            product = draws.product(name)
            error = product.std(0) / product.shape[0] ** 0.5
            # with a flow the mean itself is an average of 256 antithetic samples
            slack = 5 * error + (0.12 * product.std(0) if depth else 0)
            assert ((product.mean(0) - mean.product(name)[0]).abs() < slack).all()


def test_shared_mean_needs_its_correction():
    """m M m alone is visibly wrong, so the test above would notice a missing Mᵀ ⊙ s²."""
    posterior = build(share_inducing=True, flow_depth=0, init_sd_u=0.8, max_sd_u=1.0, init_d=0.3)
    with torch.no_grad():
        right = posterior.mean().product("block0.q")
        posterior.scale = 0.0
        without = posterior.mean().product("block0.q")
    assert (right - without).abs().max() > 0.05


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_map_recovery(scale):
    """λ → 0, s → 0, no flow (or scale 0): every draw is the deterministic bilinear map."""
    tiny = {"init_sd_u": 1e-9, "max_sd_u": 1e-8, "init_lambda": 1e-9, "max_lambda": 1e-8} if scale else {}
    posterior = build(flow_depth=0, zero_start=False, **tiny)
    posterior.scale = scale
    mean, draw = posterior.mean(), posterior.draw(3)
    for name in mean:
        for got, want in zip(draw[name], mean[name], strict=True):
            torch.testing.assert_close(got, want.expand_as(got), atol=1e-6, rtol=0)


def test_prior_draws_have_the_prior_scale():
    """V ~ N(0, I) and λ = 1: every entry of a factor is N(0, σ_F²), with and without width scaling."""
    for scaling in (False, True):
        posterior = build(
            flow_depth=0,
            prior_sd=0.7,
            sqrt_width_scaling=scaling,
            init_sd_u=1.0,
            max_sd_u=2.0,
            init_lambda=1.0,
            max_lambda=2.0,
        )
        with torch.no_grad():
            posterior.get_parameter("mean_2x2").zero_()
            factors = posterior.draw(20_000, torch.Generator().manual_seed(0))["block0.q"]
        for factor, columns in zip(factors, (6, 2), strict=True):
            want = 0.7 / columns**0.5 if scaling else 0.7
            assert ((factor.std(0) / want - 1).abs() < 0.03).all()


# Gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whitened, share", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("n", [1, 3])
def test_gradients_reach_every_parameter_at_steps_1_and_2(whitened, share, n):
    posterior = InducingPosterior(LAYERS, InducingConfig(whitened=whitened, share_inducing=share, flow_depth=2))
    optimiser = torch.optim.SGD(posterior.parameters(), lr=1e-3)
    targets = {la.name: torch.ones(la.out_features, la.in_features) for la in LAYERS}
    for step in (1, 2):
        factors = posterior.draw(n)
        fit = sum((factors.product(name) - target).square().mean() for name, target in targets.items())
        optimiser.zero_grad(set_to_none=True)
        fit.backward()
        for name, parameter in posterior.named_parameters():
            assert parameter.grad is not None, f"step {step}: no gradient at all in {name}"
            # the flow starts as the identity with a zero output layer, so nothing behind it moves at step 1
            if step == 1 and name.startswith(("flow_in", "flow_block")):
                continue
            grads = parameter.grad.flatten(1) if parameter.ndim > 1 else parameter.grad[:, None]
            assert (grads.abs().sum(1) > 0).all(), f"step {step}: a layer without gradient in {name}"
        optimiser.step()


# Settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True])
def test_inducing_sizes_may_differ_from_the_rank_and_from_each_other(share):
    for rows, cols in [(1, 3), (5, 2), (4, 4)]:
        too_large = max(rows, cols) > 2 * 2
        with pytest.warns(UserWarning, match="no capacity") if too_large else nullcontext():
            posterior = build(inducing_rows=rows, inducing_cols=cols, share_inducing=share)
        A, B = posterior.draw(2)["block0.k"]
        assert A.shape == (2, 2, 6)
        assert B.shape == (2, 5, 2)
        assert torch.isfinite(A).all() and torch.isfinite(B).all()


def test_layers_of_different_rank():
    layers = [LayerShape("a", 7, 6, rank=2), LayerShape("b", 7, 6, rank=3)]
    posterior = InducingPosterior(layers)
    factors = posterior.draw(2)
    assert factors["a"].A.shape == (2, 2, 6)
    assert factors["b"].A.shape == (2, 3, 6)
    assert posterior.kl(factors).total > 0


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"share_inducing": True, "whitened": False}, "share_inducing=True needs whitened=True"),
        ({"share_inducing": True, "zero_start": True}, "zero_start=True needs share_inducing=False"),
        ({"inducing_rows": 0}, "inducing_rows must be at least 1, got 0"),
        ({"flow_depth": -1}, "flow_depth must be 0 .no flow. or more, got -1"),
        ({"prior_sd": 0.0}, "prior_sd must be positive and finite, got 0.0"),
        ({"init_sd_u": 0.2}, "need 0 < init_sd_u < max_sd_u, got init_sd_u=0.2 and max_sd_u=0.2"),
        ({"init_lambda": 0.0}, "need 0 < init_lambda < max_lambda"),
        ({"max_lambda": float("inf")}, "need 0 < init_lambda < max_lambda"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        InducingConfig(**settings)


def test_presets():
    assert InducingConfig.preset("default") == InducingConfig()
    paper = InducingConfig.preset("paper")
    assert (paper.inducing_rows, paper.prior_sd, paper.sqrt_width_scaling, paper.init_sd_u) == (
        9,
        0.1,
        True,
        1e-3,
    )
    with pytest.raises(ValueError, match="unknown preset 'papr'; choose 'default' or 'paper'"):
        InducingConfig.preset("papr")


def test_scales_stay_within_their_bounds_and_can_return():
    posterior = InducingPosterior(LAYERS)
    config = posterior.config
    with torch.no_grad():
        for name, parameter in posterior.named_parameters():
            if "logit" in name:
                parameter.fill_(12.0)
    sd = posterior.inducing_sd((2, 2))
    assert (sd < config.max_sd_u * (1 + 1e-6)).all()
    sd.sum().backward()
    assert (posterior.get_parameter("sd_logit_2x2").grad > 0).all()


# Parameter counts (methods entry, section 13.7) --------------------------------------------------------------------


def llama2_7b(*targets, rank):
    head = [LayerShape("lm_head", 32000, 4096, rank)] if "lm_head" in targets else []
    blocks = [t for t in targets if t != "lm_head"]
    return [LayerShape(f"{k}.{t}", 4096, 4096, rank) for k in range(32) for t in blocks] + head


COLUMN_C = {4: 2.332, 9: 5.168, 16: 9.161, 32: 18.383, 64: 37.226, 128: 76.510}
"""Millions of parameters of Algorithm 1 to the letter: q, k and head, one shared matrix, rank = inducing size."""


@pytest.mark.parametrize("m", COLUMN_C)
def test_parameter_count_of_algorithm_1(m):
    with torch.device("meta"):
        posterior = InducingPosterior(llama2_7b("q", "k", "lm_head", rank=m), InducingConfig(share_inducing=True))
    flow = m * 16 + 16 + 4 * (16**2 + 16) + 2 * m * 16 + 2 * m
    per_layer = 2 * m**2 + 4 * m + 2 * m**2 + 2 + flow  # Z on the rank side, D, mean and sd, λ, flow
    exact = 64 * (m * (4096 + 4096) + per_layer) + m * (4096 + 32000) + per_layer
    assert posterior.parameter_count() == exact
    assert round(exact / 1e6, 3) == COLUMN_C[m]


@pytest.mark.filterwarnings("ignore:inducing size")
@pytest.mark.parametrize("m", [4, 9, 16, 32, 64, 128])
def test_parameter_count_of_the_published_table(m):
    """Column A: q and head stochastic, v plain LoRA; minus the m_r + m_c noise scales on Z per factor."""
    config = InducingConfig(inducing_rows=m, inducing_cols=m)
    with torch.device("meta"):
        ours = InducingPosterior(llama2_7b("q", "lm_head", rank=8), config).parameter_count()
        ours += PointPosterior(llama2_7b("v", rank=8)).parameter_count()
    extra_noise_scales = 33 * 2 * (m + m)
    assert ours + extra_noise_scales == 2_170_082 + 302_332 * m + 132 * m**2


def test_lora_count_of_the_paper():
    with torch.device("meta"):
        assert PointPosterior(llama2_7b("q", "k", "lm_head", rank=8)).parameter_count() == 4_483_072


def test_config_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        InducingConfig().prior_sd = 2.0
