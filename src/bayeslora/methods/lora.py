"""LoRA: a point estimate, the baseline of every comparison (methods entry 1)."""

from bayeslora.methods.base import PAPER, Method, Preset
from bayeslora.posterior.point import PointPosterior

METHOD = Method(
    name="lora",
    description="one pair of factors per layer, trained by maximum likelihood",
    posterior=PointPosterior,
    presets={
        "default": Preset(training={"learning_rate": 7e-4}),
        "paper": Preset(training=PAPER),
    },
)
