"""Processes that do the work of a study: they stay for what comes later, and go when the study goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bayeslora.runs.config import RunConfig, TrainingConfig
from bayeslora.runs.directory import RunDirectory
from bayeslora.studies.plan import Evaluation, Job
from bayeslora.studies.pool import Workers
from bayeslora.studies.worker import Settings
from train.tiny import model_directory, task_directory

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")]


def job(path: Path, seed: int = 0, epochs: int = 1) -> Job:
    config = RunConfig(
        model=str(model_directory()),
        task=str(task_directory()),
        method="lora",
        seed=seed,
        training=TrainingConfig(epochs=epochs, batch_size=6, patience=0),
    )
    return Job(config, path)


def children(parent: int) -> set[int]:
    """Processes that this one has started and that are there."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, its_parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(its_parent) == parent and state != "Z":
            found.add(int(place.name))
    return found


def test_processes_stay_for_later_work_until_the_block_is_left(tmp_path):
    failures = []
    before = children(os.getpid())
    with Workers(Settings(device="cpu"), 2) as workers:
        workers.run([job(tmp_path / "run")], lambda it, failure: failures.append(failure))
        first = children(os.getpid())
        evaluation = Evaluation(tmp_path / "run", str(task_directory()), tmp_path / "again", label="again", samples=0)
        workers.run([evaluation], lambda it, failure: failures.append(failure))
        assert children(os.getpid()) == first > before
    assert failures == [None, None]
    metrics = [RunDirectory(tmp_path / name).read_result()["metrics"] for name in ("run", "again")]
    assert metrics[0] == pytest.approx(metrics[1])


def test_processes_go_when_the_study_is_killed(tmp_path):
    script = tmp_path / "study.py"
    script.write_text(
        "from pathlib import Path\n"
        "from bayeslora.studies.pool import Workers\n"
        "from bayeslora.studies.worker import Settings\n"
        "from studies.test_workers import job\n"
        "if __name__ == '__main__':\n"
        "    with Workers(Settings(device='cpu', checkpoint_seconds=0.0), 2) as workers:\n"
        f"        work = [job(Path({str(tmp_path)!r}) / str(seed), seed, epochs=10_000) for seed in (0, 1)]\n"
        "        workers.run(work, lambda it, failure: None)\n"
    )
    tests = str(Path(__file__).parents[1])
    study = subprocess.Popen([sys.executable, str(script)], env=os.environ | {"PYTHONPATH": tests})
    try:
        wait_until(lambda: all(RunDirectory(tmp_path / seed).checkpoint.exists() for seed in "01"), seconds=120)
        started = children(study.pid)
    finally:
        study.send_signal(signal.SIGKILL)
        study.wait()
    assert len(started) >= 2
    wait_until(lambda: not any(is_there(pid) for pid in started), seconds=20)


def test_an_interrupt_ends_the_processes_amid_their_runs(tmp_path):
    work = [job(tmp_path / str(seed), seed, epochs=100_000) for seed in range(4)]

    def interrupt() -> None:
        wait_until(lambda: all(RunDirectory(tmp_path / seed).checkpoint.exists() for seed in "01"), seconds=120)
        os.kill(os.getpid(), signal.SIGINT)

    before = children(os.getpid())
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), Workers(Settings(device="cpu", checkpoint_seconds=0.0), 2) as workers:
        workers.run(work, lambda it, failure: None)
    wait_until(lambda: children(os.getpid()) <= before, seconds=20)
    assert not (tmp_path / "2").exists()


def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "study.py"
    script.write_text(
        "from pathlib import Path\n"
        "from bayeslora.runs.directory import RunDirectory\n"
        "from bayeslora.studies.pool import Workers\n"
        "from bayeslora.studies.worker import Settings\n"
        "from studies.test_workers import job\n"
        f"with RunDirectory(Path({str(tmp_path)!r})).locked(), Workers(Settings(device='cpu'), 2) as workers:\n"
        f"    workers.run([job(Path({str(tmp_path / 'run')!r}))], print)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    study = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert study.stderr.splitlines()[-1].startswith("bayeslora.errors.InputError: no worker process could start")
    assert study.stdout == "" and "__main__" in study.stderr.splitlines()[-1]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)
