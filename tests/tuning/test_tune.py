"""Searches really run with a tiny model: what is written, what survives, what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("botorch")

from bayeslora.errors import InputError
from bayeslora.report import make_report
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.result import RunResult
from bayeslora.runs.saved_config import from_dict, to_dict
from bayeslora.studies import worker
from bayeslora.studies.execution import Execution
from bayeslora.train import AdapterConfig, resolve, train
from bayeslora.train.errors import RunsFailed
from bayeslora.tuning import propose as proposing
from bayeslora.tuning import tune as module
from bayeslora.tuning.config import Tuning
from bayeslora.tuning.log import open_log
from bayeslora.tuning.tune import tune
from train.tiny import (
    bayeslora,
    contents,
    read_json,
    run_config,
    without_intervals,
    write_task,
)
from tuning.cases import CONSTRAINTS, SEARCH, tuning, words

pytestmark = pytest.mark.system


def without_times(path: Path) -> list[dict[str, Any]]:
    """The trials of a log, but for what took how long."""
    trials = read_json(path / "trials.json")["trials"]
    for trial in trials:
        trial["outcomes"] = {name: it for name, it in trial["outcomes"].items() if "seconds" not in name}
    return trials


def same(mine: Any, other: Any) -> bool:
    """Whether trials are equal up to rounding, which decides the last digits of what a model proposes: linear algebra may sum in
    another order where memory lies elsewhere."""
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(same(part, other[name]) for name, part in mine.items())
    if isinstance(mine, list):
        return len(mine) == len(other) and all(map(same, mine, other))
    return bool(mine == (pytest.approx(other, rel=1e-4) if isinstance(mine, float) else other))


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with without_intervals(), pytest.MonkeyPatch.context() as patched:
        for name, value in {"DRAWS": 8, "RAW_POINTS": 16, "RESTARTS": 1}.items():
            patched.setattr(proposing, name, value)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that is done; not to be changed."""
    out = tmp_path_factory.mktemp("tune") / "search"
    with without_intervals(), pytest.MonkeyPatch.context() as patched:
        for name, value in {"DRAWS": 8, "RAW_POINTS": 16, "RESTARTS": 1}.items():
            patched.setattr(proposing, name, value)
        tune(tuning(), out)
    return out


# What comes out -------------------------------------------------------------------------------------------------------


def test_everything_that_is_promised_is_written(done):
    names = {path.name for path in done.iterdir()} - {".lock"}
    assert names == {"trials.json", "trials.md", "tuned.json", "chosen.json", "pareto.png", "runs", "baseline"}
    assert (done / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (done / "runs").iterdir()) == [f"trial-{k:03d}" for k in range(5)]
    record = read_json(done / "tuned.json")
    assert record["environment"]["packages"]["torch"] and record["environment"]["botorch"]
    assert record["study"]["run"]["seed"] == 0 and record["study"]["search"] == list(SEARCH)
    assert len(record["hypervolumes"]) == 5 and record["hypervolumes"] == pytest.approx(sorted(record["hypervolumes"]))


def test_the_log_says_what_the_runs_say(done):
    trials = read_json(done / "trials.json")["trials"]
    assert [trial["source"] for trial in trials] == ["sobol"] * 3 + ["model"] * 2
    for trial in trials:
        run = done / "runs" / f"trial-{trial['number']:03d}"
        result, config = read_json(run / "result.json"), read_json(run / "config.json")
        assert trial["outcomes"]["nll"] == result["metrics"]["nll"]
        assert trial["outcomes"]["train_seconds"] == result["timing"]["train_seconds"]
        assert {name: config["training"][name] for name in ("learning_rate", "weight_decay")} == trial["values"]
        assert 1e-3 <= trial["values"]["learning_rate"] <= 1e-1
    assert f"| 4 | {trials[4]['values']['learning_rate']:.4g} |" in (done / "trials.md").read_text(encoding="utf-8")


def test_bounds_are_relative_to_a_lora_with_the_same_settings(done):
    record, baseline = read_json(done / "tuned.json"), read_json(done / "baseline" / "result.json")
    assert record["bounds"] == {CONSTRAINTS[0]: pytest.approx(baseline["metrics"]["acc"] - 0.7), CONSTRAINTS[1]: 1000.0}
    assert baseline["split"] == "validation" and baseline["config"]["training"]["learning_rate"] == 7e-4
    assert baseline["config"]["adapter"]["rank"] == 2 and baseline["config"]["training"]["epochs"] == 1


def test_no_trial_reads_the_test_split(tmp_path):
    task = write_task(tmp_path / "task")
    (task / "test.jsonl").unlink()
    tuned = tune(tuning(task=str(task), trials=3, constraints=()), tmp_path / "out")
    assert tuned.outcome.chosen is not None
    for path in (tmp_path / "out").rglob("result.json"):
        assert read_json(path)["split"] == "validation" and set(read_json(path)["counts"]) == {"train", "validation"}
    with pytest.raises(InputError, match=r"test"):
        tune(tuning(task=str(task), trials=3, constraints=()), tmp_path / "out", apply=True)


def test_the_chosen_run_is_trained_and_tested(done, tmp_path, capsys):
    out = tmp_path / "search"
    shutil.copytree(done, out)
    assert bayeslora(*words(out, "--apply", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    result = read_json(out / "chosen" / "result.json")
    assert result["split"] == "test" and told["applied"]["metrics"] == result["metrics"]
    assert result["config"] == read_json(out / "chosen.json")
    for name, value in told["chosen"]["values"].items():
        assert result["config"]["training"][name] == value
    trial = read_json(out / "runs" / f"trial-{told['chosen']['number']:03d}" / "result.json")
    assert result["history"] == trial["history"]  # the very same training


def test_the_settings_of_the_chosen_run_are_a_file_for_train(done, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "bayeslora.train.run.train", lambda config, *a, **k: seen.append(config) or RunResult(config={}, metrics={})
    )
    assert bayeslora("train", "--config", done / "chosen.json", "--out", "x") == 0
    assert to_dict(resolve(seen[0])) == read_json(done / "chosen.json") and seen[0].report_split == "test"


# Going on -------------------------------------------------------------------------------------------------------------


def test_nothing_is_run_twice(done, monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a run was made again")

    before = {name: it for name, it in contents(done).items() if name != "pareto.png"}
    monkeypatch.setattr(worker, "train", refuse)
    monkeypatch.setattr(worker, "load_base", refuse)
    monkeypatch.setattr(proposing, "propose", refuse)
    assert tune(tuning(), done).text == (done / "trials.md").read_text(encoding="utf-8")
    assert {name: it for name, it in contents(done).items() if name != "pareto.png"} == before


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_a_search_that_was_killed_ends_as_if_it_had_not_been(stop, done, tmp_path, monkeypatch):
    """In the first trials, between them and the model's, and within a batch of the model's."""
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > stop:
            raise KeyboardInterrupt
        return train(*args, **kwargs)

    monkeypatch.setattr(worker, "train", dying)
    with pytest.raises(KeyboardInterrupt):
        tune(tuning(), tmp_path / "search")
    log = read_json(tmp_path / "search" / "trials.json")["trials"]
    assert [trial["state"] for trial in log].count("done") == stop and log[stop]["state"] == "planned"
    monkeypatch.setattr(worker, "train", train)
    tune(tuning(), tmp_path / "search")
    assert same(without_times(tmp_path / "search"), without_times(done))


def test_a_search_that_ended_in_the_lora_of_its_constraints_goes_on(done, tmp_path, monkeypatch):
    out, train = tmp_path / "search", module.train

    def dying(config: Any, path: Path, *args: Any, **kwargs: Any) -> None:
        RunDirectory(path).claim(to_dict(resolve(config)))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "train", dying)
    with pytest.raises(KeyboardInterrupt):
        tune(tuning(), out)
    (out / "trials.json.partial").touch()  # as a kill leaves it that comes a moment later
    monkeypatch.setattr(module, "train", train)
    tune(tuning(), out)
    assert same(without_times(out), without_times(done))


@pytest.mark.slow
def test_a_killed_process_is_no_loss(done, tmp_path):
    """Killed for good, in the middle of the second trial."""
    out = tmp_path / "search"
    command = [sys.executable, "-m", "bayeslora", *map(str, words(out))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (out / "runs" / "trial-001").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert read_json(out / "trials.json")["trials"][2]["state"] == "planned"
    tune(tuning(), out)
    assert same(without_times(out), without_times(done))


@pytest.mark.slow
def test_workers_find_what_one_process_finds(done, tmp_path):
    tune(tuning(), tmp_path / "search", Execution(workers=2))
    ours, theirs = without_times(tmp_path / "search"), without_times(done)
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        assert mine["values"] == other["values"] and mine["outcomes"] == pytest.approx(other["outcomes"], abs=1e-5)
    assert all(trial["state"] == "done" for trial in ours)


def test_the_run_that_was_chosen_before_gives_way_to_another(done, tmp_path):
    """The page shows no figures of a run that is not the choice."""
    out = Path(shutil.copytree(done, tmp_path / "search"))
    tuned = tune(tuning(), out, apply=True)
    other = next(trial for trial in tuned.outcome.trials if trial.outcomes and trial.number != tuned.outcome.chosen)
    shutil.rmtree(out / "chosen")
    train(replace(from_dict(read_json(other.path(out) / "config.json")), report_split="test"), out / "chosen")
    page = make_report(out).read_text(encoding="utf-8")
    assert "has chosen another run since" in page
    again = tune(tuning(), out, apply=True)
    assert again.applied["config"] == tuned.applied["config"] == read_json(out / "chosen" / "config.json")
    assert "has chosen another run since" not in make_report(out).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "changes", [{"training": {"learning_rate": 0.5}}, {"method": "checkpoint-ensemble", "preset": "cyclic"}]
)
def test_the_lora_of_constraints_learns_at_its_own_rate(changes, tmp_path):
    given = tuning(search=("label_smoothing=0:0.1",), trials=2, start=2, q=1)
    training = replace(given.run.training, **changes.pop("training", {}))
    tune(replace(given, run=replace(given.run, training=training, **changes)), tmp_path / "out")
    config = read_json(tmp_path / "out" / "baseline" / "config.json")
    assert (config["method"], config["preset"], config["training"]["learning_rate"]) == ("lora", "default", 7e-4)


def test_more_trials_extend_a_search(done, tmp_path):
    out = tmp_path / "search"
    shutil.copytree(done, out)
    tuned = tune(tuning(trials=6, q=1), out)
    assert len(tuned.outcome.trials) == 6
    assert without_times(out)[:5] == without_times(done)


def test_a_run_that_two_processes_want_is_made_by_one(done, tmp_path):
    with RunDirectory(tmp_path).locked(), pytest.raises(InputError, match="another process is at work"):
        tune(tuning(), tmp_path)


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_a_trial_that_fails_costs_no_other(tmp_path, monkeypatch, capsys):
    def failing(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.training.learning_rate > 1e-2:
            raise RuntimeError("out of luck")
        return train(config, *args, **kwargs)

    monkeypatch.setattr(worker, "train", failing)
    assert bayeslora(*words(tmp_path / "out", "--constraints")) == 0
    out, err = capsys.readouterr()
    trials = read_json(tmp_path / "out" / "trials.json")["trials"]
    states = {trial["state"] for trial in trials}
    assert states == {"done", "failed"} and len(trials) == 5 and err == ""
    assert all((trial["values"]["learning_rate"] > 1e-2) == (trial["state"] == "failed") for trial in trials)
    assert "Failed:" in out and "RuntimeError: out of luck" in out and "| failed |" in out


def test_a_machine_that_fails_ends_the_search_which_goes_on_later(tmp_path, monkeypatch, capsys):
    """A full disk says nothing about the settings of a trial, so that is not one that has failed."""
    search, undisturbed = (words(tmp_path / name, "--constraints") for name in ("out", "undisturbed"))

    def full(config: Any, path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "trial-001":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return train(config, path, *args, **kwargs)

    with monkeypatch.context() as broken:
        broken.setattr(worker, "train", full)
        assert bayeslora(*search) == 1
    err = capsys.readouterr().err
    assert err.startswith("bayeslora: trial 1 could not be run: OSError: ") and err.count("\n") == 1
    states = [trial["state"] for trial in read_json(tmp_path / "out" / "trials.json")["trials"]]
    assert states == ["done", "planned", "planned"]
    assert bayeslora(*search) == bayeslora(*undisturbed) == 0
    found, wanted = (read_json(tmp_path / name / "trials.json")["trials"] for name in ("out", "undisturbed"))
    assert [(it["state"], it["values"]) for it in found] == [("done", it["values"]) for it in wanted]


def states(out: Path) -> list[str]:
    return [trial["state"] for trial in read_json(out / "trials.json")["trials"]]


def test_a_base_model_that_is_not_there_is_no_trial_that_failed(tmp_path, capsys):
    """Neither once it is there, nor if its name was wrong."""
    out, base = tmp_path / "out", tmp_path / "base"
    search = words(out, "--constraints", "--trials", 3)
    for _ in range(2):
        assert bayeslora(*search, "--model", base) == 1
        err = capsys.readouterr().err
        assert err.startswith("bayeslora: trial 0 could not be run: InputError: ") and err.count("\n") == 1
        assert states(out) == ["planned"] * 3
    assert bayeslora(*search) == 0 and states(out) == ["done"] * 3
    assert bayeslora(*search, "--model", base) == 2
    assert "holds another search (model" in capsys.readouterr().err


def test_a_base_model_that_is_gone_later_is_no_trial_that_failed(done, tmp_path, monkeypatch):
    out = Path(shutil.copytree(done, tmp_path / "search"))
    monkeypatch.setattr(worker, "load_base", lambda *a, **k: 1 / 0)
    with pytest.raises(RunsFailed, match=r"trial 5 could not be run: ZeroDivisionError: .* the same command again"):
        tune(tuning(trials=6, q=1), out)
    assert states(out) == ["done"] * 5 + ["planned"]


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match="device 'cuda:99' is not available"):
        tune(tuning(), tmp_path / "out", Execution(device="cuda:99"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("trials", [3, 5])
def test_if_everything_fails_it_is_said_why_and_tried_again(trials, tmp_path, monkeypatch, capsys):
    search = words(tmp_path / "out", "--constraints", "--trials", trials)
    with monkeypatch.context() as broken:
        broken.setattr(worker, "train", lambda *a, **k: 1 / 0)
        assert bayeslora(*search) == 1
    out, err = capsys.readouterr()
    told = (
        "all trials failed; see" if trials == 3 else "all of the first 3 trials failed, trial 0 with ZeroDivisionError"
    )
    assert told in err and err.count("\n") == 1 and ("All trials failed; correct" in out) == (trials == 3)
    assert states(tmp_path / "out") == ["failed"] * 3
    assert bayeslora(*search) == 0 and states(tmp_path / "out") == ["done"] * trials


def test_a_trial_that_failed_is_not_tried_again_once_another_is_done(done, tmp_path):
    log = read_json(done / "trials.json")
    log["trials"][0] |= {"state": "failed", "outcomes": {}, "failure": "out of luck"}
    (tmp_path / "trials.json").write_text(json.dumps(log))
    assert [trial.number for trial in open_log(tmp_path / "trials.json", to_dict(tuning())).planned] == []


def test_metrics_that_are_not_finite_are_a_failure(tmp_path, monkeypatch):
    outcomes_of = module.outcomes_of
    monkeypatch.setattr(module, "outcomes_of", lambda result: outcomes_of(result) | {"nll": float("inf")})
    with pytest.raises(RunsFailed, match="nll is inf"):
        tune(tuning(constraints=()), tmp_path / "out")


def test_if_nothing_keeps_the_constraints_there_is_no_choice(tmp_path, capsys):
    assert bayeslora(*words(tmp_path / "out", "--constraints", "nll<=0.0001", "--trials", 4)) == 1
    out, err = capsys.readouterr()
    assert "No trial keeps nll<=0.0001; loosen the constraints" in out and "no trial keeps all constraints" in err
    assert (
        not (tmp_path / "out" / "chosen.json").exists() and read_json(tmp_path / "out" / "tuned.json")["chosen"] is None
    )


def test_a_model_that_cannot_be_fitted_is_no_end(tmp_path, monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise proposing.ModelFailed("no luck")

    monkeypatch.setattr(proposing, "propose", fail)
    tuned = tune(tuning(constraints=(), trials=4), tmp_path / "out")
    assert [trial.source for trial in tuned.outcome.trials] == ["sobol"] * 4


def test_a_search_ends_when_everything_has_been_tried(tmp_path):
    tuned = tune(tuning(search=("rank=1:3",), constraints=(), trials=9), tmp_path / "out")
    assert sorted(trial.values["rank"] for trial in tuned.outcome.trials) == [1, 2, 3]


@pytest.mark.parametrize(
    "more, advice",
    [
        (("--search", "learning_rate=1:0"), "lower bound that is below the upper one"),
        (("--search", "lerning_rate=1:2"), "did you mean 'learning_rate'"),
        (("--constraints", "acc"), "in quotes, such as 'acc>=lora-0.005'"),
        (("--trials", 2), "trials is 2, but 3 are needed to start with"),
        (("--workers", 0), "workers is 0; give a whole number of at least 1"),
        (("--task", "arc-eesy"), "arc-eesy"),
        (("--method", "lore"), "did you mean 'lora'"),
        (("--report-split", "validation"), "report_split is not for tune"),
        (("--rank", 4), "holds another search (rank is 2 there and 4 here)"),
        (("--feasibility", "pof"), "holds another search (feasibility is 'mc' there and 'pof' here)"),
    ],
)
def test_bad_input_is_one_line_and_costs_nothing(more, advice, done, capsys):
    before = contents(done)
    assert bayeslora(*words(done, *more)) == 2
    out, err = capsys.readouterr()
    assert advice in err and err.count("\n") == 1 and out == "" and "Traceback" not in err
    assert contents(done) == before


def test_a_directory_that_holds_no_search_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(InputError, match=r"is not empty \(mine.txt, ...\) and holds no search"):
        tune(tuning(), tmp_path)
    with pytest.raises(InputError, match="is a file; choose a directory"):
        tune(tuning(), tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"trials": [{"number": 0}], "study": {}}', '{"trials": [], "study": {"run": 3}}']
)
def test_a_broken_log_is_refused(text, tmp_path):
    (tmp_path / "trials.json").write_text(text)
    with pytest.raises(InputError, match="is no log of a search"):
        tune(tuning(), tmp_path)


def test_without_botorch_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs BoTorch, which is not installed; run: pip install botorch"):
        tune(tuning(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_it_is_said_where_weight_decay_changes_nothing():
    assert module._decays(run_config("lora")) and not module._decays(run_config("bayesian-lora"))
    partial = run_config("bayesian-lora", adapter=AdapterConfig(stochastic_layers="last:1"))
    assert module._decays(partial)


def test_settings_from_before_one_existed_are_at_their_defaults(done, tmp_path):
    out = tmp_path / "search"
    shutil.copytree(done, out)
    log = read_json(out / "trials.json")
    del log["study"]["run"]["prediction"]["draw_layers"]
    (out / "trials.json").write_text(json.dumps(log))
    assert len(tune(tuning(), out).outcome.trials) == 5


def test_the_study_can_be_read_back(done):
    study = read_json(done / "tuned.json")["study"]
    again = Tuning(
        run=from_dict(study.pop("run")),
        **{name: tuple(it) if isinstance(it, list) else it for name, it in study.items()},
    )
    assert again == tuning()
