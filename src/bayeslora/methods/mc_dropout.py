"""MC-dropout: LoRA with dropout on the adapter's input, kept on in prediction (methods entry 2)."""

from bayeslora.methods.base import PAPER, Method, Preset
from bayeslora.posterior.dropout import DropoutPosterior

METHOD = Method(
    name="mc-dropout",
    description="LoRA with dropout on the adapter's input, kept on in prediction",
    posterior=DropoutPosterior,
    presets={
        "default": Preset(training={"learning_rate": 7e-4}),
        "paper": Preset(training=PAPER),
    },
)
