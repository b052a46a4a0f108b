"""Where and how the runs of a study execute."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bayeslora.progress import Reporter, Silent
from bayeslora.studies.pool import Executor
from bayeslora.studies.worker import Settings


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Options of everything that trains many runs; none of them changes a result.

    Attributes:
        data_dir: local copies of the benchmarks; without it they are read from the hub.
        device: as for :func:`bayeslora.load_model`.
        workers: number of parallel processes. With 0, ``compare`` and ``ablate`` start no runs and show the finished ones.
        executor: where runs execute: on this machine, or on a Ray cluster.
        trust_remote_code: run code from the base model's repository.
        report: receives progress reports.
    """

    data_dir: Path | None = None
    device: str = "auto"
    workers: int = 1
    executor: Executor = "local"
    trust_remote_code: bool = False
    report: Reporter = field(default_factory=Silent)

    @property
    def settings(self) -> Settings:
        """The part that every worker needs."""
        return Settings(self.data_dir, self.device, trust_remote_code=self.trust_remote_code)
