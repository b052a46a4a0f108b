"""IVON-LoRA: a Gaussian on every entry of both factors, trained by natural-gradient steps (methods entry 14)."""

from bayeslora.methods.base import Method, Preset
from bayeslora.posterior.ivon import IvonPosterior

IVON = {"optimiser": "ivon", "kl_beta": 0.0}
"""The prior is part of the steps."""

METHOD = Method(
    name="ivon",
    description="a Gaussian on every entry of both factors, whose widths follow the curvature",
    posterior=IvonPosterior,
    presets={
        "default": Preset(training={"learning_rate": 0.5, **IVON}),
        "paper": Preset(
            training={"learning_rate": 0.03, "batch_size": 4, "epochs": 10, "warmup": 0.0, "patience": 0, **IVON}
        ),
    },
)
