"""Test whether a model may repeat its batch between two of its layers.

Most models pass a batch through their layers, with one row per example in every argument. Some give their layers rows of
another kind, such as one per head, restore the batch's shape after the last layer, or pick one token of each row that they were
given. A model does not declare this, so it is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bayeslora.adapter.draw_expansion import DrawExpansion, tensors_in
from bayeslora.adapter.sampling import evaluating
from bayeslora.errors import out_of_memory

ROWS, TOKENS, DRAWS = 5, 2, 2
"""Size of the batch that is tried. Other sizes in a model, such as its heads, are rarely 5, so rows are told from them."""

Trying = Callable[[DrawExpansion, Tensor], AbstractContextManager[None]]
"""Prepares the means of all layers for these tokens, and repeats them as told."""

_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def may_begin(root: nn.Module, trying: Trying, device: torch.device, upper: tuple[nn.Module, ...]) -> bool:
    """Whether a batch may be repeated at the first of these ``upper`` layers, found out once for each."""
    if upper[0] not in _known:
        with torch.no_grad(), evaluating(root):
            _known[upper[0]] = _try(root, trying, device, upper)
    return _known[upper[0]]


def _try(root: nn.Module, trying: Trying, device: torch.device, upper: tuple[nn.Module, ...]) -> bool:
    """Whether some tokens come out once per draw, and all arguments of the first layer have one row each, or one for all."""
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long, device=device)
    sizes: set[int] = set()

    def watch(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes.update(len(it) for it in tensors_in([args, kwargs]) if it.ndim > 1)

    handle = upper[0].register_forward_pre_hook(watch, with_kwargs=True, prepend=True)
    try:
        with trying(DrawExpansion(upper, DRAWS), ids):
            output: Any = root.forward(input_ids=ids)  # without hooks, which expect the batch of the pass to come
        return sizes <= {1, ROWS} and len(output[0]) == DRAWS * ROWS
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        if out_of_memory(error):
            raise
        return False
    finally:
        handle.remove()
