"""Zero-shot: the base model as it is, untrained, as a row to compare with."""

from __future__ import annotations

from bayeslora.methods import lora
from bayeslora.methods.base import Made, Making, Method
from bayeslora.posterior.point import PointPosterior


def make(making: Making) -> Made:
    """Nothing: the update of a fresh point is zero."""
    return Made()


METHOD = Method(
    name="zero-shot",
    description="the base model as it is, untrained",
    posterior=PointPosterior,
    presets=lora.METHOD.presets,
    make=make,
    loras=lambda settings: 0,
)
