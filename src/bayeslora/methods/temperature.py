"""Temperature scaling: a LoRA whose probabilities are softened by one number (methods card 5)."""

from __future__ import annotations

from bayeslora.methods import lora
from bayeslora.methods.base import Made, Making, Method
from bayeslora.posterior.point import PointPosterior


def make(making: Making) -> Made:
    """Fit the temperature on the validation split."""
    from bayeslora.predict.calibrate import Calibration

    making.posterior.start_from(making.loras[0])
    temperature = making.fit_temperature(making.report.stage("fitting the temperature"))
    return Made({"temperature": temperature}, Calibration(temperature=temperature, split="validation"))


METHOD = Method(
    name="temperature",
    description="a LoRA whose probabilities are softened by a temperature fitted on held-out data",
    posterior=PointPosterior,
    presets=lora.METHOD.presets,
    make=make,
)
