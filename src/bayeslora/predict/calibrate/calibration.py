"""Calibration of a run, stored in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from bayeslora.atomic_files import replacing
from bayeslora.errors import InputError, did_you_mean
from bayeslora.layer_ranges import check_depth
from bayeslora.metrics import conformal_sets
from bayeslora.metrics.validation import ROW_SUM_TOLERANCE, BoolArray, check_probabilities
from bayeslora.number_checks import check_count, check_number, is_number
from bayeslora.predict.calibrate.confidence import ConfidenceModel
from bayeslora.predict.calibrate.temperature import LogProbabilities, apply_temperature


@dataclass(frozen=True)
class Calibration:
    """Values chosen by calibration, and the data they were chosen on; saved as JSON.

    Attributes:
        temperature: divides the log-probabilities averaged over draws.
        posterior_scale: multiplies every standard deviation of the posterior.
        draw_layers: layers in which draws differ, for which the scale was chosen.
        threshold: abstain if the largest probability is below it; ``None`` never abstains.
        target: target of the threshold, in words.
        conformal: by level, such as ``"0.9"``, how far below 1 the probability of an option in a prediction set may be.
        questions: number of questions it was chosen on.
        warnings: reasons for doubt, one sentence each.
        samples: number of draws averaged while choosing.
        task: name of the task it was chosen on.
        split: the split of that task.
        before: metrics on that split without calibration.
        after: metrics on that split with calibration; optimistic, since the choice was made there.
        automatic: whether it was made at the end of training, and may be replaced without ``force``.
        confidence: computes the confidence of free answers.
    """

    temperature: float = 1.0
    posterior_scale: float = 1.0
    draw_layers: str = "all"
    threshold: float | None = None
    target: str | None = None
    conformal: dict[str, float] = field(default_factory=dict)
    questions: int | None = None
    warnings: tuple[str, ...] = ()
    samples: int | None = None
    task: str | None = None
    split: str | None = None
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    automatic: bool = False
    confidence: ConfidenceModel | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, above=0)
        check_number("posterior_scale", self.posterior_scale, above=0)
        if self.threshold is not None:
            check_number("threshold", self.threshold, above=0, most=1 + ROW_SUM_TOLERANCE)
        for name in ("samples", "questions"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if not isinstance(self.warnings, tuple) or not all(isinstance(it, str) for it in self.warnings):
            raise InputError(f"warnings is {self.warnings!r}; give a list of sentences")
        for name in ("target", "task", "split"):
            _check_text(getattr(self, name), name)
        if not isinstance(self.automatic, bool):
            raise InputError(f"automatic is {self.automatic!r}; give true or false")
        check_depth(self.draw_layers, "draw_layers")
        _check_metrics(self.conformal, "conformal")
        _check_metrics(self.before, "before")
        _check_metrics(self.after, "after")

    def apply(self, log_probabilities: ArrayLike) -> LogProbabilities:
        """Apply the temperature to log-probabilities ``[N, O]`` averaged over draws."""
        return apply_temperature(log_probabilities, self.temperature)

    def abstains(self, probabilities: ArrayLike) -> BoolArray:
        """Which rows ``[N, O]``, with the temperature applied, are below the threshold."""
        confidence = check_probabilities(probabilities, name="probabilities").max(axis=-1)
        if self.threshold is None:
            return np.zeros(confidence.shape, dtype=bool)
        return np.asarray(confidence < self.threshold)

    def prediction_sets(self, probabilities: ArrayLike, level: float, present: ArrayLike) -> BoolArray:
        """Which options ``[N, O]`` are in each row's prediction set; sets contain the right one at rate ``level``."""
        return conformal_sets(probabilities, self.conformal[self.require_level(level)], present)

    def require_level(self, level: float) -> str:
        """Return the key of a calibrated level of prediction sets; refuse others."""
        if not self.conformal:
            raise InputError("there are no prediction sets without calibration; run bayeslora calibrate first")
        key = f"{level:g}"
        if key not in self.conformal:
            why = ""
            if 0 < level < 1 and self.questions is not None and level > self.questions / (self.questions + 1):
                why = f", as {level:g} takes more than {self.questions} questions to calibrate on"
            raise InputError(
                f"level is {level:g}; give one that prediction sets have: {', '.join(self.conformal)}{why}"
            )
        return key

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file atomically: on failure an older file is unchanged."""
        content = json.dumps(asdict(self), indent=2, allow_nan=False, default=float) + "\n"
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with replacing(Path(path)) as partial:
                partial.write_text(content, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{os.fspath(path)}: cannot be written: {error.strerror}; choose another place") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a file written by :meth:`save`; missing values get their defaults."""
        try:
            content = _parse(Path(path).read_text(encoding="utf-8"), [f.name for f in fields(cls)])
            if content.get("confidence") is not None:
                content["confidence"] = ConfidenceModel.from_dict(content["confidence"])
            return cls(**content)
        except OSError as error:
            raise InputError(
                f"{os.fspath(path)}: cannot be read: {error.strerror}; give a file that calibration has written"
            ) from error
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{os.fspath(path)}: not a calibration: {error}; mend the file or calibrate again"
            ) from error


def _check_text(value: str | None, name: str) -> None:
    if not (value is None or isinstance(value, str)):
        raise InputError(f"{name} is {value!r}; give text, or none")


def _check_metrics(metrics: Mapping[str, float], name: str) -> None:
    if not isinstance(metrics, dict):
        raise InputError(f"{name} is {metrics!r}; give metrics by name")
    for metric, value in metrics.items():
        if not isinstance(metric, str) or not is_number(value):
            raise InputError(f"{name} has {metric!r}: {value!r}; give a finite number by the name of its metric")


def _parse(text: str, known: list[str]) -> dict[str, Any]:
    """The fields of a saved calibration, by name."""
    content = json.loads(text)
    if not isinstance(content, dict) or "temperature" not in content:
        raise InputError("it has no temperature")
    for name in content:
        if name not in known:
            raise InputError(f"unknown field {name!r}{did_you_mean(name, known)}; known are {', '.join(known)}")
    if isinstance(content.get("warnings"), list):
        content["warnings"] = tuple(content["warnings"])
    return content
