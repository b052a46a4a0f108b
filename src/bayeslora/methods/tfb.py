"""TFB: noise around a trained LoRA, as wide as its predictions tolerate (methods entry 8)."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import numpy as np

from bayeslora.errors import InputError
from bayeslora.methods import lora
from bayeslora.methods.base import Method, PostHocInputs, PostHocResult, QuestionPostHocInputs
from bayeslora.posterior.tfb import TfbConfig, TfbPosterior

WIDENINGS = 12
"""Maximum number of times the interval is doubled or halved until its ends bracket the tolerance."""

NEXT_TO_NONE = 1e-9
"""Width with which predictions before the change are made. Any noise decides anew how a model in 16 bits rounds, and so the
answers to questions that are nearly a tie. Without noise before the change, they would count as changed by every width."""

LEAST_NLL = 1e-300
"""A LoRA that is certain of all anchors has an NLL of 0, relative to which every change is large."""


def fit(inputs: PostHocInputs) -> PostHocResult:
    """Find the largest width whose predictions on the anchors stay within the tolerance; labels are not used."""
    posterior = inputs.posterior
    assert isinstance(inputs, QuestionPostHocInputs)
    assert isinstance(posterior, TfbPosterior)
    posterior.start_from(inputs.loras[0])
    change = functools.cache(_change_on_anchors(inputs, posterior))
    width = search_width(change, posterior.config)
    found = change(width)
    posterior.width = width
    return PostHocResult({"width": width, "change": found})


def search_width(change: Callable[[float], float], config: TfbConfig) -> float:
    """The largest width found whose change is within the tolerance: the feasible end of the last bracket.

    Returns 0 if even the smallest width tried changes too much. A tolerance that no width exceeds, because noise alone
    changes no more, is refused: there is no largest width within it.
    """

    def fits(width: float) -> bool:
        return change(width) <= config.tolerance

    low, high = config.low, config.high
    for _ in range(WIDENINGS):
        if not fits(high):
            break
        low, high = high, 2.0 * high
    else:
        raise InputError(
            f"tolerance is {config.tolerance:g}, and noise of width {low:g}, which drowns everything, changes predictions by "
            f"{change(low):.3g} only; give less than that"
        )
    if low == config.low:  # its change is not known yet
        for _ in range(WIDENINGS):
            if fits(low):
                break
            low, high = 0.5 * low, low
        else:
            return 0.0
    for _ in range(config.bisections):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high if config.upper_end else low


def _change_on_anchors(inputs: QuestionPostHocInputs, posterior: TfbPosterior) -> Callable[[float], float]:
    """Change of the predictions on the anchors as a function of the width. All widths use the same noise."""
    config = posterior.config
    rows = list(range(len(inputs.train)))
    random.Random(f"{inputs.seed} anchors").shuffle(rows)
    anchors = [inputs.train.encoded[row] for row in rows[: config.anchors]]
    sampling = inputs.predictor.with_draws(samples=config.samples)
    posterior.width = NEXT_TO_NONE
    before = sampling.score(anchors).predictive
    labels = before.argmax(axis=1)
    advance = inputs.report.stage("searching the width")
    tried = 0

    def nll(log_probabilities: np.ndarray) -> float:
        return float(-log_probabilities[np.arange(len(labels)), labels].mean())

    def change(width: float) -> float:
        nonlocal tried
        tried += 1
        advance(tried, max(tried, config.bisections + 3))
        posterior.width = width
        after = sampling.score(anchors).predictive
        if config.change == "accuracy":
            moved = float((after.argmax(axis=1) != labels).mean())
        else:
            moved = abs(nll(after) - nll(before)) / max(nll(before), LEAST_NLL)
        return moved / len(anchors) if config.divide_by_anchors else moved

    return change


METHOD = Method(
    name="tfb",
    description="noise around a trained LoRA, as wide as its predictions bear",
    posterior=TfbPosterior,
    presets=lora.METHOD.presets,
    fit_post_hoc=fit,
    needs_options=True,
)
