"""Find weights with NaN or infinity in one pass, and name them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bayeslora.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn


def require_finite_weights(model: nn.Module, name: str) -> None:
    """Refuse a model whose weights are not all finite; ``name`` is its name for the user."""
    found = first_not_finite(model.named_parameters())
    if found is not None:
        raise InputError(f"{name}: its weights hold NaN or infinity, in {found!r}; get the model again")


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Name of the first of these tensors that contains NaN or infinity; non-float tensors (quantised weights) are skipped.

    It checks minimum and maximum, which are both NaN if any number is. That reads a tensor once, needs no mask of its size, and
    synchronises with devices only at the end.
    """
    import torch

    held = [(name, tensor.detach()) for name, tensor in tensors if tensor.is_floating_point()]
    held = [(name, tensor) for name, tensor in held if tensor.numel() and not tensor.is_meta]
    if not held:
        return None
    device = held[0][1].device
    ends = torch.stack([_ends(tensor).to(device, non_blocking=True) for _, tensor in held])
    wrong = (~torch.isfinite(ends)).any(1).nonzero().flatten().tolist()
    return held[wrong[0]][0] if wrong else None


def _ends(tensor: Tensor) -> Tensor:
    """Minimum and maximum."""
    import torch

    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # torch cannot compare 8-bit floats
    return torch.stack(torch.aminmax(wide)).double()
