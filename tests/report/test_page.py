"""Reports of runs and studies that were really made with a tiny model, read back from the page."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from bayeslora.metrics import accuracy, bootstrap_interval_over_runs, ece, nll
from bayeslora.predict.tokens.predictor import read_token_predictions
from bayeslora.report import make_report
from bayeslora.report.questions import Answers, _epistemic
from bayeslora.studies import worker
from bayeslora.studies.ablate import ablate
from bayeslora.studies.ablation import AblationStudy
from bayeslora.studies.compare import compare
from bayeslora.studies.comparison import Comparison
from bayeslora.studies.quickstart import METHODS
from bayeslora.tasks import TASKS, urns_task
from bayeslora.train import AdapterConfig, DataConfig, PredictionConfig, TrainingConfig, train
from report.pages import read_page
from tiers import some
from train.tiny import (
    bayeslora,
    contents,
    finished,
    model_directory,
    question,
    read_json,
    run_config,
    task_directory,
    without_intervals,
    write_task,
)
from tuning import cases as tuning

NASTY = '<script>alert("x")</script> & $\\alpha_1$ | 100%'
COMMON: dict[str, Any] = {
    "model": model_directory(),
    "adapter": AdapterConfig(rank=2, targets=("q_proj",)),
    "training": TrainingConfig(epochs=1, batch_size=6),
    "prediction": PredictionConfig(samples=2),
}


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Without bootstraps of runs and pairs, and with coarse pictures."""
    with without_intervals(), pytest.MonkeyPatch.context() as patched:
        patched.setattr("bayeslora.studies.evaluated.PAIRED", {})
        patched.setattr("bayeslora.report.write._SHARP", 20)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A calibrated run; not to be changed but for its report."""
    out = Path(shutil.copytree(finished(), tmp_path_factory.mktemp("run") / "run"))
    assert bayeslora("calibrate", out, "--coverage", 0.5, "--quiet") == 0
    return out


@pytest.fixture(scope="module")
def reported(run, tmp_path_factory) -> Path:
    """Its report."""
    return make_report(run, tmp_path_factory.mktemp("reported") / "report").parent


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A comparison with a shift, a search for rates, and a run that failed."""
    out = tmp_path_factory.mktemp("compare") / "study"
    tasks = (str(write_task(tmp_path_factory.mktemp("mine") / "mine")),)
    real = worker.train

    def sometimes(config, path, place):
        if config.method == "bbb" and config.seed == 1:
            raise ArithmeticError(f"lost <b>{config.method}</b>")
        return real(config, path, place)

    other = str(write_task(tmp_path_factory.mktemp("other") / "other"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(worker, "train", sometimes)
        given = {"methods": ("lora", "temperature", "bbb"), "tasks": tasks, "shift": (other,), "seeds": (0, 1)}
        compare(Comparison(**COMMON, **given, rate_factors=(1.0, 3.0)), out)
    return out


def records(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path / "predictions.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def arrays(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities, right options and those that were taken."""
    rows = records(path)
    p = np.zeros((len(rows), max(len(row["probabilities"]) for row in rows)))
    for row, record in zip(p, rows, strict=True):
        row[: len(record["probabilities"])] = record["probabilities"]
    return p, np.array([row["gold"] for row in rows]), np.array([row["choice"] for row in rows])


def copied(source: Path, place: Path) -> Path:
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("report"))
    return place


def test_an_auroc_is_told_with_its_counts_where_there_are_enough():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), 60)
    gold, epistemic = rng.integers(3, size=60), rng.random(60)
    names = [str(row) for row in range(60)]
    answers = Answers(names, p, gold, p.argmax(1), epistemic)
    wrong = p.argmax(1) != gold
    found = _epistemic(answers).caption
    assert f"{wrong.sum()} wrong and {(~wrong).sum()} right" in found
    assert f"AUROC of {roc_auc_score(wrong, epistemic):.3f}" in found
    few = _epistemic(Answers(names[:12], p[:12], gold[:12], p[:12].argmax(1), epistemic[:12])).caption
    assert "AUROC" not in few and "too few" in few


# A run ----------------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_run_are_those_of_its_predictions(run, reported):
    page = read_page(reported)
    p, gold, choice = arrays(run)
    values = page.column("metrics", "value")
    assert float(values["acc"]) == pytest.approx(np.mean(choice == gold), abs=1e-4)
    assert float(values["nll"]) == pytest.approx(log_loss(gold, p, labels=range(p.shape[1])), abs=1e-4)
    assert float(values["ece"]) == pytest.approx(ece(p, gold), abs=1e-4)
    low, high = page.column("metrics", "95 % interval")["nll"].split(" – ")
    interval = bootstrap_interval_over_runs(nll, [p], gold)
    assert (float(low), float(high)) == pytest.approx((interval.low, interval.high), abs=1e-4)
    wrong = np.sum(choice != gold)
    assert f"{wrong} wrong and {len(gold) - wrong} right answers are too few to say" in page.text
    cards = dict(page.facts[:4])
    assert cards["Accuracy"].startswith(f"{100 * np.mean(choice == gold):.1f} %")


def test_the_most_confident_mistakes_are_shown_and_confidence_in_words(run, reported):
    page = read_page(reported)
    wrong = sorted((it for it in records(run) if it["choice"] != it["gold"]), key=lambda it: -max(it["probabilities"]))
    head, *rows = page.tables["table-mistakes"]
    assert head == ["question", "answer", "right answer", "confidence"] and len(rows) == min(20, len(wrong)) > 0
    for row, record in zip(rows, wrong, strict=False):
        assert row[1:3] == [record["options"][record["choice"]], record["options"][record["gold"]]]
        assert row[3] == f"{max(record['probabilities']):.3f}" and record["question"].split()[0] in row[0]
    assert not any("question" in it for it in records(run) if it["choice"] == it["gold"])
    p, gold, choice = arrays(run)
    told = f"says it is {p.max(1).mean():.0%} sure on average, and is right in {np.mean(choice == gold):.0%}"
    assert told in page.text


def test_a_run_shows_likelihood_and_kls_apart_and_its_calibration(run, reported):
    page = read_page(reported)
    history = read_json(run / "result.json")["history"]
    kl = [history[k]["kl"]["weight"] * history[k]["kl"]["inducing"] for k in (0, -1)]
    assert any(f"inducing from {kl[0]:.4g} to {kl[1]:.4g}" in label for label in page.figures)
    train_nll = [history[k]["train_nll"] for k in (0, -1)]
    assert any(f"training from {train_nll[0]:.4g} to {train_nll[1]:.4g}" in label for label in page.figures)
    calibration = read_json(run / "adapter" / "calibration.json")
    facts = dict(page.facts)
    assert facts["answers from confidence"] == f"{calibration['threshold']:.6g}"
    assert facts["target"] == calibration["target"] and facts["temperature"] == f"{calibration['temperature']:.6g}"
    assert page.column("calibration", "after")["nll"] == f"{calibration['after']['nll']:.4f}"


def test_settings_that_are_not_defaults_are_marked(run, reported):
    page = read_page(reported)
    facts = dict(page.facts)
    assert facts["rank"] == "2 default 8" and facts["targets"].startswith("q_proj, v_proj default q_proj, k_proj")
    assert facts["alpha"] == "16" and facts["kl scaling"] == "elbo" and facts["seed"] == "0"
    environment = read_json(run / "result.json")["environment"]
    assert facts["torch"] == environment["packages"]["torch"] and facts["device"] == "cpu"
    # rank, targets, epochs, batch size, learning rate, draws, calibrate
    assert page.source.count('class="marked"') == 7


@pytest.mark.system
def test_a_run_that_training_has_calibrated_shows_both(tmp_path):
    path = finished(prediction=PredictionConfig(samples=3))
    page = read_page(make_report(path, tmp_path / "report").parent)
    result = read_json(path / "result.json")
    (table,) = (it for it in page.tables.values() if it[0] == ["metric", "as trained", "calibrated"])
    shown = {name: both for name, *both in table[1:]}
    for name, title in (("acc", "Accuracy"), ("nll", "NLL"), ("ece", "ECE"), ("brier", "Brier score")):
        assert shown[title] == [f"{it['metrics'][name]:.4f}" for it in (result, result["calibrated"])]
    cards = dict(page.facts[:4])
    assert cards["NLL"].startswith(f"{result['calibrated']['metrics']['nll']:.3f}") and "Calibrated." in page.text
    figures = {it.stem for it in (tmp_path / "report" / "figures").glob("*.svg")}
    assert {"reliability", "calibrated"} <= figures
    assert f"expected calibration error {result['calibrated']['metrics']['ece']:.3f}" in page.source


def test_files_for_papers_lie_beside_the_page(reported):
    out = reported
    names = ["confidence", "epistemic", "reliability", "risk-coverage", "training-kl", "training-nll"]
    for name in (*names, "training-validation"):
        assert (out / f"figures/{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"figures/{name}.svg").read_text()
    assert r"\begin{tabular}{lrrl}" in (out / "tables/metrics.tex").read_text()
    assert "| metric | value | 95 % interval | meaning |" in (out / "tables/metrics.md").read_text()
    assert sorted(read_json(out / "report.json")["files"]) == sorted(contents(out))


@pytest.mark.system
def test_the_same_files_give_the_same_report(run, reported, tmp_path):
    assert contents(make_report(run, tmp_path / "again").parent) == contents(reported)


@pytest.mark.system
def test_an_evaluation_elsewhere_is_reported(run, tmp_path):
    task = write_task(tmp_path / "other")
    assert bayeslora("evaluate", run, "--task", task, "--out", tmp_path / "evaluated", "--quiet") == 0
    page = read_page(make_report(tmp_path / "evaluated").parent)
    p, gold, _ = arrays(tmp_path / "evaluated")
    assert "bayesian-lora on other" in page.text
    assert float(page.column("metrics", "value")["nll"]) == pytest.approx(nll(p, gold), abs=1e-4)


def test_whatever_text_a_run_holds_is_only_text(run, tmp_path):
    place = copied(run, tmp_path / "run")
    for name, where in (("config.json", ["task"]), ("result.json", ["config", "task"])):
        record = read_json(place / name)
        part = record
        for key in where[:-1]:
            part = part[key]
        part[where[-1]] = NASTY
        if name == "result.json":
            record["environment"]["device_name"] = NASTY
        (place / name).write_text(json.dumps(record))
    page = read_page(make_report(place).parent)
    assert NASTY in page.text and "<script" not in page.source


# Tokens ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", some(["lora", "bayesian-lora"], ["lora"]))
def test_tokens_are_shown_all_and_the_uncertain_ones(method, tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "validation", "test"):
        path = tmp_path / "text" / f"{split}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(" ".join(rng.choice(["cat", "dog", "sat"], size=6)) + " .\n" for _ in range(6)))
    config = run_config(
        method,
        task=str(tmp_path / "text"),
        data=DataConfig(max_tokens=48),
        training=TrainingConfig(epochs=1, batch_size=4),
    )
    train(config, tmp_path / "run")
    page = read_page(make_report(tmp_path / "run").parent)
    for split in ("test", "validation"):
        predictions = read_token_predictions(tmp_path / f"run/tokens-{split}.safetensors")
        column = page.column(f"tokens-{split}", "NLL ↓")
        assert column["all tokens"] == f"{-np.log(predictions.scores.label_probability).mean():.4f}"
        if method == "lora":
            some = predictions.scores.label_probability[predictions.uncertain]
            assert column["the uncertain 5 %"] == f"{-np.log(some).mean():.4f}"
        else:
            assert set(column) == {"all tokens"} and "--reference" in page.text


# Studies --------------------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_comparison_has_the_recomputed_table_its_failures_rates_and_links(study, tmp_path):
    table = read_json(study / "table.json")
    factor = table["chosen_rate_factors"]["mine/lora"]
    single = make_report(study / f"runs/mine/lora/rate-{factor:g}/seed-0")
    out = make_report(study, tmp_path / "report").parent
    page = read_page(out)
    links = [address for address in page.addresses if not address.startswith("#")]
    assert [(out / link).resolve() for link in links] == [single.resolve()]
    runs = [arrays(study / f"runs/mine/lora/rate-{factor:g}/seed-{seed}") for seed in (0, 1)]
    values = [nll(p, gold) for p, gold, _ in runs]
    interval = bootstrap_interval_over_runs(nll, [p for p, _, _ in runs], runs[0][1])
    cell = f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}"
    shown = page.column("mine", "NLL ↓")["lora"]
    assert shown.startswith(cell) and shown.endswith(f" {interval.low:.3f} – {interval.high:.3f}")
    right = [np.mean(choice == gold) for _, gold, choice in runs]
    assert page.column("mine", "ACC ↑")["lora"].startswith(f"{100 * np.mean(right):.1f} ±")
    best = min(("lora", "temperature", "bbb"), key=lambda it: np.mean([
        run["metrics"]["nll"] for run in table["sections"]["mine"][it]["runs"]]))  # fmt: skip
    assert any(page.column("mine", "NLL ↓")[best].startswith(text) for text in page.bold)
    assert ["mine, bbb, seed 1", "ArithmeticError: lost <b>bbb</b>"] in page.tables["table-failures"]
    assert "mine, bbb (seed 1)" in page.text and "mine → other, bbb (seed 1)" in page.text
    assert page.column("rates", "chosen")["mine/lora"] == f"×{factor:g}"
    searched = table["rate_search"]["mine/lora"][f"{factor:g}"]
    assert page.column("rates", f"×{factor:g}")["mine/lora"] == f"{searched:.4f}"
    assert "AUROC, entropy ↑" in page.tables["table-mine-to-other"][0]
    figures = {path.stem for path in (tmp_path / "report/figures").glob("*.svg")}
    assert figures == {
        f"{kind}-{name}" for kind in ("scatter", "reliability", "risk-coverage") for name in ("mine", "mine-to-other")
    }


@pytest.mark.system
def test_a_table_without_its_runs_still_has_a_report(study, tmp_path):
    (tmp_path / "alone").mkdir()
    shutil.copy(study / "table.json", tmp_path / "alone")
    out = make_report(tmp_path / "alone").parent
    assert "predictions are not here" in read_page(out).text
    assert {path.stem for path in (out / "figures").glob("*.svg")} == {"scatter-mine", "scatter-mine-to-other"}


def test_free_answers_have_no_reliability_diagrams_to_miss(tmp_path):
    asked = [{"question": f"Is {k} even?", "answer": ("yes", "no")[k % 2]} for k in range(6)]
    task = str(write_task(tmp_path / "quiz", train=asked, validation=asked, test=asked))
    prediction = PredictionConfig(samples=2, max_new_tokens=2, calibrate="none")
    given = COMMON | {"methods": ("lora",), "tasks": (task,), "seeds": (0,), "prediction": prediction}
    compare(Comparison(**given), tmp_path / "study")
    page = read_page(make_report(tmp_path / "study").parent)
    assert "F1 ↑" in page.tables["table-quiz"][0] and "predictions are not here" not in page.text


@pytest.mark.system
@pytest.mark.parametrize(
    "name, values",
    some([("flow-depth", ("0", "1")), ("posterior-scale", ("0.5", "1"))], [("posterior-scale", ("0.5", "1"))]),
)
def test_an_ablation_has_its_table_and_figure(name, values, tmp_path):
    given = AblationStudy(**COMMON, task=task_directory(), values=values, seeds=(0,))
    [done] = ablate([name], given, tmp_path / "ablations")
    for directory in (tmp_path / "ablations", done.out):
        out = make_report(directory).parent
        page = read_page(out)
        place = done.out / "evaluated/task" if name == "posterior-scale" else tmp_path / "ablations/task/runs"
        run = {"flow-depth": "flow-depth-0", "posterior-scale": "posterior-scale-0.5"}[name]
        p, gold, _ = arrays(place / run / "seed-0")
        column = page.column(f"{name}-on-task-task", "NLL ↓")
        assert list(column) == list(values) and column[values[0]].startswith(f"{nll(p, gold):.3f}")
        assert (out / f"figures/{name}-on-task-curves.svg").exists()
        sizes = page.column(f"{name}-on-task-task", "parameters")
        assert int(sizes["1"]) >= int(sizes[values[0]]) > 0


@pytest.mark.system
def test_a_search_has_its_trials_front_and_choice(tmp_path):
    pytest.importorskip("botorch")
    words = tuning.words(tmp_path / "search", "--trials", 3, "--constraints", "nll<=9", "--apply")
    assert bayeslora(*words) == 0
    page = read_page(make_report(tmp_path / "search").parent)
    log, tuned = read_json(tmp_path / "search/trials.json"), read_json(tmp_path / "search/tuned.json")
    chosen = tuned["chosen"]["number"]
    assert chosen == min(range(3), key=lambda k: log["trials"][k]["outcomes"]["nll"])
    assert page.column("trials", "front")[str(chosen)] == "chosen"
    for trial in log["trials"]:
        path = tmp_path / f"search/runs/trial-{trial['number']:03d}"
        assert page.column("trials", "nll")[str(trial["number"])] == f"{nll(*arrays(path)[:2]):.4f}"
    assert page.column("metrics", "value")["nll"] == f"{nll(*arrays(tmp_path / 'search/chosen')[:2]):.4f}"
    assert (tmp_path / "search/report/figures/pareto.svg").exists()


@pytest.mark.system
def test_a_quickstart_has_both_methods_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "urns", lambda data_dir: urns_task(sizes={"train": 8, "validation": 10, "test": 9}))
    settings = {"task": "urns", "training": TrainingConfig(epochs=1, batch_size=8)}
    for method in METHODS:
        train(run_config(method, **settings), tmp_path / method)
    page = read_page(make_report(tmp_path).parent)
    for method in METHODS:
        p, gold, choice = arrays(tmp_path / method)
        assert page.column("quickstart", "NLL ↓")[method].startswith(f"{nll(p, gold):.3f}")
        chosen = np.eye(p.shape[1])[choice]
        assert page.column("quickstart", "ACC ↑")[method].startswith(f"{100 * accuracy(chosen, gold):.1f}")
    (tmp_path / "lora/result.json").unlink()
    assert bayeslora("report", tmp_path) == 2


# What is refused ------------------------------------------------------------------------------------------------------


def refused(capsys, *words: object) -> str:
    """The one line that is told of what cannot be done."""
    assert bayeslora("report", *words) == 2
    line = capsys.readouterr().err
    assert line.startswith("bayeslora: ") and line.count("\n") == 1
    return line


@pytest.mark.system
def test_the_verb_tells_where_the_page_is(run, tmp_path, capsys):
    assert bayeslora("report", run, "--out", tmp_path / "a") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a' / 'index.html'}\n"


def test_an_older_report_is_replaced_but_foreign_files_are_not(run, reported, tmp_path, capsys):
    place = copied(run, tmp_path / "run")
    shutil.copytree(reported, place / "report")
    (place / "report/index.html").write_text("old")
    assert bayeslora("report", place) == 0
    read_page(place / "report")
    (place / "report/notes.txt").write_text("mine")
    assert "notes.txt" in refused(capsys, place)
    assert (place / "report/notes.txt").read_text() == "mine"
    for out in (place, place / "config.json"):
        refused(capsys, place, "--out", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("result.json", "{", "result.json: is not as bayeslora wrote it"),
        ("result.json", "[]", "result.json: is not as bayeslora wrote it"),
        ("result.json", "{}", "result.json: is not as bayeslora wrote it"),
        ("result.json", None, "the run is not done; give its train command again"),
        ("config.json", "{", "config.json: is not as bayeslora wrote it"),
        ("predictions.jsonl.gz", "x", "predictions.jsonl.gz: is no complete file of predictions"),
        ("predictions.jsonl.gz", None, "has a result but no predictions"),
        ("adapter/calibration.json", "{", "calibration.json"),
    ],
)
def test_runs_that_are_not_whole_are_refused(run, tmp_path, capsys, name, content, told):
    place = copied(run, tmp_path / "run")
    (place / name).unlink()
    if content is not None:
        (place / name).write_text(content)
    assert told in refused(capsys, place)
    assert not (place / "report").exists()


@pytest.mark.parametrize("change", [0.01, -1e-4])
def test_figures_that_are_not_those_of_the_predictions_are_refused(run, tmp_path, capsys, change):
    place = copied(run, tmp_path / "run")
    result = read_json(place / "result.json")
    result["metrics"]["nll"] += change
    (place / "result.json").write_text(json.dumps(result))
    assert "do not belong together" in refused(capsys, place)


@pytest.mark.system
def test_studies_that_are_not_whole_are_refused(study, tmp_path, capsys):
    place = copied(study, tmp_path / "study")
    table = read_json(place / "table.json")
    (place / "table.json").unlink()
    assert "the study is not done; give its command again" in refused(capsys, place)
    for broken in ("{", json.dumps({"study": {}}), json.dumps(table | {"sections": {"mine": {"lora": {}}}})):
        (place / "table.json").write_text(broken)
        assert "table.json: is not as bayeslora wrote it" in refused(capsys, place)
    (tmp_path / "search").mkdir()
    (tmp_path / "search/trials.json").write_text("{}")
    assert "the search is not done" in refused(capsys, tmp_path / "search")


def test_other_directories_are_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(capsys, tmp_path / "file")
    assert "no such directory" in refused(capsys, tmp_path / "nothing")
    assert "holds nothing to report on" in refused(capsys, tmp_path)
    assert "holds nothing to report on" in refused(capsys, model_directory())


@pytest.mark.parametrize(
    "run", ["search/task/lora/rate-1/seed-0", "runs/bayesian-lora/seed-0", "task/runs/rank-2/seed-0"]
)
def test_studies_that_have_only_begun_are_refused(tmp_path, capsys, run):
    (tmp_path / run).mkdir(parents=True)
    assert "the study is not done; give its command again" in refused(capsys, tmp_path)


@pytest.mark.system
def test_labels_of_users_tasks_are_only_text(tmp_path):
    rows = [question(k, id=f"{NASTY}{k}") for k in range(8)]
    train(run_config(task=str(write_task(tmp_path / "a <b> & c", test=rows))), tmp_path / "run")
    page = read_page(make_report(tmp_path / "run").parent)
    assert "a <b> & c" in page.text
