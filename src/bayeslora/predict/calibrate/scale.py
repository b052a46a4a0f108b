"""Choose the scale of the posterior, and the number of layers in which its draws differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.errors import InputError
from bayeslora.number_checks import check_number
from bayeslora.predict.calibrate.temperature import checked, fit_temperature, normalised

CUTS = ("0.125", "0.25", "0.5", "all")
"""Candidates for the layers in which draws differ, fewest (fastest) first."""

DEFAULT_SCALES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Steps of about √2, two octaves down and up from the posterior as trained."""


@dataclass(frozen=True)
class ScaleChoice:
    """The chosen scale of the posterior, its mean NLL, and the mean NLL of every candidate."""

    scale: float
    nll: float
    tried: dict[float, float]


def choose_scale(
    scores: Callable[[float], ArrayLike],
    labels: ArrayLike,
    scales: Iterable[float] = DEFAULT_SCALES,
    progress: Callable[[int, int], None] | None = None,
) -> ScaleChoice:
    """Choose the posterior scale of least mean NLL, or one nearer to 1 (by ratio) that is not distinguishable from it.

    A temperature is fitted once the scale is chosen, so every scale is evaluated at its own fitted temperature: otherwise a
    wide posterior, which gives worse answers, would be chosen only because it reduces overconfidence. Of scales whose NLL
    is within a standard error (of the difference, question by question) of the least, the nearest to 1 is taken.

    Args:
        scores: log-probabilities ``[N, O]``, averaged over draws, of the posterior at a scale. Use the same noise at
            every scale, otherwise the best draw is chosen instead of the best scale.
        labels: ``[N]``.
        scales: the candidates, all above 0.
        progress: called after each candidate with the number done and the total.
    """
    candidates = _check_scales(scales)
    found: dict[float, NDArray[np.float64]] = {}
    for done, scale in enumerate(candidates, start=1):
        found[scale] = _tempered_nlls(scores(scale), labels, f"scores({scale:g})")
        if progress is not None:
            progress(done, len(candidates))
    least = min(found.values(), key=np.mean)
    worse = {scale: nlls - least for scale, nlls in found.items()}
    alike = [scale for scale, it in worse.items() if it.mean() <= it.std() / math.sqrt(len(it))]
    chosen = min(alike, key=lambda scale: (abs(math.log(scale)), float(found[scale].mean()), scale))
    tried = {scale: float(nlls.mean()) for scale, nlls in found.items()}
    return ScaleChoice(chosen, tried[chosen], tried)


@dataclass(frozen=True)
class CutChoice:
    """The chosen layers in which draws differ, the posterior scale for them, and the mean NLL of every candidate."""

    layers: str
    scale: float
    tried: dict[str, float]


def choose_cut(
    scores: Callable[[str, float], ArrayLike],
    labels: ArrayLike,
    tolerance: float,
    scales: Iterable[float] = DEFAULT_SCALES,
    progress: Callable[[int, int], None] | None = None,
) -> CutChoice:
    """Choose the fewest of :data:`CUTS` whose mean NLL, at its own best scale, is within ``tolerance`` of that of all layers.

    Args:
        scores: log-probabilities ``[N, O]`` of draws that differ in these layers, at a scale.
        labels: ``[N]``.
        tolerance: in nats per question, not below 0.
        scales: the candidates, all above 0.
        progress: called after each cut with the number done and the total.
    """
    check_number("tolerance", tolerance, least=0)
    choices = {}
    for done, layers in enumerate(reversed(CUTS), start=1):
        choices[layers] = choose_scale(lambda scale, layers=layers: scores(layers, scale), labels, scales)  # type: ignore[misc]
        if progress is not None:
            progress(done, len(CUTS))
    most = choices["all"].nll + tolerance
    layers = next(layers for layers in CUTS if choices[layers].nll <= most)
    return CutChoice(layers, choices[layers].scale, {layers: choice.nll for layers, choice in choices.items()})


def _tempered_nlls(log_probabilities: ArrayLike, labels: ArrayLike, name: str) -> NDArray[np.float64]:
    """NLL of every question at the temperature that fits best."""
    centred, y = checked(log_probabilities, labels, name)
    tempered = normalised(centred / fit_temperature(log_probabilities, labels))
    return np.asarray(-tempered[np.arange(len(y)), y], dtype=np.float64)


def _check_scales(scales: Iterable[float]) -> list[float]:
    candidates = list(dict.fromkeys(scales))
    if not candidates:
        raise InputError("no scales to choose from; give at least one number above 0, or leave them out")
    for scale in candidates:
        check_number("scale", scale, above=0)
    return candidates
