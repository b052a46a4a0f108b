"""Verbs that export adapters and models."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from bayeslora.atomic_files import require_new
from bayeslora.cli.common import OfDraws, OfRun, OutputOptions
from bayeslora.progress import reporter
from bayeslora.wording import counted


@dataclass(frozen=True, kw_only=True)
class Export(OfDraws):
    """Write draws of a run as ordinary LoRA adapters, for vLLM, SGLang or PEFT without this package."""

    out: Path
    """Directory for the adapters and manifest.json, which holds the command lines that serve them."""
    seed: int | None = None
    """Seed of the draws; by default the run's own, which gives the draws of its predictions."""
    raw: bool = False
    """Ignore the calibration of the run."""

    def run(self) -> None:
        """Export, with what to do next on stdout."""
        self.require_directory()
        require_new(self.out.expanduser().absolute())  # before anything is loaded
        from bayeslora.export.adapters import export_run
        from bayeslora.export.manifest import read_manifest

        with self.loaded(raw=self.raw) as trained:
            place = export_run(trained, trained.samples, self.out, seed=self.seed)
        manifest = read_manifest(place)
        if self.json:
            print((place / "manifest.json").read_text(encoding="utf-8"))
            return
        alone = manifest.adapters == (manifest.mean,)
        held = "the mean alone" if alone else f"{counted(len(manifest.adapters), 'adapter')} and their mean"
        print(f"{place}: {held}")
        for warning in manifest.warnings:
            print(f"note: {warning}")
        for engine, command in manifest.commands.items():
            print(f"\n{engine}:\n  {command}")
        print(
            f"\nfrom Python: bayeslora.remote.RemoteModel('http://127.0.0.1:8000', {str(place)!r}).ask(question, choices)"
        )


@dataclass(frozen=True, kw_only=True)
class Merge(OfRun):
    """Merge the posterior mean into the base model: an ordinary model without extra cost at inference."""

    out: Path
    """Directory for the model."""

    def run(self) -> None:
        """Merge, with the path on stdout."""
        self.require_directory()
        require_new(self.out.expanduser().absolute())  # before anything is loaded
        from bayeslora.export.adapters import merge_run
        from bayeslora.runs.load import load_run

        with reporter(quiet=self.quiet) as report:
            trained = load_run(
                self.directory,
                device=self.device,
                raw=True,
                report=report,
                trust_remote_code=self.trust_remote_code,
                model=self.model,
            )
            place = merge_run(trained, self.out)
        print(json.dumps({"directory": str(place)}) if self.json else f"{place}: the merged model")


@dataclass(frozen=True, kw_only=True)
class Push(OutputOptions):
    """Upload the adapter of a run to the hub, with a model card, its calibration and how it asks questions."""

    directory: Annotated[Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Directory of the run."""
    repository: Annotated[Positional[str], tyro.conf.arg(metavar="ORG/NAME")]
    """Repository on the hub; it is created if it does not exist."""
    private: bool = False
    """Create it as a private one."""

    def run(self) -> None:
        """Upload, with the address on stdout."""
        from bayeslora.export.hub import push_run

        address = push_run(self.directory, self.repository, private=self.private)
        print(json.dumps({"address": address}) if self.json else address)


@dataclass(frozen=True)
class Convert:
    """Convert a GGUF file (SmolLM2 or Qwen2.5) into a model directory in Hugging Face format."""

    file: Annotated[Positional[Path], tyro.conf.arg(metavar="FILE.gguf")]
    """The GGUF file."""
    directory: Annotated[Positional[Path], tyro.conf.arg(metavar="DIRECTORY")]
    """The directory to write. It appears complete or not at all."""
    force: bool = False
    """Replace a directory written by an earlier conversion."""
    quiet: bool = False
    """Print errors only."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Convert, with progress on stderr and the result on stdout."""
        from bayeslora.models.convert import convert_gguf

        start = time.perf_counter()
        with reporter(quiet=self.quiet) as report:
            convert_gguf(
                self.file, self.directory, force=self.force, progress=report.stage(f"converting {self.file.name}")
            )
        seconds = round(time.perf_counter() - start, 2)
        size = sum(path.stat().st_size for path in self.directory.iterdir())
        if self.json:
            print(json.dumps({"directory": str(self.directory), "bytes": size, "seconds": seconds}))
        elif not self.quiet:
            print(f"{self.directory}: {size / 1e6:.1f} MB written in {seconds} s")
