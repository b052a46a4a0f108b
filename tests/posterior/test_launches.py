"""The cost of a draw in kernel launches grows with the number of layer shapes and not of layers."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bayeslora.posterior import (
    AdaloraPosterior,
    InducingPosterior,
    LayerShape,
)
from posterior.cases import POSTERIORS, NoLooking

SHAPES = [(8, 12), (16, 12), (12, 20)]


def layers(count):
    return [LayerShape(f"layer{k}", *SHAPES[k % 3], rank=2) for k in range(count)]


class OperatorCount(TorchDispatchMode):
    """Counts the tensor operators issued while it is active, those of the backward pass included."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operators(function):
    with OperatorCount() as mode:
        function()
    return mode.count


def profiled_launches(function):
    """Operators as the profiler sees them, without those that run inside another one: on a CPU a batched product
    loops over its batch, on an accelerator it is one launch."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        function()
    issued = [event for event in trace.events() if event.name.startswith("aten::")]
    return sum(event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::") for event in issued)


def step(posterior):
    factors = posterior.draw(2)
    inner = [tensor for inner in factors.inners for tensor in inner.tensors]
    loss = sum(t.square().sum() for t in (*factors.A, *factors.B, *inner)) + posterior.kl(factors).total
    loss.backward()


@pytest.mark.parametrize("name", POSTERIORS)
def test_24_layers_cost_no_more_launches_than_6(name):
    few, many = POSTERIORS[name](layers(6)), POSTERIORS[name](layers(24))
    for work in (lambda p: p.eval().draw(4), lambda p: p.eval().mean(), lambda p: step(p.train())):
        work(few), work(many)  # first calls fill the cache of masks
        assert operators(lambda work=work: work(many)) <= operators(lambda work=work: work(few))
    assert operators(lambda: many.draw(1)) > 0  # something is counted


@pytest.mark.parametrize("name", POSTERIORS)
def test_a_step_does_not_wait_for_the_device(name, monkeypatch):
    monkeypatch.setattr("bayeslora.posterior.projection.ASYNCHRONOUS", ("cpu",))
    posterior = POSTERIORS[name](layers(6)).train()
    with NoLooking():
        step(posterior)


def test_penalty_and_allocation_of_rank_cost_no_more_for_24_layers_than_for_6():
    few, many = AdaloraPosterior(layers(6)), AdaloraPosterior(layers(24))
    step(few), step(many)
    works = [lambda p: p.penalty().backward()]
    works += [lambda p, at=at: p.after_step(at, 10) for at in (1, 3, 5, 8)]  # full, falling, final and fixed budget
    for work in works:
        baseline = operators(lambda work=work: work(few))
        assert baseline > 0
        assert operators(lambda work=work: work(many)) <= baseline


def test_allocation_of_rank_does_not_wait_for_the_device():
    posterior = AdaloraPosterior(layers(6))
    step(posterior)
    with NoLooking():
        for at in range(1, 11):
            posterior.after_step(at, 10)


def test_the_profiler_agrees():
    few, many = InducingPosterior(layers(6)), InducingPosterior(layers(24))
    few.draw(1), many.draw(1)
    assert profiled_launches(lambda: many.draw(1)) <= profiled_launches(lambda: few.draw(1))


def test_one_cholesky_for_all_kernels_of_one_size():
    posterior = InducingPosterior(layers(30))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        posterior.draw(1)
    counts = {event.key: event.count for event in trace.key_averages()}
    assert counts["aten::linalg_cholesky_ex"] == 1


def test_few_tensors():
    """Optimisers pay per tensor: their number follows the shapes."""
    assert len(list(InducingPosterior(layers(24)).parameters())) == len(list(InducingPosterior(layers(6)).parameters()))


def test_draws_keep_the_layers_contiguous():
    """Layers multiply by Aᵀ and Bᵀ; both are rows in memory, so no copy is needed."""
    A, B = InducingPosterior(layers(6)).draw(2)["layer1"]
    assert A.is_contiguous()
    assert B.mT.is_contiguous()
    assert torch.equal(B.mT.contiguous().mT, B)
