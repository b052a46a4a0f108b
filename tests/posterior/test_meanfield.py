"""BBB's posterior against torch.distributions and the moments of its own draws."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from bayeslora.posterior import LayerShape, MeanFieldConfig, MeanFieldPosterior

LAYERS = [LayerShape("q", 6, 5, rank=2), LayerShape("v", 4, 5, rank=2), LayerShape("k", 6, 5, rank=2)]


def posterior(seed=0, **settings):
    made = MeanFieldPosterior(LAYERS, MeanFieldConfig(**settings), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return made


def moments(made, factor, group):
    mean, rho = (made.get_parameter(f"{name}_{factor}_{group.key}") for name in ("mean", "rho"))
    return mean, torch.log1p(rho.exp())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prior_sd", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_the_kl_is_that_of_independent_gaussians(seed, prior_sd, scale):
    made = posterior(seed, prior_sd=prior_sd)
    made.scale = scale
    expected = sum(
        kl_divergence(Normal(mean, scale * sd), Normal(0.0, prior_sd)).sum()
        for group in made.groups
        for mean, sd in (moments(made, factor, group) for factor in ("A", "B"))
    )
    torch.testing.assert_close(made.kl()["factors"], expected)
    assert list(made.kl().terms) == ["factors"]


def test_draws_have_the_moments_they_should():
    made = posterior(init_sd=0.3)
    with torch.no_grad():
        draws = made.draw(20_000, torch.Generator().manual_seed(0))
        for index, group in enumerate(made.groups):
            for stack, factor in ((draws.A, "A"), (draws.B, "B")):
                mean, sd = moments(made, factor, group)
                torch.testing.assert_close(stack[index].mean(1), mean, atol=0.015, rtol=0)
                torch.testing.assert_close(stack[index].std(1), sd, atol=0, rtol=0.03)


def test_it_starts_as_lora_does_with_narrow_noise():
    made = MeanFieldPosterior(LAYERS, MeanFieldConfig(init_sd=0.01))
    assert made.mean().product("q").abs().max() == 0
    for group in made.groups:
        for factor in ("A", "B"):
            _, sd = moments(made, factor, group)
            assert 0.005 < sd.min() < sd.max() <= 0.01 * (1 + 1e-5)
    assert made.draw(1)["q"].B.abs().max() > 0  # so the update is not zero but noise


@pytest.mark.parametrize("name", ["prior_sd", "init_sd"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be positive and finite, got {value}"):
        MeanFieldConfig(**{name: value})


def test_scales_are_told_from_means():
    assert {posterior().kind(name) for name, _ in posterior().named_parameters()} == {"mean", "scale"}
