"""torch.compile of an adapted model: the same numbers, and no recompilation from draw to draw."""

import pytest
import torch
import torch._dynamo

from adapter.cases import adapted, generator, logits, tokens
from bayeslora import find_holder
from rounding import summed

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_counting(model):
    """Compile with a backend that runs the graph as it is and counts how often it is asked."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    return torch.compile(model, backend=backend), compiled


def test_evaluation_and_draws():
    model = adapted()
    expected = [logits(model)]
    for seed in range(3):
        with model.draws(2, generator(seed)):
            expected.append(logits(model))
    faster, compiled = compile_counting(model)
    torch.testing.assert_close(logits(faster), expected[0], atol=1e-5, rtol=1e-4)
    counts = []
    for seed in range(3):
        with model.draws(2, generator(seed)):
            torch.testing.assert_close(logits(faster), expected[1 + seed], atol=1e-5, rtol=1e-4)
        counts.append(len(compiled))
    assert counts[1] == counts[2], "a new draw must not compile the model again"


def test_training():
    model = adapted().train()

    def gradients(callable_model):
        model.zero_grad()
        model.seed_draws(0)
        callable_model(input_ids=tokens(), labels=tokens()).loss.backward()
        return {n: p.grad.clone() for n, p in find_holder(model).named_parameters()}

    expected = gradients(model)
    faster, compiled = compile_counting(model)
    counts = []
    for _ in range(3):
        got = gradients(faster)
        counts.append(len(compiled))
        for name, grad in expected.items():
            torch.testing.assert_close(got[name], grad, **summed(grad))
    assert counts[1] == counts[2]
