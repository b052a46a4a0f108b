"""Temperature scaling: a LoRA whose probabilities are rescaled by one parameter (methods entry 5)."""

from __future__ import annotations

from bayeslora.methods import lora
from bayeslora.methods.base import Method, PostHocInputs, PostHocResult
from bayeslora.posterior.point import PointPosterior


def fit(inputs: PostHocInputs) -> PostHocResult:
    """Fit the temperature on the validation split."""
    from bayeslora.predict.calibrate import Calibration

    inputs.posterior.start_from(inputs.loras[0])
    temperature = inputs.fit_temperature(inputs.report.stage("fitting the temperature"))
    return PostHocResult({"temperature": temperature}, Calibration(temperature=temperature, split="validation"))


METHOD = Method(
    name="temperature",
    description="a LoRA whose probabilities are softened by a temperature fitted on held-out data",
    posterior=PointPosterior,
    presets=lora.METHOD.presets,
    fit_post_hoc=fit,
)
