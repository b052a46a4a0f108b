"""CUDA graphs of draws in training.

A draw with its KL and their backward pass takes hundreds of small operators, whatever the number of layers. Launched one by
one, they keep the GPU waiting for the host. Captured as graphs they are two launches. A step only sets a fresh seed, from which
the graph makes its noise.

A graph writes its draws to the same memory every time. So it is replayed only when the last draw is no longer needed: its
gradient was taken, or nothing references it. Otherwise, and wherever else a graph does not fit, draws run operator by
operator, with the same numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bayeslora.posterior.base import Posterior
from bayeslora.posterior.factors import Factors
from bayeslora.posterior.kl import KL
from bayeslora.posterior.noise import Variates

EAGER = 3
"""Draws before a graph is captured: it does not pay off for a few steps."""


class Capture:
    """Draws from one posterior, with a CUDA graph where possible."""

    def __init__(self, posterior: Posterior) -> None:
        self.posterior = posterior
        self._key: tuple[Any, ...] = ()
        self._alike = 0
        self._graph: Graph | None = None

    def draw(self, n: int, generator: torch.Generator | None, variates: Variates) -> Factors:
        """Same as :meth:`Posterior.draw`; where a graph was used, the draw includes its KL."""
        posterior = self.posterior
        if not _eligible(posterior):
            return posterior.draw(n, generator, variates)
        key = (n, variates, posterior.scale, *((p.data_ptr(), p.requires_grad) for p in posterior.parameters()))
        if key != self._key:
            self._key, self._alike, self._graph = key, 0, None
        self._alike += 1
        if self._alike <= EAGER or (self._graph is not None and self._graph.in_use):
            return posterior.draw(n, generator, variates)
        if self._graph is None:
            self._graph = Graph(posterior, n, variates)
        return self._graph.draw(generator)


def _eligible(posterior: Posterior) -> bool:
    parameters = list(posterior.parameters())
    return (
        posterior.capturable
        and posterior.training
        and torch.is_grad_enabled()
        and any(p.requires_grad for p in parameters)
        and all(p.is_cuda and type(p.data) is Tensor for p in parameters)  # not sharded over processes
        and not torch.cuda.is_current_stream_capturing()
    )


@contextmanager
def _aliases(posterior: Posterior) -> Iterator[None]:
    """Replace the parameters, inside the block, by other leaves in the same memory.

    Autograd ties a leaf to the stream of its first use, and a graph captured on another stream may not wait for that one.
    Earlier draws that are still alive have used the parameters themselves.
    """
    kept = [(module, dict(module._parameters)) for module in posterior.modules()]
    for module, parameters in kept:
        for name, parameter in parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.data, parameter.requires_grad)
    try:
        yield
    finally:
        for module, parameters in kept:
            module._parameters.update(parameters)


class _Token:
    """Alive as long as the gradient of a draw may be requested."""


class Graph:
    """A draw of a posterior and its KL, captured with their backward pass."""

    def __init__(self, posterior: Posterior, n: int, variates: Variates) -> None:
        self.parameters = [p for p in posterior.parameters() if p.requires_grad]
        self.number = 0
        self._used_up = True
        self._last: weakref.ref[_Token] | None = None
        device = self.parameters[0].device
        self.noise = posterior.noise(None, variates)
        with torch.cuda.device(device), _aliases(posterior):
            self._leaves = [p for p in posterior.parameters() if p.requires_grad]
            self._capture(posterior, n, torch.cuda.Stream(device))

    def _capture(self, posterior: Posterior, n: int, stream: torch.cuda.Stream) -> None:
        """Capture on a stream of the posterior's device; torch's default stream may be on another device."""
        self._warm_up(posterior, n)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.forward, stream=stream):
            factors, self.outputs = self._work(posterior, n)
        self.by_outputs = [torch.zeros_like(output) for output in self.outputs]
        with torch.cuda.graph(self.backward, pool=self.forward.pool(), stream=stream):
            self.found = self._gradients(self.outputs, self.by_outputs)
        self._factors = factors.detach()

    def _warm_up(self, posterior: Posterior, n: int) -> None:
        """Let libraries initialise, which cannot be captured."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                _, outputs = self._work(posterior, n)
                self._gradients(outputs, [torch.zeros_like(output) for output in outputs])
        torch.cuda.current_stream().wait_stream(side)

    def _work(self, posterior: Posterior, n: int) -> tuple[Factors, tuple[Tensor, ...]]:
        factors = posterior.draw_from(self.noise.rewind(), n)
        kl = posterior.kl(factors)
        self._terms = tuple(kl.terms)
        return factors, (*factors.A, *factors.B, *kl.terms.values())

    def _gradients(self, outputs: Sequence[Tensor], by_outputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        pairs = [(output, given) for output, given in zip(outputs, by_outputs, strict=True) if output.requires_grad]
        # retain the graph: otherwise its memory would be reused, and gradients could be taken only once
        wanted, given = zip(*pairs, strict=True)
        return torch.autograd.grad(wanted, self._leaves, given, retain_graph=True, allow_unused=True)

    @property
    def in_use(self) -> bool:
        """Whether the gradient of the last draw may still be requested."""
        return not self._used_up and self._last is not None and self._last() is not None

    def draw(self, generator: torch.Generator | None) -> Factors:
        """The next draw."""
        self.noise.restart(generator)
        outputs = _Replay.apply(self, *self.parameters)
        half, both = len(self._factors.A), 2 * len(self._factors.A)
        kl = KL(dict(zip(self._terms, outputs[both:], strict=True)))
        return replace(self._factors, A=outputs[:half], B=outputs[half:both], latents=kl)

    def begin(self) -> tuple[_Token, int]:
        """Start a new draw, which replaces the last one."""
        token = _Token()
        self.number, self._used_up, self._last = self.number + 1, False, weakref.ref(token)
        return token, self.number

    def use_up(self) -> None:
        """Mark the gradient of the last draw as taken."""
        self._used_up = True


class _Replay(torch.autograd.Function):
    """Replays the graphs."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.graph, (ctx.token, ctx.number) = graph, graph.begin()
        graph.forward.replay()
        made = tuple(output.detach() for output in graph.outputs)
        ctx.mark_non_differentiable(*(it for it, own in zip(made, graph.outputs, strict=True) if not own.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        graph: Graph = ctx.graph
        if ctx.number != graph.number:
            raise RuntimeError(
                "the gradient of a draw was asked for after the next draw was made, whose memory it shares; take gradients "
                "before the model is called again"
            )
        for kept, gradient in zip(graph.by_outputs, gradients, strict=True):
            kept.zero_() if gradient is None else kept.copy_(gradient)
        graph.backward.replay()
        graph.use_up()
        # copies: torch may keep a gradient as it is, and the next replay would write over it
        return None, *(None if gradient is None else gradient.clone() for gradient in graph.found)
