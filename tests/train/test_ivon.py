"""IVON's steps against the published optimiser, and what training makes of them."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from bayeslora.posterior import IvonConfig, IvonPosterior, LayerShape
from bayeslora.train.ivon import Ivon, IvonSteps
from bayeslora.train.optimise import parameter_kinds

SIZE = 12
# Hessians that float32 holds exactly: the published optimiser rounds them to it
CONFIGS = [
    IvonConfig(sample_size=50.0, hessian=0.5, damping=0.1, beta2=0.9, radius=1e9),
    IvonConfig(sample_size=1e3, hessian=0.25, damping=0.0, beta1=0.5, beta2=0.999, radius=0.5),
    IvonConfig(sample_size=1e6, hessian=2**-10, radius=1e-3),
]


def target(theta, step):
    """A loss that is another one at every step and no quadratic."""
    x = torch.linspace(-1, 1, SIZE, dtype=torch.float64) + 0.1 * step
    return ((theta - x).square() * (1 + x.abs()) + (3 * theta).sin()).mean()


def official(config, noises, rate):
    """Mean and width after every step of the published optimiser, given its noise."""
    ivon = pytest.importorskip("ivon")
    theta = nn.Parameter(torch.linspace(0.5, -0.5, SIZE, dtype=torch.float64))
    optimiser = ivon.IVON(
        [theta],
        lr=rate,
        ess=config.sample_size,
        hess_init=config.hessian,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=config.damping,
        mc_samples=noises.shape[1],
        clip_radius=config.radius,
        rescale_lr=False,
    )
    path = []
    given = iter(noises.flatten(0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn", lambda *shape, **kwargs: next(given).clone())
        for step in range(len(noises)):
            for _ in range(noises.shape[1]):
                with optimiser.sampled_params(train=True):
                    optimiser.zero_grad()
                    target(theta, step).backward()
            optimiser.step()
            hessian = optimiser.param_groups[0]["hess"]
            path.append((theta.detach().clone(), (config.sample_size * (hessian + config.damping)).rsqrt()))
    return path


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("draws", [1, 3])
def test_a_trajectory_is_that_of_the_published_optimiser(config, draws):
    noises = torch.randn(40, draws, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = official(config, noises, rate=0.3)
    mean = nn.Parameter(torch.linspace(0.5, -0.5, SIZE, dtype=torch.float64))
    sd = nn.Parameter(torch.full((SIZE,), config.start_sd, dtype=torch.float64))
    optimiser = Ivon([(mean, sd)], 0.3, config)
    for step, noise in enumerate(noises):
        optimiser.zero_grad()
        mean.grad = sd.grad = None
        (sum(target(mean + sd * one, step) for one in noise) / draws).backward()
        optimiser.step()
        torch.testing.assert_close(mean.detach(), expected[step][0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(sd.detach(), expected[step][1], rtol=1e-9, atol=1e-12)
    assert (expected[0][0] - expected[-1][0]).abs().max() > 1e-3


LAYERS = [LayerShape("q", 6, 5, rank=2), LayerShape("v", 4, 5, rank=2)]


def groups(posterior, rate=0.1):
    kinds = {name: posterior.kind(name) for name, _ in posterior.named_parameters()}
    return [
        {
            "params": [p for name, p in posterior.named_parameters() if kinds[name] == kind],
            "names": [f"model.bayeslora_posterior.default.{name}" for name in kinds if kinds[name] == kind],
            "kind": kind,
            "multiplier": 1.0,
            "lr": rate,
            "weight_decay": 0.0,
        }
        for kind in ("mean", "scale")
    ]


def test_backpropagation_through_draws_gives_the_noise_times_the_gradient():
    """So one draw is one sample of the Hessian: ``ε g / σ``."""
    posterior = IvonPosterior(LAYERS).double()
    factors = posterior.draw(3, torch.Generator().manual_seed(0), "independent")
    weight = torch.randn(factors.A[0].shape, generator=torch.Generator().manual_seed(1)).double()
    (factors.A[0] * weight).sum().backward()
    mean, sd = (posterior.get_parameter(f"{name}_A_6x5_r2") for name in ("mean", "sd"))
    noise = (factors.A[0].detach() - mean.detach().unsqueeze(1)) / sd.detach().unsqueeze(1)
    torch.testing.assert_close(mean.grad, weight.sum(1))
    torch.testing.assert_close(sd.grad, (noise * weight).sum(1))


def test_gradients_that_are_not_finite_move_nothing():
    posterior = IvonPosterior(LAYERS)
    steps = IvonSteps(groups(posterior), posterior.config)
    before = {name: value.clone() for name, value in posterior.state_dict().items()}
    steps.zero_grad()
    steps.backward(posterior.draw(1).A[0].sum() * math.inf, torch.zeros(()))
    assert not math.isfinite(steps.step())
    assert all(torch.equal(value, before[name]) for name, value in posterior.state_dict().items())


def test_widths_follow_the_curvature():
    """At the optimum of a quadratic ``½ c θ²`` the Hessian is ``c``, and the width that of the exact posterior."""
    config = replace(CONFIGS[0], damping=0.0, beta2=0.99, sample_size=100.0)
    curvature = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    mean, sd = (nn.Parameter(torch.full((3,), value, dtype=torch.float64)) for value in (0.3, config.start_sd))
    optimiser, generator = Ivon([(mean, sd)], 0.05, config), torch.Generator().manual_seed(0)
    for _ in range(800):
        mean.grad = sd.grad = None
        theta = mean + sd * torch.randn((64, 3), generator=generator, dtype=torch.float64)
        (0.5 * curvature * theta.square()).sum(1).mean().backward()
        optimiser.step()
    torch.testing.assert_close(sd.detach(), (100 * curvature).rsqrt(), rtol=0.1, atol=0)
    assert mean.abs().max() < 0.05


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"sample_size": 0.0}, "sample_size must be positive"),
        ({"damping": -1.0}, "damping must be finite and not negative"),
        ({"beta2": 1.0}, "beta2 must be at least 0 and below 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        IvonConfig(**settings)


def test_kinds_are_means_and_widths():
    posterior = IvonPosterior(LAYERS)
    assert {posterior.kind(name) for name, _ in posterior.named_parameters()} == {"mean", "scale"}
    assert parameter_kinds(nn.Linear(2, 2)) == {"weight": "weights", "bias": "weights"}
    assert posterior.kl().total == 0
