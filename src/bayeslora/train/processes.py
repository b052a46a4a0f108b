"""Data-parallel training of one adapter: how processes divide examples and exchange gradients.

A launcher (``accelerate launch``, ``torchrun``) starts them. Every process has the whole posterior and makes the same draws.
The examples of a step are divided and gradients summed: the step is that of one process with all examples. The base model is
frozen, so none of it is sent, unless it is sharded (FSDP2), where layers are gathered on use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn

from bayeslora.adapter.base import Holder
from bayeslora.adapter.draw_expansion import Stack
from bayeslora.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those that train together; alone by default.

    Attributes:
        rank: its index.
        count: number of processes.
        device: of its model, if the launcher determines it.
    """

    rank: int = 0
    count: int = 1
    device: str | None = None

    @classmethod
    def join(cls, device: str = "auto") -> Processes:
        """Join the processes that a launcher has started, or use this one alone."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            raise InputError(
                "DeepSpeed needs a trainer: use bayeslora.train.trainer (docs/distributed.md), or a config for DDP or FSDP here"
            )
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu")
        return cls(state.process_index, state.num_processes, str(state.device))

    @property
    def main(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0

    def agree(self, decide: Callable[[], T]) -> T:
        """Broadcast the decision of the main process. If it raises, the launcher ends all processes."""
        if self.count == 1:
            return decide()
        told: list[Any] = [decide() if self.main else None]
        torch.distributed.broadcast_object_list(told, device=torch.device(self.device or "cpu"))
        decided: T = told[0]
        return decided

    def share(self, examples: Sequence[T]) -> tuple[list[T], list[float]]:
        """The examples of this process, and their weights.

        All processes get equally many, since sharded layers are gathered by all at once: where there are not enough, an
        example of weight zero fills in.
        """
        size = -(-len(examples) // self.count)
        mine = list(examples[self.rank :: self.count])
        missing = size - len(mine)
        return [*mine, *[examples[0]] * missing], [1.0] * len(mine) + [0.0] * missing

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all processes, in one message."""
        if self.count == 1 or not tensors:
            return
        joined = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
        torch.distributed.all_reduce(joined)
        for tensor, total in zip(tensors, joined.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(total.view_as(tensor))

    @property
    def sharded(self) -> bool:
        """Whether the launcher is configured to shard the base model."""
        return self.count > 1 and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"

    def shard(self, model: nn.Module, holder: Holder) -> None:
        """Shard the base model over the processes, layer by layer; the posterior stays whole in each of them."""
        if not self.sharded:
            return
        if os.environ.get("FSDP_VERSION", "1") != "2":
            raise InputError("FSDP 1 cannot leave the posterior whole; set fsdp_version: 2 in accelerate's config")
        from torch.distributed.fsdp import fully_shard

        stack = Stack.find(model, holder.layer_names)
        if stack is None:
            raise InputError(
                "the adapted modules are not in one list of layers, so the model cannot be sharded by layers"
            )
        whole = set(holder.parameters())
        for layer in stack.layers:
            fully_shard(layer, ignored_params=whole)
        fully_shard(model, ignored_params=whole)
        holder.to(self.device)
