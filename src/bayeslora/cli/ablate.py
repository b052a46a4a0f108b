"""The verb that takes Bayesian-LoRA apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from bayeslora.cli.common import OfManyRuns
from bayeslora.progress import reporter
from bayeslora.studies.ablation import AblationStudy
from bayeslora.studies.ablations import ABLATIONS
from bayeslora.train.errors import RunsFailed

_NAMES = "\n".join(
    [
        "What to vary, with its values:",
        *(f"{it.name}: {it.description} ({' '.join(it.values)})" for it in ABLATIONS.values()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Ablate(OfManyRuns):
    """What one setting of Bayesian-LoRA does: runs, table and figure. The same command makes only what is missing."""

    name: Annotated[Positional[str], tyro.conf.arg(metavar="NAME", help=_NAMES)]
    study: OmitArgPrefixes[AblationStudy]
    out: Path
    """Directory for the runs, the table (Markdown, LaTeX, JSON) and the figure. Give all ablations the same one: they share
    the runs that they have in common."""

    def run(self) -> None:
        """Run what is missing, with the table on stdout."""
        from bayeslora.studies.ablate import ablate

        with reporter(quiet=self.quiet) as report:
            ablated = ablate(
                self.name,
                self.study,
                self.out,
                data_dir=self.data_dir,
                device=self.device,
                workers=self.workers,
                executor=self.executor,
                report=report,
            )
        if self.json:
            print((ablated.out / "table.json").read_text(encoding="utf-8"))
        else:
            print(f"{ablated.text}\nfigure and tables: {ablated.out}")
        if ablated.failures:
            raise RunsFailed(f"{len(ablated.failures)} runs failed, the table has gaps; see {ablated.out / 'table.md'}")
