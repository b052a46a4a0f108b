"""The factor given its inducing matrix, against dense Gaussian algebra (methods entry 13, properties 1 to 3)."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from bayeslora.posterior.conditional import conditional_mean, conditional_sample
from bayeslora.posterior.kl import conditional_noise_kl
from bayeslora.posterior.projection import project
from posterior.cases import random_side

SHAPES = [  # rows, columns, m_r, m_c
    (2, 5, 2, 2),
    (5, 2, 2, 2),
    (2, 5, 4, 3),  # more inducing rows than rows
    (5, 2, 3, 4),
    (3, 3, 1, 5),
    (1, 6, 2, 1),
]
DIAGONALS = [1e-3, 0.3, 3.0]


def projections(rows, columns, m_r, m_c, d):
    return project([random_side(m_r, rows, d, layers=1, seed=1), random_side(m_c, columns, d, layers=1, seed=2)])


def noise_matrix(row, col):
    """Every coefficient of the noise, exactly: the sampler is linear in the normals it asks for.

    Feeds unit vectors instead of random numbers and returns ``J [entries of X, all normals]``.
    """
    rows, columns, m_r, m_c = row.p.shape[-1], col.p.shape[-1], row.p.shape[-2], col.p.shape[-2]
    core = torch.zeros(1, 1, m_r, m_c, dtype=torch.float64)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    sizes: list[int] = []

    def sample(unit):
        given = iter(unit)

        def noise(shape):
            sizes.append(math.prod(shape))
            return torch.tensor([next(given) for _ in range(math.prod(shape))]).double().view(shape)

        return conditional_sample(row, col, core, one, noise).flatten()

    sample([0.0] * 10_000)
    total = sum(sizes)
    basis = torch.eye(total).tolist()
    return torch.stack([sample(unit) for unit in basis], dim=1), rows * columns


def dense_covariance(row, col):
    """Σ_X = I − (P_rᵀ P_r) ⊗ (P_cᵀ P_c), row-major."""
    s_r, s_c = row.p[0].mT @ row.p[0], col.p[0].mT @ col.p[0]
    return torch.eye(s_r.shape[0] * s_c.shape[0], dtype=torch.float64) - torch.kron(s_r, s_c)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("d", DIAGONALS)
def test_noise_covariance_is_exact(shape, d):
    row, col = projections(*shape, d)
    jacobian, entries = noise_matrix(row, col)
    assert jacobian.shape[0] == entries
    torch.testing.assert_close(jacobian @ jacobian.mT, dense_covariance(row, col), atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_empirical_noise_covariance(shape):
    row, col = projections(*shape, 0.3)
    generator = torch.Generator().manual_seed(0)
    n = 50_000
    core = torch.zeros(1, n, *shape[2:], dtype=torch.float64)
    scale = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64)
    draws = conditional_sample(
        row, col, core, scale, lambda s: torch.randn(s, generator=generator, dtype=torch.float64)
    )
    samples = draws[0].flatten(1)
    # variances are 0.25 at most, so that these are six standard errors of a mean and of a covariance
    assert samples.mean(0).abs().max() < 6 * (0.25 / n) ** 0.5
    want = 0.25 * dense_covariance(row, col)
    torch.testing.assert_close(samples.T.cov(), want, atol=6 * 0.25 * (2 / n) ** 0.5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("d", DIAGONALS)
def test_marginal_variance_is_one_when_the_inducing_matrix_is_integrated_out(shape, d):
    row, col = projections(*shape, d)
    rows, columns, m_r, m_c = shape
    basis = torch.eye(m_r * m_c, dtype=torch.float64).view(1, -1, m_r, m_c)
    mean_map = conditional_mean(row, col, basis)[0].flatten(1).T
    total = mean_map @ mean_map.T + dense_covariance(row, col)
    torch.testing.assert_close(total, torch.eye(rows * columns, dtype=torch.float64))


@pytest.mark.parametrize("shape", SHAPES)
def test_mean_is_the_bilinear_form(shape):
    row, col = projections(*shape, 0.1)
    core = torch.randn(1, 3, *shape[2:], dtype=torch.float64)
    want = row.p.mT.unsqueeze(1) @ core @ col.p.unsqueeze(1)
    torch.testing.assert_close(conditional_mean(row, col, core), want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("noise_scale", [1e-3, 0.7, 1.0, 2.5])
def test_conditional_kl_equals_the_dense_gaussian_kl(shape, noise_scale):
    row, col = projections(*shape, 0.3)
    covariance = dense_covariance(row, col)
    mean = torch.randn(covariance.shape[0], dtype=torch.float64)
    dense = kl_divergence(MultivariateNormal(mean, noise_scale**2 * covariance), MultivariateNormal(mean, covariance))
    ours = conditional_noise_kl(torch.tensor([noise_scale], dtype=torch.float64), covariance.shape[0])
    torch.testing.assert_close(ours, dense, atol=1e-9, rtol=1e-9)
