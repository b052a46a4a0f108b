"""Test whether options and questions may share a row of a batch without influencing each other.

Pure attention models follow the mask and the positions. Recurrent layers do not, nor do layers that derive positions from
columns, and some models accept no such mask. A model does not declare this, so it is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from bayeslora.adapter.sampling import MEAN, sampled
from bayeslora.predict.questions.options import Encoded, attention_window, pack, packed_length, packed_logits

TOLERANCE = 1e-5
"""Root mean square of differences of log-probabilities below which two predictions are the same, in every precision."""

ROUND_OFF = 3.0
"""How many times the difference between two ways to compute the same prediction: so much may be round-off."""

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
    """Whether a question's second option is predicted as the first, if it is the same text.

    It would not if it attended to the first, or if its position in the row mattered.
    """
    first = next(model.parameters())
    ids = [number % model.get_input_embeddings().weight.shape[0] for number in range(3, 27)]  # type: ignore[operator]
    question = _Question(ids[:16], [ids[16:]] * 2)

    def predict(apart: bool) -> Tensor:
        batch = pack([question], apart=apart).to(first.device)
        with sampled(model, MEAN):
            logits = packed_logits(model, batch)[0, batch.source]
        return logits.unflatten(0, (2, -1))

    try:
        one, other = predict(apart=False)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        IndexError,
    ):  # the mask is not accepted, or another failure
        predict(apart=True)
        return False
    precision = getattr(model, "dtype", first.dtype)
    return same_up_to_round_off(one, other, lambda: predict(apart=True)[0], precision)


def same_up_to_round_off(one: Tensor, other: Tensor, again: Callable[[], Tensor], precision: torch.dtype) -> bool:
    """Whether two predictions, logits of one shape, differ by round-off only.

    ``again`` computes the first in another way, which shows how large round-off is: at least that of the logits themselves. A
    fixed tolerance for half precision would be as large as what a state of another option does.
    """
    difference = _distance(one, other)
    if difference <= TOLERANCE:
        return True
    of_logits = torch.finfo(precision).eps * _root_mean_square(one)
    return difference <= ROUND_OFF * max(of_logits, _distance(one, again()))


def _distance(one: Tensor, other: Tensor) -> float:
    """Root mean square of the differences of log-probabilities."""
    return _root_mean_square(one.log_softmax(-1) - other.log_softmax(-1))


def _root_mean_square(values: Tensor) -> float:
    squared: Any = values.square().mean().tolist()
    return math.sqrt(squared)
