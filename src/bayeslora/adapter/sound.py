"""Checks that the tensors of an adapter are finite floating-point numbers; others are damaged or not an adapter's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bayeslora.errors import InputError
from bayeslora.models.finite import first_not_finite


def require_finite(tensors: Mapping[str, Tensor], where: object) -> None:
    """Refuse tensors that contain NaN or infinity."""
    found = first_not_finite(tensors.items())
    if found is not None:
        raise InputError(f"{where}: tensor {found!r} holds NaN or infinity; restore the adapter, or train it again")


def require_floats(tensors: Mapping[str, Tensor], but: Mapping[str, Tensor] | None = None) -> None:
    """Refuse integers, booleans and complex numbers, which torch would silently cast, except where ``but`` has them."""
    for name, tensor in tensors.items():
        own = None if but is None else but.get(name)
        if not tensor.is_floating_point() and (own is None or own.dtype != tensor.dtype):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(
                f"tensor {name!r} is of type {kind}, and an adapter's are floats; save it again as float32"
            )
