"""CUDA graphs of the model's pass over a batch, forward and backward.

A pass over a batch of a small model takes thousands of short operators, and the GPU waits while the host launches them one by
one. Captured as graphs they are two launches. There is one pair of graphs for each shape of batch, and all share their
memory, which is that of one pass. What differs between steps, the batch and the draw, is copied into the graphs' inputs.

Where a graph does not fit, the pass runs operator by operator, with the same numbers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.holder import PosteriorHolder
from bayeslora.posterior import Factors

Compute = Callable[..., Tensor]

EAGER = 2
"""Passes over batches of one shape before its graphs are captured: a capture takes as long as a few passes."""

MOST = 32
"""Shapes of batch that have graphs."""

logger = logging.getLogger(__name__)


def graphed_pass(model: nn.Module) -> GraphedPass | None:
    """Graphs for training the adapter of this model, or ``None`` where they cannot be used."""
    if not all(p.is_cuda for p in model.parameters()):
        return None
    holder = find_any_holder(model)
    return GraphedPass(model, holder) if isinstance(holder, PosteriorHolder) and _capturable(model, holder) else None


def _capturable(model: nn.Module, holder: PosteriorHolder) -> bool:
    """Whether the whole model is on one GPU, only the adapter is trained, and activations are kept and not recomputed."""
    trained = {id(p) for p in holder.parameters()}
    parameters = list(model.parameters())
    return (
        all(p.device == parameters[0].device and not hasattr(p, "device_mesh") for p in parameters)
        and not any(p.requires_grad and id(p) not in trained for p in parameters)
        and not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    )


class GraphedPass:
    """Computes a function of a batch and of the draws in use, by graphs where possible."""

    def __init__(self, model: nn.Module, holder: PosteriorHolder) -> None:
        self.model = model
        self.holder = holder
        self.graphs: dict[Hashable, _Graph] = {}
        self.usable = True
        self.number = 0  # of the last pass that was replayed; its activations are the ones in memory
        self._seen: Counter[Hashable] = Counter()

    def __call__(self, compute: Compute, *batch: Tensor) -> Tensor:
        """Same as ``compute(*batch)``, which calls the model, does the same for all batches of one shape, and never waits."""
        factors = self.holder.factors_in_use()
        if not self.usable or not torch.is_grad_enabled() or any(it.inners for it in factors.values()):
            return compute(*batch)
        key = self._key(batch, factors)
        if key not in self.graphs:
            self._seen[key] += 1
            if self._seen[key] <= EAGER or len(self.graphs) >= MOST or not self._capture(key, compute, batch, factors):
                return compute(*batch)
        losses: Tensor = _Replay.apply(self, self.graphs[key], batch, *_stacks(factors))
        return losses

    def _key(self, batch: Sequence[Tensor], factors: Mapping[str, Factors]) -> Hashable:
        """All that a graph depends on besides the values that are copied into it: shapes, and where the weights are."""
        shapes = tuple((it.shape, it.dtype, it.requires_grad) for it in (*batch, *_stacks(factors)))
        return shapes, self.model.training, tuple(p.data_ptr() for p in self.model.parameters())

    def _capture(
        self, key: Hashable, compute: Compute, batch: Sequence[Tensor], factors: Mapping[str, Factors]
    ) -> bool:
        """Whether the graphs were captured; after a failure none is tried again."""
        try:
            with self.holder.restoring():
                self.graphs[key] = _Graph(compute, batch, self.holder, factors, next(iter(self.graphs.values()), None))
        except RuntimeError as error:  # memory has run out, or an operator cannot be captured
            logger.info("training goes on without CUDA graphs: %s", error)
            self.usable = False
            self.graphs.clear()
            torch.cuda.empty_cache()
        self.holder.factors_in_use()  # the KL is to be that of the draws, not of their copies that the graph reads
        return self.usable


def _stacks(factors: Mapping[str, Factors]) -> list[Tensor]:
    return [stack for it in factors.values() for stack in (*it.A, *it.B)]


def _leaf(stack: Tensor) -> Tensor:
    return stack.detach().clone(memory_format=torch.contiguous_format).requires_grad_(stack.requires_grad)


class _Graph:
    """A pass over batches of one shape, captured with its backward pass.

    It shares its memory and its stream with another graph, if given: torch keeps the memory of every stream apart.
    """

    def __init__(
        self,
        compute: Compute,
        batch: Sequence[Tensor],
        holder: PosteriorHolder,
        factors: Mapping[str, Factors],
        other: _Graph | None,
    ) -> None:
        self.batch = [it.clone() for it in batch]
        leaves = {
            name: replace(it, A=tuple(map(_leaf, it.A)), B=tuple(map(_leaf, it.B)), latents=None)
            for name, it in factors.items()
        }
        self.stacks = _stacks(leaves)
        self._wanted = [stack for stack in self.stacks if stack.requires_grad]

        def losses() -> Tensor:
            holder.use(leaves)
            return compute(*self.batch)

        self._capture(losses, other)

    def _capture(self, losses: Callable[[], Tensor], other: _Graph | None) -> None:
        """Capture the losses and their gradient; the state of random numbers stays as it is."""
        device = self.batch[0].device
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.random.fork_rng([device]):
            self.stream: torch.cuda.Stream = torch.cuda.Stream() if other is None else other.stream
            self._warm_up(losses)
            _require_room(device)
            torch.cuda.empty_cache()  # of the passes until now, which graphs cannot use
            with torch.cuda.graph(
                self.forward, pool=None if other is None else other.forward.pool(), stream=self.stream
            ):
                found = losses()
            self.slopes = torch.zeros_like(found)
            with torch.cuda.graph(self.backward, pool=self.forward.pool(), stream=self.stream):
                self.gradients = self._differentiate(found)
        self.losses = found.detach()

    def _warm_up(self, losses: Callable[[], Tensor]) -> None:
        """Let libraries initialise, which cannot be captured."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            found = losses()
            self.slopes = torch.zeros_like(found)
            self._differentiate(found)
        torch.cuda.current_stream().wait_stream(self.stream)

    def _differentiate(self, losses: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(losses, self._wanted, self.slopes, allow_unused=True)

    def set(self, batch: Sequence[Tensor], stacks: Sequence[Tensor]) -> None:
        """Copy a batch and a draw into the inputs."""
        with torch.no_grad():
            for kept, given in zip((*self.batch, *self.stacks), (*batch, *stacks), strict=True):
                kept.copy_(given, non_blocking=True)


def _require_room(device: torch.device) -> None:
    """Refuse unless the memory of a pass, which torch has kept from the last one, is free twice: evaluations need some too."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    if kept > free:
        raise RuntimeError(f"a pass takes {kept:,} bytes, and only {free:,} are free beside it")


class _Replay(torch.autograd.Function):
    """Replays the graphs."""

    @staticmethod
    def forward(ctx: Any, owner: GraphedPass, graph: _Graph, batch: Sequence[Tensor], *stacks: Tensor) -> Tensor:
        owner.number += 1
        ctx.owner, ctx.graph, ctx.number = owner, graph, owner.number
        graph.set(batch, stacks)
        graph.forward.replay()
        return graph.losses.clone()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        graph: _Graph = ctx.graph
        if ctx.number != ctx.owner.number:
            raise RuntimeError(
                "the gradient of a pass was asked for twice, or after the next pass, whose memory it shares; take it once, "
                "before the next pass"
            )
        ctx.owner.number += 1
        graph.slopes.copy_(slopes[0])
        graph.backward.replay()
        # copies: torch may keep a gradient as it is, and the next replay would write over it
        found = iter([None if gradient is None else gradient.clone() for gradient in graph.gradients])
        return None, None, None, *(next(found) if stack.requires_grad else None for stack in graph.stacks)
