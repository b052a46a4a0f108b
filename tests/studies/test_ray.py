"""Runs on a Ray cluster: the same results, and nothing lost when a node dies."""

from __future__ import annotations

import importlib.util
import shutil
import threading
import time
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bayeslora.errors import InputError
from bayeslora.runs.config import RunConfig, TrainingConfig
from bayeslora.runs.directory import RunDirectory
from bayeslora.studies import ray_pool
from bayeslora.studies.plan import Job
from bayeslora.studies.pool import Workers
from bayeslora.studies.worker import Settings
from bayeslora.train.run import RunContext, train
from train import tiny

pytestmark = pytest.mark.system

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs `pip install ray`")


def job(path, seed, **changes):
    training = TrainingConfig(epochs=12, batch_size=1, patience=0)
    config = RunConfig(
        model=str(tiny.model_directory()), task=str(tiny.task_directory()), seed=seed, training=training, **changes
    )
    return Job(config, path)


@needs_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_node_that_dies_costs_no_run(tmp_path, monkeypatch):
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    jobs = [job(tmp_path / str(seed), seed) for seed in range(4)]
    killed_at = []

    def kill_when_two_are_under_way():
        while not killed_at:
            begun = [made for made in jobs if RunDirectory(made.path).checkpoint.exists()]
            if len(begun) == 2:
                cluster.remove_node(node, allow_graceful=False)
                killed_at.append([made.path.name for made in jobs if RunDirectory(made.path).result.exists()])
            time.sleep(0.05)

    killer = threading.Thread(target=kill_when_two_are_under_way, daemon=True)
    killer.start()
    ended = {}
    try:
        with Workers(Settings(device="cpu", checkpoint_seconds=0.0), 2, "ray") as workers:
            workers.run(jobs, lambda made, failure: ended.update({made.path.name: failure}))
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert killed_at and len(killed_at[0]) < 4
    assert ended == dict.fromkeys(map(str, range(4)))
    for made in jobs:
        found = RunDirectory(made.path).read_result()
        want = train(made.config, tmp_path / f"local-{made.path.name}", RunContext(device="cpu"))
        assert found["metrics"] == want["metrics"]


class Elsewhere:
    """Ray as far as it is needed, with all of its workers in another directory."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, place):
        self.place = place

    def remote(self, function):
        def execute(*args):
            with chdir(self.place):
                return [function(*args)]

        return SimpleNamespace(options=lambda **wanted: SimpleNamespace(remote=lambda *args: Done(execute(*args))))

    def wait(self, running, num_returns):
        return running[:num_returns], running[num_returns:]

    def get(self, done):
        return done.failure


class Done:
    def __init__(self, result):
        [self.failure] = result


@pytest.mark.parametrize("shared", [True, False])
def test_models_and_tasks_may_be_relative_paths_where_the_directory_is_shared(shared, tmp_path, monkeypatch):
    """Everything else works without it."""
    place = tmp_path / "here"
    place.mkdir()
    shutil.copytree(tiny.model_directory(), place / "base")
    shutil.copytree(tiny.task_directory(), place / "quiz")
    monkeypatch.chdir(place)
    monkeypatch.setattr(ray_pool, "_ray", lambda: Elsewhere("/"))
    monkeypatch.setattr(ray_pool, "_gpus", lambda settings: 0)
    if not shared:
        monkeypatch.setattr("os.path.isdir", lambda path: path != str(place))
    config = tiny.run_config("lora")
    relative = Job(replace(config, model="base", task="quiz"), Path("relative"))
    ended = {}
    with Workers(Settings(device="cpu"), 1, "ray") as workers:
        workers.run([relative, Job(config, Path("absolute"))], lambda made, failure: ended.update({made.path: failure}))
    assert [failure is None for failure in ended.values()] == [shared, True]
    assert (place / "absolute" / "result.json").exists()
    assert not shared or RunDirectory(place / "relative").read_result().config["task"] == "quiz"


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="executor 'ray' needs ray; run: pip install ray"):
        Workers(Settings(device="cpu"), executor="ray").run([job(tmp_path, 0)], lambda made, failure: None)


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_does_not_answer_is_named_at_once(address, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InputError, match=rf"no Ray cluster answers at RAY_ADDRESS={address}: .*start one"):
        Workers(Settings(device="cpu"), executor="ray").run([job(tmp_path, 0)], lambda made, failure: None)
