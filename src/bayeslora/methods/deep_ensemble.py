"""Deep ensemble: LoRAs trained from different seeds, whose probabilities are averaged (methods entry 4)."""

from __future__ import annotations

from bayeslora.methods import lora
from bayeslora.methods.base import Method, PostHocInputs, PostHocResult
from bayeslora.posterior.ensemble import EnsembleConfig, EnsemblePosterior


def fit(inputs: PostHocInputs) -> PostHocResult:
    """Copy the trained LoRAs into the ensemble's members."""
    posterior = inputs.posterior
    assert isinstance(posterior, EnsemblePosterior)
    for index, member in enumerate(inputs.loras):
        posterior.set_member(index, member)
    return PostHocResult({"members": len(inputs.loras)})


METHOD = Method(
    name="deep-ensemble",
    description="three LoRAs from different seeds, averaged",
    posterior=EnsemblePosterior,
    presets=lora.METHOD.presets,
    fit_post_hoc=fit,
    loras=lambda settings: EnsembleConfig(**settings).members,
)
