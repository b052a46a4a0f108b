"""Scoring many questions with one model: in batches of like length, for one draw of the weights or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bayeslora.adapter.holder import find_holder
from bayeslora.posterior import LaplacePosterior, Posterior
from bayeslora.predict.mc import average_draws
from bayeslora.predict.options import Encoded, OptionScores, pack, score_options


class Scorer:
    """Scores questions with a model.

    Args:
        model: a causal language model.
        pad_id: token that fills batches up; it is never seen by another.
    """

    def __init__(self, model: nn.Module, pad_id: int = 0) -> None:
        self.model = model
        self.pad_id = pad_id

    def __call__(self, items: Sequence[Encoded], draws: int = 1) -> OptionScores:
        """Scores of the questions, once for each of the draws that are in use, in blocks ``[draws · B, O]``."""
        batch = pack(items, self.pad_id).to(self.device)
        return score_options(self.model, batch.repeat(draws))

    def prepare(
        self, items: Sequence[Encoded], batch_tokens: int, advance: Callable[[int, int], None] | None = None
    ) -> None:
        """Do once what can be done before questions are scored; nothing here."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device


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
def score_questions(
    scorer: Scorer,
    items: Sequence[Encoded],
    *,
    samples: int,
    seed: int,
    batch_tokens: int,
    advance: Callable[[int, int], None] | None = None,
) -> DrawScores:
    """Score questions under the same ``samples`` draws of the adapter, or under its mean if there are to be none.

    The draws are made once from the seed and used for all questions, so a prediction depends neither on the other
    questions nor on how they are batched, and equals that of the same draws exported as ordinary adapters. A Laplace
    approximation answers by the linearised model instead, unless it is set to draw weights.
    """
    holder = find_holder(scorer.model)
    posteriors = [holder.posterior(name) for name in holder.active]
    if samples > 0 and (linearised := _linearised(posteriors)) is not None:
        from bayeslora.predict.linearised import score_linearised

        return score_linearised(
            scorer, items, linearised, samples=samples, seed=seed, batch_tokens=batch_tokens, advance=advance
        )
    deterministic = samples == 0 or not any(posterior.stochastic for posterior in posteriors)
    draws = 1 if deterministic else max(posterior.draw_count(samples) for posterior in posteriors)
    options = max(len(item.option_ids) for item in items)
    log_probabilities = torch.full((draws, len(items), options), -torch.inf, dtype=torch.float64)
    totals = log_probabilities.clone()
    training = scorer.model.training
    scorer.model.eval()
    done = 0
    try:
        with holder.restoring():
            if deterministic:
                holder.deterministic()
            else:
                holder.draw(draws, torch.Generator().manual_seed(seed))
            for rows in batches_by_length(items, batch_tokens // draws):
                scores = scorer([items[row] for row in rows], draws)
                require_numbers(scores.log_probabilities)
                width = scores.total.shape[1]
                log_probabilities[:, rows, :width] = scores.log_probabilities.unflatten(0, (draws, -1)).double().cpu()
                totals[:, rows, :width] = scores.total.unflatten(0, (draws, -1)).double().cpu()
                done += len(rows)
                if advance is not None:
                    advance(done, len(items))
    finally:
        scorer.model.train(training)
    return DrawScores(log_probabilities, totals)


def _linearised(posteriors: Sequence[Posterior]) -> LaplacePosterior | None:
    """The posterior in use, if its predictions are those of the linearised model."""
    only = posteriors[0] if len(posteriors) == 1 else None
    return only if isinstance(only, LaplacePosterior) and only.config.predictive != "draws" else None


def require_numbers(log_probabilities: Tensor) -> None:
    """Refuse scores that are not numbers, with what may have led to them."""
    if bool(log_probabilities.isnan().any()):
        raise ArithmeticError(
            "the model's scores are not numbers (nan): its adapter has diverged, or the base model overflows; train with a "
            "lower learning rate, or load the model with --dtype float32"
        )


def batches_by_length(items: Sequence[Encoded], tokens: int) -> Iterator[list[int]]:
    """Row numbers of the items, longest first, in batches that fill at most so many tokens (or hold one item)."""
    order = sorted(range(len(items)), key=lambda row: packed_length(items[row]), reverse=True)
    start = 0
    while start < len(order):
        rows = max(1, tokens // packed_length(items[order[start]]))
        yield order[start : start + rows]
        start += rows


def packed_length(item: Encoded) -> int:
    """Tokens of a question with all its options."""
    return len(item.prompt_ids) + sum(map(len, item.option_ids))
