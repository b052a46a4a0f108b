"""Draws as CUDA graphs: the noise they are fed with, when they are used, and, where there is a GPU, the numbers."""

from types import SimpleNamespace

import pytest
import torch

from bayeslora.posterior import (
    KL,
    DecoupledPosterior,
    InducingPosterior,
    LayerShape,
    MeanFieldPosterior,
    PointPosterior,
)
from bayeslora.posterior.capture import EAGER, Capture, Graph, _aliases, _Replay

LAYERS = [LayerShape("a", 12, 10, rank=3), LayerShape("b", 12, 10, rank=3), LayerShape("c", 20, 12, rank=3)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def loss(posterior, factors):
    kl = posterior.kl(factors)
    weighted = (0.1 * (1 + k) * term for k, term in enumerate(kl.terms.values()))
    return sum(stack.square().sum() for stack in (*factors.A, *factors.B)) + sum(weighted)


@pytest.mark.parametrize("make", [InducingPosterior, DecoupledPosterior, MeanFieldPosterior])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_noise_that_starts_again_gives_the_same_draw(make, n):
    """What a graph makes after it was given a seed is what a draw would have made for itself."""
    posterior = make(LAYERS)
    kept = posterior.noise(None, "antithetic")
    posterior.draw_from(kept, n)
    for seed in range(2):
        want = posterior.draw(n, seeded(seed=seed))
        kept.restart(seeded(seed=seed))
        got = posterior.draw_from(kept.rewind(), n)
        assert all(map(torch.equal, (*got.A, *got.B), (*want.A, *want.B)))
        assert torch.equal(posterior.kl(got).total, posterior.kl(want).total)


def test_a_kl_that_comes_with_the_draw_is_taken():
    posterior = InducingPosterior(LAYERS)
    known = KL({"inducing": torch.tensor(1.0), "conditional": torch.tensor(2.0)})
    from dataclasses import replace

    assert posterior.kl(replace(posterior.draw(1), latents=known)) is known


def test_on_a_cpu_draws_are_the_posteriors_own():
    posterior = InducingPosterior(LAYERS)
    capture = Capture(posterior)
    for seed in range(EAGER + 2):
        got, want = capture.draw(2, seeded(seed=seed), "antithetic"), posterior.draw(2, seeded(seed=seed))
        assert all(map(torch.equal, (*got.A, *got.B), (*want.A, *want.B)))
        assert not isinstance(got.latents, KL)


@needs_gpu
@pytest.mark.parametrize("make", [InducingPosterior, DecoupledPosterior, MeanFieldPosterior])
@pytest.mark.parametrize("n", [1, 2])
def test_captured_draws_equal_eager_ones_in_value_and_gradient(make, n):
    posterior = make(LAYERS).cuda()
    capture = Capture(posterior)
    optimiser = torch.optim.SGD(posterior.parameters(), lr=1e-3)
    captured = 0
    for seed in range(EAGER + 4):
        want = posterior.draw(n, seeded(seed))
        expected = torch.autograd.grad(loss(posterior, want), list(posterior.parameters()), allow_unused=True)
        got = capture.draw(n, seeded(seed), "antithetic")
        captured += isinstance(got.latents, KL)
        for one, other in zip((*got.A, *got.B), (*want.A, *want.B), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
        optimiser.zero_grad()
        loss(posterior, got).backward()
        for parameter, gradient in zip(posterior.parameters(), expected, strict=True):
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(
                found, torch.zeros_like(found) if gradient is None else gradient, atol=1e-4, rtol=1e-4
            )
        optimiser.step()  # the graph reads the parameters as they are
    assert captured == 4


@needs_gpu
def test_a_draw_whose_gradient_is_wanted_is_not_overwritten():
    posterior = InducingPosterior(LAYERS).cuda()
    capture = Capture(posterior)
    for seed in range(EAGER + 1):
        loss(posterior, capture.draw(1, seeded(seed), "antithetic")).backward()
    first = capture.draw(1, seeded(7), "antithetic")
    values = [stack.clone() for stack in first.B]
    held = loss(posterior, first)
    del first
    second = capture.draw(1, seeded(8), "antithetic")
    assert not isinstance(second.latents, KL)  # made operator by operator
    del second
    third = capture.draw(1, seeded(7), "antithetic")
    assert not isinstance(third.latents, KL)
    assert all(map(torch.equal, third.B, values)) or torch.allclose(third.B[0], values[0])
    held.backward()
    assert isinstance(capture.draw(1, None, "antithetic").latents, KL)


def captured(make):
    """A posterior whose draws are replayed from now on."""
    posterior = make(LAYERS).cuda()
    capture = Capture(posterior)
    for seed in range(EAGER + 1):
        last = capture.draw(1, seeded(seed), "antithetic")
        loss(posterior, last).backward()
    assert isinstance(last.latents, KL)
    return posterior, capture


def test_a_replay_does_not_write_over_the_gradient_of_the_last():
    """Without a GPU: a graph whose replays are functions. Torch keeps the first gradient of a parameter as it is given."""
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    graph = object.__new__(Graph)
    graph.number, graph._used_up, graph._last = 0, True, None
    graph.outputs, graph.by_outputs = (parameter.square(),), [torch.zeros(3)]
    graph.found = (torch.zeros(3),)
    graph.forward = SimpleNamespace(replay=lambda: None)
    graph.backward = SimpleNamespace(replay=lambda: graph.found[0].copy_(2 * parameter.detach() * graph.by_outputs[0]))
    slopes = [torch.tensor([1.0, 1.0, 2.0]), torch.tensor([5.0, 0.5, -1.0]), torch.tensor([0.0, 3.0, 1.0])]
    for slope in slopes:
        _Replay.apply(graph, parameter)[0].backward(slope)
    torch.testing.assert_close(parameter.grad, 2 * parameter.detach() * sum(slopes))


@needs_gpu
@pytest.mark.parametrize("make", [InducingPosterior, DecoupledPosterior, MeanFieldPosterior])
def test_gradients_of_captured_draws_add_up(make):
    """As in a step of several parts: torch keeps the first gradient as it is given."""
    posterior, capture = captured(make)
    wanted = torch.autograd.grad(
        sum(loss(posterior, posterior.draw(1, seeded(seed))) for seed in (7, 8)),
        list(posterior.parameters()),
        allow_unused=True,
    )
    posterior.zero_grad()
    for seed in (7, 8):
        drawn = capture.draw(1, seeded(seed), "antithetic")
        assert isinstance(drawn.latents, KL)
        loss(posterior, drawn).backward()
        del drawn
    for parameter, gradient in zip(posterior.parameters(), wanted, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-4, rtol=1e-4)


@needs_gpu
def test_changes_of_the_posterior_make_a_new_graph():
    posterior, capture = captured(InducingPosterior)
    posterior.scale = 0.5
    want, got = posterior.draw(1, seeded()), capture.draw(1, seeded(), "antithetic")
    torch.testing.assert_close(got.B[0], want.B[0])
    assert not isinstance(capture.draw(2, None, "antithetic").latents, KL)


@needs_gpu
def test_where_nothing_is_trained_nothing_is_captured():
    posterior = InducingPosterior(LAYERS).cuda()
    point = PointPosterior(LAYERS).cuda()
    for made in (posterior.eval(), point):
        capture = Capture(made)
        for _ in range(EAGER + 2):
            assert not isinstance(capture.draw(1, None, "antithetic").latents, KL)


def test_aliases_are_other_leaves_in_the_same_memory():
    posterior = InducingPosterior(LAYERS)
    own = dict(posterior.named_parameters())
    with _aliases(posterior):
        for name, alias in posterior.named_parameters():
            assert alias is not own[name] and alias.data_ptr() == own[name].data_ptr()
            assert alias.requires_grad == own[name].requires_grad
        got = posterior.draw(1, seeded())
    assert all(parameter is own[name] for name, parameter in posterior.named_parameters())
    assert torch.equal(got.B[0], posterior.draw(1, seeded()).B[0])
