"""Gradients of a draw under re-entrant gradient checkpointing.

Re-entrant checkpointing runs a separate backward pass for every block. The factors of all blocks come from one graph
(the draw), which the second block would find freed. So the layers get *leaves* instead, cut from the draw; each block's
backward adds to their ``.grad``. The leaves are tied to the draw by an identity on the first activation of the network:
its backward runs after that of every block, and passes the collected gradients on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayeslora.adapter.draws import Draws


class Bridge:
    """Leaves for the layers, and the identity that connects them to the draw they were cut from."""

    def __init__(self, drawn: Sequence[Tensor]) -> None:
        self._drawn = tuple(drawn)
        self.leaves = tuple(tensor.detach().requires_grad_() for tensor in drawn)
        self.crossed = False

    def cross(self, activation: Tensor) -> Tensor:
        """The activation unchanged, with the draw attached to it in the graph."""
        self.crossed = True
        crossed: Tensor = _Identity.apply(activation, self.leaves, *self._drawn)
        return crossed

    @classmethod
    def across(cls, drawn: Mapping[str, Draws]) -> tuple[Bridge, dict[str, Draws]]:
        """Create a bridge for these draws, by adapter; also returns the same draws with leaves in the layers."""
        bridge = cls([tensor for draws in drawn.values() for tensor in draws.tensors if tensor.requires_grad])
        leaves = iter(bridge.leaves)

        def leaf(tensor: Tensor) -> Tensor:
            return next(leaves) if tensor.requires_grad else tensor

        return bridge, {name: draws.map(leaf) for name, draws in drawn.items()}

    def hang(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the first activation of the pass with these arguments cross; returns the arguments if they change."""
        if kwargs.get("inputs_embeds") is not None:
            return args, {**kwargs, "inputs_embeds": self.cross(kwargs["inputs_embeds"])}
        embeddings = getattr(root, "get_input_embeddings", lambda: None)()
        if embeddings is not None:
            _once_after(embeddings, self.cross)
        return None


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, leaves: tuple[Tensor, ...], *drawn: Tensor) -> Tensor:
        ctx.leaves = leaves
        return activation.view_as(activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        collected = tuple(leaf.grad for leaf in ctx.leaves)
        for leaf in ctx.leaves:
            leaf.grad = None
        return (grads[0], None, *collected)


def uses_reentrant_checkpointing(modules: Sequence[nn.Module]) -> bool:
    """Whether any of these modules is checkpointed by transformers in the re-entrant way."""
    for module in modules:
        if getattr(module, "gradient_checkpointing", False) and module.training:
            function = getattr(module, "_gradient_checkpointing_func", None)
            if getattr(function, "keywords", {}).get("use_reentrant", False):
                return True
    return False


def _once_after(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to the module's next output only."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        handle.remove()
        return function(output)

    handle = module.register_forward_hook(hook)
