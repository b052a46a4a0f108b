"""Checkpoint ensemble: the last snapshots of one LoRA in training (methods entry 3)."""

from bayeslora.methods.base import PAPER, Method, Preset
from bayeslora.posterior.point import PointPosterior

CYCLES = 3
KEPT = {"snapshots": 4, "members": 3}

METHOD = Method(
    name="checkpoint-ensemble",
    description="the last three snapshots of one LoRA in training",
    posterior=PointPosterior,
    presets={
        "default": Preset(training={"learning_rate": 7e-4, **KEPT}),
        "paper": Preset(training={**PAPER, **KEPT}),
        "cyclic": Preset(
            training={
                "learning_rate": 7e-4,
                "schedule": "cyclic",
                "cycles": CYCLES,
                "warmup": 0.0,
                "snapshots": CYCLES,
                "members": CYCLES,
            },
        ),
    },
)
