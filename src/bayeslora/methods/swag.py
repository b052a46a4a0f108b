"""SWAG-LoRA: the moments of one LoRA's last iterates, at a constant learning rate (methods entry 15)."""

from bayeslora.methods.base import PAPER, Method, Preset
from bayeslora.posterior.swag import SwagPosterior

METHOD = Method(
    name="swag",
    description="a Gaussian with the moments of one LoRA's last iterates",
    posterior=SwagPosterior,
    presets={
        "default": Preset(training={"learning_rate": 3.5e-4, "schedule": "constant", "patience": 0}),
        "paper": Preset(training={**PAPER, "patience": 0}),
    },
)
