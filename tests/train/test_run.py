"""One run from settings to result: what is written, what is refused, what survives failures."""

from __future__ import annotations

import errno
import gzip
import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bayeslora import find_holder, load_run, metrics
from bayeslora.errors import InputError
from bayeslora.methods import METHODS
from bayeslora.models import load_model
from bayeslora.predict.questions.predictions import Predictions
from bayeslora.runs import directory as directories
from bayeslora.runs.predictors import load_base
from bayeslora.runs.saved_config import to_dict
from bayeslora.runs.split_evaluation import EvaluatedSplit
from bayeslora.tasks import TASKS, urns_task
from bayeslora.train import AdapterConfig, PredictionConfig, RunContext, TrainingConfig, resolve, run, train
from bayeslora.train.run import adapt
from bayeslora.train.trackers import tracking
from tiers import some
from train import tiny
from train.tiny import bayeslora, contents, options, outcome, read_json, run_config, without_intervals

IDS = torch.arange(1, 25).reshape(2, 12)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done; not to be changed."""
    return Path(shutil.copytree(tiny.finished(), tmp_path_factory.mktemp("done") / "run"))


@pytest.fixture(autouse=True)
def quick(done: Path) -> Iterator[None]:
    """All runs but the one that is there already."""
    with without_intervals():
        yield


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("bayeslora: ") and err.count("\n") == 1, err
    return err


# What is written ------------------------------------------------------------------------------------------------------


def test_the_result_holds_what_it_promises(done: Path) -> None:
    result = read_json(done / "result.json")
    assert result["schema"] == 1 and result["seed"] == 0 and result["split"] == "test"
    assert result["config"] == to_dict(resolve(run_config())) == read_json(done / "config.json")
    assert {"bayeslora", "python", "packages", "device", "commit"} <= result["environment"].keys()
    assert {"acc", "nll", "ece", "brier"} <= result["metrics"].keys()
    for name, interval in result["intervals"].items():
        assert interval["low"] <= interval["value"] <= interval["high"]
        assert interval["value"] == pytest.approx(result["metrics"][name])
    assert {name: it["questions"] for name, it in result["counts"].items()} == tiny.SIZES
    assert result["timing"]["steps"] == tiny.STEPS and result["timing"]["train_seconds"] > 0
    assert result["memory"]["peak_bytes"] > 1e6
    assert 0 < result["parameters"]["trainable"] < result["parameters"]["total"]
    assert [(it["epoch"], it["step"]) for it in result["history"]] == [(1, 3), (2, 6)]
    assert all(it["validation"]["nll"] > 0 and it["train_nll"] > 0 for it in result["history"])
    assert sorted(path.name for path in done.iterdir() if path.name != ".lock") == [
        "adapter", "config.json", "predictions.jsonl.gz", "result.json",
    ]  # fmt: skip


def recomputed(path: Path) -> dict[str, float]:
    """All metrics from a file of predictions and nothing else."""
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    p = np.zeros((len(rows), max(len(row["probabilities"]) for row in rows)))
    present = np.zeros(p.shape, dtype=bool)
    for k, row in enumerate(rows):
        p[k, : len(row["probabilities"])] = row["probabilities"]
        present[k, : len(row["probabilities"])] = True
    gold = np.array([row["gold"] for row in rows])
    right = np.array([row["choice"] for row in rows]) == gold
    figures = {
        "acc": right.mean(),
        "nll": -np.log(p[np.arange(len(rows)), gold]).mean(),
        "ece": metrics.ece(p, gold),
        "brier": ((p - np.eye(p.shape[1])[gold]) ** 2).sum(1).mean(),
        "adaptive_ece": metrics.adaptive_ece(p, gold),
        "classwise_ece": metrics.classwise_ece(p, gold, present=present),
        "mce": metrics.reliability_bins(p, gold).mce,
        "aurc": metrics.aurc(p.max(1), right),
        "confidence": p.max(1).mean(),
        "entropy": -(p * np.log(np.where(p > 0, p, 1))).sum(1).mean(),
        "epistemic": np.mean([row["epistemic"] for row in rows]),
    }
    if all("truth" in row for row in rows):
        truth = [np.array(row["truth"]) for row in rows]
        figures["distance_to_truth"] = np.mean([abs(p[k, : len(t)] - t).sum() / 2 for k, t in enumerate(truth)])
        figures["truth_entropy"] = np.mean([-(t * np.log(t)).sum() for t in truth])
    return figures


def test_every_metric_can_be_computed_again_from_the_predictions(done: Path) -> None:
    assert recomputed(done / "predictions.jsonl.gz") == pytest.approx(read_json(done / "result.json")["metrics"])


def test_metrics_against_the_truth_can_be_computed_again_too(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "urns", lambda data_dir: urns_task(sizes={"train": 8, "validation": 10, "test": 9}))
    assert bayeslora("evaluate", done, "--task", "urns", "--out", tmp_path / "urns", "--quiet") == 0
    figures = read_json(tmp_path / "urns" / "result.json")["metrics"]
    assert "distance_to_truth" in figures
    assert recomputed(tmp_path / "urns" / "predictions.jsonl.gz") == pytest.approx(figures)


OWN = [name for name, method in METHODS.items() if method.foreign() is None]  # others: test_foreign.py


def logits(model: Any) -> dict[str, torch.Tensor]:
    """At the mean, and for two draws."""
    model.eval()
    with torch.no_grad():
        with model.deterministic():
            mean = model(IDS).logits
        model.seed_draws(7)
        with model.draws(2):
            draws = model(IDS.repeat(2, 1)).logits
    return {"mean": mean, "draws": draws}


SAVED_IN_OTHER_WAYS = ("lora", "adalora", "checkpoint-ensemble", "laplace", "c-lora", "bayesian-lora", "zero-shot")
"""Factors, with a mask of ranks, several at once, with curvature, with a net for contexts, inducing matrices, and nothing."""


@pytest.mark.parametrize("method", some(OWN, SAVED_IN_OTHER_WAYS))
def test_the_adapter_in_stock_peft_is_the_model_that_was_trained(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = {}
    save = run._save_adapter
    monkeypatch.setattr(run, "_save_adapter", lambda model, *more: (trained.update(logits(model)), save(model, *more)))
    monkeypatch.setattr(run.QuestionRunner, "evaluate", lambda *args: EvaluatedSplit({}, {}, lambda directory: None))
    train(run_config(method, training=replace(run_config().training, epochs=1)), tmp_path / "run")
    base = AutoModelForCausalLM.from_pretrained(tiny.model_directory(), dtype=torch.float32)
    with torch.no_grad():
        before = base(IDS).logits
    loaded = logits(PeftModel.from_pretrained(base, tmp_path / "run" / "adapter"))
    for name, expected in trained.items():
        torch.testing.assert_close(loaded[name], expected)
    assert torch.allclose(loaded["mean"], before, atol=1e-3) == (method == "zero-shot")
    one, other = loaded["draws"].chunk(2)
    mixture = "members" in METHODS[method].presets["default"].training
    assert torch.allclose(one, other) != (mixture or METHODS[method].posterior.spread != "nothing")


# The same run again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", some(["lora", "adalora", "bbb", "bayesian-lora"], ["adalora", "bayesian-lora"]))
def test_validation_during_training_is_of_the_weights_at_that_moment(method: str, tmp_path: Path) -> None:
    """The last epoch's figure is that of the adapter which was kept, evaluated anew; and epochs differ."""
    training = TrainingConfig(epochs=3, batch_size=4, learning_rate=0.05, patience=0)
    result = train(run_config(method, training=training), tmp_path / "run")
    found = [epoch["validation"]["nll"] for epoch in result["history"]]
    assert len(set(found)) == 3
    again = load_run(tmp_path / "run").evaluate(split="validation").metrics()["nll"]
    assert found[-1] == pytest.approx(again, abs=1e-6)


@pytest.mark.parametrize(("rank", "started"), [(1, 2), (2, 3), (4, 6), (8, 12)])
def test_adalora_starts_with_more_rank_and_ends_with_that_which_was_asked_for(rank: int, started: int) -> None:
    config = run_config("adalora", adapter=AdapterConfig(rank=rank, targets=("q_proj", "v_proj")))
    loaded = load_base(config, "cpu")
    model = adapt(loaded, config)
    peft_config = model.peft_config["default"]
    assert peft_config.r == started and peft_config.lora_alpha / started == pytest.approx(16 / rank)
    posterior = find_holder(model).posterior("default")
    layers = sum(len(group) for group in posterior.groups)
    assert posterior.budget(0, 100) == started * layers and posterior.budget(100, 100) == rank * layers
    kept = adapt(load_base(config, "cpu"), replace(config, start_from=("a lora",)))
    assert kept.peft_config["default"].r == rank


def test_a_second_call_returns_the_result_and_computes_nothing(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "load_base", None)
    before = contents(done)
    assert train(run_config(), done) == read_json(done / "result.json")
    assert contents(done) == before


def test_a_run_is_a_function_of_its_settings(done: Path, tmp_path: Path) -> None:
    for name, config in {"same": run_config(), "other": run_config(seed=1)}.items():
        train(config, tmp_path / name)
    assert outcome(tmp_path / "same") == outcome(done)
    file = "adapter/adapter_model.safetensors"
    assert outcome(tmp_path / "other")[file] != outcome(done)[file]


def test_a_run_from_before_a_setting_existed_is_the_same_run(done: Path, tmp_path: Path) -> None:
    """It had what is the default now, or for all methods was when the setting came (nobody aimed)."""
    old = tmp_path / "old"
    shutil.copytree(done, old)
    config = json.loads((old / "config.json").read_text())
    del config["adapter"]["stochastic_layers"], config["prediction"]["draw_layers"], config["training"]["aim"]
    (old / "config.json").write_text(json.dumps(config))
    unaimed = replace(run_config().training, aim=0)
    assert train(run_config(training=unaimed), old) == json.loads((done / "result.json").read_text())
    with pytest.raises(InputError, match=r"draw_layers is 'all' there and 'last:1' here"):
        train(run_config(training=unaimed, prediction=PredictionConfig(samples=3, draw_layers="last:1")), old)
    with pytest.raises(InputError, match=r"aim is 0 there and 4 here"):
        train(run_config(), old)


def test_a_run_to_choose_among_is_about_the_validation_split_and_never_reads_the_test_split(tmp_path: Path) -> None:
    task = tiny.write_task(tmp_path / "task")
    (task / "test.jsonl").unlink()
    result = train(run_config(task=str(task), report_split="validation"), tmp_path / "run")
    assert result["split"] == "validation" and set(result["counts"]) == {"train", "validation"}
    validation = load_run(tmp_path / "run").evaluate(split="validation")
    assert result["metrics"] == pytest.approx(validation.metrics())
    with pytest.raises(InputError, match="test"):
        train(run_config(task=str(task)), tmp_path / "other")
    with pytest.raises(InputError, match="report_split is 'train'; choose test, validation"):
        run_config(report_split="train")


@pytest.mark.parametrize(
    "changes, difference",
    [
        ({"seed": 3}, "seed is 0 there and 3 here"),
        ({"adapter": AdapterConfig(rank=4, targets=("q_proj", "v_proj"))}, "rank is 2 there and 4 here"),
        ({"method": "lora"}, "method is 'bayesian-lora' there and 'lora' here"),
    ],
)
def test_another_run_in_the_directory_is_refused_with_what_differs(
    done: Path, changes: dict[str, Any], difference: str
) -> None:
    before = contents(done)
    with pytest.raises(InputError, match="holds another run") as refusal:
        train(run_config(**changes), done)
    assert difference in str(refusal.value) and "--force" in str(refusal.value)
    assert contents(done) == before


def test_force_replaces_another_run_and_nothing_else(tmp_path: Path) -> None:
    train(run_config("lora"), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "adapter" / "calibration.json").write_text('{"temperature": 2}')
    result = train(run_config(seed=1), tmp_path, force=True)
    assert result["config"]["seed"] == 1 and read_json(tmp_path / "config.json")["method"] == "bayesian-lora"
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "adapter" / "calibration.json").exists()


def test_a_directory_with_somebody_elses_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert bayeslora(*options(tmp_path)) == 2
    assert "thesis.tex" in one_line(capsys)
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize(
    "mistake",
    [
        ["--task", "urn"],
        ["--model", "smolm2"],
        ["--targets", "nothing"],
        ["--layers", "last:99"],
        ["--max-tokens", "5"],
        ["--cache-trunk"],
        ["--report-to", "tensorbord"],
        ["--device", "cuda:99"],
    ],
)
def test_a_mistake_with_force_costs_no_run(done: Path, mistake: list[str]) -> None:
    before = contents(done)
    assert bayeslora(*options(done, "--force", *mistake)) == 2
    assert contents(done) == before


def test_a_mistake_does_not_claim_the_directory(tmp_path: Path) -> None:
    assert bayeslora(*options(tmp_path / "run", "--task", "urn")) == 2
    assert bayeslora(*options(tmp_path / "run")) == 0


def test_a_base_model_in_use_is_given_back_as_it_was(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RunContext(loaded=load_model(tiny.model_directory()))
    names = [name for name, _ in place.loaded.model.named_modules()]

    def fail(self: Predictions, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(Predictions, "write", fail)
        with pytest.raises(OSError, match="No space"):
            train(run_config(), tmp_path, place)
    assert [name for name, _ in place.loaded.model.named_modules()] == names
    train(run_config(), tmp_path, place)
    assert [name for name, _ in place.loaded.model.named_modules()] == names
    assert outcome(tmp_path) == outcome(done)


def test_a_base_model_in_use_checkpoints_no_longer_than_the_run(tmp_path: Path) -> None:
    place, training = RunContext(loaded=load_model(tiny.model_directory())), replace(run_config().training, epochs=1)
    train(run_config(training=replace(training, gradient_checkpointing=True)), tmp_path, place)
    assert not place.loaded.model.is_gradient_checkpointing


def test_a_limit_on_questions_keeps_those_that_the_seed_chooses(tmp_path: Path) -> None:
    config = run_config()
    config = replace(config, data=replace(config.data, max_train=5))
    assert train(config, tmp_path)["counts"]["train"]["questions"] == 5


SCORED_IN_OTHER_WAYS = ("bayesian-lora", "laplace", "monteclora")
"""One method for each way in which questions are scored: by draws, linearised, and by PEFT's own layers."""


@pytest.mark.parametrize("method", some(METHODS, SCORED_IN_OTHER_WAYS))
def test_a_kept_trunk_changes_nothing(method: str, tmp_path: Path) -> None:
    settings = {"members": 2} if method == "deep-ensemble" else {}
    adapter = AdapterConfig(rank=2, layers="last:1", settings=settings)
    training = TrainingConfig(epochs=2, batch_size=12, learning_rate=0.01)
    results = [
        train(run_config(method, adapter=adapter, training=replace(training, cache_trunk=kept)), tmp_path / str(kept))
        for kept in (False, True)
    ]
    assert results[0]["metrics"] == pytest.approx(results[1]["metrics"], rel=1e-3, abs=1e-5)


# Failures -------------------------------------------------------------------------------------------------------------


@contextmanager
def powerless() -> Iterator[None]:
    """Inside the block permissions count, though root runs the tests."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.system
def test_a_read_only_directory_is_a_failure_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = options(tmp_path)
    tmp_path.chmod(0o555)
    with powerless():
        assert bayeslora(*words) == 1
    assert "Permission denied" in one_line(capsys) and contents(tmp_path) == {}
    tmp_path.chmod(0o755)
    assert bayeslora(*words) == 0


def test_an_output_that_is_a_file_is_a_failure_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert bayeslora(*options(tmp_path / "file")) == 2
    assert f"{tmp_path / 'file'}: is a file, or below one; choose a directory" in one_line(capsys)
    assert (tmp_path / "file").read_text() == "mine"


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Inside the block the system writes no file beyond this size, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.system
def test_a_disk_that_is_full_at_a_checkpoint_costs_nothing_but_time(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with largest_file(20_000):  # room for settings, not for tensors
        assert bayeslora(*options(tmp_path, "--checkpoint-seconds", 0)) == 1
    err = one_line(capsys)
    assert "checkpoint.safetensors" in err and "File too large" in err
    assert contents(tmp_path).keys() == {"config.json"}
    assert bayeslora(*options(tmp_path)) == 0
    assert outcome(tmp_path) == outcome(done)


FILES = ("config.json", "checkpoint.safetensors", "predictions.jsonl.gz", "result.json")


@pytest.mark.parametrize(
    "name, call",
    some(
        [(name, call) for name in FILES for call in ("fsync", "replace")],
        [("checkpoint.safetensors", "replace")],
    ),
)
def test_a_full_disk_at_any_file_is_one_line_and_the_run_goes_on_later(
    name: str,
    call: str,
    done: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = getattr(os, call)

    def full(target: Any, *more: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{target}") if call == "fsync" else os.fspath(target)
        if Path(path).name == f"{name}.partial":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return real(target, *more)

    with monkeypatch.context() as broken:
        broken.setattr(os, call, full)
        assert bayeslora(*options(tmp_path)) == 1
    assert "No space left on device" in one_line(capsys)
    assert not (tmp_path / "result.json").exists() and not list(tmp_path.glob("*.partial"))
    assert bayeslora(*options(tmp_path)) == 0
    assert outcome(tmp_path) == outcome(done)


@pytest.mark.system
def test_a_full_disk_at_the_adapter_is_one_line_and_the_run_goes_on_later(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = run._save_adapter

    def full(*given: Any) -> None:
        with largest_file(20_000):
            save(*given)

    with monkeypatch.context() as broken:
        broken.setattr(run, "_save_adapter", full)
        assert bayeslora(*options(tmp_path)) == 1
    assert "adapter" in one_line(capsys)
    assert not (tmp_path / "adapter").exists() and (tmp_path / "checkpoint.safetensors").exists()
    assert bayeslora(*options(tmp_path)) == 0
    assert outcome(tmp_path) == outcome(done)
    assert not (tmp_path / "adapter.partial").exists()


ALL = ["--targets", "q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    "more, where",
    [
        (["--method", "lora", "--learning-rate", "1e30", *ALL], "step 2 of 6"),
        (["--learning-rate", "1e30"], "step 2 of 6"),
        (["--method", "lora", "--learning-rate", "1e30", "--batch-size", "12", *ALL], "evaluation after step 1 of 2"),
        (["--learning-rate", "1e30", "--batch-size", "12"], "evaluation after step 1 of 2"),
    ],
)
def test_a_diverging_run_ends_in_one_line_that_says_where(
    more: list[str], where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bayeslora(*options(tmp_path, *more)) == 1
    err = one_line(capsys)
    assert where in err and "learning rate" in err
    assert not (tmp_path / "result.json").exists() and not (tmp_path / "checkpoint.safetensors").exists()


def test_the_last_good_checkpoint_of_a_diverging_run_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora(*options(tmp_path, "--learning-rate", "1e30", "--checkpoint-seconds", 0)) == 1
    assert f"the last good state is kept in {tmp_path / 'checkpoint.safetensors'}" in one_line(capsys)
    tensors = load_file(tmp_path / "checkpoint.safetensors")
    assert tensors and all(bool(torch.isfinite(value).all()) for value in tensors.values())


def test_parameters_that_are_not_finite_are_never_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = torch.optim.AdamW.step

    def overflow(self: torch.optim.AdamW) -> None:
        step(self)
        self.param_groups[0]["params"][0].data.fill_(torch.inf)

    monkeypatch.setattr(torch.optim.AdamW, "step", overflow)
    assert bayeslora(*options(tmp_path, "--checkpoint-seconds", 0)) == 1
    assert "a parameter is no longer finite" in one_line(capsys)
    assert contents(tmp_path).keys() == {"config.json"}


# Places ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_impossible_checkpoint_times_are_refused(seconds: float) -> None:
    with pytest.raises(InputError, match="checkpoint_seconds"):
        RunContext(checkpoint_seconds=seconds)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"seed": 0}'])
def test_a_directory_with_broken_settings_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json|holds another run") as refusal:
        train(run_config(), tmp_path)
    assert "--force" in str(refusal.value)
    assert (tmp_path / "config.json").read_text() == text


def test_clearing_a_run_begins_with_its_result(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run whose adapter is gone would still look done."""
    train(run_config(), tmp_path)

    def interrupt(path: Path, *args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(directories.shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            directories.RunDirectory(tmp_path).claim({}, force=True)
    assert not (tmp_path / "result.json").exists()
    train(run_config(), tmp_path)
    assert outcome(tmp_path) == outcome(done)


def test_trackers_leave_the_process_group_to_the_run(tmp_path: Path, free_port: int) -> None:
    """Several processes still have to agree on what is written when training is over."""
    pytest.importorskip("tensorboard")
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port}", rank=0, world_size=1)
    try:
        with tracking(["tensorboard"], tmp_path, {"seed": 1}) as log:
            assert log is not None
            log({"nll": 0.5}, 1)
        assert torch.distributed.is_initialized()
        assert list(tmp_path.glob("bayeslora/events*"))
    finally:
        torch.distributed.destroy_process_group()


def test_trackers_are_told_likelihood_and_kls_apart(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert bayeslora(*options(tmp_path, "--report-to", "tensorboard")) == 0
    [events] = {path.parent for path in tmp_path.glob("bayeslora/events*")}
    found = EventAccumulator(str(events)).Reload()
    told = {tag: [event.value for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert {len(told[f"train/{name}"]) for name in ("nll", "kl_inducing", "kl_conditional")} == {tiny.STEPS}
    assert told["train/kl_inducing"] != told["train/kl_conditional"]
    history = read_json(tmp_path / "result.json")["history"]
    assert told["validation/nll"] == pytest.approx([it["validation"]["nll"] for it in history])
    assert np.mean(told["train/nll"][:3]) == pytest.approx(history[0]["train_nll"])
