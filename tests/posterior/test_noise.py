"""Noise arranged over draws: every draw stays standard normal, and averages over few of them err less."""

import pytest
import torch

from bayeslora.posterior import InducingPosterior, LayerShape
from bayeslora.posterior.noise import Noise

CPU = torch.device("cpu")
LAYERS = [LayerShape("a", 12, 10, 3), LayerShape("b", 12, 10, 3), LayerShape("c", 6, 10, 2)]
ARRANGED = pytest.mark.parametrize("variates", ["antithetic", "latin"])


def noise(n, variates, seed=0, layers=40, rest=(50,)):
    return Noise(torch.Generator().manual_seed(seed), CPU, torch.float64, variates).normal((layers, n, *rest))


@ARRANGED
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_every_draw_is_standard_normal(variates, n):
    for draw in noise(n, variates, layers=400).unbind(1):
        draw = draw.flatten().sort().values
        assert abs(draw.mean()) < 0.03 and abs(draw.std() - 1) < 0.03
        normal = torch.special.ndtr(draw)
        steps = torch.arange(1, len(draw) + 1) / len(draw)
        assert (normal - steps).abs().max() < 1.95 / len(draw) ** 0.5  # Kolmogorov's distance at one in a thousand


@pytest.mark.parametrize("variates", ["independent", "antithetic"])
def test_a_draw_does_not_depend_on_the_number_of_draws_or_layers(variates):
    many = noise(9, variates)
    for n in (2, 3, 6):
        assert torch.equal(noise(n, variates, layers=7), many[:7, :n])


def test_requests_differ_and_are_repeated_after_a_rewind():
    source = Noise(torch.Generator().manual_seed(3), CPU)
    first, second, uniform = source.normal((2, 3, 5)), source.normal((2, 3, 5)), source.uniform((2, 3, 1, 5))
    assert not torch.equal(first, second) and uniform.shape == (2, 3, 1, 5)
    source.rewind()
    assert torch.equal(source.normal((2, 3, 5)), first)
    source.restart(torch.Generator().manual_seed(3))
    assert torch.equal(source.normal((2, 3, 5)), first)
    source.restart(torch.Generator().manual_seed(4))
    assert not torch.equal(source.normal((2, 3, 5)), first)


def test_orders_are_permutations_that_change():
    source = Noise(torch.Generator().manual_seed(0), CPU)
    orders = [tuple(source.order(5)) for _ in range(600)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    drawn = Noise(torch.Generator().manual_seed(0), CPU).normal((1, 1, 5)).flatten()
    assert orders[0] != tuple(drawn.argsort().tolist())  # nothing in common with the noise
    firsts = [sum(order[0] == k for order in orders) for k in range(5)]
    assert all(abs(count - 120) < 4 * (600 * 0.2 * 0.8) ** 0.5 for count in firsts)


def test_noise_takes_a_seed_only_when_it_is_asked_for():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    source = Noise(None, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    source.normal((1, 1, 1))
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_antithetic_draws_are_opposite_pairs(n):
    drawn = noise(n, "antithetic")
    assert torch.equal(drawn[:, 0 : n - n % 2 : 2], -drawn[:, 1 : n - n % 2 + 1 : 2])


@pytest.mark.parametrize("n", [2, 5, 8])
def test_a_latin_hypercube_has_one_draw_in_every_part_of_every_coordinate(n):
    parts = (torch.special.ndtr(noise(n, "latin")) * n).long().sort(dim=1).values
    assert torch.equal(parts, torch.arange(n).view(1, n, 1).expand_as(parts))


@ARRANGED
def test_averages_of_few_draws_err_less_and_stay_unbiased(variates):
    """Of a mildly non-linear function, over many repetitions."""

    def errors(kind):
        repeated = torch.cat([noise(4, kind, seed, layers=20) for seed in range(20)])
        return (repeated + 0.2 * repeated.square() + 0.1 * repeated.pow(3)).mean(1) - 0.2

    arranged, independent = errors(variates), errors("independent")
    assert arranged.square().mean() < 0.5 * independent.square().mean()
    assert abs(arranged.mean()) < 4 * arranged.std() / arranged.numel() ** 0.5


@ARRANGED
def test_posteriors_draw_with_it(variates):
    posterior = InducingPosterior(LAYERS)
    draws = posterior.draw(6, torch.Generator().manual_seed(1), variates)
    again = posterior.draw(6, torch.Generator().manual_seed(1), variates)
    assert all(torch.equal(one, other) for one, other in zip(draws.A, again.A, strict=True))
    independent = posterior.draw(6, torch.Generator().manual_seed(1), "independent")
    mean = posterior.mean()
    spread = [(d.A[0].mean(1, keepdim=True) - mean.A[0]).square().mean() for d in (draws, independent)]
    assert spread[0] < 0.5 * spread[1]


def test_unknown_arrangements_are_refused():
    with pytest.raises(ValueError, match=r"variates is 'sobol'; choose one of independent, antithetic, latin"):
        InducingPosterior(LAYERS).draw(2, None, "sobol")
