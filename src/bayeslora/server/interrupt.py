"""Interrupts a forward pass of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Interrupted(Exception):
    """A forward pass was interrupted because its result is no longer needed."""


@contextmanager
def interruptible(model: nn.Module, wanted: Callable[[], bool]) -> Iterator[None]:
    """Inside the block, a forward pass raises :class:`Interrupted` before its next module once ``wanted`` returns true."""

    def check(module: nn.Module, args: Any) -> None:
        if wanted():
            raise Interrupted

    handles = [module.register_forward_pre_hook(check) for module in model.modules() if not any(module.children())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
