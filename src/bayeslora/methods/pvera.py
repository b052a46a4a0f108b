"""PVeRA: PEFT's own adapter, vectors between shared random projections, with a Gaussian per token."""

from bayeslora.methods.base import PAPER, Method, Preset

RATE = 5e-2
"""Each step moves the vectors by about the learning rate: on the urns with SmolLM2 (one seed, ten epochs) 2e-2 reached a
validation NLL of 0.899 at the end and 5e-2 one of 0.893 in half the time; on a tiny model 5e-4 and 5e-3 hardly learn."""

METHOD = Method(
    name="pvera",
    description="PEFT's PVeRA: a Gaussian per token between random projections that all layers share",
    presets={
        "default": Preset(training={"learning_rate": RATE}),
        "paper": Preset(training=PAPER),
    },
    peft=(0, 19),
)
