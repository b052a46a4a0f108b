"""Execute many runs and evaluations, sequentially or in parallel; a failure does not affect others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_bool
from functools import cached_property
from pathlib import Path
from typing import Literal

from bayeslora.errors import InputError
from bayeslora.studies.plan import StudyJob
from bayeslora.studies.worker import RunWorker, Settings

Ended = Callable[[StudyJob, str | None], None]
"""Callback for every unit of work that has ended, with the reason if it failed."""

Executor = Literal["local", "ray"]
"""Where work executes."""


Starter = Callable[[Sequence[StudyJob]], Iterator[tuple[StudyJob, str | None]]]
"""Executes work, and yields the units as they end."""


class Workers:
    """Executes the work of a study: in this process, in several others, or on a Ray cluster.

    Processes, with their loaded models, are reused for later work until the block ends.

    Args:
        settings: settings of the workers.
        count: number of parallel processes; with 1 everything runs in this process.
        executor: where work executes: on this machine, or on a Ray cluster.
        here: the worker of this process; a new one by default.
    """

    def __init__(
        self, settings: Settings, count: int = 1, executor: Executor = "local", here: RunWorker | None = None
    ) -> None:
        self._processes = _Processes(settings, count)
        self._start = _starter(settings, count, executor, here or RunWorker(settings), self._processes)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        if isinstance(error[1], KeyboardInterrupt):
            self._processes.stop()
        self._processes.close()

    def run(self, work: Sequence[StudyJob], ended: Ended) -> None:
        """Execute the work, dependencies first. ``ended`` is called for every unit that has ended."""
        failed: set[Path] = set()

        def note(it: StudyJob, failure: str | None) -> None:
            if failure is not None:
                failed.add(it.path)
            ended(it, failure)

        for wave in (tuple(it for it in work if not it.needs), tuple(it for it in work if it.needs)):
            ready = []
            for it in wave:
                broken = [path for path in it.needs if path in failed]
                if broken:
                    note(it, f"a run that it builds on has failed: {broken[0]}")
                else:
                    ready.append(it)
            for it, failure in self._start(ready):
                note(it, failure)


def _starter(settings: Settings, count: int, executor: Executor, here: RunWorker, processes: _Processes) -> Starter:
    if executor == "ray":
        from bayeslora.studies.ray_pool import in_ray

        return lambda work: in_ray(work, settings, count)
    if count > 1:
        return processes
    return lambda work: ((it, here(it)) for it in work)


class _Processes:
    """Processes on this machine, started on demand. If one dies (for example out of memory), its work has failed and the rest
    continues. If none ever begins, nothing can be done."""

    def __init__(self, settings: Settings, count: int) -> None:
        self._settings, self._count = settings, count
        self._context = multiprocessing.get_context("spawn")  # CUDA does not support fork
        self._pool: ProcessPoolExecutor | None = None

    @cached_property
    def _begun(self) -> c_bool:
        """Whether any process has begun. It is no event, because a process may die with the lock of an event."""
        return self._context.RawValue(c_bool, False)

    @cached_property
    def _stopped(self) -> c_bool:
        """Whether the processes are to exit, whatever they do."""
        return self._context.RawValue(c_bool, False)

    def __call__(self, work: Sequence[StudyJob]) -> Iterator[tuple[StudyJob, str | None]]:
        """Yield units of work as they end."""
        waiting = list(work)
        while waiting:
            self._pool = self._pool or self._started(self._count)
            for it, failure in _until_broken(self._pool, waiting):
                waiting.remove(it)
                yield it, failure
            if not waiting:
                return
            self.close()
            self._require_begun()
            suspects, waiting = waiting[: self._count], waiting[self._count :]
            for it in suspects:  # one of the running units is at fault; run each alone to find it
                self._pool = self._started(1)
                alone = list(_until_broken(self._pool, [it]))
                self.close()
                yield alone[0] if alone else (it, "its process died; give it more memory, or use fewer workers")

    def _started(self, count: int) -> ProcessPoolExecutor:
        given = (self._settings, os.getpid(), self._begun, self._stopped)
        return ProcessPoolExecutor(count, self._context, _start_worker, given)

    def _require_begun(self) -> None:
        """Refuse to go on if no process could begin: each runs the script again up to its ``__main__`` guard."""
        if not self._begun.value:
            raise InputError(
                "no worker process could start; put the code of your script below \"if __name__ == '__main__':\", or use "
                "1 worker"
            )

    def stop(self) -> None:
        """Let the processes exit at once. Their runs resume from their checkpoints."""
        self._stopped.value = True

    def close(self) -> None:
        """End the processes after their present work; pending work is cancelled."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None


def _until_broken(pool: ProcessPoolExecutor, work: Sequence[StudyJob]) -> Iterator[tuple[StudyJob, str | None]]:
    """Yield units of work as they end, until all have ended or a process dies."""
    try:
        running = {pool.submit(_run, it): it for it in work}
        for future in as_completed(running):
            yield running[future], future.result()
    except BrokenProcessPool:
        return


_worker: RunWorker | None = None


def _start_worker(settings: Settings, parent: int, begun: c_bool, stopped: c_bool) -> None:
    global _worker
    begun.value = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts all processes; the study ends its own
    threading.Thread(target=_end_with, args=(parent, stopped), daemon=True).start()
    _worker = RunWorker(settings)


def _end_with(parent: int, stopped: c_bool) -> None:
    """Exit when the study is interrupted, or its process is gone, even if killed: otherwise the run stays locked and its memory
    allocated."""
    while os.getppid() == parent and not stopped.value:
        time.sleep(0.5)
    os._exit(1)


def _run(work: StudyJob) -> str | None:
    assert _worker is not None
    return _worker(work)
