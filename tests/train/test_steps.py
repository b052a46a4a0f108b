"""Whose gradient reaches which parameters: AdamW on everything, or AdamW and SGD side by side."""

import copy

import pytest
import torch
from torch import nn

from bayeslora.train.steps import JointSteps, SplitSteps

SPLIT = {"mean": "kl", "scale": "both"}


def parameters():
    generator = torch.Generator().manual_seed(0)
    return {kind: nn.Parameter(torch.randn(3, generator=generator)) for kind in ("weights", "mean", "scale")}


def groups(tensors, rate=0.1, multipliers=None):
    return [
        {"params": [p], "names": [k], "kind": k, "multiplier": m, "lr": rate * m, "weight_decay": 0.0}
        for k, p in tensors.items()
        for m in [(multipliers or {}).get(k, 1.0)]
    ]


def loss_and_kl(tensors):
    """Both depend on mean and scale; only the loss depends on the weights."""
    w, m, s = tensors.values()
    return ((w * m + s).sin()).sum(), (m.square() + s.exp()).sum()


def test_joint_steps_are_adamw_on_the_sum():
    ours, theirs = parameters(), parameters()
    steps = JointSteps(groups(ours), clip=1e9)
    optimiser = torch.optim.AdamW(theirs.values(), lr=0.1, weight_decay=0.0, fused=True)
    for _ in range(3):
        steps.zero_grad()
        steps.backward(*loss_and_kl(ours))
        assert torch.isfinite(steps.step())
        optimiser.zero_grad()
        sum(loss_and_kl(theirs)).backward()
        optimiser.step()
    assert all(torch.equal(ours[kind], theirs[kind]) for kind in ours)


@pytest.mark.parametrize("parts", [1, 3])
def test_split_steps_are_adamw_on_the_loss_and_sgd_on_the_kl(parts):
    """Card 7: AdamW on the likelihood's gradient of M and B; SGD on the KL's of M and on both of G."""
    ours, theirs = parameters(), parameters()
    steps = SplitSteps(groups(ours), 1e9, SPLIT, rate=0.05)
    adamw = torch.optim.AdamW([theirs["weights"], theirs["mean"]], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        steps.zero_grad()
        for _ in range(parts):
            loss, kl = loss_and_kl(ours)
            steps.backward(loss / parts, kl / parts)
        steps.step()
        loss, kl = loss_and_kl(theirs)
        of_loss = torch.autograd.grad(loss, theirs.values())
        of_kl = torch.autograd.grad(kl, [theirs["mean"], theirs["scale"]])
        theirs["weights"].grad, theirs["mean"].grad = of_loss[0], of_loss[1]
        adamw.step()
        with torch.no_grad():
            theirs["mean"] -= 0.05 * of_kl[0]
            theirs["scale"] -= 0.05 * (of_kl[1] + of_loss[2])
    for kind in ours:
        torch.testing.assert_close(ours[kind], theirs[kind])


def test_multipliers_hold_for_sgd_too():
    ours = parameters()
    steps = SplitSteps(groups(ours, multipliers={"scale": 3.0}), 1.0, SPLIT, rate=0.05)
    rates = {group["kind"]: group["lr"] for group in steps._sgd.param_groups}
    assert rates == pytest.approx({"mean": 0.05, "scale": 0.15})


@pytest.mark.parametrize("make", [JointSteps, lambda g, clip, e: SplitSteps(g, clip, SPLIT, 0.1, e)])
def test_the_epsilon_is_adamws(make):
    """A large one makes the first step small: lr · g / (|g| + ε)."""
    ours = parameters()
    before = ours["weights"].detach().clone()
    steps = make(groups(ours), 1e9, 10.0)
    loss, kl = loss_and_kl(ours)
    steps.backward(loss, kl)
    gradient = ours["weights"].grad.clone()
    steps.step()
    torch.testing.assert_close(before - ours["weights"].detach(), 0.1 * gradient / (gradient.abs() + 10.0))


def test_only_what_adamw_sees_is_clipped():
    """Adam itself does not feel the size of a gradient; SGD must not be slowed by a bound that is not its own."""
    ours = parameters()
    before = copy.deepcopy(ours)
    steps = SplitSteps(groups(ours), 1e-3, SPLIT, rate=0.05)
    steps.backward(*loss_and_kl(ours))
    steps.step()
    torch.testing.assert_close(ours["mean"].grad, 2 * before["mean"])


def test_the_schedule_reaches_both_optimisers():
    ours = parameters()
    before = copy.deepcopy(ours)
    steps = SplitSteps(groups(ours), 1.0, SPLIT, rate=0.05)
    assert [group["lr"] for group in steps.groups] == [0.1, 0.1, 0.05, 0.05]
    for group in steps.groups:
        group["lr"] = 0.0
    steps.backward(*loss_and_kl(ours))
    steps.step()
    assert all(torch.equal(ours[kind], before[kind]) for kind in ours)


@pytest.mark.parametrize("make", [lambda g: JointSteps(g, 1.0), lambda g: SplitSteps(g, 1.0, SPLIT, 0.1)])
@pytest.mark.parametrize("victim", ["loss", "kl"])
def test_a_gradient_that_is_not_finite_moves_nothing(make, victim):
    ours = parameters()
    before = copy.deepcopy(ours)
    steps = make(groups(ours))
    loss, kl = loss_and_kl(ours)
    steps.backward(loss * (torch.nan if victim == "loss" else 1), kl * (torch.inf if victim == "kl" else 1))
    assert not torch.isfinite(steps.step())
    assert all(torch.equal(ours[kind], before[kind]) for kind in ours)
