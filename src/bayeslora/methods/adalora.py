"""AdaLoRA: a point estimate whose rank is allocated by importance (methods entry 12)."""

from bayeslora.methods.base import PAPER, Method, Preset
from bayeslora.posterior.adalora import AdaloraPosterior

METHOD = Method(
    name="adalora",
    description="a point estimate that gives rank up where it matters least",
    posterior=AdaloraPosterior,
    start_rank=1.5,
    presets={
        "default": Preset(training={"learning_rate": 2e-3}),
        "paper": Preset(training=PAPER),
    },
)
