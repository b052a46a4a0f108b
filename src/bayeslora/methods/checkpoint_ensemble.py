"""Checkpoint ensemble: the last snapshots of one LoRA in training (methods card 3)."""

from dataclasses import asdict

from bayeslora.methods.base import PAPER, Method, Preset
from bayeslora.posterior.snapshots import SnapshotConfig

CYCLES = 3

METHOD = Method(
    name="checkpoint-ensemble",
    description="the last three snapshots of one LoRA in training",
    posterior="snapshots",
    presets={
        "default": Preset(training={"learning_rate": 7e-4}),
        "paper": Preset(training=PAPER),
        "cyclic": Preset(
            settings=asdict(SnapshotConfig(members=CYCLES, snapshots=CYCLES)),
            training={"learning_rate": 7e-4, "schedule": "cyclic", "cycles": CYCLES, "warmup": 0.0},
        ),
    },
)
