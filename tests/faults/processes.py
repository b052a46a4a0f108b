"""The command line in processes that can be killed, limited, or deprived of rights."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bayeslora import cli


class Forked:
    """A process of its own without the seconds that imports take: a copy of one that has done them."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(
        ["pytest", "bayeslora.train.run", "bayeslora.studies.compare", "transformers.models.llama.modeling_llama"]
    )

    def __init__(
        self, words: Sequence[object], before: Callable[[], None] | None = None, log: Path | None = None
    ) -> None:
        """``before`` is called in the process first; what it prints on stderr goes to ``log``."""
        self._process = self._context.Process(target=_run, args=([str(word) for word in words], before, log))
        self._process.start()

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, or nothing if the process is still at work."""
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _run(words: Sequence[str], before: Callable[[], None] | None, log: Path | None) -> None:
    if log is not None:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    if before is not None:
        before()
    cli.main(words)


class Started:
    """``python -m bayeslora`` as anybody starts it."""

    def __init__(self, words: Sequence[object]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "bayeslora", *(str(word) for word in words)]
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def wait(self, seconds: float | None = None) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
