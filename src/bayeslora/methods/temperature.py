"""Temperature scaling: a LoRA whose probabilities are rescaled by one parameter (methods entry 5)."""

from __future__ import annotations

from bayeslora.methods import lora
from bayeslora.methods.base import Method, PostHocInputs, PostHocResult, QuestionPostHocInputs
from bayeslora.posterior.point import PointPosterior


def fit(inputs: PostHocInputs) -> PostHocResult:
    """Fit the temperature on the validation split; it is 1 where that cannot determine it."""
    from bayeslora.predict.calibrate import FEWEST, Calibration, too_few

    inputs.posterior.start_from(inputs.loras[0])
    if isinstance(inputs, QuestionPostHocInputs) and (count := len(inputs.validation.items)) < FEWEST:
        inputs.report.say(too_few(count))
        temperature = 1.0
    else:
        temperature = _fitted(inputs)
    return PostHocResult({"temperature": temperature}, Calibration(temperature=temperature, split="validation"))


def _fitted(inputs: PostHocInputs) -> float:
    """The temperature of least NLL, or 1 for the lowest of all: answers that are all right ask for certainty."""
    from bayeslora.predict.calibrate import doubt_temperature

    found = inputs.fit_temperature(inputs.report.stage("fitting the temperature"))
    doubt = doubt_temperature(found)
    if doubt is None:
        return found
    kept = max(found, 1.0)
    inputs.report.say(f"{doubt}; this run has {kept:g}")
    return kept


METHOD = Method(
    name="temperature",
    description="a LoRA whose probabilities are softened by a temperature fitted on held-out data",
    posterior=PointPosterior,
    presets=lora.METHOD.presets,
    fit_post_hoc=fit,
)
