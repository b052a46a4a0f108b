"""LA: a Laplace approximation around a trained LoRA, predicted by the linearised model (methods entry 9)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bayeslora.methods import lora
from bayeslora.methods.base import Method, PostHocInputs, PostHocResult, QuestionPostHocInputs
from bayeslora.posterior.laplace import LaplacePosterior

if TYPE_CHECKING:
    from bayeslora.predict.questions.scorer import DrawScores

STEPS = tuple(10.0 ** (k / 2) for k in range(-6, 7))
"""Prior precisions tried on the validation questions, relative to the one with the greatest evidence."""


def fit(inputs: PostHocInputs) -> PostHocResult:
    """Fit the curvature on the training questions, then the prior's precision by the evidence or on the validation questions."""
    from bayeslora.predict.linearised.curvature import fit_curvature

    posterior = inputs.posterior
    assert isinstance(inputs, QuestionPostHocInputs)
    assert isinstance(posterior, LaplacePosterior)
    posterior.start_from(inputs.loras[0])
    predictor = inputs.predictor
    advance = inputs.report.stage("measuring the curvature")
    fit_curvature(
        predictor.scorer,
        inputs.train.encoded,
        posterior,
        advance=advance,
        batch_tokens=predictor.batch_tokens,
    )
    if posterior.config.prior != "given":
        posterior.prior_precision = posterior.best_precision()
    if posterior.config.prior == "validation":
        posterior.prior_precision = _best_on_validation(inputs, posterior)
    occam = posterior.log_evidence(log_likelihood=0.0)
    return PostHocResult({"prior_precision": posterior.prior_precision, "log_occam_factor": occam})


def _best_on_validation(inputs: QuestionPostHocInputs, posterior: LaplacePosterior) -> float:
    """The precision with the least validation NLL."""
    from bayeslora import metrics
    from bayeslora.tasks import require_gold

    gold = np.array(require_gold(inputs.validation.items))
    precisions = [posterior.prior_precision * step for step in STEPS]
    scores = _scores_at(precisions, inputs, posterior)
    nlls = [metrics.nll(np.exp(it.predictive), gold) for it in scores]
    return precisions[int(np.argmin(nlls))]


def _scores_at(
    precisions: Sequence[float], inputs: QuestionPostHocInputs, posterior: LaplacePosterior
) -> Iterator[DrawScores]:
    """Scores of the validation questions at each precision."""
    from bayeslora.adapter.sampling import Sampling
    from bayeslora.predict.linearised.scores import score_at_precisions

    predictor, encoded = inputs.predictor, inputs.validation.encoded
    advance = inputs.report.stage("choosing the prior")
    if posterior.config.predictive != "draws":
        yield from score_at_precisions(
            predictor.scorer,
            encoded,
            posterior,
            precisions,
            samples=predictor.sampling.samples,
            seed=predictor.sampling.seed,
            batch_tokens=predictor.batch_tokens,
            advance=advance,
        )
        return
    if predictor.sampling.samples == 0:  # the mean, which no precision changes
        predictor = predictor.with_draws(samples=Sampling().samples)
    for done, precision in enumerate(precisions, start=1):
        posterior.prior_precision = precision
        yield predictor.score(encoded)
        advance(done, len(precisions))


METHOD = Method(
    name="laplace",
    description="a Laplace approximation around a trained LoRA, predicted by the linearised model",
    posterior=LaplacePosterior,
    presets=lora.METHOD.presets,
    fit_post_hoc=fit,
    needs_options=True,
)
