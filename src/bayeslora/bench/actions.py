"""What is timed and counted: a training step, a prediction, decoding, memory, operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from bayeslora.bench.subjects import Subjects
from bayeslora.predict.mc import posterior_predictive

KL_WEIGHT = 1e-6


@dataclass
class TrainStep:
    """A repeatable training step."""

    model: Any
    ids: Tensor
    with_kl: bool
    optimiser: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(self.parameters, lr=1e-5, weight_decay=0.0, fused=self.ids.is_cuda)

    def __call__(self) -> None:
        """Take the step."""
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        if self.with_kl:
            loss = loss + KL_WEIGHT * self.model.kl().total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Predict:
    """The averaged next-token distribution of a batch."""

    model: Any
    ids: Tensor
    samples: int
    layers: str

    seed: int = 0

    @torch.no_grad()
    def __call__(self) -> Any:
        """Compute it."""
        with averaged(self.model, self.samples, self.layers, self.seed):
            return self.model(input_ids=self.ids, use_cache=False, logits_to_keep=1).logits


@dataclass(frozen=True)
class Redraw:
    """The same with other draws every time."""

    model: Any
    ids: Tensor
    samples: int
    layers: str
    seeds: Iterator[int] = field(default_factory=count)

    def __call__(self) -> Any:
        """Compute it."""
        return Predict(self.model, self.ids, self.samples, self.layers, next(self.seeds))()


@dataclass(frozen=True)
class Cold:
    """Load an adapter and predict once."""

    subjects: Subjects
    place: Path
    ids: Tensor
    samples: int

    def __call__(self) -> Any:
        """Do it."""
        return Predict(self.subjects.load(self.place).eval(), self.ids, self.samples, "all")()


@dataclass(frozen=True)
class Decode:
    """Greedy decoding."""

    model: Any
    ids: Tensor
    samples: int
    layers: str
    new_tokens: int

    @torch.no_grad()
    def __call__(self) -> Any:
        """Decode."""
        given = {"input_ids": self.ids, "attention_mask": torch.ones_like(self.ids), "do_sample": False}
        given |= {"max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens, "pad_token_id": 0}
        with averaged(self.model, self.samples, self.layers):
            return self.model.generate(**given)


def averaged(model: Any, samples: int, layers: str, seed: int = 0) -> AbstractContextManager[object]:
    """Context in which a model averages ``samples`` draws; with 0 draws the model is unchanged."""
    return posterior_predictive(model, samples, seed, layers=layers) if samples else nullcontext()


def count_operators(action: Callable[[], object]) -> int:
    """Count operators except views: roughly the number of GPU kernel launches."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += not func.is_view
            return func(*args, **(kwargs or {}))

    with Count() as count:
        action()
    return count.number


def peak_memory(step: TrainStep, device: torch.device) -> int:
    """Bytes at the peak of a few steps: on CUDA all memory, elsewhere the tensors saved for the backward pass."""
    if device.type != "cuda":
        return saved_bytes(step)
    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(3):
        step()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device))


def saved_bytes(step: TrainStep) -> int:
    """Bytes that autograd saves for the backward pass, each storage counted once and weights not at all.

    The storages are held until the end: one that is freed may leave its address to the next one.
    """
    weights = {parameter.untyped_storage().data_ptr() for parameter in step.model.parameters()}
    kept: dict[int, UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(storage.nbytes() for storage in kept.values())
