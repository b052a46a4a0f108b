"""C-LoRA: a random core between the factors that depends on the input (methods entry 10)."""

from bayeslora.methods.base import PAPER, Method, Preset
from bayeslora.posterior.contextual import ContextualPosterior

SPLIT = {"optimiser": "split", "kl_scaling": "blob", "kl_beta": 1e-6 / 65, "kl_rate": 0.01}
"""AdamW on the factors, SGD on the network; the KL's weight is a tuned constant, so the objective is not a bound."""

METHOD = Method(
    name="c-lora",
    description="a random core between the factors, drawn by a network from the input",
    posterior=ContextualPosterior,
    presets={
        "default": Preset(training={"learning_rate": 7e-4, **SPLIT}),
        "paper": Preset(training={**PAPER, **SPLIT}),
    },
)
