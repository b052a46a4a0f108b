"""The Laplace approximation against dense matrices: covariance, evidence, prior precision, variances of functions."""

import math

import pytest
import torch

from bayeslora.posterior import (
    FactorCurvature,
    Factors,
    LaplaceConfig,
    LaplacePosterior,
    LayerCurvature,
    LayerShape,
    PointPosterior,
)
from bayeslora.posterior.kronecker import Spectrum, spectrum
from bayeslora.posterior.laplace import PRECISIONS

LAYERS = [
    LayerShape("one.q", 7, 5, rank=2),
    LayerShape("one.v", 4, 6, rank=3),
    LayerShape("two.q", 7, 5, rank=2),
]
SCOPES = pytest.mark.parametrize("scope", ["all", "last"])


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def side(layer, factor, seed=0, columns=3):
    d = layer.in_features if factor == "A" else layer.out_features
    small, long = normal(layer.rank, layer.rank, seed=seed), normal(d, columns, seed=seed + 1)
    return FactorCurvature(small @ small.T, long)


def curvature(scope="all", columns=3):
    layers = LAYERS if scope == "all" else LAYERS[-1:]
    return {
        layer.name: LayerCurvature(side(layer, "A", 10 * k, columns), side(layer, "B", 10 * k + 5, columns))
        for k, layer in enumerate(layers)
    }


def laplace(scope="all", tau=0.7, columns=3, **settings):
    """In float64, away from its start, with random curvature."""
    made = LaplacePosterior(LAYERS, LaplaceConfig(scope=scope, prior_precision=tau, **settings)).double().eval()
    with torch.no_grad():
        for k, parameter in enumerate(made.parameters()):
            parameter += 0.3 * normal(*parameter.shape, seed=100 + k)
    made.prior_precision = tau
    made.set_curvature(curvature(scope, columns))
    return made


def dense(block, factor, tau):
    """``Λ`` of one factor flattened by rows: outputs before inputs, so the rank comes first in A and last in B."""
    long = block.long @ block.long.T
    H = torch.kron(block.small, long) if factor == "A" else torch.kron(long, block.small)
    return H + tau * torch.eye(len(H), dtype=H.dtype)


def blocks(scope, tau=0.7):
    for name, layer in curvature(scope).items():
        for factor in ("A", "B"):
            yield name, factor, dense(getattr(layer, factor), factor, tau)


# Formulas -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1e-4, 0.7, 50.0])
@pytest.mark.parametrize("columns", [1, 3, 8])
def test_the_inverse_root_is_that_of_the_dense_matrix(tau, columns):
    """With fewer and with more columns than the long side has entries."""
    small, long = normal(2, 3, 3), normal(2, 5, columns, seed=1)
    small = small @ small.mT
    found = spectrum(small, long, rank=min(columns, 5))
    x = normal(2, 4, 3, 5, seed=2)
    got = found.inverse_root(x, torch.tensor(tau, dtype=torch.float64))
    for k in range(2):
        matrix = torch.kron(small[k], long[k] @ long[k].T) + tau * torch.eye(15, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(matrix)
        root = vectors @ values.rsqrt().diag() @ vectors.T
        torch.testing.assert_close(got[k].flatten(1), x[k].flatten(1) @ root)


def test_the_spectrum_keeps_the_largest_directions_and_fills_up_with_zeros():
    small, long = torch.eye(2, dtype=torch.float64)[None], normal(1, 6, 4)
    values = torch.linalg.eigvalsh(long[0] @ long[0].T).flip(0)
    torch.testing.assert_close(spectrum(small, long, 2).long_values[0], values[:2])
    filled = spectrum(small, long, 6)
    torch.testing.assert_close(filled.long_values[0, :4], values[:4])
    assert filled.long_vectors.shape == (1, 6, 6) and not filled.long_vectors[..., 4:].any()
    zero = Spectrum(*(torch.zeros(1, *shape) for shape in ((2, 2), (2,), (6, 3), (3,))))
    x = torch.ones(1, 1, 2, 6)
    assert torch.equal(zero.inverse_root(x, torch.tensor(4.0)), x / 2)


# The posterior --------------------------------------------------------------------------------------------------------


@SCOPES
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_draws_have_the_covariance_of_the_dense_precision(scope, scale):
    made = laplace(scope)
    made.scale = scale
    n = 40_000
    with torch.no_grad():
        draws, mean = made.draw(n, torch.Generator().manual_seed(0)), made.mean()
    for name, factor, precision in blocks(scope):
        want = scale**2 * torch.linalg.inv(precision)
        noise = (getattr(draws[name], factor) - getattr(mean[name], factor)).flatten(1)
        torch.testing.assert_close(noise.mean(0), torch.zeros(len(want)).double(), atol=0.03, rtol=0)
        sd = want.diag().sqrt()
        assert ((noise.T @ noise / n - want).abs() < 6 * torch.outer(sd, sd) * math.sqrt(2 / n)).all()


def test_blocks_and_layers_are_independent():
    draws = laplace().draw(20_000, torch.Generator().manual_seed(0))
    firsts = [getattr(draws[layer.name], factor)[:, 0, 0] for layer in LAYERS for factor in ("A", "B")]
    correlation = torch.corrcoef(torch.stack(firsts).detach())
    assert (correlation - torch.eye(6)).abs().max() < 0.04


def test_only_the_last_layer_is_random_where_it_is_the_scope():
    made = laplace("last")
    draws, mean = made.draw(3), made.mean()
    for layer in LAYERS:
        for drawn, point in zip(draws[layer.name], mean[layer.name], strict=True):
            same = torch.equal(drawn, point.expand_as(drawn))
            assert same == (layer.name != "two.q")
    assert [group.names for group in made.random_groups] == [("two.q",)]
    sizes = {name: len(buffer) for name, buffer in made.named_buffers() if name != "log_precision"}
    assert len(sizes) == 8 and set(sizes.values()) == {1}  # nothing is kept of the others


@SCOPES
def test_training_sees_a_lora(scope):
    made = laplace(scope).train()
    points = PointPosterior(LAYERS).double()
    points.load_state_dict(dict(made.named_parameters()))
    assert {name: made.kind(name) for name, _ in made.named_parameters()} == {
        name: points.kind(name) for name, _ in points.named_parameters()
    }
    ours, theirs = made.draw(2), points.draw(2)
    for layer in LAYERS:
        assert torch.equal(ours[layer.name].A, theirs[layer.name].A)
        assert torch.equal(ours[layer.name].B, theirs[layer.name].B)
    assert made.kl().total == 0


def test_it_starts_as_a_lora_does():
    made, points = LaplacePosterior(LAYERS, seed=3), PointPosterior(LAYERS, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), points.parameters(), strict=True))


@SCOPES
def test_without_curvature_the_prior_is_left(scope):
    made = LaplacePosterior(LAYERS, LaplaceConfig(scope=scope, prior_precision=4.0)).eval()
    with torch.no_grad():
        noise = made.draw(20_000, torch.Generator().manual_seed(0))["two.q"].A - made.mean()["two.q"].A
    torch.testing.assert_close(noise.std(0), torch.full((2, 5), 0.5), atol=0.02, rtol=0)
    with pytest.raises(ValueError, match="no curvature to choose a prior precision by"):
        made.best_precision()


def test_starting_from_a_lora_forgets_the_curvature():
    made = laplace()
    made.start_from(PointPosterior(LAYERS).double().mean())
    assert not any(buffer.any() for name, buffer in made.named_buffers() if name != "log_precision")
    assert made.prior_precision == pytest.approx(0.7)


# Evidence -------------------------------------------------------------------------------------------------------------


def dense_evidence(scope, tau, log_likelihood):
    mean, total = laplace(scope).mean(), log_likelihood
    for name, factor, precision in blocks(scope, tau):
        theta = getattr(mean[name], factor)[0].detach()
        total -= 0.5 * tau * float(theta.square().sum())
        total -= 0.5 * float(torch.linalg.slogdet(precision / tau).logabsdet)
    return total


@SCOPES
@pytest.mark.parametrize("tau", [0.01, 0.7, 30.0])
def test_the_evidence_is_that_of_the_dense_matrices(scope, tau):
    made = laplace(scope)
    assert made.log_evidence(tau, log_likelihood=-12.5) == pytest.approx(dense_evidence(scope, tau, -12.5), rel=1e-10)
    made.prior_precision = tau
    assert made.log_evidence() == pytest.approx(made.log_evidence(tau), rel=1e-10)


@SCOPES
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_the_best_precision_is_the_best_of_a_grid(scope, size):
    made = laplace(scope)
    made.set_curvature(
        {
            name: LayerCurvature(*(FactorCurvature(size * block.small, block.long) for block in layer))
            for name, layer in curvature(scope).items()
        }
    )
    best = made.best_precision()
    grid = torch.logspace(-6, 6, 481, dtype=torch.float64).tolist()
    evidence = [made.log_evidence(tau) for tau in grid]
    assert best == pytest.approx(grid[evidence.index(max(evidence))], rel=0.03)
    assert made.log_evidence(best) >= max(evidence) - 1e-9


def test_the_best_precision_of_zero_weights_is_the_end_of_the_range():
    made = laplace()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert made.best_precision() == pytest.approx(PRECISIONS[1])


# Variances of functions -----------------------------------------------------------------------------------------------


def jacobian(made, n=4, outputs=3):
    """For each random group the derivatives by A and by B."""
    shapes = [(len(group), *group.factor_shapes.values()) for group in made.random_groups]
    return [
        (normal(layers, n, outputs, *a, seed=k), normal(layers, n, outputs, *b, seed=k + 50))
        for k, (layers, a, b) in enumerate(shapes)
    ]


@SCOPES
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_variances_of_functions_are_those_of_the_dense_matrices(scope, scale):
    made = laplace(scope)
    made.scale = scale
    rows, want = jacobian(made), torch.zeros(4, 3, 3, dtype=torch.float64)
    layers = {
        name: {"A": rows[g][0][k], "B": rows[g][1][k]}
        for g, group in enumerate(made.random_groups)
        for k, name in enumerate(group.names)
    }
    for name, factor, precision in blocks(scope):
        J = layers[name][factor].flatten(2)
        want += scale**2 * J @ torch.linalg.inv(precision) @ J.mT
    torch.testing.assert_close(made.functional_variance(rows)[0], want)


@SCOPES
def test_variances_at_several_precisions_are_those_of_each_in_use(scope):
    made = laplace(scope)
    precisions, rows = [1e-6, 0.3, 40.0, 1e6], jacobian(made)
    found = made.functional_variance(rows, precisions)
    for precision, got in zip(precisions, found, strict=True):
        made.prior_precision = precision
        torch.testing.assert_close(got, made.functional_variance(rows)[0])
        assert (torch.linalg.eigvalsh(got) > -1e-9 * got.max()).all()


def test_variances_in_float32_are_not_lost_where_the_curvature_is_large():
    """They are as small as 1e-8 of what they would be without curvature, less than float32 can tell from nothing."""
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(1, 40, 4, generator=generator, dtype=torch.float64)).Q
    U = torch.linalg.qr(torch.randn(1, 3, 3, generator=generator, dtype=torch.float64)).Q
    exact = Spectrum(U, torch.full((1, 3), 1e4).double(), Q, torch.full((1, 4), 1e4).double())
    coordinates = torch.randn(1, 2, 5, 3, 4, generator=generator, dtype=torch.float64)
    x = U @ coordinates @ Q[:, None, None].mT  # nothing outside the directions that are kept
    rough = Spectrum(
        *(getattr(exact, name).float() for name in ("small_vectors", "small_values", "long_vectors", "long_values"))
    )
    want = torch.einsum("lnorc,lnqrc->noq", coordinates, coordinates) / (1e8 + 1.0)
    torch.testing.assert_close(exact.inverse_grams(x, torch.ones(1))[0], want)
    torch.testing.assert_close(
        rough.inverse_grams(x.float(), torch.ones(1))[0], want, rtol=1e-3, atol=1e-3 * float(want.max())
    )


def test_sums_of_squares_in_float32_are_as_exact_as_float64():
    """Log-probabilities move against each other: what is left of their covariance in one direction is rounding alone."""
    rows = torch.randn(2, 3, 2, 3, 40, generator=torch.Generator().manual_seed(0))
    x = torch.cat([rows, -rows.sum(2, keepdim=True)], dim=2)
    nothing_kept = Spectrum(torch.eye(3).repeat(2, 1, 1), torch.zeros(2, 3), torch.zeros(2, 40, 4), torch.zeros(2, 4))
    (got,) = nothing_kept.inverse_grams(x, torch.tensor([0.5]))
    want = 2 * torch.einsum("lnord,lnqrd->noq", x.double(), x.double())
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12 * float(want.max()))


def test_variances_of_functions_are_those_of_draws():
    made = laplace()
    rows = jacobian(made, n=2, outputs=2)
    with torch.no_grad():
        draws, mean = made.draw(40_000, torch.Generator().manual_seed(0), "independent"), made.mean()
        f = sum(
            torch.einsum("lnoab,lsab->sno", J, drawn - point)
            for (by_A, by_B), A, B, a, b in zip(rows, draws.A, draws.B, mean.A, mean.B, strict=True)
            for J, drawn, point in ((by_A, A, a), (by_B, B, b))
        )
    got = torch.einsum("sno,snp->nop", f, f) / len(f)
    torch.testing.assert_close(got, made.functional_variance(rows)[0], rtol=0.04, atol=0.5)


@SCOPES
def test_placing_its_own_point_gives_the_mean(scope):
    made = laplace(scope)
    A, B = ([point.unsqueeze(1).repeat(1, 2, 1, 1) for point in points] for points in made.random_points())
    placed, mean = made.place(made.mean(), A, B), made.mean()
    assert isinstance(placed, Factors) and placed.n == 2
    for layer in LAYERS:
        for got, want in zip(placed[layer.name], mean[layer.name], strict=True):
            assert torch.equal(got, want.expand_as(got))


# Curvature and settings -----------------------------------------------------------------------------------------------


def test_the_curvature_is_cut_to_its_largest_directions():
    made = laplace(curvature_rank=2)
    block = curvature()["one.v"].A
    values = torch.linalg.eigvalsh(block.long @ block.long.T).flip(0)[:2]
    torch.testing.assert_close(made.get_buffer("long_values_A_4x6_r3")[0], values)
    assert made.get_buffer("long_vectors_A_4x6_r3").shape == (1, 6, 2)


def test_layers_may_have_curvature_of_different_widths():
    given = curvature()
    narrow = FactorCurvature(given["one.q"].A.small, given["one.q"].A.long[:, :1])
    made = laplace()
    made.set_curvature({**given, "one.q": LayerCurvature(narrow, given["one.q"].B)})
    assert (made.get_buffer("long_values_A_7x5_r2") > 1e-12).sum(-1).tolist() == [1, 3]


def test_curvature_of_other_layers_or_without_numbers_is_refused():
    given = curvature()
    with pytest.raises(ValueError, match=r"wanted for 3 layers and was given for 2; .*one\.v is in one only"):
        laplace().set_curvature({name: layer for name, layer in given.items() if name != "one.v"})
    bad = FactorCurvature(given["two.q"].A.small * math.nan, given["two.q"].A.long)
    with pytest.raises(ArithmeticError, match=r"factor B of two\.q is not finite"):
        laplace().set_curvature({**given, "two.q": LayerCurvature(given["two.q"].A, bad)})


def test_curvature_and_precision_are_part_of_the_state():
    made = laplace()
    made.prior_precision = 3.0
    fresh = LaplacePosterior(LAYERS, LaplaceConfig(prior_precision=0.1)).double().eval()
    fresh.load_state_dict(made.state_dict())
    assert fresh.prior_precision == pytest.approx(3.0)
    assert fresh.best_precision() == made.best_precision()
    one, other = (p.draw(2, torch.Generator().manual_seed(0)) for p in (made, fresh))
    assert all(torch.equal(a, b) for a, b in zip((*one.A, *one.B), (*other.A, *other.B), strict=True))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"scope": "first"}, "scope must be one of all, last, got 'first'"),
        ({"predictive": "bridge"}, "predictive must be one of mc, probit, draws, got 'bridge'"),
        ({"prior_precision": 0.0}, "prior_precision must be positive and finite, got 0"),
        ({"prior_precision": math.nan}, "prior_precision must be positive and finite, got nan"),
        ({"curvature_rank": 0}, "curvature_rank must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LaplaceConfig(**settings)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf])
def test_a_bad_precision_is_refused(value):
    made = laplace()
    with pytest.raises(ValueError, match="prior_precision must be positive and finite"):
        made.prior_precision = value
    with pytest.raises(ValueError, match="prior_precision must be positive and finite"):
        made.log_evidence(value)
    assert made.prior_precision == pytest.approx(0.7)
