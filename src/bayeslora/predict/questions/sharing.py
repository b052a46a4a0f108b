"""Test whether options and questions may share a row of a batch without influencing each other.

Pure attention models follow the mask and the positions. Recurrent layers do not, nor do layers that derive positions from
columns, and some models accept no such mask. A model does not declare this, so it is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from bayeslora.adapter.sampling import MEAN, sampled
from bayeslora.predict.questions.options import Encoded, attention_window, pack, packed_length, score_options

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Tolerance for round-off between two scores of the same text, per token, by precision."""

IN_HALF_PRECISION = 0.1

_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class _Question(NamedTuple):
    prompt_ids: Sequence[int]
    option_ids: Sequence[Sequence[int]]


def may_share_rows(model: nn.Module, items: Sequence[Encoded]) -> bool:
    """Whether these questions get the same scores in shared rows as alone."""
    window = attention_window(model)
    if window is not None and max(map(packed_length, items)) > window:
        return False
    if next(model.parameters()).is_meta:  # nothing is computed, and shared rows need the least memory
        return True
    base = getattr(model, "get_base_model", lambda: model)()
    if base not in _known:
        _known[base] = _scores_copies_alike(model)
    return _known[base]


@torch.no_grad()
def _scores_copies_alike(model: nn.Module) -> bool:
    """Whether a question's second option gets the score of the first, if it is the same text.

    It would not if it attended to the first, or if its position in the row mattered.
    """
    first = next(model.parameters())
    ids = [number % model.get_input_embeddings().weight.shape[0] for number in range(3, 27)]  # type: ignore[operator]
    question = _Question(ids[:16], [ids[16:]] * 2)

    def scores(apart: bool) -> list[float]:
        with sampled(model, MEAN):
            found: list[float] = score_options(model, pack([question], apart=apart).to(first.device)).mean[0].tolist()
        return found

    try:
        one, other = scores(apart=False)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        IndexError,
    ):  # the mask is not accepted, or another failure
        scores(apart=True)
        return False
    precision = getattr(model, "dtype", first.dtype)
    return abs(one - other) <= TOLERANCE.get(precision, IN_HALF_PRECISION)
