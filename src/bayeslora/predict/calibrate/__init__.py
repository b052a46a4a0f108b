"""Calibration after training: posterior scale, temperature, prediction sets and abstention.

Nothing is retrained. A few numbers are chosen, in this order, because each affects the next:

1. the scale of the posterior, by :func:`choose_scale`;
2. the temperature of the probabilities averaged over draws, by :func:`fit_temperature`;
3. how improbable an option of a prediction set may be, by :func:`conformal_thresholds`;
4. the confidence below which to abstain, by :func:`choose_threshold`.

:class:`Calibration` stores them in a file. Choose on a validation split: metrics on the data used for the choice are
optimistic.

Log-probabilities are ``[N, O]``, an option that a question does not have is ``-inf``. They need not be normalised.
"""

from bayeslora.predict.calibrate.calibration import Calibration
from bayeslora.predict.calibrate.doubts import (
    FEWEST,
    describe_doubts,
    doubt_temperature,
    require_enough,
    too_few,
)
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
    "doubt_temperature",
    "fit_temperature",
    "require_enough",
    "too_few",
]
