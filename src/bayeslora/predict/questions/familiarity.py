"""Whether a question is like those that a run was trained on.

Three scores should be higher for questions of another kind:

- ``distance``: how far the feature of the question lies from those of the training questions
  (:mod:`bayeslora.metrics.mahalanobis`, :mod:`bayeslora.predict.questions.features`);
- ``entropy``: of the averaged prediction;
- ``epistemic``: the part of it that is disagreement between draws.

A score becomes a share by the validation questions: 0.99 is higher than that of 99 % of them. One of the three scores
decides from which share on a question is called unfamiliar.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from bayeslora.atomic_files import replacing, tensor_failures
from bayeslora.errors import InputError
from bayeslora.metrics import FeatureGaussian, shift_auroc
from bayeslora.metrics.validation import BoolArray
from bayeslora.number_checks import check_number
from bayeslora.predict.questions.predictions import Predictions

SCORES = ("distance", "entropy", "epistemic")

FEATURES = "base"
"""Network whose features are compared; an earlier version used the posterior mean."""

Floats = NDArray[np.float64]

_GAUSSIAN = ("mean", "scale", "directions", "variances")
_VALIDATION = "validation."


@dataclass(frozen=True, eq=False)
class Familiarity:
    """The training questions as a Gaussian over features, and the scores of the validation questions.

    Attributes:
        gaussian: over the features of training questions.
        validation: sorted scores of the validation questions, by name.
        decides: name of the score that decides which questions are unfamiliar.
        quantile: they are, if the score is higher than that of this share of the validation questions.
    """

    gaussian: FeatureGaussian
    validation: Mapping[str, Floats]
    decides: str = "distance"
    quantile: float = 0.99

    def __post_init__(self) -> None:
        check_number("quantile", self.quantile, above=0, most=1)
        if self.decides not in SCORES:
            raise InputError(f"there is no score {self.decides!r}; choose {', '.join(SCORES)}")
        for name in dict.fromkeys(("distance", "entropy", self.decides)):
            if name not in self.validation:
                raise InputError(f"there is no score {name!r} of the validation questions")
        for name, values in self.validation.items():
            if values.ndim != 1 or not len(values) or not np.isfinite(values).all() or (np.diff(values) < 0).any():
                raise InputError(f"the scores {name!r} of the validation questions are not finite numbers in order")

    @classmethod
    def of(
        cls, gaussian: FeatureGaussian, validation: Predictions, decides: str, quantile: float, features: ArrayLike
    ) -> Familiarity:
        """From predictions of the validation questions and their features."""
        scores = uncertainty_scores(replace(validation, distances=gaussian.distances(features)))
        return cls(gaussian, {name: np.sort(values) for name, values in scores.items()}, decides, quantile)

    def shares(self, score: str, values: ArrayLike) -> Floats:
        """Shares ``[N]`` of the validation questions with a lower score than each of these."""
        known = self.validation[score]
        return np.asarray(np.searchsorted(known, np.asarray(values), side="left") / len(known))

    def unfamiliar(self, predictions: Predictions) -> BoolArray:
        """Which of the questions are not like those of training."""
        scores = uncertainty_scores(predictions)
        if self.decides not in scores:
            return np.zeros(len(predictions.items), dtype=bool)
        return np.asarray(self.shares(self.decides, scores[self.decides]) >= self.quantile)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file atomically; the same content gives the same bytes."""
        arrays = {name: getattr(self.gaussian, name) for name in _GAUSSIAN}
        arrays["directions"] = arrays["directions"].astype(np.float32)  # nearly all of the file
        arrays["shrinkage"] = np.array([self.gaussian.shrinkage])
        arrays["quantile"] = np.array([self.quantile])
        arrays |= {f"{_VALIDATION}{name}": values for name, values in self.validation.items()}
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with tensor_failures(place), replacing(place) as partial:
            told = json.dumps({"decides": self.decides, "features": FEATURES})  # one entry: several have no order
            contiguous = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
            save_file(contiguous, partial, metadata={"told": told})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Familiarity:
        """Read a file written by :meth:`save`."""
        try:
            with safe_open(path, framework="np") as file:
                arrays = {name: file.get_tensor(name).astype(np.float64) for name in file.keys()}  # noqa: SIM118
                told = json.loads((file.metadata() or {}).get("told", "{}"))
            if not isinstance(told, dict) or told.get("features") != FEATURES:
                raise InputError("its features are not those of the base model")
            gaussian = FeatureGaussian(
                **{name: arrays[name] for name in _GAUSSIAN}, shrinkage=float(arrays["shrinkage"].item())
            )
            found = {name.removeprefix(_VALIDATION): it for name, it in arrays.items() if name.startswith(_VALIDATION)}
            return cls(gaussian, found, told["decides"], float(arrays["quantile"].item()))
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise InputError(
                f"{os.fspath(path)}: holds no distances from training questions ({error}); remove it, or run bayeslora "
                "calibrate again"
            ) from error


def uncertainty_scores(predictions: Predictions) -> dict[str, Floats]:
    """Scores ``[N]`` of questions by name: those of :data:`SCORES` that the predictions have."""
    scores = {"distance": predictions.distances, "entropy": predictions.entropies, "epistemic": predictions.epistemic}
    return {name: values for name, values in scores.items() if values is not None}


def tell_apart(own: Mapping[str, Floats], shifted: Mapping[str, Floats]) -> dict[str, float]:
    """For each score that both have, the AUROC of telling shifted questions from a run's own by it.

    A score that is zero for all questions, as the epistemic part without draws is, is left out.
    """
    known = [name for name in SCORES if name in own and name in shifted]
    return {name: shift_auroc(own[name], shifted[name]) for name in known if own[name].any() or shifted[name].any()}
