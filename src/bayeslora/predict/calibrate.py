"""Calibration after training: how wide the posterior, how soft the probabilities, and when not to answer.

Nothing is trained again. Some numbers are chosen, in this order, because each changes what the next one sees:

1. the scale of the posterior, by :func:`choose_scale`;
2. the temperature of the probabilities averaged over draws, by :func:`fit_temperature`;
3. how improbable an option of a prediction set may be, by :func:`conformal_thresholds`;
4. the confidence below which one does not answer, by :func:`choose_threshold`.

:class:`Calibration` keeps them in a file. Choose on a validation split: on the data they were chosen on, all of them
look better than they are.

Log-probabilities are ``[N, O]``, an option that a question does not have is ``-inf``. They need not be normalised.

Example:
    >>> log_p = np.log([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1]])  # right in two of three, yet 90 % sure
    >>> temperature = fit_temperature(log_p, [0, 0, 1])
    >>> round(temperature, 2), np.exp(apply_temperature(log_p, temperature)).round(2)[0].tolist()
    (3.17, [0.67, 0.33])
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.depth import check_depth
from bayeslora.errors import InputError, did_you_mean
from bayeslora.files import replacing
from bayeslora.metrics import (
    conformal_sets,
    conformal_threshold,
    risk_coverage,
    threshold_for_coverage,
    threshold_for_risk,
)
from bayeslora.metrics.scores import top_class
from bayeslora.metrics.validation import (
    ROW_SUM_TOLERANCE,
    BoolArray,
    IntArray,
    check_classification,
    check_labels,
    check_probabilities,
    real_array,
    refuse,
)

LogProbabilities = NDArray[np.float64]

TEMPERATURES = (0.05, 20.0)
"""Least and greatest temperature: where the data ask for none at all (every answer right) or an infinite one."""

CUTS = ("0.125", "0.25", "0.5", "all")
"""Layers in which draws may differ, from the fewest, which are the fastest."""

DEFAULT_SCALES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""Steps of about √2, two octaves down and up from the posterior as trained."""

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Levels that prediction sets are calibrated for."""

_HALVINGS = 50
"""Narrow the range of ``log T`` down to 5e-15."""


@dataclass(frozen=True)
class ScaleChoice:
    """The chosen scale of the posterior, its mean NLL, and the mean NLL of every scale that was tried."""

    scale: float
    nll: float
    tried: dict[float, float]


@dataclass(frozen=True)
class Threshold:
    """When to answer, and what that gave on the data it was chosen on.

    Attributes:
        confidence: the least largest probability at which one still answers.
        coverage: share of the questions answered.
        error_rate: share of wrong answers among those.
        target: what was asked for, in words.
    """

    confidence: float
    coverage: float
    error_rate: float
    target: str


@dataclass(frozen=True)
class Calibration:
    """What was chosen after training, and on what; saved as JSON.

    Attributes:
        temperature: divides the log-probabilities averaged over draws.
        posterior_scale: multiplies every standard deviation of the posterior.
        draw_layers: layers in which draws differ, for which the scale was chosen.
        threshold: the least largest probability at which one still answers; none answers always.
        target: what the threshold was chosen for, in words.
        conformal: by level, such as ``"0.9"``, how far below 1 the probability of an option in a prediction set may be.
        samples: number of draws averaged while choosing.
        task: name of the task it was chosen on.
        split: the split of that task.
        before: metrics on that split without calibration.
        after: metrics on that split with it; flattering, since the choice was made there.
    """

    temperature: float = 1.0
    posterior_scale: float = 1.0
    draw_layers: str = "all"
    threshold: float | None = None
    target: str | None = None
    conformal: dict[str, float] = field(default_factory=dict)
    samples: int | None = None
    task: str | None = None
    split: str | None = None
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_positive(self.temperature, "temperature")
        _check_positive(self.posterior_scale, "posterior_scale")
        if self.threshold is not None:
            _check_positive(self.threshold, "threshold", most=1 + ROW_SUM_TOLERANCE)
        if self.samples is not None and (type(self.samples) is not int or self.samples < 1):
            raise InputError(f"samples is {self.samples!r}; give a whole number of at least 1, or none")
        for name in ("target", "task", "split"):
            _check_text(getattr(self, name), name)
        check_depth(self.draw_layers, "draw_layers")
        _check_metrics(self.conformal, "conformal")
        _check_metrics(self.before, "before")
        _check_metrics(self.after, "after")

    def apply(self, log_probabilities: ArrayLike) -> LogProbabilities:
        """Log-probabilities (averaged over draws, ``[N, O]``) at the temperature chosen."""
        return apply_temperature(log_probabilities, self.temperature)

    def abstains(self, probabilities: ArrayLike) -> BoolArray:
        """Which of the rows ``[N, O]``, already at the temperature chosen, are too unsure to be answered."""
        confidence = check_probabilities(probabilities, name="probabilities").max(axis=-1)
        if self.threshold is None:
            return np.zeros(confidence.shape, dtype=bool)
        return np.asarray(confidence < self.threshold)

    def prediction_sets(self, probabilities: ArrayLike, level: float, present: ArrayLike) -> BoolArray:
        """Which options ``[N, O]`` are in each row's prediction set: sets hold the right one in ``level`` of the questions."""
        return conformal_sets(probabilities, self.conformal[self.require_level(level)], present)

    def require_level(self, level: float) -> str:
        """The name of a level that prediction sets were calibrated for; others are refused."""
        if not self.conformal:
            raise InputError("there are no prediction sets without calibration; run bayeslora calibrate first")
        key = f"{level:g}"
        if key not in self.conformal:
            raise InputError(f"level is {level:g}; prediction sets were calibrated for {', '.join(self.conformal)}")
        return key

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file, whole or not at all: whatever fails, an older file stays as it was."""
        content = json.dumps(asdict(self), indent=2, allow_nan=False, default=float) + "\n"
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with replacing(Path(path)) as partial:
                partial.write_text(content, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{os.fspath(path)}: cannot be written: {error.strerror}; choose another place") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a file written by :meth:`save`; values left out are as if nothing had been chosen."""
        try:
            content = _parse(Path(path).read_text(encoding="utf-8"), [f.name for f in fields(cls)])
            return cls(**content)
        except OSError as error:
            raise InputError(
                f"{os.fspath(path)}: cannot be read: {error.strerror}; give a file that calibration has written"
            ) from error
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{os.fspath(path)}: not a calibration: {error}; mend the file or calibrate again"
            ) from error


# Temperature ----------------------------------------------------------------------------------------------------------


def fit_temperature(log_probabilities: ArrayLike, labels: ArrayLike) -> float:
    """The temperature ``T`` in :data:`TEMPERATURES` of least mean NLL of ``softmax(log p / T)``.

    The NLL is convex in ``β = 1/T`` and its slope is ``mean(E_β[log p] − log p_y)``: the slope's only change of sign
    is found by bisection. A result at either end says that the data do not determine it: a few questions that are all
    answered rightly ask for certainty, answers worse than guessing for none. Where no temperature changes anything
    (one option each, or all equal), it is 1.
    """
    centred, y = _checked(log_probabilities, labels)
    if not np.any(np.isfinite(centred) & (centred < 0)):
        return 1.0
    least, greatest = TEMPERATURES
    if _slope(centred, y, 1 / least) <= 0:
        return least
    if _slope(centred, y, 1 / greatest) >= 0:
        return greatest
    return _bisect(lambda temperature: _slope(centred, y, 1 / temperature) > 0, least, greatest)


def apply_temperature(log_probabilities: ArrayLike, temperature: float) -> LogProbabilities:
    """``log softmax(log p / T)`` over the options present; the order of the options stays as it was."""
    _check_positive(temperature, "temperature")
    return _normalised(_centred(log_probabilities, "log_probabilities") / temperature)


def _bisect(too_cold: Callable[[float], bool], low: float, high: float) -> float:
    """Where ``too_cold`` turns from true to false, by halving the range of the logarithm."""
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if too_cold(middle) else (low, middle)
    return math.sqrt(low * high)


def _slope(centred: LogProbabilities, labels: IntArray, inverse_temperature: float) -> float:
    """Derivative of the mean NLL by ``β = 1/T``, of checked input."""
    probabilities = np.exp(_normalised(inverse_temperature * centred))
    present = np.isfinite(centred)
    expected = np.sum(probabilities * np.where(present, centred, 0.0), axis=-1)
    return float(np.mean(expected - centred[np.arange(len(labels)), labels]))


def _normalised(centred: LogProbabilities) -> LogProbabilities:
    """Rows whose probabilities sum to 1, from rows whose maximum is 0."""
    return centred - np.log(np.exp(centred).sum(axis=-1, keepdims=True))


# Scale of the posterior -----------------------------------------------------------------------------------------------


def choose_scale(
    scores: Callable[[float], ArrayLike],
    labels: ArrayLike,
    scales: Iterable[float] = DEFAULT_SCALES,
    progress: Callable[[int, int], None] | None = None,
) -> ScaleChoice:
    """The scale of the posterior of least mean NLL, or one nearer to 1 (by ratio) that cannot be told from it.

    A temperature is fitted once the scale is chosen, so every scale is judged at the temperature it would get: else a wide
    posterior, which gives worse answers, would be chosen for making sure ones less sure. Of scales whose NLL is within a
    standard error (of the difference, question by question) of the least, the nearest to 1 is taken.

    Args:
        scores: log-probabilities ``[N, O]``, averaged over draws, of the posterior at a scale. Use the same noise at
            every scale, else the best draw wins instead of the best scale.
        labels: ``[N]``.
        scales: the candidates, all above 0.
        progress: called after each candidate with the number done and the number of all.
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
    """Layers in which draws are to differ, the scale of the posterior for them, and the mean NLL of every cut tried."""

    layers: str
    scale: float
    tried: dict[str, float]


def choose_cut(
    scores: Callable[[str, float], ArrayLike],
    labels: ArrayLike,
    tolerance: float,
    progress: Callable[[int, int], None] | None = None,
) -> CutChoice:
    """The fewest of :data:`CUTS` whose mean NLL, at its own best scale, is within ``tolerance`` of that of all layers.

    Args:
        scores: log-probabilities ``[N, O]`` of draws that differ in these layers, at a scale.
        labels: ``[N]``.
        tolerance: in nats per question, not below 0.
        progress: called after each cut with the number done and the number of all.
    """
    if not (_is_number(tolerance) and 0 <= tolerance < math.inf):
        raise InputError(f"tolerance is {tolerance!r}; give a finite number of nats, 0 or more")
    choices = {}
    for done, layers in enumerate(reversed(CUTS), start=1):
        choices[layers] = choose_scale(lambda scale, layers=layers: scores(layers, scale), labels)  # type: ignore[misc]
        if progress is not None:
            progress(done, len(CUTS))
    most = choices["all"].nll + tolerance
    layers = next(layers for layers in CUTS if choices[layers].nll <= most)
    return CutChoice(layers, choices[layers].scale, {layers: choice.nll for layers, choice in choices.items()})


def _tempered_nlls(log_probabilities: ArrayLike, labels: ArrayLike, name: str) -> NDArray[np.float64]:
    """NLL of every question at the temperature that fits best."""
    centred, y = _checked(log_probabilities, labels, name)
    tempered = _normalised(centred / fit_temperature(log_probabilities, labels))
    return np.asarray(-tempered[np.arange(len(y)), y], dtype=np.float64)


def _check_scales(scales: Iterable[float]) -> list[float]:
    candidates = list(dict.fromkeys(scales))
    if not candidates:
        raise InputError("no scales to choose from; give at least one number above 0, or leave them out")
    for scale in candidates:
        _check_positive(scale, "scale")
    return candidates


# Prediction sets ------------------------------------------------------------------------------------------------------


def conformal_thresholds(
    probabilities: ArrayLike, labels: ArrayLike, levels: Iterable[float] = LEVELS
) -> dict[str, float]:
    """Thresholds of :func:`bayeslora.metrics.conformal_threshold` by level.

    At most 1, with which every option is in the set: what too few rows for a level amount to.
    """
    return {f"{level:g}": min(1.0, conformal_threshold(probabilities, labels, level)) for level in levels}


# Threshold ------------------------------------------------------------------------------------------------------------


def choose_threshold(
    probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    error_rate: float | None = None,
    coverage: float | None = None,
) -> Threshold:
    """The confidence from which on to answer, for one of two targets.

    With ``error_rate`` the answers given are wrong in at most that share, and as many as possible are given; a rate
    that no threshold reaches is refused. With ``coverage`` at least that share is answered, the most confident, and
    more only where confidences are equal: those are answered all or none.

    Both hold exactly on the rows given, and only roughly on new ones of the same kind: the fewer rows are answered,
    the more the error among them is a matter of luck.

    Args:
        probabilities: ``[N, O]``, calibrated as they will be when the threshold is used.
        labels: ``[N]``.
        error_rate: greatest share of wrong answers among those given, from 0 to 1.
        coverage: least share of questions answered, above 0 and at most 1.
    """
    confidence, correct = top_class(*check_classification(probabilities, labels, "probabilities"))
    target = describe_target(error_rate, coverage)
    if error_rate is not None:
        threshold = threshold_for_risk(confidence, correct, error_rate)
    else:
        assert coverage is not None
        threshold = threshold_for_coverage(confidence, coverage)
    if math.isinf(threshold):
        raise InputError(f"an {target} is not reached: {_least_error(confidence, correct)}; ask for that or more")
    answered = confidence >= threshold
    return Threshold(threshold, float(answered.mean()), float((~correct[answered]).mean()), target)


def describe_target(error_rate: float | None, coverage: float | None) -> str:
    """What :func:`choose_threshold` is asked for, in words; refuses what it cannot be asked for."""
    if error_rate is not None and coverage is None:
        return f"error rate of at most {_check_share(error_rate, 'error_rate'):g}"
    if coverage is not None and error_rate is None:
        return f"coverage of at least {_check_share(coverage, 'coverage', above=True):g}"
    raise InputError(f"got error_rate={error_rate} and coverage={coverage}; give exactly one of the two")


def _least_error(confidence: NDArray[np.floating[Any]], correct: BoolArray) -> str:
    """The least error rate of any threshold, at the largest coverage that has it."""
    curve = risk_coverage(confidence, correct)
    best = np.flatnonzero(curve.risk == curve.risk.min())[-1]
    risk = math.ceil(1e4 * curve.risk[best]) / 1e4  # rounded up, so that asking for it succeeds
    return f"the least is {risk:g}, answering {curve.coverage[best]:.1%} of {len(correct)} questions"


# Checks ---------------------------------------------------------------------------------------------------------------


def _checked(
    log_probabilities: ArrayLike, labels: ArrayLike, name: str = "log_probabilities"
) -> tuple[LogProbabilities, IntArray]:
    """Centred rows, and labels that are present."""
    centred = _centred(log_probabilities, name)
    y = check_labels(labels, centred)
    absent = np.flatnonzero(np.isneginf(centred[np.arange(len(y)), y]))
    if len(absent):
        row = int(absent[0])
        raise InputError(
            f"{name}: the right option, {y[row]}, of row {row} has probability 0 ({len(absent)} such rows), which is what "
            "an option looks like that the question does not have; correct the labels or leave these rows out"
        )
    return centred, y


def _centred(log_probabilities: ArrayLike, name: str) -> LogProbabilities:
    """Rows in float64 shifted to a maximum of 0, which loses nothing and cannot overflow."""
    log_p = real_array(log_probabilities, name).astype(np.float64)
    if log_p.ndim != 2 or log_p.size == 0:
        raise InputError(f"{name} has shape {log_p.shape}; give [N, O], at least one row and one option")
    refuse(np.isnan(log_p) | np.isposinf(log_p), log_p, f"{name} must be finite, or -inf where there is no option")
    highest = log_p.max(axis=-1, keepdims=True)
    refuse(np.isneginf(highest[:, 0]), highest[:, 0], f"{name} must have an option in every row", what="maximum")
    return log_p - highest


def _check_positive(value: float, name: str, most: float = sys.float_info.max) -> None:
    if not _is_number(value) or not 0 < value <= most:
        limit = "" if most == sys.float_info.max else " and at most 1"
        raise InputError(f"{name} is {value!r}; give a finite number above 0{limit}")


def _check_share(value: float, name: str, above: bool = False) -> float:
    if not _is_number(value) or not 0 <= value <= 1 or (above and value == 0):
        raise InputError(f"{name} is {value!r}; give a number {'above 0 and at most' if above else 'from 0 to'} 1")
    return value


def _check_text(value: str | None, name: str) -> None:
    if not (value is None or isinstance(value, str)):
        raise InputError(f"{name} is {value!r}; give text, or none")


def _check_metrics(metrics: Mapping[str, float], name: str) -> None:
    if not isinstance(metrics, dict):
        raise InputError(f"{name} is {metrics!r}; give metrics by name")
    for metric, value in metrics.items():
        if not isinstance(metric, str) or not _is_number(value) or not abs(value) <= sys.float_info.max:
            raise InputError(f"{name} has {metric!r}: {value!r}; give a finite number by the name of its metric")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


# The file -------------------------------------------------------------------------------------------------------------


def _parse(text: str, known: list[str]) -> dict[str, Any]:
    """The fields of a saved calibration, by name."""
    content = json.loads(text)
    if not isinstance(content, dict) or "temperature" not in content:
        raise InputError("it has no temperature")
    for name in content:
        if name not in known:
            raise InputError(f"unknown field {name!r}{did_you_mean(name, known)}; known are {', '.join(known)}")
    return content
