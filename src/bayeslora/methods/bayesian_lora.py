"""Bayesian-LoRA: inducing matrices, a flow and conditional noise, trained on the ELBO (methods card 13)."""

from dataclasses import asdict

from bayeslora.methods.base import PAPER, Method, Preset
from bayeslora.posterior import InducingConfig
from bayeslora.posterior.decoupled import DecoupledPosterior
from bayeslora.posterior.inducing import InducingPosterior

METHOD = Method(
    name="bayesian-lora",
    description="a distribution over the factors: inducing matrices, a flow and conditional noise",
    posterior=InducingPosterior,
    presets={
        "default": Preset(training={"learning_rate": 2e-3, "aim": 4}),
        "paper": Preset(
            settings=asdict(InducingConfig.preset("paper")),
            training={**PAPER, "kl_scaling": "paper", "rate_multipliers": {}},
        ),
        "free": Preset(
            posterior=DecoupledPosterior, training={"learning_rate": 7e-4, "draws": 8, "snapshots": 8, "members": 4}
        ),
    },
)
