"""Making many runs and evaluations, one after another or several at a time; one that fails costs no other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bayeslora.models import LoadedModel
from bayeslora.predict.trunk import TrunkCache
from bayeslora.studies.plan import Evaluation, Job, Work
from bayeslora.train.config import RunConfig, from_dict
from bayeslora.train.directory import RunDirectory
from bayeslora.train.evaluation import evaluate
from bayeslora.train.run import Place, load_base, train
from bayeslora.train.trained import load_run

Ended = Callable[[Work, str | None], None]
"""Told of every piece of work that has ended: nothing, or why it failed."""

Executor = Literal["local", "ray"]
"""Where work is done."""


@dataclass(frozen=True)
class Settings:
    """What a worker must know besides its work, in a form that another process can get."""

    data_dir: Path | None = None
    device: str = "auto"
    checkpoint_seconds: float = 60.0


Starter = Callable[[Sequence[Work], Settings, int], Iterator[tuple[Work, str | None]]]
"""Does work, so many pieces at a time, and gives them as they end."""


class Worker:
    """Does one piece after another and loads the base model only once, or not at all if its place has brought one for all."""

    def __init__(self, settings: Settings, place: Place | None = None) -> None:
        self._place = place or Place(
            data_dir=settings.data_dir, device=settings.device, checkpoint_seconds=settings.checkpoint_seconds
        )
        self._loaded: tuple[Any, LoadedModel] | None = None
        self._trunk: tuple[str, TrunkCache] | None = None

    def __call__(self, work: Work) -> str | None:
        """Do it; returns why it failed, if it did."""
        try:
            if isinstance(work, Job):
                train(work.config, work.path, self._prepared(work.config))
            else:
                self._evaluate(work)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _evaluate(self, it: Evaluation) -> None:
        place = self._prepared(from_dict(RunDirectory(it.run).read_config()))
        trained = load_run(it.run, samples=it.samples, report=place.report, loaded=place.loaded)
        try:
            if it.posterior_scale is not None:
                trained.set_posterior_scale(it.posterior_scale)
            evaluate(trained, it.task, "test", place.data_dir, it.path)
        finally:
            trained.model.unload()

    def _prepared(self, config: RunConfig) -> Place:
        """The place with the run's base model, and what its frozen layers gave in earlier runs."""
        if self._place.loaded is not None:
            return self._place
        if self._loaded is None or self._loaded[0] != (config.model, config.loading):
            self._loaded, self._trunk = ((config.model, config.loading), load_base(config, self._place.device)), None
        if self._trunk is None or self._trunk[0] != config.adapter.layers:
            self._trunk = config.adapter.layers, TrunkCache()
        return replace(self._place, loaded=self._loaded[1], trunk=self._trunk[1])


def run_jobs(
    jobs: Sequence[Work],
    settings: Settings,
    ended: Ended,
    *,
    workers: int = 1,
    executor: Executor = "local",
    place: Place | None = None,
) -> None:
    """Do the work that is not done yet: first what other work needs, then the rest.

    Args:
        jobs: what to do.
        settings: for workers.
        ended: told of every piece that has ended.
        workers: processes side by side; 1 does everything in this one.
        executor: where: on this machine, or on a Ray cluster.
        place: for work in this process, instead of ``settings``; a base model in it serves all of them.
    """
    worker = Worker(settings, place) if workers == 1 and executor == "local" else None
    start = _starter(executor)
    failed: set[Path] = set()

    def note(job: Work, failure: str | None) -> None:
        if failure is not None:
            failed.add(job.path)
        ended(job, failure)

    for wave in (tuple(job for job in jobs if not job.needs), tuple(job for job in jobs if job.needs)):
        ready = []
        for job in wave:
            broken = [path for path in job.needs if path in failed]
            if broken:
                note(job, f"a run that it stands on has failed: {broken[0]}")
            else:
                ready.append(job)
        for job, failure in ((job, worker(job)) for job in ready) if worker else start(ready, settings, workers):
            note(job, failure)


def _starter(executor: Executor) -> Starter:
    if executor == "local":
        return _in_pool
    from bayeslora.studies.ray_pool import in_ray

    return in_ray


def _in_pool(jobs: Sequence[Work], settings: Settings, workers: int) -> Iterator[tuple[Work, str | None]]:
    """Jobs in processes of their own. If one dies (of too little memory, say), its job has failed and the rest goes on."""
    waiting = list(jobs)
    while waiting:
        for job, failure in _until_broken(waiting, settings, workers):
            waiting.remove(job)
            yield job, failure
        suspects, waiting = (
            waiting[:workers],
            waiting[workers:],
        )  # one of those that were running; alone it shows itself
        for job in suspects:
            alone = list(_until_broken([job], settings, 1))
            yield alone[0] if alone else (job, "its process died; give it more memory, or use fewer workers")


def _until_broken(jobs: Sequence[Work], settings: Settings, workers: int) -> Iterator[tuple[Work, str | None]]:
    """Jobs as they end, until all have or a process dies."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(workers, context, _start_worker, (settings,)) as pool:
        running = {pool.submit(_run, job): job for job in jobs}
        for future in as_completed(running):
            try:
                failure = future.result()
            except BrokenProcessPool:
                return
            yield running[future], failure


_worker: Worker | None = None


def _start_worker(settings: Settings) -> None:
    global _worker
    _worker = Worker(settings)


def _run(job: Work) -> str | None:
    assert _worker is not None
    return _worker(job)
