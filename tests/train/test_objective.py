"""Cross-entropy over options and the weight of the KL, against torch and by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from bayeslora.posterior import kl_weight
from bayeslora.train.objective import KLWeight, cross_entropy


def case(seed=0, rows=6, options=4):
    source = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, options, generator=source, dtype=torch.float64)
    return scores, torch.randint(0, options, (rows,), generator=source)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_full_rows_agree_with_torch(seed, smoothing):
    scores, gold = case(seed)
    present = torch.ones_like(scores, dtype=torch.bool)
    got = cross_entropy(scores.log_softmax(-1), gold, present, smoothing)
    want = F.cross_entropy(scores, gold, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_by_hand_with_options_that_are_not_there(smoothing):
    probabilities = [[0.2, 0.8, 0.0], [0.5, 0.3, 0.2]]
    present = torch.tensor([[True, True, False], [True, True, True]])
    got = cross_entropy(torch.tensor(probabilities).log(), torch.tensor([0, 2]), present, smoothing)
    first = -(1 - smoothing) * math.log(0.2) - smoothing * (math.log(0.2) + math.log(0.8)) / 2
    second = -(1 - smoothing) * math.log(0.2) - smoothing * (math.log(0.5) + math.log(0.3) + math.log(0.2)) / 3
    torch.testing.assert_close(got, torch.tensor([first, second]))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_absent_options_change_neither_the_loss_nor_its_gradient(smoothing):
    scores, gold = case(options=3)
    wide = torch.cat([scores, torch.full((6, 2), -torch.inf, dtype=scores.dtype)], dim=1)
    gradients = []
    for values in (scores, wide):
        values.requires_grad_(True)
        present = values.detach() > -torch.inf
        cross_entropy(values.log_softmax(-1), gold, present, smoothing).sum().backward()
        gradients.append(values.grad)
    torch.testing.assert_close(gradients[1][:, :3], gradients[0])
    assert torch.equal(gradients[1][:, 3:], torch.zeros(6, 2, dtype=scores.dtype))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_through_masked_scores_is_finite(smoothing):
    """As a scorer masks: the scores that are filled with -inf depend on parameters too."""
    weights = torch.tensor([0.3, -2.0, 1.0, 0.5], requires_grad=True)
    present = torch.tensor([[True, False, True, False], [True, True, True, True], [True, False, False, False]])
    scores = weights.expand(3, 4).masked_fill(~present, -torch.inf)
    loss = cross_entropy(scores.log_softmax(-1), torch.tensor([2, 1, 0]), present, smoothing)
    assert torch.isfinite(loss).all() and float(loss.detach()[2]) == 0.0  # one option is certain
    loss.sum().backward()
    assert torch.isfinite(weights.grad).all() and weights.grad.abs().sum() > 0


def test_smoothing_spreads_over_the_right_option_too():
    """A certain and right answer costs nothing without smoothing, and a uniform one the same with any."""
    uniform = torch.full((1, 4), 0.25).log()
    present = torch.ones(1, 4, dtype=torch.bool)
    for smoothing in (0.0, 0.1, 0.9):
        got = cross_entropy(uniform, torch.tensor([1]), present, smoothing)
        torch.testing.assert_close(got, torch.tensor([math.log(4)]))


# Weight of the KL -----------------------------------------------------------------------------------------------------

SIZES = {"examples": 200, "batch_size": 16}


@pytest.mark.parametrize("scaling, full", [("elbo", 3.0 / 200), ("paper", 3.0 * 0.2 / 13)])
def test_without_warm_up_the_weight_is_full_from_the_start(scaling, full):
    weight = KLWeight(scaling, beta=3.0)
    assert full == pytest.approx(kl_weight(scaling, beta=3.0, **SIZES))
    assert [weight.at(step, 26, **SIZES) for step in range(26)] == pytest.approx([full] * 26)


@pytest.mark.parametrize("scaling", ["elbo", "paper"])
@pytest.mark.parametrize("steps, warmup", [(26, 0.5), (26, 0.1), (7, 0.3), (100, 0.99)])
def test_warm_up_is_a_line_from_above_zero_to_the_full_weight(scaling, steps, warmup):
    full = kl_weight(scaling, **SIZES)
    weights = [KLWeight(scaling, warmup=warmup).at(step, steps, **SIZES) for step in range(steps)]
    rising = warmup * steps
    assert weights == pytest.approx([full * min(1.0, (step + 1) / rising) for step in range(steps)])
    assert 0 < weights[0] < full or rising <= 1
    assert weights == sorted(weights) and weights[-1] == pytest.approx(full)
    assert sum(weight < full for weight in weights) == math.ceil(rising) - 1


def test_a_warm_up_shorter_than_a_step_is_none():
    assert KLWeight(warmup=0.01).at(0, 10, **SIZES) == pytest.approx(1 / 200)


def test_no_weight_at_all():
    assert KLWeight(beta=0.0, warmup=0.5).at(3, 10, **SIZES) == 0.0
