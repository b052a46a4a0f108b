"""The order of the training examples in an epoch."""

from __future__ import annotations

import random
from collections.abc import Sequence

WINDOW = 32
"""Batches whose examples are exchanged so that each has examples of similar length."""


def order_of_epoch(lengths: Sequence[int], batch_size: int, source: random.Random) -> list[int]:
    """A random order in which the examples of a batch are of similar length, so that little padding is needed.

    All examples are shuffled. The batches of a window then share out its examples by length, and all batches are shuffled. A
    window is at most a quarter of the batches, so every epoch has other batches. What does not fill a batch comes last.

    Args:
        lengths: of all examples. Where they are equal, the order is a plain shuffle.
        batch_size: examples of a batch.
        source: of the randomness.
    """
    order = list(range(len(lengths)))
    source.shuffle(order)
    batches = len(order) // batch_size
    window = min(WINDOW, batches // 4) * batch_size
    if window <= batch_size or len(set(lengths)) == 1:
        return order
    full = batches * batch_size
    rows: list[int] = []
    for start in range(0, full, window):
        rows += sorted(order[start : min(start + window, full)], key=lengths.__getitem__)
    numbers = list(range(batches))
    source.shuffle(numbers)
    mixed = [row for number in numbers for row in rows[number * batch_size : (number + 1) * batch_size]]
    return mixed + order[full:]
