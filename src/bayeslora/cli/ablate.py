"""The verb that runs ablations of Bayesian-LoRA."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from bayeslora.cli.common import StudyOptions, Unnamed
from bayeslora.progress import reporter
from bayeslora.studies.ablation import AblationStudy
from bayeslora.studies.ablations import ABLATIONS, find_ablation
from bayeslora.tasks.registry import check_task_names
from bayeslora.train.errors import RunsFailed
from bayeslora.wording import counted

_NAMES = "\n".join(
    [
        "What to vary, one or more of these, or all; with their values:",
        *(f"{it.name}: {it.description} ({' '.join(it.values)})" for it in ABLATIONS.values()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Ablate(StudyOptions):
    """Vary one setting of Bayesian-LoRA: runs, table and figure. The same command resumes and runs only what is missing."""

    names: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME", help=_NAMES)]
    study: Unnamed[AblationStudy]
    out: Path
    """Directory for the runs, the table (Markdown, LaTeX, JSON) and the figure. Use the same one for all ablations:
    they share common runs."""

    def run(self) -> None:
        """Run what is missing, with the table on stdout."""
        names = tuple(ABLATIONS) if self.names == ("all",) else self.names
        for name in names:
            find_ablation(name)
        check_task_names([self.study.task, *self.study.shift])
        from bayeslora.studies.ablate import ablate

        with reporter(quiet=self.quiet) as report:
            ablated = ablate(
                names,
                self.study,
                self.out,
                self.execution(report),
            )
        if self.json:
            records = [json.loads((it.out / "table.json").read_text(encoding="utf-8")) for it in ablated]
            print(json.dumps(records[0] if len(records) == 1 else records, indent=2, ensure_ascii=False))
        else:
            print("\n".join(f"{it.text}\nfigure and tables: {it.out}" for it in ablated))
        failures = {label: it.out / "table.md" for it in ablated for label in it.failures}
        if failures:
            tables = ", ".join(map(str, dict.fromkeys(failures.values())))
            raise RunsFailed(f"{counted(len(failures), 'run')} failed, tables have gaps; see {tables}")
