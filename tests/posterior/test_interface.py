"""What every posterior promises. A new posterior adds one row to POSTERIORS and gets all of these tests."""

import copy
from dataclasses import replace

import pytest
import torch

from bayeslora.posterior import (
    BlobPosterior,
    ContextualPosterior,
    DecoupledPosterior,
    EnsemblePosterior,
    InducingConfig,
    InducingPosterior,
    IvonPosterior,
    LaplacePosterior,
    LayerShape,
    MeanFieldPosterior,
    PointPosterior,
    SwagPosterior,
    build_posterior,
)
from bayeslora.posterior.registry import POSTERIORS as REGISTERED
from bayeslora.posterior.tfb import TfbPosterior
from posterior.cases import POSTERIORS, randomised

LAYERS = [
    LayerShape("block0.q", 12, 10, rank=3),
    LayerShape("block0.v", 6, 10, rank=3),
    LayerShape("block1.q", 12, 10, rank=3),
    LayerShape("block1.v", 6, 10, rank=2),
]


STOCHASTIC = [name for name in POSTERIORS if name not in ("point", "adalora")]
WIDE = (
    InducingPosterior,
    DecoupledPosterior,
    MeanFieldPosterior,
    BlobPosterior,
    ContextualPosterior,
    LaplacePosterior,
    TfbPosterior,
    IvonPosterior,
    SwagPosterior,
)
"""Posteriors that have a standard deviation for the scale to multiply."""


@pytest.fixture(params=POSTERIORS)
def make(request):
    return POSTERIORS[request.param]


def test_every_registered_posterior_is_here():
    assert {type(make(LAYERS)) for make in POSTERIORS.values()} == set(REGISTERED.values())


def tensors(factors, name):
    """Everything that the update of one layer is made of."""
    inner = factors.inner_by_layer().get(name)
    return (*factors[name], *(() if inner is None else inner.tensors))


def same(a, b):
    return all(torch.equal(x, y) for name in a for x, y in zip(tensors(a, name), tensors(b, name), strict=True))


def half(factors, name):
    """What a layer computes before ``B`` for every unit vector as input, ``[n, R, i]``: ``A`` unless there is more to it."""
    A, inner = factors[name].A, factors.inner_by_layer().get(name)
    if inner is None:
        return A
    units = torch.eye(A.shape[-1], dtype=A.dtype).expand(A.shape[0], 1, -1, -1)
    return inner(units, A)[:, 0].mT


def update(factors, name):
    """The update of every unit vector, ``[n, o, i]``: ``B A``, unless the update depends on the input in another way."""
    return factors[name].B @ half(factors, name)


def test_shapes_and_precision(make):
    factors = make(LAYERS).draw(5)
    assert factors.n == 5
    assert list(factors) == ["block0.q", "block1.q", "block0.v", "block1.v"]
    for layer in LAYERS:
        A, B = factors[layer.name]
        assert A.shape == (5, layer.rank, layer.in_features)
        assert B.shape == (5, layer.out_features, layer.rank)
        assert A.dtype == B.dtype == torch.float32


def test_a_generator_makes_draws_reproducible(make):
    posterior = make(LAYERS)
    first, second = (posterior.draw(3, torch.Generator().manual_seed(1)) for _ in range(2))
    assert same(first, second)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_draws_differ(name):
    posterior = POSTERIORS[name](LAYERS)
    factors = posterior.draw(2, torch.Generator().manual_seed(1))
    for layer in LAYERS:
        first, second = half(factors, layer.name)
        assert not torch.equal(first, second)


def test_drawing_with_a_generator_leaves_the_global_random_state_alone(make):
    posterior = make(LAYERS)
    before = torch.get_rng_state()
    posterior.draw(2, torch.Generator().manual_seed(0))
    posterior.mean()
    posterior.kl(generator=torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())


def test_factors_that_are_no_draw_have_a_kl_too(make):
    """A mean, and one of several draws, do not know what they were made from."""
    posterior = make(LAYERS)
    for factors in (posterior.mean(), posterior.draw(2).pick(0, 1), posterior.draw(2).detach()):
        assert torch.isfinite(posterior.kl(factors, torch.Generator().manual_seed(0)).total)


def test_construction_leaves_the_global_random_state_alone(make):
    before = torch.get_rng_state()
    first = make(LAYERS, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    second, other = make(LAYERS, seed=1), make(LAYERS, seed=2)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", POSTERIORS)
def test_layers_of_equal_shape_differ_at_the_start(name):
    factors = POSTERIORS[name](LAYERS).mean()
    factor = "B" if name == "adalora" else "A"  # the other one is zero
    first, second = (getattr(factors[layer], factor) for layer in ("block0.q", "block1.q"))
    assert not torch.equal(first, second)


def test_state_dict_round_trip(make):
    posterior = randomised(make(LAYERS, seed=1))
    state = copy.deepcopy(posterior.state_dict())
    assert all("." not in key for key in state), "parameters must be flat on the module"
    fresh = make(LAYERS, seed=2)
    fresh.load_state_dict(state)
    draws = [p.draw(2, torch.Generator().manual_seed(0)) for p in (posterior, fresh)]
    assert same(*draws)
    buffers = dict(posterior.named_buffers())
    assert posterior.parameter_count() == sum(value.numel() for name, value in state.items() if name not in buffers)


def test_autocast_and_half_precision_parameters_do_not_lower_the_precision(make):
    posterior = randomised(make(LAYERS))
    plain = posterior.draw(2, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = posterior.draw(2, torch.Generator().manual_seed(0))
        kl = posterior.kl(cast)
    assert same(plain, cast)
    assert kl.total.dtype == torch.float32
    half = posterior.bfloat16().draw(1, torch.Generator().manual_seed(0))
    assert half["block0.q"].A.dtype == torch.float32


def test_mean_is_the_mean_of_the_product(make):
    posterior = randomised(make(LAYERS))
    with torch.no_grad():
        mean = posterior.mean()
        draws = posterior.draw(4_000, torch.Generator().manual_seed(0))
        assert mean.n == 1
        for layer in LAYERS:
            product = update(draws, layer.name)
            tolerance = 6 * product.std(0) / product.shape[0] ** 0.5 + 0.1 * product.std(0) + 1e-5
            assert ((product.mean(0) - update(mean, layer.name)[0]).abs() < tolerance).all()


def test_kl_is_finite_and_has_a_gradient_where_it_is_not_zero(make):
    posterior = make(LAYERS)
    kl = posterior.kl(posterior.draw(2))
    assert all(term.ndim == 0 for term in kl.terms.values())
    assert torch.isfinite(kl.total)
    torch.testing.assert_close(kl.total, sum(kl.terms.values(), torch.zeros(())))
    assert kl.total.requires_grad == (kl.total.item() != 0)


def test_scale_widens_the_draws_and_keeps_the_number_of_parameters(make):
    posterior = make(LAYERS)
    spread = {}
    for scale in (0.5, 2.0):
        posterior.scale = scale
        draws = posterior.draw(198, torch.Generator().manual_seed(0)).pick(0, 66)  # of one component of three
        spread[scale] = half(draws, "block0.q").std(0).mean()
    if isinstance(posterior, WIDE):
        assert 3.5 < spread[2.0] / spread[0.5] < 4.5
    else:
        assert spread[2.0] == spread[0.5]


def test_who_has_a_width_for_the_scale_to_multiply(make):
    posterior = make(LAYERS)
    assert (posterior.spread == "width") == isinstance(posterior, WIDE)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_a_bad_scale_is_refused(make, scale):
    with pytest.raises(ValueError, match="posterior scale must be finite and not negative"):
        make(LAYERS).scale = scale


def test_bad_arguments_are_refused(make):
    with pytest.raises(ValueError, match="number of draws must be at least 1, got 0"):
        make(LAYERS).draw(0)
    with pytest.raises(ValueError, match="no layers given"):
        make([])
    with pytest.raises(ValueError, match=r"layer 'block0\.q' is listed twice"):
        make([LAYERS[0], LAYERS[0]])
    with pytest.raises(ValueError, match="layer 'x': rank must be at least 1, got 0"):
        LayerShape("x", 3, 3, rank=0)


def test_detached_factors_have_no_graph(make):
    factors = make(LAYERS).draw(2)
    detached = factors.detach()
    assert same(factors, detached)
    assert not any(t.requires_grad for name in detached for t in tensors(detached, name))


def test_deepcopy_draws_the_same(make):
    posterior = randomised(make(LAYERS))
    twin = copy.deepcopy(posterior)
    assert same(*(p.draw(2, torch.Generator().manual_seed(0)) for p in (posterior, twin)))


@pytest.mark.parametrize("name", POSTERIORS)
def test_starting_from_a_lora(name):
    """The mean becomes the given product, exactly; a shared inducing matrix cannot and says so."""
    target = randomised(PointPosterior(LAYERS)).mean()
    posterior = randomised(POSTERIORS[name](LAYERS))
    if name == "inducing-shared":
        with pytest.raises(ValueError, match="share_inducing=True cannot start from a LoRA"):
            posterior.start_from(target)
        return
    posterior.start_from(target)
    mean = posterior.mean()
    for layer in LAYERS:
        torch.testing.assert_close(update(mean, layer.name), target.product(layer.name), atol=2e-5, rtol=1e-4)
    assert all(parameter.requires_grad for parameter in posterior.parameters())


@pytest.mark.parametrize("name", ["point", "blob", "meanfield", "decoupled", "decoupled-one-mean"])
def test_padding_of_a_lora_of_lower_rank_can_learn(name):
    """Where a row of ``A`` and its column of ``B`` were both zero, neither would have a gradient."""
    layers = [LayerShape(f"block{k}.q", 12, 10, rank=4) for k in range(2)]
    lora = randomised(PointPosterior(layers)).mean()
    padded = replace(lora, A=tuple(a.clone() for a in lora.A), B=tuple(b.clone() for b in lora.B))
    padded.A[0][:, :, 2:], padded.B[0][..., 2:] = 0.0, 0.0
    settings = {"components": 1} if name == "decoupled-one-mean" else {}
    posterior = build_posterior(name.removesuffix("-one-mean"), layers, settings)
    posterior.start_from(padded)
    mean = posterior.mean()
    torch.testing.assert_close(update(mean, "block1.q"), padded.product("block1.q"), atol=1e-5, rtol=1e-4)
    sum((update(mean, it.name) * torch.randn(12, 10)).sum() for it in layers).backward()
    (gradient,) = [p.grad for key, p in posterior.named_parameters() if key.startswith(("B_", "mean_B_"))]
    assert (gradient.flatten(0, -3).abs().amax((0, 1)) > 0).all()


def test_starting_from_other_layers_or_with_too_few_inducing_points_is_refused(make):
    with pytest.raises(ValueError, match="must cover the same layers"):
        make(LAYERS).start_from(PointPosterior(LAYERS[:2]).mean())
    small = InducingPosterior(LAYERS, InducingConfig(inducing_rows=2, inducing_cols=2))
    with pytest.raises(ValueError, match="inducing size 2x2 is below the rank 3"):
        small.start_from(PointPosterior(LAYERS).mean())


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("inducng", {}, r"unknown posterior 'inducng'; choose .*did you mean 'inducing'"),
        ("inducing", {"flow_dept": 2}, r"no setting 'flow_dept'; .*did you mean 'flow_depth'"),
        ("point", {"members": 2}, "no setting 'members'; it has none"),
        ("ensemble", {"members": 0}, "at least 1 member and at most 256, got 0"),
    ],
)
def test_building_by_name_refuses_what_it_does_not_know(name, settings, message):
    with pytest.raises(ValueError, match=message):
        build_posterior(name, LAYERS, settings)


def test_building_by_name():
    posterior = build_posterior("ensemble", LAYERS, {"members": 2}, seed=1)
    assert isinstance(posterior, EnsemblePosterior)
    assert posterior.members == 2


def test_all_layers_at_once_are_what_indexing_gives(make):
    factors = make(LAYERS).draw(3)
    whole, half = factors.by_layer(), factors.by_layer(torch.bfloat16)
    assert list(whole) == list(half) == list(factors)
    for name in factors:
        assert all(torch.equal(a, b) for a, b in zip(whole[name], factors[name], strict=True))
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(half[name], factors[name], strict=True))
