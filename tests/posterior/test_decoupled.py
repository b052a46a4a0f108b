"""Bayesian-LoRA with a free mean: KL, draws and mean against dense Gaussians computed apart (methods entry 13)."""

import dataclasses

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from bayeslora.posterior import DecoupledConfig, DecoupledPosterior, LayerShape, PointPosterior
from bayeslora.posterior.flow import FlowParameters, apply_flow
from posterior.cases import ONE_MEAN

LAYERS = [LayerShape("q", 7, 6, rank=2), LayerShape("v", 5, 6, rank=2), LayerShape("k", 7, 6, rank=2)]
FORMS = [
    {},
    {"random_factors": "both"},
    {"inducing_points": 1, "prior_sd": 0.3},
    {"inducing_points": 5, "width": 1.7, "noise": 0.2, "random_factors": "both"},
    {"learn_widths": True, "random_factors": "both"},
]


@torch.no_grad()
def build(seed=0, layers=LAYERS, **settings):
    """A posterior in float64 whose every parameter has moved, as training would move it."""
    posterior = DecoupledPosterior(layers, DecoupledConfig(**{**ONE_MEAN, **settings}), seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in posterior.parameters():
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return posterior


def widths(posterior, key, row):
    """``s`` and ``λ`` of a factor, from the parameters or the settings."""
    if posterior.config.learn_widths:
        return [posterior.get_parameter(f"log_{name}_{key}")[row].exp().detach() for name in ("width", "noise")]
    return [torch.tensor(value, dtype=torch.float64) for value in (posterior.config.width, posterior.config.noise)]


def dense(posterior):
    """For every random factor of every layer: its name, and mean and covariance of one row of it, taken as a wide one."""
    random = ("A", "B") if posterior.config.random_factors == "both" else ("A",)
    for group in posterior.groups:
        for factor in random:
            key = f"{factor}_{group.key}"
            for row, name in enumerate(group.names):
                z = posterior.get_parameter(f"z_{key}")[row].detach()
                inside = z.T @ torch.linalg.inv(z @ z.T) @ z
                s, noise = (posterior.scale * width for width in widths(posterior, key, row))
                eye = torch.eye(z.shape[1], dtype=torch.float64)
                covariance = posterior.config.prior_sd**2 * (s**2 * inside + noise**2 * (eye - inside))
                mean = posterior.get_parameter(f"mean_{key}")[row].detach()
                yield name, factor, mean if factor == "A" else mean.T, covariance


@pytest.mark.parametrize("settings", FORMS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_the_kl_is_that_of_the_dense_gaussians(settings, seed, scale):
    posterior = build(seed, **settings)
    posterior.scale = scale
    prior_sd = posterior.config.prior_sd
    expected = 0.0
    for _, _, rows, covariance in dense(posterior):
        prior = MultivariateNormal(torch.zeros_like(rows[0]), prior_sd**2 * torch.eye(rows.shape[1]).double())
        expected += sum(kl_divergence(MultivariateNormal(row, covariance), prior) for row in rows)
    torch.testing.assert_close(posterior.kl().total.detach(), expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("factors", ["A", "both"])
def test_layers_narrower_than_the_rank_have_noise_in_all_their_directions(factors):
    layers = [LayerShape("narrow", 3, 2, rank=4), LayerShape("single", 1, 5, rank=8)]
    posterior = build(layers=layers, random_factors=factors)
    expected = 0.0
    for _, _, rows, covariance in dense(posterior):
        prior = MultivariateNormal(torch.zeros_like(rows[0]), torch.eye(rows.shape[1]).double())
        expected += sum(kl_divergence(MultivariateNormal(row, covariance), prior) for row in rows)
    torch.testing.assert_close(posterior.kl().total.detach(), expected, rtol=1e-8, atol=0)
    draws = posterior.draw(4, torch.Generator().manual_seed(0))
    assert all(torch.isfinite(factor).all() for name in draws for factor in draws[name])


@pytest.mark.parametrize("settings", FORMS)
def test_draws_have_the_dense_moments(settings):
    """Errors of means and covariances of ``n`` draws are Gaussian: within 6 of their standard deviations."""
    posterior, n = build(**settings), 6000
    with torch.no_grad():
        draws = posterior.draw(n, torch.Generator().manual_seed(0), "independent")
    for name, factor, rows, covariance in dense(posterior):
        drawn = draws[name].A if factor == "A" else draws[name].B.mT
        variances = covariance.diagonal()
        assert ((drawn.mean(0) - rows).abs() < 6 * (variances / n).sqrt()).all()
        spread = 6 * ((variances[:, None] * variances + covariance.square()) / n).sqrt()
        for k in range(rows.shape[0]):
            assert ((torch.cov(drawn[:, k].T) - covariance).abs() < spread).all()


def test_with_a_point_for_b_all_draws_share_it():
    posterior = build()
    draws = posterior.draw(3)
    assert all(torch.equal(draws[name].B[0], draws[name].B[k]) for name in draws for k in (1, 2))
    assert not torch.equal(draws["q"].A[0], draws["q"].A[1])
    assert posterior.kind("B_7x6_r2") == "weights_b" and posterior.kind("mean_A_7x6_r2") == "mean"


@pytest.mark.parametrize("settings", [*FORMS, {"flow_depth": 2}, {"flow_depth": 1, "random_factors": "both"}])
def test_the_mean_is_the_product_of_the_free_means_and_starting_from_a_lora_is_a_copy(settings):
    posterior, lora = build(**settings), PointPosterior(LAYERS, seed=3).double()
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter += 0.1
    posterior.start_from(lora.mean())
    for name in lora.mean():
        for ours, theirs in zip(posterior.mean()[name], lora.mean()[name], strict=True):
            assert torch.equal(ours, theirs)


def test_it_starts_where_lora_does():
    ours, lora = DecoupledPosterior(LAYERS, DecoupledConfig(**ONE_MEAN)), PointPosterior(LAYERS)
    for name in lora.mean():
        assert torch.equal(ours.mean()[name].A, lora.mean()[name].A)
        assert torch.equal(ours.mean()[name].B, torch.zeros_like(lora.mean()[name].B))


def test_what_no_parameter_changes_is_not_among_what_is_learnt():
    """Fixed widths leave the means, with the same gradient as the whole KL; learnt ones and flows leave it whole."""
    fixed, learnt = build(), build(learn_widths=True)
    kl = fixed.kl()
    assert float(kl.learnt) == float(kl["mean"]) < float(kl.total)
    gradients = [
        torch.autograd.grad(value, list(fixed.parameters()), retain_graph=True, allow_unused=True)
        for value in (kl.total, kl.learnt)
    ]
    for whole, part in zip(*gradients, strict=True):
        assert (whole is None and part is None) or torch.equal(whole, part)
    assert float(learnt.kl().learnt) == pytest.approx(float(learnt.kl().total), rel=1e-12)


# With several components --------------------------------------------------------------------------------------------


def of_component(posterior, k):
    """One component on its own, as a posterior with a single mean."""
    own = DecoupledPosterior(posterior.layers, dataclasses.replace(posterior.config, components=1)).double()
    state = {
        name: value[:, k] if name.startswith(("mean_", "A_", "B_")) else value
        for name, value in posterior.state_dict().items()
    }
    own.load_state_dict(state)
    return own


@pytest.mark.parametrize("settings", FORMS)
def test_the_kl_of_a_mixture_is_the_mean_of_its_components(settings):
    posterior = build(components=3, **settings)
    expected = torch.stack([of_component(posterior, k).kl().total for k in range(3)]).mean()
    torch.testing.assert_close(posterior.kl().total, expected, rtol=1e-12, atol=0)


def test_it_bounds_the_kl_of_the_mixture_from_above_by_at_most_the_log_of_their_number():
    """Against a Monte-Carlo estimate of the mixture's own KL, within 6 of its standard deviations."""
    posterior, n = build(components=3, layers=LAYERS[:1], width=0.9, noise=0.8), 3000
    with torch.no_grad():
        draws = posterior.draw(n, torch.Generator().manual_seed(0), "independent")["q"].A.flatten(1)
        bound = posterior.kl().total
    components = []
    for k in range(3):
        ((_, _, rows, covariance),) = dense(of_component(posterior, k))
        whole = torch.block_diag(*[covariance] * len(rows))
        components.append(MultivariateNormal(rows.flatten(), whole).log_prob(draws))
    log_q = torch.logsumexp(torch.stack(components), 0) - torch.tensor(3.0).log()
    terms = log_q - Normal(0.0, 1.0).log_prob(draws).sum(1)
    slack = 6 * terms.std() / n**0.5
    assert bound - torch.tensor(3.0).log() - slack < terms.mean() < bound + slack


@pytest.mark.parametrize("random_factors", ["A", "both"])
@pytest.mark.parametrize("n", [1, 2, 3, 6, 7])
def test_draws_are_spread_evenly_over_the_components_the_same_one_in_all_layers(n, random_factors):
    posterior = build(components=3, random_factors=random_factors, width=1e-9, noise=1e-9)
    draws = posterior.draw(n, torch.Generator().manual_seed(4))
    points = [of_component(posterior, k).mean() for k in range(3)]
    chosen = {
        name: [
            next(k for k in range(3) if torch.allclose(draws.product(name)[j], points[k].product(name)[0], atol=1e-6))
            for j in range(n)
        ]
        for name in draws
    }
    assert len({tuple(order) for order in chosen.values()}) == 1
    counts = torch.bincount(torch.tensor(chosen["q"]), minlength=3)
    assert counts.max() - counts.min() <= 1


def test_single_draws_come_from_every_component():
    posterior = build(components=3, width=1e-9, noise=1e-9)
    generator = torch.Generator().manual_seed(0)
    first = {round(posterior.draw(1, generator)["q"].A[0, 0, 0].item(), 6) for _ in range(40)}
    assert len(first) == 3


def test_opposite_draws_share_a_component():
    posterior = build(components=2)
    draws = posterior.draw(4, torch.Generator().manual_seed(0), "antithetic")["q"].A
    for k in range(2):
        middle = of_component(posterior, k).mean()["q"].A[0]
        torch.testing.assert_close((draws[2 * k] + draws[2 * k + 1]) / 2, middle)


def test_the_mean_is_that_of_the_components_products():
    posterior = build(components=3)
    for name in posterior.mean():
        products = torch.stack([of_component(posterior, k).mean().product(name) for k in range(3)])
        torch.testing.assert_close(posterior.mean().product(name), products.mean(0))


def test_components_start_apart_where_their_loras_would_and_all_from_a_lora_that_is_given():
    posterior, lora = DecoupledPosterior(LAYERS, DecoupledConfig(components=2)), PointPosterior(LAYERS)
    starts = posterior.get_parameter("mean_A_7x6_r2")
    assert torch.equal(starts[:, 0], lora.get_parameter("A_7x6_r2")) and not torch.equal(starts[:, 0], starts[:, 1])
    with torch.no_grad():
        lora.get_parameter("B_7x6_r2").fill_(0.5)
    posterior.start_from(lora.mean())
    assert all(
        torch.equal(posterior.get_parameter("mean_A_7x6_r2")[:, k], lora.get_parameter("A_7x6_r2")) for k in (0, 1)
    )
    assert (posterior.get_parameter("B_7x6_r2") == 0.5).all()


def test_questions_of_one_component_move_no_other():
    posterior = build(components=2)
    posterior.draw(4)["q"].A[:2].sum().backward()
    gradient = posterior.get_parameter("mean_A_7x6_r2").grad
    assert gradient[:, 0].abs().sum() > 0 and gradient[:, 1].abs().sum() == 0


@pytest.mark.parametrize("components", [0, -1, 257, 10**9])
def test_the_number_of_components_is_bounded(components):
    with pytest.raises(ValueError, match="components must be at least 1 and at most 256"):
        DecoupledConfig(components=components)


# With a flow ------------------------------------------------------------------------------------------------------


def flow_of(posterior, size):
    names = FlowParameters._fields
    return FlowParameters(*(posterior.get_parameter(f"flow_{name}_{size[0]}x{size[1]}").detach() for name in names))


@pytest.mark.parametrize("depth", [1, 2])
def test_opposite_noise_gives_opposite_draws(depth):
    """So the mean of the inducing matrix is zero, whatever the flow has learnt."""
    posterior = build(flow_depth=depth)
    flow, x = flow_of(posterior, (2, 2)), torch.randn(posterior._stacks[(2, 2)], 9, 2).double()
    (plus, log_det), (minus, same) = apply_flow(flow, x, odd=True), apply_flow(flow, -x, odd=True)
    torch.testing.assert_close(plus, -minus, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_det, same, rtol=1e-12, atol=1e-12)
    assert (apply_flow(flow, x)[0] - plus).abs().max() > 0.01  # the flow itself is not odd


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("points", [1, 3])
def test_the_odd_flows_determinant_is_that_of_its_jacobian(depth, points):
    posterior = build(flow_depth=depth, inducing_points=points)
    flow = flow_of(posterior, (2, points))
    count = posterior._stacks[(2, points)]
    x = torch.randn(count, 1, points, generator=torch.Generator().manual_seed(0)).double()
    jacobian = torch.autograd.functional.jacobian(lambda it: apply_flow(flow, it, odd=True)[0], x)
    own = torch.stack([jacobian[k, 0, :, k, 0] for k in range(count)])
    torch.testing.assert_close(apply_flow(flow, x, odd=True)[1][:, 0], torch.linalg.slogdet(own)[1])


@pytest.mark.parametrize("depth", [1, 2])
def test_the_sampled_kl_is_unbiased(depth):
    """Its average against that of ``log q − log p`` of whole factors, with the density of ``V`` from its Jacobian."""
    posterior, n = build(flow_depth=depth, layers=LAYERS[:1], noise=0.1), 1500
    posterior.requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    draws = posterior.draw(n, generator, "independent")
    (group,) = posterior.groups
    key = f"A_{group.key}"
    z = posterior.get_parameter(f"z_{key}")[0]
    chol = torch.linalg.cholesky(z @ z.T)
    p = torch.linalg.solve_triangular(chol, z, upper=False)
    mean = posterior.get_parameter(f"mean_{key}")[0]
    noise = draws["q"].A - mean
    v = noise @ p.T
    outside = noise - v @ p
    # log q(V): the noise before the flow is what the generator gave first
    base = posterior.noise(torch.Generator().manual_seed(3)).normal((1, n, 2, 2))[0]
    flow = flow_of(posterior, (2, 2))
    s = posterior.config.width

    def through(x):
        return apply_flow(flow, x.view(1, -1, 2), odd=True)[0].view_as(x)

    torch.testing.assert_close(through(s * base), v, rtol=1e-9, atol=1e-9)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda x: through(x.view(1, 2)).view(2)))(s * base.view(-1, 2))
    log_det = torch.linalg.slogdet(jacobians)[1].view(n, 2).sum(1)
    log_q_v = Normal(0.0, s).log_prob(s * base).sum((1, 2)) - log_det
    log_p = Normal(0.0, 1.0).log_prob(draws["q"].A).sum((1, 2))
    free = 2 * (6 - 2)  # dimensions of the noise outside, each N(0, λ²) in some orthonormal basis
    lam = posterior.config.noise
    log_q_outside = (
        -0.5 * outside.square().sum((1, 2)) / lam**2 - free * torch.tensor(lam * (2 * torch.pi) ** 0.5).log()
    )
    ratio = log_q_v + log_q_outside - log_p
    error = 6 * ratio.std() / n**0.5
    assert (posterior.kl(draws).total - ratio.mean()).abs() < error
    assert (posterior.kl(generator=generator).total - posterior.kl(draws).total).abs() < 20  # one sample of the same


# Widths and settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [64, 576, 2048])
def test_the_noise_an_input_sees_is_the_same_share_of_loras_start_at_every_width(features):
    """``s √(3 m)``, so that one setting serves models of all sizes."""
    posterior = DecoupledPosterior([LayerShape("q", 8, features, rank=8)], DecoupledConfig(**ONE_MEAN, noise=1e-9))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(features, 40, generator=generator)
    with torch.no_grad():
        mean, draws = posterior.mean()["q"].A @ x, posterior.draw(200, generator, "independent")["q"].A @ x
    ratio = (draws - mean).square().mean().sqrt() / mean.square().mean().sqrt()
    assert float(ratio) == pytest.approx(0.3 * (3 * 8) ** 0.5, rel=0.15)


def test_learnt_widths_begin_at_the_settings_and_are_the_only_difference():
    fixed, learnt = (DecoupledPosterior(LAYERS, DecoupledConfig(learn_widths=it)) for it in (False, True))
    extra = dict(learnt.named_parameters()).keys() - dict(fixed.named_parameters()).keys()
    assert {name.rsplit("_", 2)[0] for name in extra} == {"log_width_A", "log_noise_A"}
    draws = [it.draw(2, torch.Generator().manual_seed(0)) for it in (fixed, learnt)]
    for name in draws[0]:
        torch.testing.assert_close(draws[0][name].A, draws[1][name].A)
    learnt.kl().total.backward()
    assert all(float(learnt.get_parameter(name).grad.abs().min()) > 0 for name in extra)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"random_factors": "B"}, "random_factors must be one of A, both, got 'B'"),
        ({"inducing_points": 0}, "inducing_points must be at least 1, got 0"),
        ({"flow_depth": -1}, "flow_depth must be 0"),
        ({"flow_hidden": 0}, "flow_hidden must be at least 1"),
        ({"width": 0.0}, "width must be positive and finite"),
        ({"noise": float("nan")}, "noise must be positive and finite"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DecoupledConfig(**settings)


def test_more_points_than_a_factor_is_long_are_refused():
    with pytest.raises(ValueError, match="inducing_points=7 is more than a factor's long side has entries, 6"):
        DecoupledPosterior(LAYERS, dataclasses.replace(DecoupledConfig(), inducing_points=7))
