"""Plain LoRA and ensembles: LoRA's start, exact averaging, balanced draws."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from bayeslora.posterior import EnsembleConfig, EnsemblePosterior, LayerShape, PointPosterior

LAYERS = [LayerShape("q", 8, 40, rank=3), LayerShape("k", 8, 40, rank=3), LayerShape("v", 6, 40, rank=3)]


def random_point(seed):
    point = PointPosterior(LAYERS, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in point.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return point


def test_lora_start():
    """A as torch's kaiming_uniform_(a=√5) draws it, B zero."""
    mean = PointPosterior([LayerShape("x", 16, 400, rank=64)]).mean()["x"]
    reference = torch.empty(64, 400)
    torch.nn.init.kaiming_uniform_(reference, a=math.sqrt(5), generator=torch.Generator().manual_seed(0))
    assert mean.B.abs().max() == 0
    bound = 1 / math.sqrt(400)
    assert mean.A.abs().max() <= bound
    assert reference.abs().max() <= bound
    assert abs(mean.A.std() / reference.std() - 1) < 0.02
    assert abs(mean.A.var() / (1 / (3 * 400)) - 1) < 0.03


@pytest.mark.parametrize("posterior", [PointPosterior, EnsemblePosterior])
def test_a_start_of_lower_rank_leaves_the_other_ranks_trainable(posterior):
    """Padded with zeros in both factors, they would never have a gradient. The product is that of the start, to the bit."""
    start = random_point(1).mean()
    padded = [F.pad(A[..., :1, :], (0, 0, 0, 2)) for A in start.A], [F.pad(B[..., :1], (0, 2)) for B in start.B]
    started = posterior(LAYERS, seed=2)
    started.start_from(replace(start, A=tuple(padded[0]), B=tuple(padded[1])))
    drawn = started.draw(1)
    for A, B, A0, B0 in zip(drawn.A, drawn.B, *padded, strict=True):
        assert torch.equal(B @ A, B0 @ A0)
    sum((B @ A).square().sum() + (B @ A).sum() for A, B in zip(drawn.A, drawn.B, strict=True)).backward()
    for name, parameter in started.named_parameters():
        if name.startswith("B_"):
            assert (parameter.grad.abs().amax(tuple(range(parameter.dim() - 1))) > 0).all(), "every column"


def test_point_draws_share_memory():
    point = random_point(0)
    A = point.draw(7)["q"].A
    assert A.stride(0) == 0
    torch.testing.assert_close(A[3], point.get_parameter("A_8x40_r3")[0])


@pytest.fixture
def ensemble():
    ensemble = EnsemblePosterior(LAYERS, EnsembleConfig(members=4))
    for k in range(4):
        ensemble.set_member(k, random_point(k).mean())
    return ensemble


def member_of(A, ensemble):
    """Which member each draw of layer q is."""
    stack = ensemble.get_parameter("A_8x40_r3")[0]
    return [next(k for k in range(ensemble.members) if torch.equal(a, stack[k])) for a in A]


def test_as_many_draws_as_members_are_every_member_once(ensemble):
    chosen = member_of(ensemble.draw(4)["q"].A, ensemble)
    assert sorted(chosen) == [0, 1, 2, 3]


def test_draws_are_balanced_and_coherent_across_layers(ensemble):
    factors = ensemble.draw(9, torch.Generator().manual_seed(0))
    chosen = member_of(factors["q"].A, ensemble)
    counts = [chosen.count(k) for k in range(4)]
    assert sorted(counts) == [2, 2, 2, 3]
    for layer in LAYERS:
        for draw, k in enumerate(chosen):
            want = random_point(k).mean()[layer.name]
            torch.testing.assert_close(factors[layer.name].A[draw], want.A[0])
            torch.testing.assert_close(factors[layer.name].B[draw], want.B[0])


def test_every_member_is_drawn_alike(ensemble):
    generator = torch.Generator().manual_seed(0)
    chosen = [member_of(ensemble.draw(1, generator)["q"].A, ensemble)[0] for _ in range(400)]
    assert min(chosen.count(k) for k in range(4)) > 70


def test_mean_is_exactly_the_average_of_the_products(ensemble):
    mean = ensemble.mean()
    for layer in LAYERS:
        want = torch.stack([random_point(k).mean().product(layer.name)[0] for k in range(4)]).mean(0)
        torch.testing.assert_close(mean.product(layer.name)[0], want)


def test_bad_members_are_refused(ensemble):
    with pytest.raises(ValueError, match="at least 1 member and at most 256, got 0"):
        EnsembleConfig(members=0)
    with pytest.raises(ValueError, match="at most 256, got 1000000000"):
        EnsembleConfig(members=10**9)
    with pytest.raises(ValueError, match="must cover the same layers"):
        ensemble.set_member(0, PointPosterior(LAYERS[:1]).mean())


def test_a_prediction_takes_every_member_once_whatever_its_budget(ensemble):
    assert [ensemble.draw_count(samples) for samples in (1, 4, 10)] == [4, 4, 4]
