"""LoRA+: LoRA whose factor B learns faster than A (methods entry 11)."""

from bayeslora.methods.base import PAPER, Method, Preset
from bayeslora.posterior.point import PointPosterior

RATIO = 16.0
"""Learning rate of ``B`` relative to that of ``A``."""

METHOD = Method(
    name="lora-plus",
    description="LoRA whose factor B learns 16 times as fast as A",
    posterior=PointPosterior,
    presets={
        "default": Preset(training={"learning_rate": 2e-4, "rate_multipliers": {"weights_b": RATIO}}),
        "paper": Preset(training={**PAPER, "rate_multipliers": {"weights_b": RATIO}}),
    },
)
