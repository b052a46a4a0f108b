"""A comparison really run with a tiny model: what is planned, what is skipped, what survives, and what is written."""

from __future__ import annotations

import functools
import gzip
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import entropy as scipy_entropy
from sklearn.metrics import roc_auc_score

from bayeslora import metrics
from bayeslora.errors import InputError
from bayeslora.figures.table import CALIBRATED_COLUMNS, COLUMNS
from bayeslora.methods import METHODS
from bayeslora.predict.questions.predictions import read_distances, read_epistemic, read_predictions
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.result import RunResult
from bayeslora.studies.compare import _Comparison, compare
from bayeslora.studies.comparison import OWN, Comparison
from bayeslora.studies.evaluated import METRICS as MAIN
from bayeslora.studies.evaluated import Evaluated, load_evaluated, table_rows
from bayeslora.studies.execution import Execution
from bayeslora.studies.plan import Job, plan, run_path
from bayeslora.studies.pool import Workers
from bayeslora.studies.runner import Runner
from bayeslora.studies.study import task_name
from bayeslora.studies.worker import Settings
from bayeslora.train import AdapterConfig, PredictionConfig, TrainingConfig
from bayeslora.train.origin import SEED_DISTANCE
from tiers import some
from train.tiny import bayeslora, model_directory, question, read_json, task_directory, without_intervals, write_task


def study(**changes: Any) -> Comparison:
    settings: dict[str, Any] = {
        "model": model_directory(),
        "methods": ("lora", "temperature", "deep-ensemble", "bbb"),
        "tasks": (task_directory(),),
        "seeds": (0, 1),
        "adapter": AdapterConfig(rank=2, targets=("q_proj",)),
        "training": TrainingConfig(epochs=1, batch_size=6),
        "prediction": PredictionConfig(samples=2, calibrate="none"),
    }
    return Comparison(**(settings | changes))


def calibrated_study(other: str) -> Comparison:
    return study(shift=(other,), prediction=PredictionConfig(samples=2))


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Without intervals, and with few resamples of pairs: a hundred are enough to tell what is equal from what is not."""
    with without_intervals(), pytest.MonkeyPatch.context() as patched:
        few = functools.partial(metrics.paired_bootstrap_over_runs, resamples=100)
        patched.setattr(metrics, "paired_bootstrap_over_runs", few)
        yield


@pytest.fixture
def undrawn(monkeypatch):
    """Nothing is drawn, where figures are not what a test is about."""
    for name in ("scatter_figure", "reliability_figure"):
        monkeypatch.setattr(f"bayeslora.studies.compare.{name}", lambda *args, **kwargs: None)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A task of other questions, to be shifted to."""
    rows = [question(k, question=f"What about {k}?") for k in range(50, 56)]
    return str(write_task(tmp_path_factory.mktemp("tasks") / "other", test=rows))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, other: str) -> Path:
    """A comparison that is done, with a shift; not to be changed."""
    out = tmp_path_factory.mktemp("compare") / "study"
    compare(calibrated_study(other), out)
    return out


# What is planned ------------------------------------------------------------------------------------------------------


def test_methods_share_the_loras_they_stand_on():
    chosen = dict.fromkeys(((task_directory(), method) for method in ("lora", "bbb")), OWN)
    jobs = plan(study(), Path("out"), chosen)
    assert (
        len({job.path for job in jobs}) == len(jobs) == 2 + 2 * 2 + 2 + 2 + 2
    )  # loras, more members, bbb, the two made
    made = {(job.config.method, job.config.seed): job for job in jobs if job.needs}
    lora = run_path(Path("out"), task_directory(), "lora", OWN, 0)
    assert made["temperature", 0].needs == (lora,)
    seeds = [path.name for path in made["deep-ensemble", 1].needs]
    assert seeds == ["seed-1", f"seed-{1 + SEED_DISTANCE}", f"seed-{1 + 2 * SEED_DISTANCE}"]
    at = {job.path: k for k, job in enumerate(jobs)}
    assert all(at[path] < at[job.path] for job in jobs for path in job.needs)


def test_members_that_are_no_rows_write_no_solutions():
    """They are there to be averaged; what the table shows of problems is written by its own runs."""
    jobs = plan(study(methods=("deep-ensemble",), seeds=(0,)), Path("out"), {})
    members = {job.config.seed: job.config.prediction for job in jobs if job.config.method == "lora"}
    assert members[0] == study().prediction
    assert [members[SEED_DISTANCE * k].solutions for k in (1, 2)] == [0, 0]


def test_all_methods_can_be_planned():
    everything = study(methods=("all",))
    assert everything.method_names == tuple(METHODS)
    chosen = {(task_directory(), method): OWN for method in METHODS}
    jobs = plan(everything, Path("out"), chosen)
    assert {job.config.method for job in jobs} == set(METHODS)


# What comes out -------------------------------------------------------------------------------------------------------


def test_everything_that_is_promised_is_written(done):
    names = {path.name for path in done.iterdir() if path.name != ".lock"}
    assert names == {
        "runs", "shift", "table.md", "table.tex", "table.json", "scatter.png",
        "reliability-task.png", "reliability-task-to-other.png",
    }  # fmt: skip
    assert (done / "scatter.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_says_what_the_runs_say(done):
    record = read_json(done / "table.json")
    rows = record["sections"]["task"]
    assert list(rows) == ["lora", "temperature", "deep-ensemble", "bbb"]
    for method, row in rows.items():
        for run in row["runs"]:
            path = run_path(done, task_directory(), method, OWN, run["seed"])
            result = read_json(path / "result.json")
            after = {
                f"calibrated_{name}": result["calibrated"]["metrics"][name] for name in ("acc", "nll", "ece", "aurc")
            }
            assert run["metrics"] == result["metrics"] | after
    values = [run["metrics"]["nll"] for run in rows["bbb"]["runs"]]
    text = (done / "table.md").read_text(encoding="utf-8")
    assert "†: the paired bootstrap over questions and seeds cannot tell it from the best" in text
    shown = f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"
    line = next(line for line in text.splitlines() if line.startswith("| bbb"))
    assert shown in line
    assert shown.replace("±", r"$\pm$") in (done / "table.tex").read_text(encoding="utf-8")


def test_temperature_and_lora_answer_alike_in_the_table(done):
    rows = read_json(done / "table.json")["sections"]["task"]
    assert [r["metrics"]["acc"] for r in rows["lora"]["runs"]] == [
        r["metrics"]["acc"] for r in rows["temperature"]["runs"]
    ]


def test_shift_evaluates_the_same_runs_on_another_task(done, other, tmp_path):
    rows = read_json(done / "table.json")["sections"]["task → other"]
    assert all(len(row["runs"]) == 2 for row in rows.values())
    path = run_path(done, task_directory(), "bbb", OWN, 1)
    assert bayeslora("evaluate", path, "--task", other, "--out", tmp_path / "other", "--quiet") == 0
    alone = read_json(tmp_path / "other" / "result.json")["metrics"]
    metrics = rows["bbb"]["runs"][1]["metrics"]
    assert {name: metrics[name] for name in alone} == pytest.approx(alone)


def test_uncertainty_tells_shifted_questions_from_its_own(done):
    rows = read_json(done / "table.json")["sections"]["task → other"]
    for method, seed in (("bbb", 1), ("deep-ensemble", 0)):
        own = run_path(done, task_directory(), method, OWN, seed) / "predictions.jsonl.gz"
        shifted = done / "shift" / "task" / "other" / method / f"seed-{seed}" / "predictions.jsonl.gz"
        found = rows[method]["runs"][seed]["metrics"]
        for name, score in (("epistemic", read_epistemic), ("entropy", _entropies), ("distance", read_distances)):
            a, b = score(own), score(shifted)
            expected = roc_auc_score([0] * len(a) + [1] * len(b), [*a, *b])
            assert found[f"shift_auroc_{name}"] == pytest.approx(expected), name


def _entropies(path: Path) -> list[float]:
    return [float(scipy_entropy(row)) for row in read_predictions(path)[1]]


def test_methods_without_draws_have_no_epistemic_uncertainty_to_tell_by(done):
    rows = read_json(done / "table.json")["sections"]["task → other"]
    for method in ("lora", "temperature"):
        metrics = rows[method]["runs"][0]["metrics"]
        assert "shift_auroc_entropy" in metrics and "shift_auroc_epistemic" not in metrics
    text = (done / "table.md").read_text(encoding="utf-8")
    own, shifted = text.split("## task → other")
    assert "AUROC, epistemic ↑" in shifted and "AUROC, distance ↑" in shifted
    assert "AURC ↓" in shifted and "AURC" not in own.split("## task")[1]
    line = next(line for line in shifted.splitlines() if line.startswith("| lora"))
    assert line.split(" | ")[-5] == "—"
    assert "AUROC: how well" in own


def test_aurc_is_shown_as_the_runs_have_it(done):
    rows = read_json(done / "table.json")["sections"]["task → other"]["bbb"]
    mean = np.mean([run["metrics"]["aurc"] for run in rows["runs"]])
    after = {"calibrated_nll", "calibrated_ece"}
    told_by = {f"shift_auroc_{name}" for name in ("epistemic", "entropy", "distance")}
    assert set(rows["ties_best"]) == {"acc", "nll", "ece", "aurc"} | told_by | after
    shifted = (done / "table.md").read_text(encoding="utf-8").split("## task → other")[1]
    assert f"{mean:.3f} ±" in next(line for line in shifted.splitlines() if line.startswith("| bbb"))


@pytest.mark.usefixtures("undrawn")
def test_nothing_is_run_twice(done, other, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a run was made again")

    before = {path: path.stat().st_mtime_ns for path in done.rglob("result.json")}
    monkeypatch.setattr("bayeslora.studies.worker.train", refuse)
    monkeypatch.setattr("bayeslora.studies.worker.evaluate", refuse)
    text = (done / "table.md").read_text(encoding="utf-8")
    assert compare(calibrated_study(other), done).text == text
    assert {path: path.stat().st_mtime_ns for path in done.rglob("result.json")} == before


@pytest.mark.system
def test_a_study_goes_on_wherever_it_lies_and_however_it_is_named(done, other, tmp_path, monkeypatch):
    """Methods that stand on LoRAs of the study find them from where they lie."""
    moved = Path(shutil.copytree(done, tmp_path / "elsewhere" / "study"))
    monkeypatch.chdir(moved.parent)
    made = run_path(Path("study"), task_directory(), "deep-ensemble", OWN, 1)
    shutil.rmtree(made)
    compared = compare(calibrated_study(other), Path("study"))
    assert not compared.failures and (made / "result.json").exists()
    assert compared.text == (done / "table.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("undrawn")
def test_without_workers_what_is_done_is_shown_and_nothing_is_run(done, tmp_path):
    out = tmp_path / "study"
    shutil.copytree(done, out)
    given = study(methods=("lora", "bbb"), prediction=PredictionConfig(samples=2))
    lora, bbb = (run_path(out, given.tasks[0], method, OWN, 1) for method in given.methods)
    shutil.rmtree(bbb)
    compared = compare(given, out, Execution(workers=0))
    assert not bbb.exists() and lora.exists() and not compared.failures
    rows = compared.sections["task"]
    assert [len(rows[method]["nll"].values) for method in given.methods] == [2, 1]
    frame = compared.to_pandas()
    means = frame[frame["metric"] == "nll"].set_index("name")
    assert means["mean"].to_dict() == {method: row["nll"].mean for method, row in rows.items()}
    assert means["seeds"].tolist() == [2, 1] and set(frame["section"]) == {"task"}
    assert repr(compared) == f"StudyOutcome(1 sections, 2 rows, in {str(out)!r})"


@pytest.mark.usefixtures("undrawn")
def test_without_workers_and_without_any_run_there_is_nothing_to_show(tmp_path):
    with pytest.raises(InputError, match=r"no run is done, .* give the command without --workers 0"):
        compare(study(methods=("lora", "bbb")), tmp_path, Execution(workers=0))
    assert not (tmp_path / "table.json").exists()


def test_a_method_that_cannot_be_told_from_the_best_is_marked(done):
    """Two methods with equal predictions are a tie; one that is much worse is none."""
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 2, 300)
    good = np.where(np.eye(2)[gold] == 1, 0.8, 0.2)
    bad = np.full((300, 2), 0.5)

    def run(p: np.ndarray) -> Evaluated:
        figures = {name: metric(p, gold) for name, metric in MAIN.items()}
        return Evaluated(
            0,
            RunResult(config={}, metrics=figures),
            tuple(map(str, range(300))),
            p,
            gold,
            np.zeros(300),
            np.full(300, 2),
        )

    rows = table_rows({"a": [run(good)], "b": [run(good)], "c": [run(bad)], "gap": []})
    assert [rows[m]["nll"].ties_best for m in "abc"] == [True, True, False] and rows["gap"] == {}


def test_after_calibration_it_is_those_predictions_that_are_compared(done):
    """They are equal after calibration, and not before."""
    rng = np.random.default_rng(0)
    gold = rng.integers(0, 2, 300)
    good, bad = (np.where(np.eye(2)[gold] == 1, p, 1 - p) for p in (0.8, 0.6))

    def run(p: np.ndarray) -> Evaluated:
        after = {"calibrated_nll": MAIN["nll"](good, gold)}
        figures = {name: metric(p, gold) for name, metric in MAIN.items()} | after
        return Evaluated(
            0, RunResult(config={}, metrics=figures), tuple(map(str, range(300))), p, gold, np.zeros(300), gold, good
        )

    rows = table_rows({"a": [run(good)], "b": [run(bad)]}, (*COLUMNS, *CALIBRATED_COLUMNS))
    assert not rows["b"]["nll"].ties_best and rows["b"]["calibrated_nll"].ties_best


def test_of_options_that_are_equal_the_chosen_ones_are_compared(done, tmp_path):
    run = shutil.copytree(done / LORA, tmp_path / "run")
    place = RunDirectory(run).predictions
    with gzip.open(place, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    with gzip.open(place, "wt", encoding="utf-8") as file:
        for record in records:
            count = len(record["probabilities"])
            file.write(json.dumps({**record, "probabilities": [1 / count] * count, "choice": record["gold"]}) + "\n")
    found = load_evaluated(run, 0)
    assert metrics.accuracy(found.probabilities, found.gold) == 1.0
    np.testing.assert_allclose(found.probabilities.max(axis=1), 1 / found.options, rtol=1e-12)


def test_a_uniform_guess_is_shown_and_never_the_best(done):
    """Questions of the tiny task have two and three options by turns."""
    guess = read_json(done / "table.json")["references"]["task"]["uniform guess"]
    assert guess == pytest.approx({"acc": (1 / 2 + 1 / 3) / 2, "nll": (np.log(2) + np.log(3)) / 2, "ece": 0})
    text = (done / "table.md").read_text(encoding="utf-8").split("## task")[1]
    line = next(line for line in text.splitlines() if line.startswith("| uniform guess"))
    assert line == f"| uniform guess | 41.7 | {guess['nll']:.3f} | 0.0 | — | — |"
    own = [line for line in text.splitlines() if line.startswith("| ")][1:-1]
    assert any("**" in line.split(" | ")[3] for line in own)


# What goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_fails_leaves_a_gap_and_costs_nothing_else(tmp_path, monkeypatch):
    from bayeslora.studies import worker

    train = worker.train

    def failing(config, *args, **kwargs):
        if config.method == "bbb" and config.seed == 1:
            raise RuntimeError("out of luck")
        if config.method == "lora" and config.seed == 0:
            raise RuntimeError("no lora")
        return train(config, *args, **kwargs)

    monkeypatch.setattr(worker, "train", failing)
    compared = compare(study(methods=("lora", "temperature", "bbb")), tmp_path / "study")
    assert len(compared.failures) == 3
    assert any("builds on has failed" in why for why in compared.failures.values())
    assert "out of luck" in compared.text and "## Failed" in compared.text
    assert [
        len(cell["runs"]) for cell in read_json(tmp_path / "study" / "table.json")["sections"]["task"].values()
    ] == [1, 1, 1]
    monkeypatch.setattr(worker, "train", train)
    again = compare(study(methods=("lora", "temperature", "bbb")), tmp_path / "study")
    assert not again.failures and "## Failed" not in again.text


@pytest.mark.usefixtures("undrawn")
def test_a_method_without_any_result_is_a_gap(tmp_path, monkeypatch):
    from bayeslora.studies import worker

    train = worker.train
    monkeypatch.setattr(
        worker, "train", lambda config, *a, **k: 1 / 0 if config.method == "bbb" else train(config, *a, **k)
    )
    compared = compare(study(methods=("lora", "bbb"), seeds=(0,)), tmp_path / "study")
    assert "| bbb | — | — | — |" in compared.text


@pytest.mark.system
@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_that_fails_leaves_a_gap_and_is_made_by_the_next_call(other, tmp_path, monkeypatch):
    from bayeslora.studies import worker

    shifted = study(methods=("lora", "bbb"), seeds=(0,), shift=(other,))
    evaluate = worker.evaluate

    def failing(trained, *args, **kwargs):
        if trained.config.method == "lora":
            raise RuntimeError("out of memory")
        return evaluate(trained, *args, **kwargs)

    monkeypatch.setattr(worker, "evaluate", failing)
    compared = compare(shifted, tmp_path / "study")
    assert compared.failures == {"task → other, lora, seed 0": "RuntimeError: out of memory"}
    assert compared.sections["task → other"]["lora"] == {} and compared.sections["task → other"]["bbb"]
    monkeypatch.setattr(worker, "evaluate", evaluate)
    again = compare(shifted, tmp_path / "study")
    assert not again.failures and again.sections["task → other"]["lora"]


@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_of_another_run_is_refused(other, tmp_path):
    shifted = study(methods=("lora",), seeds=(0,), shift=(other,))
    compare(shifted, tmp_path / "study")
    shutil.rmtree(tmp_path / "study" / "runs")
    with pytest.raises(InputError, match="evaluation of another run"):
        compare(replace(shifted, training=TrainingConfig(epochs=2, batch_size=6)), tmp_path / "study")


@pytest.fixture
def evaluated(done, tmp_path) -> Path:
    """A finished comparison with a shift, to be worked in."""
    return Path(shutil.copytree(done, tmp_path / "study"))


def only_lora(other: str) -> Comparison:
    """One run of a finished comparison, and its evaluation."""
    return replace(calibrated_study(other), methods=("lora",), seeds=(0,))


def change(run: Path) -> None:
    """Stands in for training or calibrating again: the bytes of the run are others."""
    calibration = run / "adapter" / "calibration.json"
    calibration.write_text(calibration.read_text(encoding="utf-8") + "\n", encoding="utf-8")


LORA = Path("runs/task/lora/rate-1/seed-0")
SHIFTED = Path("shift/task/other/lora/seed-0/result.json")


def test_an_evaluation_on_another_task_of_the_same_name_is_refused(other, evaluated, tmp_path):
    namesake = str(write_task(tmp_path / "elsewhere" / "other"))
    before = (evaluated / "table.json").read_bytes()
    with pytest.raises(InputError, match=f"holds the evaluation on task '{other}', not on '{namesake}'; remove it"):
        compare(only_lora(namesake), evaluated)
    assert (evaluated / "table.json").read_bytes() == before


@pytest.mark.usefixtures("undrawn")
def test_runs_that_are_trained_again_are_evaluated_again(other, tmp_path):
    """On mended answers, with the same settings."""
    task = write_task(tmp_path / "mine", train=[question(k, answer=0) for k in range(12)])
    learning = TrainingConfig(epochs=1, batch_size=6, learning_rate=0.05)
    given = study(tasks=(str(task),), methods=("lora",), seeds=(0,), shift=(other,), training=learning)
    wrong = compare(given, tmp_path / "study").sections
    write_task(task, train=[question(k, answer=1) for k in range(12)])
    shutil.rmtree(tmp_path / "study" / "runs")
    mended, anew = (compare(given, tmp_path / name).sections for name in ("study", "anew"))
    nll, before = (it["mine → other"]["lora"]["nll"].values for it in (mended, wrong))
    assert nll == anew["mine → other"]["lora"]["nll"].values != before


@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_of_a_run_that_has_changed_since_is_never_shown(other, evaluated, monkeypatch):
    change(evaluated / LORA)
    with pytest.raises(
        InputError, match=r"was evaluated before its run .* again; give the command without --workers 0"
    ):
        compare(only_lora(other), evaluated, Execution(workers=0))
    monkeypatch.setattr("bayeslora.studies.worker.evaluate", lambda *args: 1 / 0)
    compared = compare(only_lora(other), evaluated)
    assert list(compared.failures) == ["task → other, lora, seed 0"]
    assert compared.sections["task → other"] == {"lora": {}} and compared.sections["task"]["lora"]


@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_by_an_earlier_version_is_read(other, evaluated, monkeypatch):
    """It does not say of which state of the run it is."""
    result = read_json(evaluated / SHIFTED)
    assert result.pop("run_state") == RunDirectory(evaluated / LORA).fingerprint()
    (evaluated / SHIFTED).write_text(json.dumps(result), encoding="utf-8")
    monkeypatch.setattr("bayeslora.studies.worker.evaluate", lambda *args: 1 / 0)
    compared = compare(only_lora(other), evaluated)
    assert not compared.failures and compared.sections["task → other"]["lora"]["nll"].values == (
        result["metrics"]["nll"],
    )


def test_shifts_that_cannot_be_read_are_refused_before_anything_is_run(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("no JSON\n")
    with pytest.raises(InputError, match=r"broken\.jsonl"):
        compare(study(shift=(str(broken),)), tmp_path / "study")
    assert not (tmp_path / "study").exists()


BROKEN = [{"question": "Which?", "choices": ["yes", "no"]}]  # without an answer


@pytest.mark.parametrize(
    "changes, advice",
    [
        ({"device": "cudaa"}, "unknown device 'cudaa'"),
        ({"model": "./nowhere"}, "'./nowhere': no such directory"),
        ({"split": "train"}, "has no answer"),
        ({"split": "test"}, "has no answer"),
    ],
)
def test_what_no_run_can_succeed_with_is_refused_before_anything_is_run(tmp_path, changes, advice):
    tasks = [
        task_directory(),
        str(write_task(tmp_path / "mine", **({changes["split"]: BROKEN} if "split" in changes else {}))),
    ]
    given = study(model=changes.get("model", model_directory()), tasks=tuple(tasks), rate_factors=(1.0, 2.0))
    with pytest.raises(InputError, match=advice):
        compare(given, tmp_path / "study", Execution(device=changes.get("device", "cpu")))
    assert not (tmp_path / "study").exists()


def test_what_is_done_needs_neither_model_nor_data(other, evaluated, monkeypatch):
    for name in ("locate", "open_task"):
        monkeypatch.setattr(f"bayeslora.studies.runner.{name}", lambda *args: 1 / 0)
    assert not compare(only_lora(other), evaluated).failures


def test_tables_of_something_else_are_not_replaced(tmp_path):
    for name, text in (("table.json", '{"ablation": "rank", "study": {"task": "urns"}}'), ("table.md", "| mine |")):
        mine = tmp_path / name.replace(".", "-") / name
        mine.parent.mkdir()
        mine.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=rf"{name} is not that of a comparison; choose another directory"):
            compare(study(), mine.parent)
        assert [it.name for it in mine.parent.iterdir()] == [name] and mine.read_text(encoding="utf-8") == text


def test_the_command_line_exits_with_1_if_runs_failed(tmp_path, monkeypatch, capsys):
    from bayeslora.studies import worker

    monkeypatch.setattr(worker, "train", lambda *a, **k: 1 / 0)
    words = ["compare", "--model", model_directory(), "--tasks", task_directory(), "--out", tmp_path / "study"]
    assert bayeslora(*words, "--methods", "lora", "--seeds", 0, "--quiet") == 1
    out, err = capsys.readouterr()
    assert "1 run failed" in err and err.count("\n") == 1 and "ZeroDivisionError" in out


@pytest.mark.parametrize(
    "changes, advice",
    [
        ({"methods": ("lora", "lora")}, "names one twice"),
        ({"seeds": ()}, "seeds is empty"),
        ({"rate_factors": (0.0,)}, "rate_factors is 0.0; give a finite number above 0"),
        ({"rates_beyond": 1}, "rates_beyond is 1 with 1 rate_factors; .* two factors to go beyond"),
        ({"rates_beyond": -1, "rate_factors": (1.0, 2.0)}, "rates_beyond is -1"),
        ({"adapter": AdapterConfig(settings={"members": 2})}, "settings belong to one posterior"),
        ({"tasks": ("a/x.jsonl", "b/x.jsonl")}, "two tasks have the same name 'x': a/x.jsonl and b/x.jsonl"),
        (
            {"tasks": ("a/x.jsonl",), "shift": ("b/x.jsonl",)},
            "two tasks have the same name 'x': a/x.jsonl and b/x.jsonl",
        ),
        (
            {"tasks": ("a/x.csv",), "shift": ("a/x.jsonl",)},
            r"a/x.csv and a/x.jsonl \(the ending of a file .* rename one",
        ),
        ({"shift": ("a/x", "a/x")}, "two tasks have the same name 'x': a/x and a/x .* give each once"),
    ],
)
def test_comparisons_that_make_no_sense_are_refused(changes, advice):
    with pytest.raises(InputError, match=advice):
        study(**changes)


def test_versions_of_a_task_are_told_apart(tmp_path):
    given = study(tasks=("a/x-1.0", "a/x-1.1"), methods=("lora",), seeds=(0,))
    jobs = plan(given, tmp_path, {(task, "lora"): OWN for task in given.tasks})
    assert [job.path.relative_to(tmp_path).parts[:2] for job in jobs] == [("runs", "x-1.0"), ("runs", "x-1.1")]
    assert [task_name(it) for it in ("urns", "a/x.jsonl", "x.v2.jsonl.gz", "x.txt")] == ["urns", "x", "x.v2.jsonl", "x"]


def test_a_task_may_be_learnt_and_be_a_shift_of_others(other, tmp_path):
    tasks = (task_directory(), other)
    given = study(tasks=tasks, shift=tasks, methods=("lora",))
    jobs = plan(given, tmp_path, {(task, "lora"): OWN for task in tasks})
    wanted = {(job.config.task, job.config.method, job.config.seed): job.path for job in jobs}
    shifts = _Comparison(given, tmp_path, Runner(Execution()))._shifts(wanted)
    assert list(shifts) == [tasks, tasks[::-1]]


def test_unknown_names_are_refused_before_anything_is_run(tmp_path):
    with pytest.raises(InputError, match=r"unknown method 'lore'.*did you mean 'lora'"):
        compare(study(methods=("lore",)), tmp_path / "study")
    with pytest.raises(InputError, match=r"unknown task|no such"):
        compare(study(tasks=("arc-eesy",)), tmp_path / "study")
    with pytest.raises(InputError, match="workers is -1"):
        compare(study(), tmp_path / "study", Execution(workers=-1))
    assert not (tmp_path / "study").exists()


def test_a_directory_of_another_comparison_is_refused(done):
    with pytest.raises(
        InputError, match=r"holds another run.*epochs is 1 there and 2 here.*\); choose another directory$"
    ):
        compare(study(training=TrainingConfig(epochs=2, batch_size=6)), done)


OTHERS = {
    "questions": [question(k) for k in range(100, 108)],
    "answers": [question(k, answer=(k + 1) % 2) for k in range(22, 30)],
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("what", some(OTHERS, ["answers"]))
def test_other_questions_under_the_same_name_are_refused(tmp_path, what):
    """The same path, but the file has changed between two runs."""
    task = write_task(tmp_path / "mine")
    own = study(tasks=(str(task),), methods=("lora",), seeds=(0,))
    compare(own, tmp_path / "study")
    write_task(task, test=OTHERS[what])
    with pytest.raises(InputError, match="not evaluated on the same questions"):
        compare(study(tasks=(str(task),), methods=("lora",), seeds=(0, 1)), tmp_path / "study")


# Workers --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_give_what_one_process_gives(done, other, tmp_path):
    compare(calibrated_study(other), tmp_path / "study", Execution(workers=2))
    made = list((tmp_path / "study").rglob("predictions.jsonl.gz"))
    assert any("shift" in path.parts for path in made)
    for path in made:
        ours, theirs = (read_predictions(it)[1] for it in (path, done / path.relative_to(tmp_path / "study")))
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_processes_that_cannot_begin_are_no_failed_runs(tmp_path, monkeypatch):
    """As in a script that compares on import: each process starts it again, and ends."""
    from bayeslora.studies import pool

    monkeypatch.setattr(pool, "_until_broken", lambda *args: iter(()))
    work = [Job(study().config(task_directory(), "lora", 0), tmp_path / "run")]
    processes = pool._Processes(Settings(), 2)
    with pytest.raises(
        InputError, match=r"could start; put the code of your script below \"if __name__ == '__main__':"
    ):
        list(processes(work))
    processes._begun.value = True
    assert [why for _, why in processes(work)] == ["its process died; give it more memory, or use fewer workers"]


def die(job: Job) -> None:
    """Stands in for a run that is killed by the system."""
    if job.config.seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_dies_fails_its_own_run_only(tmp_path, monkeypatch):
    from bayeslora.studies import pool

    jobs = [Job(study().config(task_directory(), "lora", seed), tmp_path / str(seed)) for seed in range(4)]
    monkeypatch.setattr(pool, "_run", _run_or_die)
    ended: dict[int, str | None] = {}
    with Workers(Settings(), 2) as workers:
        workers.run(jobs, lambda job, why: ended.update({job.config.seed: why}))
    assert {seed: why is None for seed, why in ended.items()} == {0: True, 1: False, 2: True, 3: True}
    assert "process died" in str(ended[1])


def _run_or_die(job: Job) -> None:
    die(job)


def test_the_record_is_json_without_predictions_or_numbers_that_are_none(done):
    text = (done / "table.json").read_text(encoding="utf-8")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert "probabilities" not in text and len(text) < 200_000
