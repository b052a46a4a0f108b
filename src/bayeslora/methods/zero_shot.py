"""Zero-shot: the untrained base model, as a baseline."""

from __future__ import annotations

from bayeslora.methods import lora
from bayeslora.methods.base import Method, PostHocInputs, PostHocResult
from bayeslora.posterior.point import PointPosterior


def fit(inputs: PostHocInputs) -> PostHocResult:
    """Fit nothing: the update of a fresh point is zero."""
    return PostHocResult()


METHOD = Method(
    name="zero-shot",
    description="the base model as it is, untrained",
    posterior=PointPosterior,
    presets=lora.METHOD.presets,
    fit_post_hoc=fit,
    loras=lambda settings: 0,
)
