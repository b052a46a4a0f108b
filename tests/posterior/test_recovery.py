"""Known posteriors: Bayesian linear regression on a factor, fitted by maximising the ELBO.

With as many inducing rows and columns as the factor has, and a tiny ``D``, the projectors are rotations and ``A`` and
``V`` determine each other. For ``y = A x + noise`` the exact posterior is Gaussian, and so is the evidence. Nothing is
observed of ``B``, whose posterior must return to the prior.
"""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from bayeslora.posterior import InducingConfig, InducingPosterior, LayerShape
from bayeslora.posterior.projection import Side, project

RANK, INPUTS, EXAMPLES, NOISE = 2, 3, 12, 0.6


def regression(seed=0):
    """Correlated inputs ``x [N, i]`` and targets ``y [N, R]``."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.6, 0.5], [0.0, 0.0, 0.7]], dtype=torch.float64)
    x = torch.randn(EXAMPLES, INPUTS, generator=generator, dtype=torch.float64) @ mixing
    truth = torch.randn(RANK, INPUTS, generator=generator, dtype=torch.float64)
    y = x @ truth.T + NOISE * torch.randn(EXAMPLES, RANK, generator=generator, dtype=torch.float64)
    return x, y


def exact_posterior(x, y):
    """Mean of ``A`` and covariance of each of its rows."""
    precision = torch.eye(INPUTS, dtype=torch.float64) + x.T @ x / NOISE**2
    covariance = torch.linalg.inv(precision)
    return (covariance @ x.T @ y / NOISE**2).T, covariance


def log_evidence(x, y):
    covariance = x @ x.T + NOISE**2 * torch.eye(EXAMPLES, dtype=torch.float64)
    return MultivariateNormal(torch.zeros(EXAMPLES, dtype=torch.float64), covariance).log_prob(y.T).sum()


def build(flow_depth):
    """Full-size inducing matrices and scales free to reach the prior's, 1."""
    config = InducingConfig(
        inducing_rows=RANK,
        inducing_cols=INPUTS,
        flow_depth=flow_depth,
        init_sd_u=0.5,
        max_sd_u=4.0,
        init_lambda=0.5,
        max_lambda=4.0,
        init_d=1e-3,
    )
    posterior = InducingPosterior([LayerShape("x", 3, INPUTS, RANK)], config).double()
    for name, parameter in posterior.named_parameters():
        parameter.requires_grad_(not name.startswith(("z_", "log_d_")))
    return posterior


def elbo(posterior, x, y, draws, generator):
    factors = posterior.draw(draws, generator)
    residual = y - x @ factors["x"].A.mT
    log_likelihood = -0.5 * (residual / NOISE).square() - math.log(NOISE) - 0.5 * math.log(2 * math.pi)
    return log_likelihood.sum((-1, -2)).mean() - posterior.kl(factors).total


def fit(posterior, x, y, steps, lr):
    generator = torch.Generator().manual_seed(0)
    trainable = [p for p in posterior.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(trainable, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, eta_min=1e-4)
    for _ in range(steps):
        optimiser.zero_grad()
        (-elbo(posterior, x, y, draws=32, generator=generator)).backward()
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        bound = elbo(posterior, x, y, draws=20_000, generator=generator)
        draws = posterior.draw(20_000, generator)["x"]
    return float(bound), draws


def column_projector(posterior):
    """P_c of factor A: with full-size inducing matrices, a rotation of the columns."""
    key = "A_3x3_r2"
    z = posterior.get_parameter(f"z_col_{key}").detach()
    d = posterior.get_parameter(f"log_d_col_{key}").detach().exp()
    return project([Side(z, d)])[0].p[0]


def best_mean_field(posterior, covariance):
    """Standard deviations of the best independent Gaussians for a row of V, and how far their bound stays below the
    evidence: the KL between them and the exact posterior."""
    rotation = column_projector(posterior)
    precision = rotation @ torch.linalg.inv(covariance) @ rotation.T
    sd = precision.diagonal().rsqrt()
    return sd, RANK * (-sd.log().sum() - 0.5 * torch.logdet(precision))


@pytest.mark.system
@pytest.mark.parametrize("seed", [0, 1])
def test_gaussian_posterior_finds_the_best_mean_field_fit(seed):
    """Without flow: exact mean, and standard deviations ``1/√(precision)_jj`` in the coordinates of V."""
    x, y = regression(seed)
    mean, covariance = exact_posterior(x, y)
    posterior = build(flow_depth=0)
    bound, draws = fit(posterior, x, y, steps=800, lr=0.1)

    best_sd, gap = best_mean_field(posterior, covariance)
    sd = posterior.inducing_sd((RANK, INPUTS)).detach()
    torch.testing.assert_close(sd[0], best_sd.expand(RANK, -1), rtol=0.05, atol=0)
    torch.testing.assert_close(draws.A.mean(0), mean, rtol=0, atol=0.03)
    assert abs(bound - float(log_evidence(x, y) - gap)) < 0.1
    # nothing is known about B: its inducing matrix and noise are the prior's
    torch.testing.assert_close(sd[1], torch.ones_like(sd[1]), rtol=0.05, atol=0)
    assert posterior.inducing_mean((RANK, INPUTS))[1].abs().max() < 0.05


@pytest.mark.system
@pytest.mark.parametrize("seed", [0, 1])
def test_a_flow_recovers_the_correlated_posterior(seed):
    """With flow: the full covariance, and a bound within 0.15 nats of the evidence."""
    x, y = regression(seed)
    mean, covariance = exact_posterior(x, y)
    posterior = build(flow_depth=1)
    bound, draws = fit(posterior, x, y, steps=1500, lr=0.03)

    _, gap_without_flow = best_mean_field(posterior, covariance)
    assert gap_without_flow > 0.5, "the target must be out of reach without the flow"
    assert abs(bound - float(log_evidence(x, y))) < 0.15
    torch.testing.assert_close(draws.A.mean(0), mean, rtol=0, atol=0.03)
    for row in range(RANK):
        scale = covariance.diagonal().sqrt()
        correlation_error = (draws.A[:, row].T.cov() - covariance) / torch.outer(scale, scale)
        assert correlation_error.abs().max() < 0.12
