"""SWAG's moments against those of the iterates themselves."""

import pytest
import torch

from bayeslora.posterior import LayerShape, SwagConfig, SwagPosterior

LAYERS = [LayerShape("q", 6, 5, rank=2), LayerShape("v", 4, 5, rank=2), LayerShape("k", 6, 5, rank=2)]


def walk(posterior, steps, seed=0):
    """Move every parameter at random; returns the factors after each step, all layers in one vector."""
    generator, path = torch.Generator().manual_seed(seed), []
    for step in range(1, steps + 1):
        with torch.no_grad():
            for parameter in posterior.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        posterior.after_step(step, steps)
        path.append(torch.cat([p.detach().flatten() for p in posterior.parameters()]))
    return torch.stack(path)


def flat(factors):
    """Draws ``[n, P]`` in the order of the parameters."""
    pieces = [stack.transpose(0, 1).flatten(1) for pair in zip(factors.A, factors.B, strict=True) for stack in pair]
    return torch.cat(pieces, 1)


def build(**settings):
    return SwagPosterior(LAYERS, SwagConfig(**settings)).double()


@pytest.mark.parametrize(
    "steps, start, iterates, expected",
    [(10, 0.5, 5, [6, 7, 8, 9, 10]), (12, 0.5, 3, [8, 10, 12]), (4, 0.0, 20, [1, 2, 3, 4]), (7, 0.5, 2, [5, 7])],
)
def test_iterates_are_collected_at_equal_distances_from_the_start_to_the_end(steps, start, iterates, expected):
    config = SwagConfig(start=start, iterates=iterates, columns=2)
    assert [step for step in range(1, steps + 1) if config.due(step, steps)] == expected


@pytest.mark.parametrize("columns", [3, 6])
def test_the_moments_are_those_of_the_iterates(columns):
    posterior = build(start=0.5, iterates=6, columns=columns)
    iterates = walk(posterior, 12)[6:]
    buffers = dict(posterior.named_buffers())
    names = [name for name, _ in posterior.named_parameters()]
    average = torch.cat([buffers[f"average_{name}"].flatten() for name in names])
    variance = torch.cat([buffers[f"variance_{name}"].flatten() for name in names])
    torch.testing.assert_close(average, iterates.mean(0))
    torch.testing.assert_close(variance, iterates.var(0, correction=0))
    running = torch.stack([iterates[: k + 1].mean(0) for k in range(6)])
    wanted = (iterates - running)[-columns:]
    kept = torch.cat([buffers[f"column_{name}"].transpose(0, 1).flatten(1) for name in names], 1)
    order = [k % columns for k in range(6 - columns, 6)]
    torch.testing.assert_close(kept[order], wanted)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_draws_have_the_covariance_of_swag(scale):
    """``½ (diag σ² + D Dᵀ / (K − 1))`` over all layers together, within 6 standard errors."""
    posterior, n = build(start=0.5, iterates=6, columns=3).eval(), 8000
    iterates = walk(posterior, 12)[6:]
    posterior.scale = scale
    running = torch.stack([iterates[: k + 1].mean(0) for k in range(6)])
    columns = (iterates - running)[-3:]
    covariance = scale**2 * 0.5 * (iterates.var(0, correction=0).diag() + columns.T @ columns / 2)
    draws = flat(posterior.draw(n, torch.Generator().manual_seed(1), "independent"))
    variances = covariance.diagonal()
    assert ((draws.mean(0) - iterates.mean(0)).abs() < 6 * (variances / n).sqrt() + 1e-9).all()
    spread = 6 * ((variances[:, None] * variances + covariance.square()) / n).sqrt()
    assert ((torch.cov(draws.T) - covariance).abs() < spread + 1e-9).all()


def test_the_mean_is_that_of_the_product_with_both_factors_following_the_same_columns():
    posterior = build(start=0.5, iterates=6, columns=3).eval()
    walk(posterior, 12)
    n = 8000
    draws, mean = posterior.draw(n, torch.Generator().manual_seed(0), "independent"), posterior.mean()
    for name in draws:
        products = draws.product(name)
        assert ((products.mean(0) - mean.product(name)[0]).abs() < 6 * products.std(0) / n**0.5).all()
    plain = posterior._part("average", "B")[0][0] @ posterior._part("average", "A")[0][0]
    assert (mean.product("q")[0] - plain).abs().max() > 0.01


def test_in_training_and_before_two_iterates_it_is_the_lora():
    posterior = build(start=0.5, iterates=6, columns=3)
    walk(posterior, 12)
    assert torch.equal(posterior.train().draw(2)["q"].A[0], posterior.A_6x5_r2[0])
    fresh = build().eval()
    assert torch.equal(fresh.draw(2)["q"].A[1], fresh.A_6x5_r2[0])
    posterior.start_from(fresh.mean())
    assert posterior.iterates == 0 and torch.equal(posterior.eval().draw(1)["q"].A[0], fresh.A_6x5_r2[0])


def test_a_second_run_has_iterates_of_its_own_and_a_frozen_adapter_keeps_those_it_has():
    posterior = build(start=0.5, iterates=6, columns=3).eval()
    walk(posterior, 12)
    with torch.no_grad():
        for parameter in posterior.parameters():
            parameter += 100.0
    iterates = walk(posterior, 12)[6:]
    draws = flat(posterior.draw(400, torch.Generator().manual_seed(1), "independent"))
    assert posterior.iterates == 6 and ((draws - iterates.mean(0)).abs() < 50).all()
    before = flat(posterior.draw(4, torch.Generator().manual_seed(0)))
    walk(posterior.requires_grad_(False), 12)
    assert torch.equal(flat(posterior.draw(4, torch.Generator().manual_seed(0))), before)


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="start must be at least 0 and below 1, got 1"):
        SwagConfig(start=1.0)
    with pytest.raises(ValueError, match="columns must be at least 2 and at most iterates, got 1 of 5"):
        SwagConfig(iterates=5, columns=1)
