"""Estimates the cost of a run before it starts: parameters, memory, steps and time, without loading any weights.

The model is built on torch's ``meta`` device, whose tensors have shapes but no data. A real training step on it shows what
the backward pass would keep.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import masking_utils

from bayeslora.adapter.base import ATTRIBUTE, find_any_holder
from bayeslora.adapter.draw_expansion import Stack
from bayeslora.adapter.lean_layers import lean_layers
from bayeslora.methods import find_method
from bayeslora.models.device import resolve_device, resolve_dtype
from bayeslora.models.load import load_empty
from bayeslora.number_checks import check_number
from bayeslora.runs.config import RunConfig, resolve
from bayeslora.train.objective import Named
from bayeslora.train.run import adapt, open_task
from bayeslora.train.task_runner import TaskRunner

ADAM_BYTES = 16
"""Bytes per trained scalar: its value, its gradient and two moments, in float32."""

GIB = 2**30

SHOWN = 3
"""Number of training examples to show."""

LONGEST_PIECE = 600
"""Longest piece of an example to show whole, in characters."""

Example = tuple[tuple[str, bool], ...]

REACHED = 0.4
"""Approximate share of the speed of a matrix product that training reaches."""


@dataclass(frozen=True)
class Estimate:
    """Estimated cost of a run on one device.

    Attributes:
        parameters: of the base model.
        active_parameters: of those, how many a token uses.
        trainable: of the adapter.
        base_bytes: the frozen weights.
        trained_bytes: adapter, gradients and the optimiser's state.
        activation_bytes: kept for the backward pass of the largest batch.
        steps: of the optimiser, if training does not end early.
        tokens: processed in all of them.
        flops: of all steps, forward and backward.
        seconds: at the assumed speed.
        tflops: that speed.
        examples: some training examples as the model reads them: pieces of text, with whether they are learnt.
    """

    parameters: int
    active_parameters: int
    trainable: int
    base_bytes: int
    trained_bytes: int
    activation_bytes: int
    steps: int
    tokens: int
    flops: float
    seconds: float
    tflops: float
    examples: tuple[Example, ...] = ()

    @property
    def bytes(self) -> int:
        """Total memory."""
        return self.base_bytes + self.trained_bytes + self.activation_bytes

    def to_dict(self) -> dict[str, Any]:
        """All figures by name."""
        return {**asdict(self), "bytes": self.bytes}

    def __str__(self) -> str:
        return "\n".join(
            [
                f"base model     {self.parameters / 1e9:.2f} billion parameters"
                + (
                    f", {self.active_parameters / 1e9:.2f} for each token"
                    if self.active_parameters < self.parameters
                    else ""
                ),
                f"adapter        {self.trainable / 1e6:.2f} million parameters",
                f"memory         {self.bytes / GIB:.1f} GiB: base {self.base_bytes / GIB:.1f}, adapter with its optimiser "
                f"{self.trained_bytes / GIB:.2f}, activations of the largest batch {self.activation_bytes / GIB:.1f}",
                f"steps          {self.steps} at most, {self.tokens / 1e6:.2f} million tokens",
                f"time           about {_duration(self.seconds)} of training at {self.tflops:.2g} TFLOP/s; evaluation comes on "
                "top",
                *(
                    f"\nexample {number}, of which [[this]] is learnt:\n{_marked(it)}"
                    for number, it in enumerate(self.examples, 1)
                ),
            ]
        )


def _marked(example: Example) -> str:
    """An example as text, shortened in the middle of long pieces, with marks around what is learnt."""
    return "".join(f"[[{_shortened(text)}]]" if learnt else _shortened(text) for text, learnt in example)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_PIECE else f"{text[: LONGEST_PIECE // 2]} ... {text[-LONGEST_PIECE // 2 :]}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{math.ceil(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def estimate(
    config: RunConfig, data_dir: Path | None = None, *, device: str = "auto", tflops: float | None = None
) -> Estimate:
    """Estimate the cost of a run on one device; ``tflops`` is the speed actually reached there.

    By default that is :data:`REACHED` of the speed of a matrix product, measured on this machine.
    """
    if tflops is not None:
        check_number("tflops", tflops, above=0)
    config = resolve(config)
    runner = open_task(config, data_dir)
    place = resolve_device(device)
    precision = resolve_dtype(config.loading.dtype, place)
    tflops = tflops or REACHED * product_speed(place, precision)
    loaded = load_empty(config.model, precision, config.loading.revision)
    base = loaded.model
    parameters = sum(p.numel() for p in _once(base))
    idle = _idle_parameters(base)
    width = config.loading.bits / 8 if config.loading.bits else precision.itemsize
    runner.encode(loaded)
    model = adapt(loaded, config)
    if config.training.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with _lean_attention():
        runner.bind(model, None)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    epochs, size = (config.training.epochs or 1) * _trainings(config), config.training.batch_size or 1
    tokens = sum(map(runner.length, runner.examples)) * epochs
    below = _below(model)
    runner.config = replace(config, training=replace(config.training, cache_trunk=False))  # meta tensors hold no data
    with _lean_attention():
        runner.bind(model, None)
        with lean_layers(model, place):
            kept = _kept(model, runner, runner.largest_batch(config.training.micro_batch or size))
    forward = parameters - idle - (below if config.training.cache_trunk else 0)
    backward = (2 if config.training.gradient_checkpointing else 1) * (parameters - idle - below)
    flops = 2.0 * (forward + backward) * tokens
    if config.training.cache_trunk:
        flops += 2.0 * below * tokens / max(1, epochs)  # once, to fill the cache
    return Estimate(
        parameters=parameters,
        active_parameters=parameters - idle,
        trainable=trainable,
        base_bytes=math.ceil(parameters * width),
        trained_bytes=ADAM_BYTES * trainable,
        activation_bytes=kept,
        steps=math.ceil(len(runner.examples) / size) * epochs,
        tokens=tokens,
        flops=flops,
        seconds=flops / (tflops * 1e12),
        tflops=tflops,
        examples=tuple(tuple(runner.show(it)) for it in runner.examples[:SHOWN]),
    )


def product_speed(device: torch.device, precision: torch.dtype, size: int = 1024) -> float:
    """TFLOP/s of a product of two square matrices, the best of several trials."""
    left, right = (torch.ones(size, size, device=device, dtype=precision) for _ in range(2))
    best = math.inf
    for _ in range(4):  # the first also initialises the libraries
        start = time.perf_counter()
        float((left @ right)[0, 0])  # waits for the result
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best / 1e12


def _below(model: nn.Module) -> int:
    """Parameters of the layers below the lowest adapted one, which need no backward pass."""
    root = next(module for module in model.modules() if ATTRIBUTE in module._modules)
    names = find_any_holder(model).layer_names
    stack = Stack.find(root, names)
    if stack is None:
        return 0
    frozen = stack.layers[: min(map(stack.index, names))]
    return sum(p.numel() for p in frozen.parameters())


def _trainings(config: RunConfig) -> int:
    """Number of training runs: one, or one for each LoRA that the method needs and was not given."""
    method = find_method(config.method)
    if method.fit_post_hoc is None:
        return 1
    return 0 if config.start_from else method.loras(config.adapter.settings)


def _kept(model: nn.Module, runner: TaskRunner, batch: Sequence[Named]) -> int:
    """Bytes that a training step keeps for its backward pass, without the weights."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    model.train()
    find_any_holder(model).draw(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        runner.objective.losses(batch, 1)
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in weights)


class _Attention(torch.autograd.Function):
    """Attention like a GPU's fused kernels: keeps inputs and output, but no matrix of tokens times tokens."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, output)
        return output


@contextmanager
def _lean_attention() -> Iterator[None]:
    """Use GPU-like attention inside the block; on ``meta`` torch would use the plain formula. Nor may transformers look for
    several texts in one row, which would read values."""
    own, find_packed = F.scaled_dot_product_attention, masking_utils.find_packed_sequence_indices

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _Attention.apply(query, key, value)

    F.scaled_dot_product_attention, masking_utils.find_packed_sequence_indices = attention, lambda position_ids: None
    try:
        yield
    finally:
        F.scaled_dot_product_attention, masking_utils.find_packed_sequence_indices = own, find_packed


def _once(model: nn.Module) -> list[nn.Parameter]:
    """Parameters, tied ones counted once."""
    return list({id(p): p for p in model.parameters()}.values())


def _idle_parameters(model: nn.Module) -> int:
    """Parameters of experts that a token does not use."""
    config: Any = model.config
    experts, used = getattr(config, "num_experts", None), getattr(config, "num_experts_per_tok", None)
    if not experts or not used:
        return 0
    total = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return round(total * (1.0 - used / experts))
