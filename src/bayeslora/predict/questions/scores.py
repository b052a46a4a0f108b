"""Score questions as the active posterior requires: with drawn networks, or with the linearised model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bayeslora.adapter.base import Holder, find_any_holder
from bayeslora.adapter.holder import PosteriorHolder
from bayeslora.adapter.sampling import Sampling
from bayeslora.errors import InputError
from bayeslora.posterior import Posterior
from bayeslora.predict.linearised.scores import score_linearised
from bayeslora.predict.questions.options import Encoded
from bayeslora.predict.questions.scorer import DrawScores, Scorer, score_draws


def score_questions(
    scorer: Scorer,
    items: Sequence[Encoded],
    sampling: Sampling,
    *,
    batch_tokens: int,
    advance: Callable[[int, int], None] | None = None,
) -> DrawScores:
    """Score questions under the same draws of the adapter, or under its mean with 0 samples.

    The draws are made once from the seed and used for all questions, so a prediction depends neither on the other
    questions nor on how they are batched, and equals that of the same draws exported as ordinary adapters. Draws and
    questions are split into batches of ``batch_tokens``, or smaller ones if these do not fit the GPU's memory. A
    Laplace approximation uses the linearised model instead, unless it is set to draw weights. PEFT's own adapters whose
    noise is drawn per token do depend on the batching (see :mod:`bayeslora.adapter.foreign.holder`).
    """
    linearised = linearised_posterior(find_any_holder(scorer.model)) if sampling.samples > 0 else None
    if linearised is None:
        return score_draws(scorer, items, sampling, batch_tokens=batch_tokens, advance=advance)
    if sampling.layers != "all":
        raise InputError(
            f"draw_layers is {sampling.layers!r}, but this Laplace approximation answers by its linearised model, which has "
            "no draws to cut; use 'all', or train it with --settings predictive=draws"
        )
    samples, seed = sampling.samples, sampling.seed
    return score_linearised(
        scorer, items, linearised, samples=samples, seed=seed, batch_tokens=batch_tokens, advance=advance
    )


def linearised_posterior(holder: Holder) -> Posterior | None:
    """The posterior in use, if its predictions are those of the linearised model."""
    if not isinstance(holder, PosteriorHolder) or len(holder.active) != 1:
        return None
    only = holder.posterior(holder.active[0])
    return only if only.linearised else None
