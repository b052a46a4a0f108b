"""Batches of a trainer in smaller parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def split_rows(inputs: Mapping[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch as batches of at most ``size`` rows; what has no row for each is in all of them."""
    count = len(inputs["input_ids"])
    for first in range(0, count, size):
        yield {
            name: value[first : first + size]
            if isinstance(value, Tensor) and value.ndim and len(value) == count
            else value
            for name, value in inputs.items()
        }
