"""Calibration after training: how wide the posterior, how soft the probabilities, and when not to answer.

Nothing is trained again. Some numbers are chosen, in this order, because each changes what the next one sees:

1. the scale of the posterior, by :func:`choose_scale`;
2. the temperature of the probabilities averaged over draws, by :func:`fit_temperature`;
3. how improbable an option of a prediction set may be, by :func:`conformal_thresholds`;
4. the confidence below which one does not answer, by :func:`choose_threshold`.

:class:`Calibration` keeps them in a file. Choose on a validation split: on the data they were chosen on, all of them
look better than they are.

Log-probabilities are ``[N, O]``, an option that a question does not have is ``-inf``. They need not be normalised.
"""

from bayeslora.predict.calibrate.calibration import Calibration
from bayeslora.predict.calibrate.doubts import FEWEST, describe_doubts, require_enough
from bayeslora.predict.calibrate.scale import CUTS, DEFAULT_SCALES, CutChoice, ScaleChoice, choose_cut, choose_scale
from bayeslora.predict.calibrate.temperature import PRIOR_SD, TEMPERATURES, apply_temperature, fit_temperature
from bayeslora.predict.calibrate.threshold import (
    LEVELS,
    Threshold,
    Unreached,
    choose_threshold,
    conformal_thresholds,
    describe_target,
)

__all__ = [
    "CUTS",
    "DEFAULT_SCALES",
    "FEWEST",
    "LEVELS",
    "PRIOR_SD",
    "TEMPERATURES",
    "Calibration",
    "CutChoice",
    "ScaleChoice",
    "Threshold",
    "Unreached",
    "apply_temperature",
    "choose_cut",
    "choose_scale",
    "choose_threshold",
    "conformal_thresholds",
    "describe_doubts",
    "describe_target",
    "fit_temperature",
    "require_enough",
]
