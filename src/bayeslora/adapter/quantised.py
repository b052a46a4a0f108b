"""Which of PEFT's backends a layer with a quantised weight needs.

To find it, PEFT imports every library of quantised layers that is installed; bitsandbytes takes seconds. Plain layers need none.
"""

from __future__ import annotations

from typing import Any

from peft.utils.quantization_utils import resolve_quantization_backend
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def quantisation_backend(layer: nn.Module) -> Any:
    """The backend of a layer, or ``None`` if its weight is not quantised."""
    return None if _is_plain(layer) else resolve_quantization_backend(layer)


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is of torch's own class, or GPT-2's, and its weight an ordinary tensor: torchao replaces only that."""
    return type(layer) in (nn.Linear, Conv1D) and type(layer.weight.data) is Tensor
