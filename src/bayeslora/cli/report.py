"""The verb that writes reports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from bayeslora.cli.common import OutputOptions


@dataclass(frozen=True, kw_only=True)
class Report(OutputOptions):
    """Write an HTML report on a run or a study, with its figures (PNG, SVG) and tables (LaTeX, Markdown) as files.

    It needs only saved files: no model is loaded, and metrics are checked against the saved predictions.
    """

    directory: Annotated[Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Directory that train, evaluate, compare, ablate, tune or quickstart has written."""
    out: Path | None = None
    """Directory for the report, by default DIR/report. An earlier report there is replaced; other files are refused."""

    def run(self) -> None:
        """Write the report, with the page's path on stdout."""
        from bayeslora.report import make_report

        page = make_report(self.directory, self.out)
        print(json.dumps({"page": str(page)}) if self.json else page)
