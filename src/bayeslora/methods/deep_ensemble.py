"""Deep ensemble: LoRAs trained from different seeds, whose probabilities are averaged (methods card 4)."""

from __future__ import annotations

from bayeslora.methods import lora
from bayeslora.methods.base import Made, Making, Method
from bayeslora.posterior.ensemble import EnsembleConfig, EnsemblePosterior


def make(making: Making) -> Made:
    """Put the members side by side."""
    posterior = making.posterior
    assert isinstance(posterior, EnsemblePosterior)
    for index, member in enumerate(making.loras):
        posterior.set_member(index, member)
    return Made({"members": len(making.loras)})


METHOD = Method(
    name="deep-ensemble",
    description="three LoRAs from different seeds, averaged",
    posterior=EnsemblePosterior,
    presets=lora.METHOD.presets,
    make=make,
    loras=lambda settings: EnsembleConfig(**settings).members,
)
