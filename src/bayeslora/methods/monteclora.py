"""MonteCLoRA: PEFT's own adapter, LoRA whose factor A is a random mixture of noisy copies."""

from bayeslora.methods.base import PAPER, Method, Preset

METHOD = Method(
    name="monteclora",
    description="PEFT's MonteCLoRA: LoRA whose factor A is a random mixture of noisy copies of itself",
    presets={
        "default": Preset(training={"learning_rate": 7e-4}),
        "paper": Preset(training=PAPER),
    },
    peft=(0, 20),
)
