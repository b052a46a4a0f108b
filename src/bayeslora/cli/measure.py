"""The verb that measures time and memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from bayeslora.bench.config import BenchConfig
from bayeslora.cli.common import OutputOptions, Unnamed
from bayeslora.progress import reporter


@dataclass(frozen=True, kw_only=True)
class Bench(OutputOptions):
    """Time and memory, side by side with stock PEFT LoRA in one process, on shapes with random weights."""

    what: Annotated[
        Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="{train,predict,redraw,cold,questions,decode,draw,memory,growth}"),
    ]
    """What to measure; several are measured one after another."""
    bench: Unnamed[BenchConfig]
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    out: Path | None = None
    """File for the record as JSON; nothing is written without it."""
    figures: Path | None = None
    """Directory for the figures of growth, one for each thing that grows."""

    def run(self) -> None:
        """Measure, with the table on stdout."""
        from bayeslora.bench.run import bench

        with reporter(quiet=self.quiet) as report:
            found = bench(self.what, self.bench, device=self.device, out=self.out, figures=self.figures, report=report)
        print(json.dumps(found.record) if self.json else found.text)
