"""Execute studies on a Ray cluster. Results are files, so all nodes must share the directory under the same path.

Ray restarts a run elsewhere when its process or its node dies. It then resumes from its checkpoint, like any interrupted
run.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import chdir, nullcontext
from dataclasses import replace
from typing import Any

from bayeslora.errors import InputError, first_line
from bayeslora.studies.plan import Evaluation, StudyJob
from bayeslora.studies.worker import RunWorker, Settings

RETRIES = 3
"""How often a run is restarted after its process or its node has died."""

_workers: dict[tuple[Settings, str], RunWorker] = {}


def in_ray(jobs: Sequence[StudyJob], settings: Settings, workers: int) -> Iterator[tuple[StudyJob, str | None]]:
    """Yield jobs as they end, with the reason if they failed; at most ``workers`` run at a time.

    The cluster is the one that ``RAY_ADDRESS`` names, or this machine. Each run takes a CPU, and a GPU if it uses one.
    """
    ray = _ray()
    if settings.data_dir is not None:
        settings = replace(settings, data_dir=settings.data_dir.absolute())
    task = ray.remote(_run).options(num_cpus=1, num_gpus=_gpus(settings), max_retries=RETRIES)
    waiting = [_absolute(job) for job in reversed(jobs)]
    running: dict[Any, StudyJob] = {}
    given = {made.path: job for made, job in zip(reversed(waiting), jobs, strict=True)}
    while waiting or running:
        while waiting and len(running) < workers:
            job = waiting.pop()
            running[task.remote(job, settings, os.getcwd())] = job
        (done, *_), _ = ray.wait(list(running), num_returns=1)
        job = running.pop(done)
        try:
            failure = ray.get(done)
        except ray.exceptions.RayError as error:
            failure = f"{type(error).__name__}: {first_line(error)}"
        yield given[job.path], failure


def _ray() -> Any:
    """Ray, connected to the cluster."""
    if importlib.util.find_spec("ray") is None:
        raise InputError("executor 'ray' needs ray; run: pip install ray")
    import ray

    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        try:
            _require_answer(address)
            ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
        except (OSError, ValueError) as error:
            raise InputError(
                f"no Ray cluster answers at RAY_ADDRESS={address}: {error}; start one (ray start --head), or unset it for this "
                "machine"
            ) from error
    return ray


def _require_answer(address: str | None) -> None:
    """Fail fast if the head node is unreachable, which Ray itself would retry for minutes."""
    host, _, port = (address or "").rpartition("//")[2].rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=5.0).close()


def _gpus(settings: Settings) -> int:
    """Number of GPUs per run; with ``auto`` one if the cluster has any."""
    import ray

    wanted = settings.device.startswith("cuda") or (settings.device == "auto" and "GPU" in ray.cluster_resources())
    return int(wanted)


def _absolute(job: StudyJob) -> StudyJob:
    """Make the paths of directories absolute, since a node need not have the study's working directory."""
    if isinstance(job, Evaluation):
        return replace(job, path=job.path.absolute(), run=job.run.absolute())
    return replace(job, path=job.path.absolute(), needs=tuple(path.absolute() for path in job.needs))


def _run(job: StudyJob, settings: Settings, place: str) -> str | None:
    """Execute a job in a worker's process, which keeps the base model for the next one.

    Names of models and tasks may be paths relative to ``place``, the study's working directory.
    """
    if (settings, place) not in _workers:
        _workers.clear()
        _workers[settings, place] = RunWorker(settings)
    with chdir(place) if os.path.isdir(place) else nullcontext():
        return _workers[settings, place](job)
