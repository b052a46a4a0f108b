"""Score many questions with one model, in batches of similar length, for one or several draws of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.sampling import Sampling, sampled
from bayeslora.errors import out_of_memory
from bayeslora.models.context import context_length
from bayeslora.predict.mc import average_draws
from bayeslora.predict.questions.options import Encoded, OptionScores, PackedBatch, pack, packed_length, score_options
from bayeslora.predict.questions.sharing import may_share_rows

T = TypeVar("T")


class Scorer:
    """Scores questions with a model.

    Args:
        model: a causal language model.
        pad_id: padding token; other tokens never attend to it.
    """

    def __init__(self, model: nn.Module, pad_id: int = 0) -> None:
        self.model = model
        self.pad_id = pad_id

    def __call__(self, items: Sequence[Encoded], draws: int = 1, *, blocks: int = 1) -> OptionScores:
        """Scores of the questions under each of the draws in use, in blocks ``[draws · N, O]``.

        With ``blocks`` the questions are divided among that many draws instead, and each is scored by one of them.
        """
        return score_options(self.model, self.pack(items, blocks=blocks), copies=self._copies(draws))

    def pack(self, items: Sequence[Encoded], *, blocks: int = 1) -> PackedBatch:
        """Pack the questions into a batch for the model."""
        multiple = 8 if self.device.type == "cuda" else 1
        apart = not may_share_rows(self.model, items)
        return pack(items, self.pad_id, multiple=multiple, blocks=blocks, apart=apart).to(self.device)

    def _copies(self, draws: int) -> int:
        """How often to repeat a batch; some adapters repeat it themselves."""
        return 1 if find_any_holder(self.model).fans_out else draws

    def prepare(
        self, items: Sequence[Encoded], batch_tokens: int, advance: Callable[[int, int], None] | None = None
    ) -> None:
        """Precompute for questions to be scored later; does nothing here."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @property
    def context(self) -> int | None:
        """Context length of the model in tokens, if known."""
        return context_length(self.model)


@dataclass(frozen=True)
class DrawScores:
    """Scores of ``N`` questions under each of ``n`` draws; ``-inf`` where a question has no such option.

    Attributes:
        log_probabilities: ``[n, N, O]``, normalised over the options present.
        totals: ``[n, N, O]``, log-likelihood of the whole option.
    """

    log_probabilities: Tensor
    totals: Tensor

    @property
    def predictive(self) -> NDArray[np.float64]:
        """Logarithm of the predicted distribution, ``[N, O]``: probabilities averaged over the draws."""
        averaged: NDArray[np.float64] = average_draws(self.log_probabilities).numpy()
        return averaged


@torch.no_grad()
def score_draws(
    scorer: Scorer,
    items: Sequence[Encoded],
    sampling: Sampling,
    *,
    batch_tokens: int,
    advance: Callable[[int, int], None] | None = None,
) -> DrawScores:
    """Score questions with drawn networks, or with the mean, for :func:`bayeslora.predict.questions.scores.score_questions`."""
    with sampled(scorer.model, sampling, fan_out=True) as draws:
        return within_memory(
            lambda tokens: _score_at_most(scorer, items, draws, tokens, advance),
            batch_tokens,
            least=max(map(packed_length, items)),
        )


def within_memory(action: Callable[[int], T], batch_tokens: int, *, least: int) -> T:
    """Run the action with ``batch_tokens``, halving them as often as the GPU's memory runs out."""
    try:
        return action(batch_tokens)
    except RuntimeError as error:
        if batch_tokens <= least or not out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    return within_memory(action, batch_tokens // 2, least=least)


def _score_at_most(
    scorer: Scorer,
    items: Sequence[Encoded],
    draws: int,
    batch_tokens: int,
    advance: Callable[[int, int], None] | None,
) -> DrawScores:
    holder = find_any_holder(scorer.model)
    options = max(len(item.option_ids) for item in items)
    log_probabilities = torch.full((draws, len(items), options), -torch.inf, dtype=torch.float64)
    totals = log_probabilities.clone()
    at_once = min(draws, max(1, batch_tokens // max(map(packed_length, items))))
    done = 0
    for first in range(0, draws, at_once):
        part = slice(first, min(first + at_once, draws))
        count = part.stop - part.start
        with holder.restoring():
            if count < draws:
                holder.narrow(first, count)
            for rows in batches_by_length(items, batch_tokens // count):
                scores = scorer([items[row] for row in rows], count)
                require_numbers(scores.log_probabilities)
                width = scores.total.shape[1]
                for kept, found in ((log_probabilities, scores.log_probabilities), (totals, scores.total)):
                    kept[part, rows, :width] = found.unflatten(0, (count, -1)).double().cpu()
                done += count * len(rows)
                if advance is not None:
                    advance(done // draws, len(items))
    return DrawScores(log_probabilities, totals)


def require_numbers(log_probabilities: Tensor) -> None:
    """Refuse scores that are NaN, naming possible causes."""
    if bool(log_probabilities.isnan().any()):
        raise ArithmeticError(
            "the model's scores are not numbers (nan): its adapter has diverged, or the base model overflows; train with a "
            "lower learning rate, or load the model with --dtype float32"
        )


def batches_by_length(items: Sequence[Encoded], tokens: int) -> Iterator[list[int]]:
    """Row numbers of the items, longest first, in batches of at most ``tokens`` tokens (or of one item)."""
    order = sorted(range(len(items)), key=lambda row: packed_length(items[row]), reverse=True)
    batch: list[int] = []
    room = tokens
    for row in order:
        length = packed_length(items[row])
        if batch and length > room:
            yield batch
            batch, room = [], tokens
        batch.append(row)
        room -= length
    yield batch
