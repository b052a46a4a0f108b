"""Several processes train like one: shares, sums, and the same steps as one process with all examples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from bayeslora.errors import InputError
from bayeslora.progress import Silent
from bayeslora.runs.config import RunConfig, TrainingConfig
from bayeslora.train.processes import Processes
from bayeslora.train.run import RunContext, train
from train import tiny
from train.tiny import read_json
from train.together import CASES, first_step
from train.trainer_steps import change, make_trainer

pytestmark = pytest.mark.system

TESTS = Path(__file__).parents[1]
CONFIGS = TESTS.parent / "configs"


@pytest.mark.parametrize("examples, count", [(7, 2), (8, 2), (1, 3), (5, 4)])
def test_every_example_counts_once_and_all_get_as_many(examples, count):
    given = [f"q{k}" for k in range(examples)]
    shares = [Processes(rank, count).share(given) for rank in range(count)]
    assert len({len(mine) for mine, _ in shares}) == 1
    counted = [example for mine, counts in shares for example, one in zip(mine, counts, strict=True) if one]
    assert sorted(counted) == given


def test_alone_everything_is_as_it_was():
    alone = Processes()
    assert Processes.join() == alone and alone.main and not alone.sharded
    assert alone.share(["a", "b"]) == (["a", "b"], [1.0, 1.0])
    tensor = torch.ones(2)
    alone.add_up([tensor])
    assert tensor.tolist() == [1, 1]
    assert alone.agree(lambda: 3) == 3


PORT = str(20000 + os.getpid() % 20000)


def run(*command, **environment):
    environment = {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *map(str, command)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def launch(arguments, processes=2, **environment):
    """What ``accelerate launch`` comes to: processes that know of each other by their environment."""
    several = ["torch.distributed.run", "--nproc_per_node", processes, "--master_port", PORT]
    return run(*several, "-m", *arguments, **environment)


def accelerate(config, out, *arguments, precision="no"):
    """Three steps of a trainer with a configuration that is shipped, but for the device and the precision."""
    shipped = yaml.safe_load((CONFIGS / config).read_text(encoding="utf-8"))
    here = out.with_suffix(".yaml")
    here.write_text(yaml.safe_dump({**shipped, "mixed_precision": precision, "use_cpu": True}), encoding="utf-8")
    options = ["--config_file", here, "--main_process_port", PORT]
    return run(
        "accelerate.commands.launch", *options, "-m", "train.trainer_steps", out, *arguments, DS_ACCELERATOR="cpu"
    )


SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize("environment", [{}, SHARDED], ids=["replicated", "sharded"])
def test_two_processes_take_the_step_of_one(environment, tmp_path):
    ended = launch(["train.together", tmp_path / "out.safetensors"], **environment)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = load_file(tmp_path / "out.safetensors")
    for case in CASES:
        want = first_step(case, Processes())
        for name, value in want.items():
            scale = float(value.abs().max()) + 1e-6
            torch.testing.assert_close(found[f"{case}/{name}"], value, atol=3e-5 * scale, rtol=0, msg=f"{case}, {name}")


@pytest.mark.parametrize("config", ["ddp.yaml", "deepspeed-zero2.yaml"])
def test_trainers_of_two_processes_take_the_steps_of_one(config, tmp_path):
    if "deepspeed" in config:
        pytest.importorskip("deepspeed")
    ended = accelerate(config, tmp_path / "two.safetensors")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ("DeepSpeed" in ended.stdout) == ("deepspeed" in config)
    found, want = load_file(tmp_path / "two.safetensors"), change(make_trainer(tmp_path / "one", bf16=False))
    off = sum(float((found[name] - want[name]).square().sum()) for name in want)
    assert off <= 0.002**2 * sum(float(moved.square().sum()) for moved in want.values())


def test_deepspeed_must_not_cast_the_posterior(tmp_path):
    pytest.importorskip("deepspeed")
    ended = accelerate("deepspeed-zero2.yaml", tmp_path / "two.safetensors", "bf16", precision="bf16")
    assert ended.returncode == 1
    assert "the posterior was cast to torch.bfloat16, in which its steps are lost" in ended.stderr


def test_runs_go_on_with_another_number_of_processes(tmp_path):
    """Interrupted after the first epoch in one process, ended by two through the command line."""
    config = RunConfig(
        model=str(tiny.model_directory()),
        task=str(tiny.task_directory()),
        training=TrainingConfig(epochs=2, batch_size=8, learning_rate=1e-4, patience=0),
    )
    want = train(config, tmp_path / "whole", RunContext(device="cpu"))

    def stop_after_one_epoch(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    class Report(Silent):
        def stage(self, label):
            return stop_after_one_epoch if label == "training" else super().stage(label)

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", RunContext(device="cpu", report=Report(), checkpoint_seconds=0.0))
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()
    arguments = ["--config", tmp_path / "run" / "config.json", "--device", "cpu", "--out", tmp_path / "run"]
    ended = launch(["bayeslora", "train", *arguments])
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.count("adapter, predictions and result") == 1
    found = read_json(tmp_path / "run" / "result.json")
    assert found["processes"] == 2
    assert [record["step"] for record in found["history"]] == [record["step"] for record in want["history"]]
    assert found["metrics"]["nll"] == pytest.approx(want["metrics"]["nll"], rel=1e-3)


def test_what_several_cannot_do_is_refused(monkeypatch):
    several = Processes(0, 2)
    monkeypatch.setattr(Processes, "join", lambda device="auto": several)
    run = RunConfig(model="m", task="t", method="laplace")
    with pytest.raises(InputError, match=r"'laplace' is made from LoRAs .* with --start-from"):
        train(run, "nowhere")
    with pytest.raises(InputError, match="leave it out when several train together"):
        train(RunConfig(model="m", task="t", training=TrainingConfig(cache_trunk=True)), "nowhere")
    monkeypatch.undo()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(InputError, match=r"DeepSpeed needs a trainer"):
        Processes.join()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match="set fsdp_version: 2"):
        several.shard(torch.nn.Linear(1, 1), None)
