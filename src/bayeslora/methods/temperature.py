"""Temperature scaling: a LoRA whose probabilities are softened by one number (methods card 5)."""

from __future__ import annotations

import numpy as np

from bayeslora.methods import lora
from bayeslora.methods.base import Made, Making, Method


def make(making: Making) -> Made:
    """Fit the temperature on the validation questions."""
    from bayeslora.predict.calibrate import Calibration, fit_temperature
    from bayeslora.tasks import require_gold

    making.posterior.start_from(making.loras[0])
    questions = making.validation
    scores = making.predictor.score(questions.encoded, making.report.stage("fitting the temperature"))
    temperature = fit_temperature(scores.predictive, np.array(require_gold(questions.items)))
    return Made({"temperature": temperature}, Calibration(temperature=temperature, split="validation"))


METHOD = Method(
    name="temperature",
    description="a LoRA whose probabilities are softened by a temperature fitted on held-out questions",
    posterior="point",
    presets=lora.METHOD.presets,
    make=make,
)
