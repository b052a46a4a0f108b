"""Detect 4-bit weights that bitsandbytes dequantises wrongly.

On x86 CPUs some versions of it (0.50.2 is one) read a weight by rows where it was written by blocks of 64 numbers. Rows whose
length is not a multiple of a block then silently get the scales of others.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

BLOCK = 64
"""Numbers that share a scale, the default of bitsandbytes."""

_told: WeakSet[nn.Module] = WeakSet()


def warn_of_wrong_rows(model: nn.Module) -> None:
    """Warn, once per model, if its 4-bit layers are dequantised wrongly."""
    wrong = {name: layer.in_features for name, layer in _on_cpu(model) if layer.in_features % _block(layer)}
    if not wrong or model in _told or not reads_rows_wrongly():
        return
    _told.add(model)
    name, length = next(iter(wrong.items()))
    warnings.warn(
        f"bitsandbytes misreads 4-bit weights on this CPU if their rows are no multiple of {BLOCK} numbers long, as in "
        f"{len(wrong)} layers of this model ({length} in {name}): its answers will be wrong; use a GPU, 8 bits, or no "
        "quantisation",
        stacklevel=3,
    )


@functools.cache
def reads_rows_wrongly() -> bool:
    """Whether quantising and dequantising a weight with short rows fails on this CPU."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.ones(BLOCK, BLOCK // 2)
    weight[BLOCK // 2 :] = 100.0  # blocks get different scales
    return not torch.allclose(dequantize_4bit(*quantize_4bit(weight, quant_type="nf4")), weight)


def _on_cpu(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The 4-bit layers of a model on the CPU."""
    layers: Any = sys.modules.get("bitsandbytes.nn")  # without it nothing is quantised
    if layers is None:
        return
    for name, layer in model.named_modules():
        if isinstance(layer, layers.Linear4bit) and layer.weight.device.type == "cpu":
            yield name, layer


def _block(layer: Any) -> int:
    state = getattr(layer.weight, "quant_state", None)
    return BLOCK if state is None else int(state.blocksize)
