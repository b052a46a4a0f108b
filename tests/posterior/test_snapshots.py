"""Snapshots of a LoRA in training: when they are taken, which are kept, and what is drawn from them."""

import pytest
import torch

from bayeslora.posterior import LayerShape, PointPosterior
from bayeslora.posterior.snapshots import SnapshotConfig, SnapshotPosterior

LAYERS = [LayerShape("q", 8, 10, rank=3), LayerShape("v", 4, 10, rank=3), LayerShape("k", 8, 10, rank=3)]


def train(posterior, steps, start=0):
    """Every step moves all parameters to the step's number. Returns at which steps snapshots were taken."""
    taken = []
    for step in range(start + 1, steps + 1):
        with torch.no_grad():
            for parameter in posterior.parameters():
                parameter.fill_(step)
        before = int(posterior.taken)
        posterior.after_step(step, steps)
        taken += [step] * (int(posterior.taken) - before)
    return taken


@pytest.mark.parametrize("steps", [4, 12, 13, 250, 1001])
@pytest.mark.parametrize("snapshots", [3, 4])
def test_snapshots_are_taken_at_equal_distances_and_at_the_end(steps, snapshots):
    taken = train(SnapshotPosterior(LAYERS, SnapshotConfig(members=2, snapshots=snapshots)), steps)
    assert len(taken) == snapshots and taken[-1] == steps
    assert [step - steps * (k + 1) / snapshots for k, step in enumerate(taken)] == pytest.approx([0] * snapshots, abs=1)


def drawn(posterior, n=6):
    """Values of the factors of one layer, which are constant in each draw."""
    factors = posterior.draw(n, torch.Generator().manual_seed(0))
    return [float(a.mean()) for a in factors["v"].A], [float(b.mean()) for b in factors["k"].B]


def test_training_draws_are_the_lora_and_evaluation_draws_the_last_snapshots():
    posterior = SnapshotPosterior(LAYERS, SnapshotConfig(members=3, snapshots=4))
    train(posterior, 8)
    assert drawn(posterior.train()) == ([8.0] * 6, [8.0] * 6)
    A, B = drawn(posterior.eval())
    assert A == B and sorted(A) == [4.0, 4.0, 6.0, 6.0, 8.0, 8.0]
    assert posterior.draw_count(10) == 3


def test_before_the_first_snapshot_there_is_only_the_lora():
    posterior = SnapshotPosterior(LAYERS).eval()
    start = PointPosterior(LAYERS)
    for ours, theirs in ((posterior.draw(2), start.draw(2)), (posterior.mean(), start.mean())):
        assert all(torch.equal(ours[name].A, theirs[name].A) for name in ours)
    assert posterior.draw_count(4) == 1


def test_the_mean_is_the_average_of_the_snapshots():
    posterior = SnapshotPosterior(LAYERS, SnapshotConfig(members=2, snapshots=2)).eval()
    train(posterior, 4)
    product = posterior.mean().product("q")[0]
    torch.testing.assert_close(product, torch.full((8, 10), 3 * (2.0**2 + 4.0**2) / 2))


def test_what_is_remembered_is_saved_and_goes_on_after_a_break():
    whole, broken = (SnapshotPosterior(LAYERS, SnapshotConfig(members=2, snapshots=3)) for _ in range(2))
    train(whole, 12)
    taken = int(12 * 0.7)
    for step in range(1, taken + 1):
        with torch.no_grad():
            for parameter in broken.parameters():
                parameter.fill_(step)
        broken.after_step(step, 12)
    resumed = SnapshotPosterior(LAYERS, SnapshotConfig(members=2, snapshots=3), seed=1)
    resumed.load_state_dict(broken.state_dict())
    train(resumed, 12, start=taken)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


def test_more_members_than_snapshots_are_refused():
    with pytest.raises(ValueError, match="at most snapshots, got 3 of 2"):
        SnapshotConfig(members=3, snapshots=2)
    with pytest.raises(ValueError, match="at least 1"):
        SnapshotConfig(members=0)
