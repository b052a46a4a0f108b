"""Bayesian-LoRA: inducing matrices, a flow and conditional noise, trained on the ELBO (methods entry 13).

The default has a free mean in place of one that passes through the inducing points, and four of them: see
``benchmarks/results/components``. ``inducing`` is the published form with settings of our own, ``paper`` that with the published
ones.
"""

from dataclasses import asdict

from bayeslora.methods.base import PAPER, Method, Preset
from bayeslora.posterior import InducingConfig
from bayeslora.posterior.decoupled import DecoupledPosterior
from bayeslora.posterior.inducing import InducingPosterior

METHOD = Method(
    name="bayesian-lora",
    description="four free means with noise around each; the published inducing form as a preset",
    posterior=DecoupledPosterior,
    presets={
        "default": Preset(training={"learning_rate": 7e-4, "draws": 8}),
        "paper": Preset(
            posterior=InducingPosterior,
            settings=asdict(InducingConfig.preset("paper")),
            training={**PAPER, "kl_scaling": "paper", "rate_multipliers": {}},
        ),
        "inducing": Preset(posterior=InducingPosterior, training={"learning_rate": 2e-3, "aim": 4}),
        "free": Preset(
            settings={"components": 1, "width": 0.3},
            training={"learning_rate": 7e-4, "draws": 8, "snapshots": 8, "members": 4},
        ),
    },
)
