"""Warnings about a calibration: too few questions, or a choice at the end of the range tried."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bayeslora.errors import InputError
from bayeslora.predict.calibrate.calibration import Calibration
from bayeslora.predict.calibrate.scale import DEFAULT_SCALES
from bayeslora.predict.calibrate.temperature import TEMPERATURES
from bayeslora.predict.calibrate.threshold import LEVELS
from bayeslora.wording import counted

FEWEST = 10
"""Least number of questions for calibration: a prediction set of level 0.9 needs nine."""

ENOUGH = 100
"""Number of questions that determines a temperature to about a tenth; below it there is a warning."""


def require_enough(questions: int, where: str) -> None:
    """Refuse to calibrate on too few questions."""
    if questions < FEWEST:
        raise InputError(
            f"{where}: has {counted(questions, 'question')} to calibrate on, and it takes at least {FEWEST}; give more, with "
            "--task and --split if need be"
        )


def too_few(questions: int) -> str:
    """Why a run is not calibrated, for people."""
    return (
        f"not calibrated: it takes at least {FEWEST} validation questions, and the task has {questions}; bayeslora calibrate "
        "takes others with --task"
    )


def describe_doubts(found: Calibration) -> tuple[str, ...]:
    """Warnings about a calibration, one sentence each."""
    doubts = []
    if found.questions is not None and found.questions < ENOUGH:
        doubts.append(
            f"it was chosen on {found.questions} questions only, and may be far off on others; {ENOUGH} or more are better"
        )
    if missing := [f"{level:g}" for level in LEVELS if f"{level:g}" not in found.conformal]:
        doubts.append(f"there are no prediction sets of level {' and '.join(missing)}, which take more questions")
    if doubt := doubt_temperature(found.temperature):
        doubts.append(doubt)
    if _at_an_end(found.posterior_scale, DEFAULT_SCALES):
        doubts.append(f"the posterior scale {found.posterior_scale:g} is at the end of those tried")
    return tuple(doubts)


def doubt_temperature(temperature: float) -> str | None:
    """Warning about a temperature that its data do not determine; ``None`` for others."""
    if not _at_an_end(temperature, TEMPERATURES):
        return None
    return (
        f"the temperature {temperature:g} is at the end of what was searched: answers are no better than guesses, or all of "
        "them are right"
    )


def _at_an_end(value: float, tried: Sequence[float]) -> bool:
    return any(math.isclose(value, end, rel_tol=0.01) for end in (min(tried), max(tried)))
