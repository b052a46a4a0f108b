"""Projectors: the identities they rest on, and what happens when a kernel is close to singular."""

import pytest
import torch

from bayeslora.posterior import IllConditionedError, JitterWarning
from bayeslora.posterior.projection import BASE_JITTER, Side, project
from posterior.cases import NoLooking, random_side


@pytest.mark.parametrize("m, width", [(2, 5), (5, 2), (3, 3), (9, 8), (1, 4), (4, 1)])
@pytest.mark.parametrize("d", [1e-3, 0.1, 2.0])
def test_projectors_match_dense_formulas(m, width, d):
    side = random_side(m, width, d)
    (projection,) = project([side])
    gram = side.z @ side.z.mT
    jitter = BASE_JITTER * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    d2 = (d**2 + jitter[:, None]).expand(-1, m)
    kernel = gram + torch.diag_embed(d2)
    eye = torch.eye(m, dtype=torch.float64)

    torch.testing.assert_close(projection.chol @ projection.chol.mT, kernel)
    torch.testing.assert_close(projection.chol @ projection.p, side.z)
    torch.testing.assert_close(projection.chol @ projection.c, torch.diag_embed(d2.sqrt()))
    identity = projection.p @ projection.p.mT + projection.c @ projection.c.mT
    torch.testing.assert_close(identity, eye.expand_as(identity))
    # T = Zᵀ K⁻¹ of the unwhitened form is Pᵀ 𝓛⁻¹
    torch.testing.assert_close(
        side.z.mT @ torch.linalg.inv(kernel), projection.p.mT @ torch.linalg.inv(projection.chol)
    )


def test_sides_of_different_sizes_come_back_in_order():
    sides = [random_side(3, 7, 0.1, seed=1), random_side(2, 4, 0.2, seed=2), random_side(3, 2, 0.3, seed=3)]
    together = project(sides)
    for side, projection in zip(sides, together, strict=True):
        (alone,) = project([side])
        for got, want in zip(projection, alone, strict=True):
            torch.testing.assert_close(got, want)


def test_only_the_ratio_of_z_and_d_matters():
    side = random_side(4, 6, 0.05)
    (projection,) = project([side])
    (scaled,) = project([Side(7.0 * side.z, 7.0 * side.d)])
    torch.testing.assert_close(projection.p, scaled.p)
    torch.testing.assert_close(projection.c, scaled.c)


def nearly_singular(layers=3):
    """Equal inducing points (but for a healthy layer 1) and a diagonal far below the resolution of the kernel."""
    z = torch.ones(layers, 40, 3000, dtype=torch.float64) / 3
    z[1] = torch.randn(40, 3000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Side(z, torch.full((layers, 40), 1e-12, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore::bayeslora.posterior.JitterWarning")
def test_a_singular_kernel_gets_a_larger_jitter_and_a_warning(monkeypatch):
    monkeypatch.setattr("bayeslora.posterior.projection.BASE_JITTER", 1e-18)
    side = nearly_singular()
    with pytest.warns(JitterWarning, match=r"2 of 3 kernel matrices .* trying 1e-17"):
        (projection,) = project([side])
    torch.testing.assert_close(projection.chol @ projection.chol.mT, side.z @ side.z.mT, rtol=1e-10, atol=1e-6)
    torch.testing.assert_close(projection.chol @ projection.p, side.z, rtol=1e-6, atol=1e-6)
    # the healthy matrix keeps the small jitter: the same numbers as on its own
    (alone,) = project([Side(side.z[1:2], side.d[1:2])])
    torch.testing.assert_close(projection.p[1:2], alone.p)
    torch.testing.assert_close(projection.c[1:2], alone.c, rtol=1e-6, atol=0)  # which is the root of the jitter here


def test_a_kernel_beyond_repair_raises(monkeypatch):
    monkeypatch.setattr("bayeslora.posterior.projection.BASE_JITTER", 1e-18)
    monkeypatch.setattr("bayeslora.posterior.projection.MAX_JITTER", 1e-18)
    with pytest.raises(IllConditionedError, match="no Cholesky factor even with a relative jitter of 1e-18"):
        project([nearly_singular()])


@pytest.mark.parametrize("m, width", [(8, 8), (9, 8), (16, 8), (8, 576)])
def test_float32_projectors_are_accurate_for_random_inducing_points(m, width):
    """500 random kernels, some of them badly conditioned, against float64 throughout."""
    side = random_side(m, width, 1e-3, layers=500)
    (exact,) = project([side])
    (single,) = project([Side(side.z.float(), side.d.float())])
    assert single.p.dtype == torch.float32
    core = torch.randn(500, m, m, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    error = (single.p.double().mT @ core - exact.p.mT @ core).abs().max()
    assert error < 2e-4 * (exact.p.mT @ core).abs().max()


@pytest.mark.parametrize("field, value", [("z", float("nan")), ("z", float("inf")), ("d", float("inf"))])
def test_what_is_not_finite_raises_at_once(field, value):
    side = random_side(3, 5, 0.1)
    getattr(side, field).view(2, -1)[1, 0] = value
    with pytest.raises(IllConditionedError, match=r"1 of 2 kernel matrices .* not finite; training has diverged"):
        project([side])


def test_devices_with_a_queue_are_not_waited_for(monkeypatch):
    """The host looks at no number; what has no factor is NaN from there on, and everything else is the same."""
    side = random_side(3, 5, 0.1)
    (want,) = project([side])
    monkeypatch.setattr("bayeslora.posterior.projection.ASYNCHRONOUS", ("cpu",))
    with NoLooking():
        (found,) = project([side])
    assert all(map(torch.equal, found, want))
    side.z[1, 0, 0] = torch.inf
    with NoLooking():
        (found,) = project([side])
    assert torch.equal(found.p[0], want.p[0])
    assert found.p[1].isnan().all() and found.chol[1].isnan().all()
