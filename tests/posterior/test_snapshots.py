"""Snapshots of a posterior in training: when they are taken, which are kept, and what is drawn from them."""

import pytest
import torch

from bayeslora.posterior import (
    DecoupledConfig,
    DecoupledPosterior,
    LayerShape,
    MeanFieldPosterior,
    PointPosterior,
    Snapshots,
    build_posterior,
)
from bayeslora.posterior.registry import POSTERIORS
from bayeslora.posterior.snapshots import take_turns
from posterior.cases import ONE_MEAN

LAYERS = [LayerShape("q", 8, 10, rank=3), LayerShape("v", 4, 10, rank=3), LayerShape("k", 8, 10, rank=3)]
TRAINED = ["decoupled", "inducing", "point", "dropout", "meanfield", "blob", "ivon", "adalora"]


def point(taken, kept, seed=0):
    return PointPosterior(LAYERS, seed=seed, snapshots=Snapshots(taken, kept))


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
    taken = train(point(snapshots, 2), steps)
    assert len(taken) == snapshots and taken[-1] == steps
    assert [step - steps * (k + 1) / snapshots for k, step in enumerate(taken)] == pytest.approx([0] * snapshots, abs=1)


def drawn(posterior, n=6):
    """Values of the factors of one layer, which are constant in each draw."""
    factors = posterior.draw(n, torch.Generator().manual_seed(0))
    return [float(a.mean()) for a in factors["v"].A], [float(b.mean()) for b in factors["k"].B]


def test_training_draws_are_the_lora_and_evaluation_draws_the_last_snapshots():
    posterior = point(4, 3)
    train(posterior, 8)
    assert drawn(posterior.train()) == ([8.0] * 6, [8.0] * 6)
    A, B = drawn(posterior.eval())
    assert A == B and sorted(A) == [4.0, 4.0, 6.0, 6.0, 8.0, 8.0]
    assert posterior.draw_count(10) == 3 and posterior.stochastic


@pytest.mark.parametrize("n", range(1, 9))
def test_draws_are_spread_evenly_and_take_turns(n):
    posterior = point(4, 3).eval()
    train(posterior, 8)
    A, _ = drawn(posterior, n)
    counts = [A.count(value) for value in (4.0, 6.0, 8.0)]
    assert sum(counts) == n and max(counts) - min(counts) <= 1
    assert (A[:3] * 3)[:n] == A


def test_before_the_first_snapshot_there_is_only_the_lora():
    posterior, start = point(4, 3).eval(), PointPosterior(LAYERS)
    for ours, theirs in ((posterior.draw(2), start.draw(2)), (posterior.mean(), start.mean())):
        assert all(torch.equal(ours[name].A, theirs[name].A) for name in ours)
    assert posterior.draw_count(4) == 1


def test_the_mean_is_the_average_of_the_snapshots():
    posterior = point(2, 2).eval()
    train(posterior, 4)
    product = posterior.mean().product("q")[0]
    torch.testing.assert_close(product, torch.full((8, 10), 3 * (2.0**2 + 4.0**2) / 2))


def test_what_is_remembered_is_saved_and_goes_on_after_a_break():
    whole, broken = (point(3, 2) for _ in range(2))
    train(whole, 12)
    taken = int(12 * 0.7)
    for step in range(1, taken + 1):
        with torch.no_grad():
            for parameter in broken.parameters():
                parameter.fill_(step)
        broken.after_step(step, 12)
    resumed = point(3, 2, seed=1)
    resumed.load_state_dict(broken.state_dict())
    train(resumed, 12, start=taken)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


def test_a_second_training_run_forgets_the_snapshots_of_the_first():
    posterior = point(2, 2).eval()
    train(posterior, 4)
    posterior.after_step(1, 4)
    assert posterior.held == 0


def test_an_adapter_that_is_not_trained_keeps_its_snapshots():
    """As one that is active while another is trained."""
    posterior = point(2, 2).eval()
    train(posterior, 4)
    before = drawn(posterior)
    train(posterior.requires_grad_(False), 8)
    assert drawn(posterior) == before


def test_starting_from_a_lora_forgets_the_snapshots():
    posterior = point(2, 2).eval()
    train(posterior, 4)
    lora = PointPosterior(LAYERS, seed=5).mean()
    posterior.start_from(lora)
    assert posterior.held == 0 and torch.equal(posterior.mean()["q"].A, lora["q"].A)


# A mixture of distributions ---------------------------------------------------------------------------------------


def wander(posterior, steps=4, seed=0):
    """Train at random; returns the parameters after every step."""
    generator, states = torch.Generator().manual_seed(seed), []
    for step in range(1, steps + 1):
        with torch.no_grad():
            for parameter in posterior.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
                parameter.grad = torch.zeros_like(parameter)
        posterior.after_step(step, steps)
        states.append({name: tensor.clone() for name, tensor in posterior.named_parameters()})
    return states


@pytest.mark.parametrize("name", TRAINED)
def test_a_mixture_is_the_snapshots_side_by_side(name):
    """Its mean is the average of theirs, and its draws are theirs with the noise in order, up to rounding."""
    posterior = build_posterior(name, LAYERS, snapshots=Snapshots(4, 2)).eval()
    *_, first, last = wander(posterior)
    members = []
    for state in (first, last):
        member = build_posterior(name, LAYERS).eval()
        member.load_state_dict(state, strict=False)
        members.append(member)
    wanted = sum(member.mean().product("q") for member in members) / 2
    torch.testing.assert_close(posterior.mean().product("q"), wanted)
    drawing = posterior.draw(4, torch.Generator().manual_seed(1))
    source = posterior.noise(torch.Generator().manual_seed(1), "antithetic")
    theirs = take_turns([members[k].draw_from(source, 2) for k in source.order(2)])
    for layer in drawing:
        torch.testing.assert_close(tuple(drawing[layer]), tuple(theirs[layer]), rtol=1e-5, atol=1e-6)


def test_opposite_draws_stay_within_a_snapshot():
    """The average over a pair is the mean of its snapshot, where the other factor has no noise."""
    posterior = DecoupledPosterior(LAYERS, DecoupledConfig(**ONE_MEAN), snapshots=Snapshots(4, 2)).eval()
    states = wander(posterior)[-2:]
    draws = posterior.draw(4, torch.Generator().manual_seed(0))["q"].A
    pairs = sorted(float(it[0, 0]) for it in (0.5 * (draws[0] + draws[2]), 0.5 * (draws[1] + draws[3])))
    assert pairs == pytest.approx(sorted(float(state["mean_A_8x10_r3"][0, 0, 0]) for state in states), abs=1e-5)


def test_one_scale_widens_all_snapshots():
    posterior = MeanFieldPosterior(LAYERS, snapshots=Snapshots(2, 2)).eval()
    wander(posterior)
    posterior.scale = 0.0
    draws = posterior.draw(4, torch.Generator().manual_seed(0))["q"].A
    assert torch.equal(draws[0], draws[2]) and torch.equal(draws[1], draws[3]) and not torch.equal(draws[0], draws[1])


def test_layers_with_a_point_are_remembered_too():
    posterior = build_posterior("decoupled", LAYERS, points=["v"], snapshots=Snapshots(2, 2)).eval()
    states = wander(posterior)
    draws = posterior.draw(2, torch.Generator().manual_seed(0))["v"].A
    kept = [states[step]["point_A_4x10_r3"][0] for step in (1, 3)]
    assert {float(draw[0, 0]) for draw in draws} == {float(it[0, 0]) for it in kept}


def test_room_for_snapshots_is_all_that_a_mixture_adds():
    for name in set(POSTERIORS) - {"contextual", "swag"}:
        plain, mixture = (build_posterior(name, LAYERS, snapshots=it) for it in (Snapshots(), Snapshots(4, 3)))
        added = mixture.state_dict().keys() - plain.state_dict().keys()
        assert added == {"taken", *(f"kept_{key}" for key, value in plain.state_dict().items() if value.ndim)}
        assert mixture.parameter_count() == plain.parameter_count()


def test_what_depends_on_the_input_has_no_mixture():
    with pytest.raises(ValueError, match="'contextual' depends on the input, so snapshots of it have no common mean"):
        build_posterior("contextual", LAYERS, snapshots=Snapshots(4, 3))


def test_what_collects_iterates_has_no_mixture():
    """A snapshot from before the first iterate has moments of zero: its draws would be those of the base model."""
    with pytest.raises(ValueError, match="'swag' collects iterates itself, and early snapshots would have none"):
        build_posterior("swag", LAYERS, snapshots=Snapshots(4, 3))


@pytest.mark.parametrize("taken, kept", [(2, 3), (4, 0), (0, 1), (-1, 0)])
def test_numbers_that_do_not_fit_are_refused(taken, kept):
    with pytest.raises(ValueError, match=f"members must be at least 1 and at most snapshots, or both 0, got {kept} of"):
        Snapshots(taken, kept)
