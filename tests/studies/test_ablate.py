"""Ablations really run with a tiny model: what is written, what is not made twice, what survives."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayeslora.errors import InputError
from bayeslora.predict.questions.predictions import read_predictions
from bayeslora.runs.load import load_run
from bayeslora.studies import pool, worker
from bayeslora.studies.ablate import ablate
from bayeslora.studies.ablation import AblationStudy
from bayeslora.studies.tables import StudyOutcome
from bayeslora.train import AdapterConfig, PredictionConfig, TrainingConfig
from train.tiny import (
    bayeslora,
    model_directory,
    question,
    read_json,
    task_directory,
    without_intervals,
    write_task,
)


def study(**changes: Any) -> AblationStudy:
    settings: dict[str, Any] = {
        "model": model_directory(),
        "task": task_directory(),
        "seeds": (0,),
        "adapter": AdapterConfig(rank=2, targets=("q_proj",)),
        "training": TrainingConfig(epochs=1, batch_size=6),
        "prediction": PredictionConfig(samples=2, calibrate="none"),
    }
    return AblationStudy(**(settings | changes))


def options(name: str, out: Path, *more: object) -> list[object]:
    """The same on the command line."""
    words = ["ablate", name, "--model", model_directory(), "--task", task_directory(), "--seeds", 0, "--out", out]
    return [
        *words,
        "--rank",
        2,
        "--targets",
        "q_proj",
        "--epochs",
        1,
        "--batch-size",
        6,
        "--samples",
        2,
        "--quiet",
        *more,
    ]


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Without bootstraps, which have tests of their own and take most of the time."""
    with without_intervals(), pytest.MonkeyPatch.context() as patched:
        patched.setattr("bayeslora.studies.evaluated.PAIRED", {})
        yield


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A task of other questions, to be shifted to."""
    rows = [question(k, question=f"What about {k}?") for k in range(50, 56)]
    return str(write_task(tmp_path_factory.mktemp("tasks") / "other", test=rows))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, other: str) -> tuple[Path, StudyOutcome]:
    """An ablation that is done, with two seeds and a shift; not to be changed."""
    out = tmp_path_factory.mktemp("ablate") / "study"
    return out, ablate(["flow-depth"], study(values=("0", "1"), seeds=(0, 1), shift=(other,)), out)[0]


@pytest.fixture
def trained(done, tmp_path) -> Path:
    """A directory with finished runs, to be worked in."""
    shutil.copytree(done[0], tmp_path / "study")
    return tmp_path / "study"


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("something was made again")


# What comes out -------------------------------------------------------------------------------------------------------


def test_everything_that_is_promised_is_written(done):
    out, ablated = done
    assert ablated.out == out / "task" / "flow-depth"
    names = {path.name for path in ablated.out.iterdir()}
    assert names == {"table.md", "table.tex", "table.json", "figure.png", "evaluated"}
    assert (ablated.out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (out / "task" / "runs").iterdir()} == {"flow-depth-0", "bayesian-lora"}


def test_the_table_says_what_the_runs_say(done):
    out, ablated = done
    record = read_json(ablated.out / "table.json")
    assert record["ablation"] == "flow-depth" and record["seeds"] == [0, 1] and record["environment"]["packages"]
    for label, folder in (("0", "flow-depth-0"), ("1", "bayesian-lora")):
        results = [read_json(out / "task" / "runs" / folder / f"seed-{seed}" / "result.json") for seed in (0, 1)]
        assert [run["metrics"] for run in record["sections"]["task"][label]["runs"]] == [
            it["metrics"] for it in results
        ]
        assert record["variants"][label]["config"] == results[0]["config"]
        nlls, epistemic = ([it["metrics"][name] for it in results] for name in ("nll", "epistemic"))
        shown = f"{np.mean(nlls):.3f} ± {np.std(nlls, ddof=1):.3f}"
        line = next(line for line in ablated.text.splitlines() if line.startswith(f"| {label} |"))
        assert shown in line and f"{np.mean(epistemic):.3f} ±" in line
        assert line.endswith(f"| {results[0]['parameters']['trainable']} |")
    assert "| flow layers | ACC ↑ |" in ablated.text
    assert "flow layers & ACC" in (ablated.out / "table.tex").read_text(encoding="utf-8")


def test_shifted_questions_are_reported_apart_with_how_they_are_told(done):
    _, ablated = done
    assert list(ablated.sections) == ["task", "task → other"]
    for row in ablated.sections["task → other"].values():
        assert set(row) == {"acc", "nll", "ece", "aurc", "shift_auroc_epistemic", "shift_auroc_entropy"}
        assert len(row["nll"].values) == 2


def test_nothing_is_made_twice(done, other, monkeypatch):
    out, ablated = done
    monkeypatch.setattr(worker, "train", refuse)
    monkeypatch.setattr(worker, "evaluate", refuse)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    [again] = ablate(["flow-depth"], study(values=("0", "1"), seeds=(0, 1), shift=(other,)), out)
    assert again.text.split("## task")[0] == ablated.text.split("## task")[0]
    assert {path: path.stat().st_mtime_ns for path in out.rglob("result.json")} == before


# What is evaluated otherwise ------------------------------------------------------------------------------------------


def test_numbers_of_draws_need_no_training_and_are_those_of_evaluate(trained, other, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "train", refuse)
    [ablated] = ablate(["samples"], study(values=("0", "3"), shift=(other,)), trained)
    run = trained / "task" / "runs" / "bayesian-lora" / "seed-0"
    for task, title in ((task_directory(), "task"), (other, "task → other")):
        words = ["evaluate", run, "--task", task, "--samples", 3, "--out", tmp_path / title, "--quiet"]
        assert bayeslora(*words) == 0
        expected = read_json(tmp_path / title / "result.json")["metrics"]["nll"]
        assert ablated.sections[title]["3"]["nll"].values == pytest.approx((expected,))
    assert ablated.sections["task"]["0"]["epistemic"].values == (0.0,)
    record = read_json(ablated.out / "table.json")["variants"]["3"]
    assert record["evaluated_with"] == {"samples": 3} and record["run"] == "bayesian-lora"


def test_posterior_scales_need_no_training_and_multiply_the_spread(trained, monkeypatch):
    monkeypatch.setattr(worker, "train", refuse)
    [ablated] = ablate(["posterior-scale"], study(values=("1", "3")), trained)
    run = trained / "task" / "runs" / "bayesian-lora" / "seed-0"
    own = read_json(run / "result.json")["metrics"]
    assert ablated.sections["task"]["1"]["nll"].values == pytest.approx((own["nll"],))
    model = load_run(run, samples=2)
    model.model.base_model.posterior_scale = 3.0  # as everybody who loads the adapter with PEFT can
    place = ablated.out / "evaluated" / "task" / "posterior-scale-3" / "seed-0"
    found = read_predictions(place / "predictions.jsonl.gz")[1]
    np.testing.assert_allclose(found, model.evaluate(task_directory()).probabilities, atol=1e-6)
    assert not np.allclose(found, read_predictions(run / "predictions.jsonl.gz")[1], atol=1e-3)
    assert read_json(place / "result.json")["calibration"]["posterior_scale"] == 3.0
    config = read_json(run / "adapter" / "adapter_config.json")
    assert config["posterior_scale"] == 1.0  # nothing on disk has changed


def test_a_scale_is_refused_where_there_is_none_to_set(done):
    model = load_run(done[0] / "task" / "runs" / "bayesian-lora" / "seed-0")
    with pytest.raises(InputError, match="posterior_scale"):
        model.set_posterior_scale(-1.0)
    assert model.calibration.posterior_scale == 1.0


def test_ablations_share_the_runs_they_have_in_common(trained, monkeypatch):
    """Of three posteriors one is there already."""
    made = []
    train = worker.train

    def noting(config, path, *args, **kwargs):
        made.append(Path(path).parent.name)
        return train(config, path, *args, **kwargs)

    monkeypatch.setattr(worker, "train", noting)
    [ablated] = ablate(["map-recovery"], study(), trained)
    assert made == ["lora", "map-recovery-degenerate"]
    assert list(ablated.sections["task"]) == ["lora", "degenerate (sd 1e-3, lambda 1e-4, no flow)", "bayesian-lora"]
    lora, degenerate, usual = ablated.sections["task"].values()
    assert lora["epistemic"].mean == 0 < degenerate["epistemic"].mean < 0.01 * usual["epistemic"].mean


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_an_interrupted_ablation_goes_on(tmp_path, monkeypatch):
    train = worker.train
    made: list[str] = []

    def interrupted(config, path, *args, **kwargs):
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append(Path(path).parent.name)
        return train(config, path, *args, **kwargs)

    monkeypatch.setattr(worker, "train", interrupted)
    assert bayeslora(*options("share-inducing", tmp_path / "study")) == 130
    assert made == ["bayesian-lora"]
    monkeypatch.setattr(worker, "train", train)
    runs = tmp_path / "study" / "task" / "runs"
    before = (runs / "bayesian-lora" / "seed-0" / "result.json").stat().st_mtime_ns
    assert bayeslora(*options("share-inducing", tmp_path / "study")) == 0
    assert (runs / "bayesian-lora" / "seed-0" / "result.json").stat().st_mtime_ns == before
    assert (runs / "share-inducing-shared" / "seed-0" / "result.json").exists()


def test_a_run_that_fails_leaves_a_gap_and_exits_with_1(trained, monkeypatch, capsys):
    monkeypatch.setattr(worker, "train", lambda *a, **k: 1 / 0)
    assert bayeslora(*options("flow-depth", trained, "--values", 1, 2)) == 1
    out, err = capsys.readouterr()
    assert "1 run failed" in err and err.count("\n") == 1 and "ZeroDivisionError" in out
    assert "| 2 | — | — | — | — | — |" in out and "| 1 | " in out


def test_all_runs_failing_gives_a_table_of_gaps_and_no_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "train", lambda *a, **k: 1 / 0)
    [ablated] = ablate(["preset"], study(), tmp_path / "study")
    assert len(ablated.failures) == 2 and not (ablated.out / "figure.png").exists()


def test_runs_of_other_settings_are_refused(done):
    with pytest.raises(InputError, match=r"holds another run.*epochs is 1 there and 2 here"):
        ablate(["flow-depth"], study(training=TrainingConfig(epochs=2, batch_size=6)), done[0])


def test_json_is_the_record(trained, capsys):
    assert bayeslora(*options("flow-depth", trained, "--values", 1, "--json")) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == 1 and list(record["sections"]["task"]) == ["1"]


@pytest.mark.parametrize(
    "name, more, advice",
    [
        ("flow-deep", [], "unknown ablation 'flow-deep' (did you mean 'flow-depth'?)"),
        ("rank", ["--values", "big"], "values has 'big'; rank takes whole numbers from 1, such as 2 4 8 16 32"),
        ("rank", ["--shift", "arc-eesy"], "unknown task 'arc-eesy'"),
        ("rank", ["--shift", "wikitext2"], "has no questions with options"),
        ("rank", ["--task", "nowhere.jsonl"], "nowhere.jsonl"),
        ("rank", ["--workers", "-1"], "workers is -1"),
        ("rank", ["--settings", "flow_dept=1"], "flow_dept"),
    ],
)
def test_bad_input_is_one_line_and_2_before_anything_is_run(name, more, advice, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(worker, "train", refuse)
    assert bayeslora(*options(name, tmp_path / "study", *more)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and advice in err and "Traceback" not in err
    assert not (tmp_path / "study").exists()


def test_a_missing_name_is_told_in_one_line(capsys):
    assert bayeslora("ablate", "--model", "m", "--task", "urns", "--out", "x") == 2
    err = capsys.readouterr().err
    assert "no ablation is named" in err and "flow-depth" in err and err.count("\n") == 1


@pytest.mark.system
def test_several_ablations_make_what_they_share_once_and_name_their_own_failures_only(tmp_path, monkeypatch):
    train, made = worker.train, []

    def failing(config: Any, path: Path, place: Any) -> Any:
        made.append(path.parent.name)
        return 1 / 0 if config.method == "lora" else train(config, path, place)

    monkeypatch.setattr(worker, "train", failing)
    ablated = ablate(["share-inducing", "map-recovery", "samples"], study(), tmp_path / "study")
    assert sorted(made) == ["bayesian-lora", "lora", "map-recovery-degenerate", "share-inducing-shared"]
    assert [it.out.name for it in ablated] == ["share-inducing", "map-recovery", "samples"]
    assert [len(it.failures) for it in ablated] == [0, 1, 0]
    assert all((it.out / "figure.png").exists() for it in ablated)


def test_all_ablations_have_a_name_and_values_belong_to_one(capsys, monkeypatch, tmp_path):
    seen: list[str] = []
    monkeypatch.setattr("bayeslora.studies.ablate.ablate", lambda names, *args, **kwargs: seen.extend(names) or [])
    assert bayeslora(*options("all", tmp_path / "study")) == 0
    assert len(seen) == 12 and {"flow-depth", "preset"} <= set(seen)
    monkeypatch.undo()
    assert bayeslora(*options("rank", tmp_path / "study", "--values", 2), "flow-depth") == 2
    assert bayeslora("ablate", "rank", "shape", *options("x", tmp_path / "study", "--values", 2)[2:]) == 2
    assert "give values for one" in capsys.readouterr().err
    assert bayeslora("ablate", "rank", "rank", *options("x", tmp_path / "study")[2:]) == 2
    assert "names one twice (rank, rank)" in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_help_lists_every_ablation(capsys):
    from bayeslora.studies.ablations import ABLATIONS

    assert bayeslora("ablate", "--help") == 0
    text = capsys.readouterr().out
    assert all(f"{name}:" in text for name in ABLATIONS) and "(A B C D E)" in text


def test_seeds_of_an_ablation_are_its_own_unless_given(monkeypatch, tmp_path):
    """Nothing is run: the jobs are what counts."""
    seen: list[Any] = []
    monkeypatch.setattr(pool.Workers, "run", lambda self, work, ended: seen.extend(work))
    ablate(["seeds"], replace(study(), seeds=()), tmp_path / "study")
    assert {(job.config.method, job.config.seed) for job in seen} == {
        (method, seed) for method in ("lora", "bayesian-lora") for seed in range(10)
    }
