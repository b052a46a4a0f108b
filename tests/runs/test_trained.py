"""A trained run in use: evaluated, asked, calibrated."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bayeslora import load_run
from bayeslora.errors import InputError
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.generation import Writing
from bayeslora.predict.questions.predictions import read_predictions
from bayeslora.runs import calibration
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks import Item, Prompt, load_task, require_gold
from bayeslora.train import AdapterConfig, PredictionConfig, train
from tasks.cases import write_lines
from tiers import some
from train import tiny
from train.tiny import (
    SIZES,
    bayeslora,
    contents,
    options,
    question,
    read_json,
    run_config,
    without_intervals,
    write_task,
)

ASK = ("Is 3 even?", ["yes", "no"])
WORDS = ["--question", "Is 3 even?", "--choice", "yes", "--choice", "no"]


WIDE = run_config(
    adapter=AdapterConfig(rank=2, targets=("q_proj", "v_proj"), settings={"init_sd_u": 0.1}),
    training=replace(run_config().training, aim=0),
)
"""A run that is not sure of everything it has seen, so that there is something to calibrate."""


SCALES = (0.25, 0.5, 2.0)
"""Without 1, which a few questions cannot tell from others, so that the one that is chosen can be seen."""


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Without bootstraps, and with few scales to choose among."""
    with without_intervals(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(calibration, "DEFAULT_SCALES", SCALES)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done; not to be changed."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(WIDE, out)
    return out


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The same for a test to change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def calibrated(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, calibrated; not to be changed."""
    out = Path(shutil.copytree(trained, tmp_path_factory.mktemp("calibrated") / "run"))
    load_run(out).calibrate(coverage=0.5)
    return out


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("bayeslora: ") and err.count("\n") == 1, err
    return err


def answer(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """What ``predict --json`` prints."""
    assert bayeslora("predict", *words, "--json", "--quiet") == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


# Evaluate -------------------------------------------------------------------------------------------------------------


def test_evaluating_the_test_split_gives_the_runs_own_result(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(trained)
    assert bayeslora("evaluate", trained, "--json", "--quiet") == 0
    told, result = json.loads(capsys.readouterr().out), read_json(trained / "result.json")
    assert told["metrics"] == pytest.approx(result["metrics"]) and told["split"] == "test"
    assert told["config"] == result["config"] and told["samples"] == 3
    assert contents(trained) == before


def test_evaluating_another_task_and_split(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_lines(tmp_path / "other.jsonl", [question(k, passage="Numbers.") for k in range(40, 60)])
    for split, number in {"validation": 4, "train": 12}.items():
        assert bayeslora("evaluate", trained, "--task", other, "--split", split, "--json", "--quiet") == 0
        told = json.loads(capsys.readouterr().out)
        assert told["task"] == str(other) and told["split"] == split
        assert told["counts"] == {split: {"questions": number}}


def test_a_long_question_of_another_task_stays_whole_if_the_model_can_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study is not lost for one question that is longer than what was learnt from."""
    assert bayeslora(*options(tmp_path / "run", "--max-tokens", 100)) == 0
    for words, code in ((40, 0), (200, 2)):  # about 240 and 1,200 tokens; the model reads 512
        rows = [question(k) for k in range(19)] + [question(19, question="Is it even? " * words)]
        long = write_task(tmp_path / str(words), test=rows)
        assert bayeslora("evaluate", tmp_path / "run", "--task", long, "--json", "--quiet") == code
        assert bayeslora(*options(tmp_path / f"own-{words}", "--max-tokens", 100, "--task", long, "--json")) == code
    shown = capsys.readouterr()
    evaluated, trained = (json.loads(line) for line in shown.out.splitlines()[-2:])
    assert evaluated["counts"] == {"test": {"questions": 20}} and trained["counts"]["test"]["questions"] == 20
    assert shown.err.count("tokens without its passage, and at most 512 are allowed") == 2


def test_an_evaluation_is_written_where_it_is_asked_for(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "evaluation"
    words = ["evaluate", trained, "--split", "validation", "--out", out]
    assert bayeslora(*words) == 0
    shown = capsys.readouterr().out
    result = read_json(out / "result.json")
    ids, probabilities, gold = read_predictions(out / result["predictions"])
    assert len(ids) == tiny.SIZES["validation"]
    nll = -np.log(probabilities[np.arange(len(gold)), gold]).mean()
    assert result["metrics"]["nll"] == pytest.approx(nll) and f"{nll:.4f}" in shown

    before = contents(out)
    assert bayeslora(*words, "--samples", 1) == 2
    assert "--force" in refusal(capsys) and contents(out) == before
    assert bayeslora(*words, "--samples", 1, "--force", "--quiet") == 0
    assert contents(out) != before and read_json(out / "result.json")["samples"] == 1
    assert bayeslora(*words, "--draw-layers", "last:1", "--force", "--quiet") == 0
    assert read_json(out / "result.json")["draw_layers"] == "last:1"


def test_an_evaluation_never_lands_in_a_run_or_on_a_file(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(trained)
    assert bayeslora("evaluate", trained, "--out", trained, "--force") == 2
    assert "holds a run" in refusal(capsys) and contents(trained) == before
    (tmp_path / "file").write_text("mine")
    assert bayeslora("evaluate", trained, "--out", tmp_path / "file", "--force") == 2
    assert "is a file" in refusal(capsys) and (tmp_path / "file").read_text() == "mine"
    assert bayeslora("evaluate", trained, "--out", tmp_path / "file" / "below") == 2
    assert "is below a file" in refusal(capsys)
    (tmp_path / "answers.jsonl").write_text("mine")
    assert bayeslora("evaluate", trained, "--out", tmp_path) == 2
    assert "answers.jsonl" in refusal(capsys) and (tmp_path / "answers.jsonl").read_text() == "mine"


def test_questions_without_answers_cannot_be_evaluated(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [question(k, answer=None) for k in range(10)]
    assert bayeslora("evaluate", trained, "--task", write_lines(tmp_path / "open.jsonl", rows), "--quiet") == 2
    assert "has no answer" in refusal(capsys)


def test_samples_are_as_asked(trained: Path) -> None:
    items = load_task(tiny.task_directory()).test
    draws = {n: load_run(trained, samples=n).predict(items).draws for n in (None, 0, 1, 5)}
    assert {n: len(it) for n, it in draws.items()} == {None: 3, 0: 1, 1: 1, 5: 5}
    assert not np.allclose(draws[0], draws[1])  # the mean is not a draw
    model = load_run(trained, samples=5)
    assert model.predict(items).probabilities == pytest.approx(draws[5].mean(0))


def test_a_point_estimate_is_one_draw(tmp_path: Path) -> None:
    train(run_config("lora"), tmp_path)
    model = load_run(tmp_path, samples=8)
    answer = model.ask(*ASK)
    assert answer.epistemic == 0 and answer.entropy > 0
    found = model.calibrate()
    assert found.posterior_scale == 1 and found.temperature != 1


@pytest.mark.parametrize("change", ["missing", "empty", "model", "unfinished", "unreadable"])
def test_what_is_no_run_is_refused(
    change: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = copied
    if change == "missing":
        place = tmp_path / "nowhere"
    elif change == "empty":
        place = tmp_path
    elif change == "model":
        place = Path(tiny.model_directory())
    elif change == "unfinished":
        shutil.rmtree(copied / "adapter")
    else:
        (copied / "config.json").write_text('{"model"')
    for verb in ("evaluate", "calibrate", "predict"):
        assert bayeslora(verb, place, *(WORDS if verb == "predict" else []), "--quiet") == 2
        err = refusal(capsys)
        assert str(place) in err
        assert ("train" in err) or change in ("model", "missing")
        assert change != "unfinished" or "its adapter is gone; restore it, or train again with --force" in err


# Predict --------------------------------------------------------------------------------------------------------------


def test_a_question_is_answered_in_words(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("predict", trained, *WORDS, "--quiet") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    expected = load_run(trained).ask(*ASK)
    assert [line.split() for line in lines] == [
        [f"{p:.1%}", choice] for p, choice in zip(expected.probabilities, ASK[1], strict=True)
    ]
    assert last.startswith(f"answer: {expected.answer} (uncertainty {expected.entropy:.2f} nats")


def test_a_question_is_answered_in_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(capsys, trained, *WORDS)
    assert told["choices"] == ["yes", "no"] and sum(told["probabilities"]) == pytest.approx(1)
    assert told["answer"] == told["choices"][int(np.argmax(told["probabilities"]))]
    assert told["confidence"] == max(told["probabilities"]) and told["abstains"] is False
    assert 0 < told["epistemic"] < told["entropy"] < np.log(2) + 1e-9


def test_a_bare_question_is_asked_as_it_stands(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = answer(capsys, trained, *WORDS, "--bare")
    model = load_run(trained)
    item = Item("x", Prompt(ASK[0]), (" yes", " no"), ("A", "B"), None)
    assert bare["probabilities"] == pytest.approx(model.predict([item]).probabilities[0].tolist())
    assert bare["probabilities"] != pytest.approx(answer(capsys, trained, *WORDS)["probabilities"], abs=1e-4)
    assert bayeslora("predict", trained, *WORDS, "--bare", "--passage", "x") == 2
    assert "a bare question has no passage" in refusal(capsys)


def test_a_bare_question_in_python(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_run(trained)
    assert model.ask(*ASK, bare=True).probabilities != model.ask(*ASK).probabilities
    told = answer(capsys, trained, *WORDS, "--bare")
    assert told["probabilities"] == pytest.approx(model.ask(*ASK, bare=True).probabilities)


def test_the_passage_and_the_order_of_choices_are_read(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, trained, *WORDS)
    about = answer(capsys, trained, *WORDS, "--passage", "Three is an odd number.")
    assert about["probabilities"] != pytest.approx(plain["probabilities"], abs=1e-4)
    long = answer(capsys, trained, *WORDS, "--passage", "Three is an odd number. " * 200)  # cut from the left
    assert sum(long["probabilities"]) == pytest.approx(1)


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--question", "Why?"], "0 choices"),
        (["--question", "Why?", "--choice", "so"], "1 choice;"),
        (["--question", "Why?", "--choice", "so", "--choice", ""], "empty choice"),
        (["--question", "Why?", "--choice", "so", "--choice", " so "], "two choices are equal"),
        (["--question", " ", "--choice", "so", "--choice", "not so"], "empty question"),
        (["--question", "Why?", "--choice", "so", "--input", "file.jsonl"], "one of --question"),
        (["--choice", "so", "--choice", "not so"], "one of --question"),
        ([], "one of --question"),
        (["--input", "file.jsonl", "--choice", "so"], "--choice, --passage and --bare belong to --question"),
        (
            ["--question", "Why?", "--choice", "so", "--choice", "no", "--output", "o.jsonl"],
            "--output belongs to --input",
        ),
        (["--input", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--input", "questions.txt"], "questions.txt"),
        (["--question", "Why?", "--choice", "so", "--choice", "not so", "--samples", "-1"], "samples is -1"),
        (["--question", "Why?", "--choice", "so", "--choice", "not so", "--samples", "x"], "'x'"),
    ],
)
def test_questions_that_cannot_be_asked_are_refused(
    words: list[str], reason: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bayeslora("predict", trained, *words) == 2
    err = refusal(capsys)
    assert reason in err
    assert "give" in err or "pass" in err or "--help" in err  # what to do


def test_one_text_in_place_of_choices_is_refused(trained: Path) -> None:
    with pytest.raises(InputError, match="one text"):
        load_run(trained).ask("Is 3 even?", "yes")


# Calibrate ------------------------------------------------------------------------------------------------------------


def nll_at(model: TrainedModel) -> Callable[[float, float], float]:
    """On the validation split, by scale and temperature, computed here."""
    items = load_task(tiny.task_directory()).validation
    model.calibration = Calibration()

    @functools.cache
    def probabilities(scale: float) -> np.ndarray:
        model.model.base_model.posterior_scale = scale
        return model.predict(items).probabilities

    def nll(scale: float, temperature: float) -> float:
        p = probabilities(scale) ** (1 / temperature)
        p /= p.sum(1, keepdims=True)
        return float(-np.log(p[np.arange(len(items)), require_gold(items)]).mean())

    return nll


def test_scale_and_temperature_are_the_best_on_the_validation_split(calibrated: Path) -> None:
    found = Calibration.load(calibrated / "adapter" / "calibration.json")
    assert (found.task, found.split, found.samples) == (tiny.task_directory(), "validation", 3)
    nll = nll_at(load_run(calibrated))
    assert found.before["nll"] == pytest.approx(nll(1.0, 1.0))
    count, grid = SIZES["validation"], np.geomspace(0.05, 20, 30)
    assert found.questions == count and "10 questions only" in found.warnings[0]
    fitted = {scale: min(nll(scale, t) for t in grid) for scale in SCALES}
    least = min(fitted, key=fitted.get)
    assert abs(np.log(found.posterior_scale)) <= abs(np.log(least))
    best = nll(found.posterior_scale, found.temperature)
    assert found.after["nll"] == pytest.approx(best) and best < found.before["nll"]

    def loss(t: float) -> float:
        return count * nll(found.posterior_scale, t) + 0.5 * (np.log(t) / np.log(2)) ** 2

    for other in (0.98, 1.02):
        assert loss(found.temperature) < loss(other * found.temperature)


def test_the_scale_is_kept_where_stock_peft_finds_it(trained: Path, calibrated: Path) -> None:
    scale = Calibration.load(calibrated / "adapter" / "calibration.json").posterior_scale
    configs = [read_json(run / "adapter" / "adapter_config.json") for run in (trained, calibrated)]
    assert scale != 1 and [it.pop("posterior_scale") for it in configs] == [1.0, scale]
    for it in configs:
        it["target_modules"].sort()
    assert configs[0] == configs[1]
    base = AutoModelForCausalLM.from_pretrained(tiny.model_directory(), dtype=torch.float32)
    model = PeftModel.from_pretrained(base, calibrated / "adapter")
    assert model.posterior_scale == scale


def test_calibration_changes_nothing_but_itself(trained: Path, calibrated: Path) -> None:
    before, after = contents(trained), contents(calibrated)
    assert after.keys() - before.keys() == {"adapter/calibration.json", "adapter/familiarity.safetensors"}
    assert {name for name in before if before[name] != after[name]} == {"adapter/adapter_config.json"}
    assert train(WIDE, calibrated) == read_json(trained / "result.json")  # the run is still this run


def test_predictions_follow_the_temperature(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Calibration.load(calibrated / "adapter" / "calibration.json")
    model = load_run(calibrated, raw=True)
    model.model.base_model.posterior_scale = found.posterior_scale
    scaled = np.array(model.ask(*ASK).probabilities)
    expected = scaled ** (1 / found.temperature)
    told = answer(capsys, calibrated, *WORDS)
    assert told["probabilities"] == pytest.approx(expected / expected.sum())
    assert found.temperature != 1


def test_raw_leaves_calibration_out(trained: Path, calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, trained, *WORDS)
    assert answer(capsys, calibrated, *WORDS, "--raw") == plain != answer(capsys, calibrated, *WORDS)
    told = {}
    for name, words in {"plain": [trained], "raw": [calibrated, "--raw"], "calibrated": [calibrated]}.items():
        assert bayeslora("evaluate", *words, "--json", "--quiet") == 0
        told[name] = json.loads(capsys.readouterr().out)
    assert told["raw"]["metrics"] == told["plain"]["metrics"] == pytest.approx(told["calibrated"]["metrics"])
    assert told["calibrated"]["calibrated"]["metrics"] != told["calibrated"]["metrics"]
    assert "calibrated" not in told["raw"] and "calibrated" not in told["plain"]
    assert told["raw"]["calibration"] == {"temperature": 1.0, "posterior_scale": 1.0}
    assert told["calibrated"]["calibration"]["temperature"] != 1


def test_the_model_keeps_quiet_below_the_threshold(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threshold = Calibration.load(calibrated / "adapter" / "calibration.json").threshold
    items = load_task(tiny.task_directory()).validation
    answers = (model := load_run(calibrated)).answers(model.predict(items))
    assert {it.abstains for it in answers} == {True, False}
    for it in answers:
        assert it.abstains == (it.confidence < threshold) == (it.answer is None)
    assert np.mean([not it.abstains for it in answers]) >= 0.5
    unsure = next(item for item, it in zip(items, answers, strict=True) if it.abstains)
    number = int(unsure.id.removeprefix("q"))
    words = ["--question", f"Is {number} even?", *(w for c in question(number)["choices"] for w in ("--choice", c))]
    assert bayeslora("predict", calibrated, *words, "--quiet") == 0
    *_, said, how, last = capsys.readouterr().out.splitlines()
    assert said.startswith("not sure enough to answer") and last.startswith("prediction set: ") and "90% of" in last
    assert "familiar question (farther from the training questions than" in how
    assert answer(capsys, calibrated, *words)["answer"] is None


def test_calibration_data_may_have_other_names_for_their_fields(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = (question(k) for k in range(60))
    rows = [{"query": it["question"], "options": it["choices"], "key": it["answer"]} for it in asked]
    words = ("calibrate", copied, "--task", write_lines(tmp_path / "mine.jsonl", rows), "--quiet", "--force")
    assert bayeslora(*words) == 2
    assert "with --columns" in capsys.readouterr().err
    assert bayeslora(*words, "--columns", "question=query", "choices=options", "answer=key") == 0


def test_calibrating_again_needs_force(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("calibrate", copied, "--error-rate", "0.5") == 0
    out = capsys.readouterr().out
    assert "temperature" in out and "error rate of at most 0.5" in out and "validation" in out
    before = contents(copied)
    assert bayeslora("calibrate", copied, "--coverage", "0.9") == 2
    assert "--force" in refusal(capsys) and contents(copied) == before
    assert bayeslora("calibrate", copied, "--coverage", "0.9", "--force", "--json", "--quiet") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        **asdict(kept := Calibration.load(copied / "adapter" / "calibration.json")),
        "warnings": [*kept.warnings],
    }
    assert told["target"] == "coverage of at least 0.9"


def test_calibrating_again_starts_from_the_run_and_not_from_the_last_calibration(
    copied: Path, calibrated: Path
) -> None:
    for _ in range(2):
        assert bayeslora("calibrate", copied, "--coverage", "0.5", "--force", "--quiet") == 0
    assert contents(copied)["adapter/calibration.json"] == contents(calibrated)["adapter/calibration.json"]
    model = load_run(copied)
    assert model.calibrate(coverage=0.5) == Calibration.load(calibrated / "adapter" / "calibration.json")


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--error-rate", "0.5", "--coverage", "0.5"], "give exactly one"),
        (["--error-rate", "2"], "error_rate is 2.0"),
        (["--error-rate", "nan"], "error_rate is nan"),
        (["--coverage", "0"], "coverage is 0.0"),
        (["--task", "urn"], "did you mean 'urns'"),
        (["--samples", "-3"], "samples is -3"),
    ],
)
def test_a_calibration_that_cannot_be_asked_for_is_refused_before_any_work(
    words: list[str], reason: str, copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bayeslora.runs.calibration.calibrate", None)
    before = contents(copied)
    assert bayeslora("calibrate", copied, *words) == 2
    assert reason in refusal(capsys) and contents(copied) == before


def test_an_error_rate_out_of_reach_keeps_the_rest_and_says_what_can_be_reached(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_run(copied, samples=0)
    rows = [question(k) for k in range(40, 50)]
    for row in rows:  # of all answers the wrong one
        row["answer"] = (row["choices"].index(model.ask(row["question"], row["choices"]).answer) + 1) % 2
    task = tiny.write_task(tmp_path / "task", validation=rows)
    words = ["calibrate", copied, "--task", task, "--samples", 0, "--quiet"]
    assert bayeslora(*words, "--error-rate", "0.2") == 1
    out, said = capsys.readouterr()
    assert "temperature" in out and "there is no threshold" not in out and said.count("\n") == 1
    assert "there is no threshold" in said and "the least is 1, answering" in said and "the rest" in said
    kept = Calibration.load(copied / "adapter" / "calibration.json")
    assert (
        kept.threshold is None and kept.temperature > 1.5 and kept.conformal and "is not reached" in kept.warnings[-1]
    )
    assert model.calibrate(str(task), error_rate=0.2) == kept
    assert bayeslora(*words, "--error-rate", "1", "--force") == 0
    assert Calibration.load(copied / "adapter" / "calibration.json").threshold is not None


def test_a_handful_of_questions_is_refused(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = tiny.write_task(tmp_path / "task", validation=[question(k) for k in range(9)])
    before = contents(copied)
    assert bayeslora("calibrate", copied, "--task", task) == 2
    assert "has 9 questions to calibrate on, and it takes at least 10" in refusal(capsys) and contents(copied) == before


def test_a_calibration_that_fails_leaves_the_model_as_it_was(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_run(copied)
    plain, before = model.ask(*ASK), contents(copied)
    monkeypatch.setattr("bayeslora.runs.calibration.choose_threshold", None)
    with pytest.raises(TypeError):
        model.calibrate(coverage=0.5)
    assert model.ask(*ASK) == plain and contents(copied) == before


def test_the_posterior_mean_is_calibrated_without_a_scale(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = answer(capsys, copied, *WORDS, "--samples", 0)
    assert raw["epistemic"] == 0
    assert bayeslora("calibrate", copied, "--samples", 0, "--quiet") == 0
    capsys.readouterr()
    found = Calibration.load(copied / "adapter" / "calibration.json")
    assert found.posterior_scale == 1 and found.samples is None and found.temperature != 1
    told = answer(capsys, copied, *WORDS, "--samples", 0)
    expected = np.array(raw["probabilities"]) ** (1 / found.temperature)
    assert told["probabilities"] == pytest.approx(expected / expected.sum())


@pytest.mark.parametrize("file", some(["adapter_config.json", "calibration.json"], ["calibration.json"]))
@pytest.mark.system
def test_a_full_disk_while_calibrating_leaves_a_run_that_works(
    file: str, copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_file = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).name == file:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        replace_file(source, target)

    plain = answer(capsys, copied, *WORDS)
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        assert bayeslora("calibrate", copied, "--quiet") in (1, 2)
    assert "No space left on device" in refusal(capsys)
    assert not list((copied / "adapter").glob("*.partial"))
    assert answer(capsys, copied, *WORDS) == plain
    assert bayeslora("calibrate", copied, "--quiet") == 0


def test_a_run_with_a_kept_trunk_is_used_like_any_other(tmp_path: Path) -> None:
    config = run_config(adapter=AdapterConfig(rank=2, layers="last:1"), prediction=PredictionConfig(samples=2))
    config = replace(config, training=replace(config.training, cache_trunk=True))
    result = train(config, tmp_path)
    model = load_run(tmp_path)
    assert load_run(tmp_path, raw=True).evaluate().metrics() == pytest.approx(result["metrics"], rel=1e-4)
    assert model.evaluate().metrics() == pytest.approx(result["calibrated"]["metrics"], rel=1e-4)
    assert model.calibrate(coverage=0.5).threshold is not None
    assert sum(model.ask(*ASK).probabilities) == pytest.approx(1)


def test_letters_are_scored_as_in_training(tmp_path: Path) -> None:
    config = run_config()
    result = train(replace(config, data=replace(config.data, scoring="letter")), tmp_path)
    assert load_run(tmp_path).evaluate().metrics() == pytest.approx(result["metrics"])


# Sets, layers, text ---------------------------------------------------------------------------------------------------


def test_prediction_sets_come_with_calibration(
    trained: Path, calibrated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(capsys, trained, *WORDS)["prediction_set"] is None
    found = Calibration.load(calibrated / "adapter" / "calibration.json")
    assert list(found.conformal) == ["0.5", "0.8", "0.9"]  # ten questions cannot promise more
    assert "no prediction sets of level 0.95 and 0.99" in found.warnings[1]
    model = load_run(calibrated)
    items = load_task(tiny.task_directory()).validation
    predictions, gold = model.predict(items), require_gold(items)
    for level in (0.5, 0.8, 0.9):
        sets = [it.prediction_set for it in model.answers(predictions, level)]
        held = [item.options[y].strip() in (own or ()) for item, y, own in zip(items, gold, sets, strict=True)]
        assert np.mean(held) >= level
    with pytest.raises(InputError, match=r"0\.99 takes more than 10 questions to calibrate on"):
        model.ask(*ASK, level=0.99)
    told = answer(capsys, calibrated, *WORDS, "--level", "0.5")
    assert tuple(told["prediction_set"]) == model.ask(*ASK, level=0.5).prediction_set
    assert bayeslora("predict", calibrated, *WORDS, "--level", "0.7") == 2
    assert "level is 0.7; give one that prediction sets have: 0.5, 0.8, 0.9" in refusal(capsys)


def test_uncertainty_is_split(trained: Path) -> None:
    told = load_run(trained).ask(*ASK)
    assert told.entropy == pytest.approx(told.aleatoric + told.epistemic) and told.aleatoric > 0


@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_parts_of_the_uncertainty_keep_their_shares_at_any_temperature(trained: Path, temperature: float) -> None:
    model = load_run(trained)
    before = model.ask(*ASK)
    model.calibration = Calibration(temperature=temperature)
    told = model.ask(*ASK)
    assert told.entropy == pytest.approx(told.aleatoric + told.epistemic) and 0 < told.epistemic < told.entropy
    assert told.epistemic / told.entropy == pytest.approx(before.epistemic / before.entropy)


def test_draws_may_differ_in_upper_layers_only(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, late = load_run(trained), load_run(trained, draw_layers="last:1")
    assert late.ask(*ASK).probabilities != whole.ask(*ASK).probabilities
    assert load_run(trained, draw_layers="last:3").ask(*ASK).probabilities == pytest.approx(
        whole.ask(*ASK).probabilities
    )
    told = answer(capsys, trained, *WORDS, "--draw-layers", "last:1")
    assert told["probabilities"] == pytest.approx(late.ask(*ASK).probabilities)
    assert bayeslora("predict", trained, *WORDS, "--draw-layers", "last:9") == 2
    assert "draw_layers is 'last:9', but the model has 3 layers; give at most last:3" in refusal(capsys)


def test_calibration_may_choose_the_layers_and_keeps_them(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("calibrate", copied, "--tolerance", "10", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["draw_layers"] == "0.125"
    assert load_run(copied).draw_layers == "0.125" and load_run(copied, raw=True).draw_layers == "all"
    assert bayeslora("calibrate", copied, "--tolerance", "-1", "--force") == 2
    assert "tolerance is -1.0; give a finite number of at least 0" in refusal(capsys)
    assert (
        bayeslora("calibrate", copied, "--force", "--json") == 0
    )  # without a tolerance the run's own layers count again
    assert json.loads(capsys.readouterr().out)["draw_layers"] == "all"


def test_text_is_written_with_its_uncertainty(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--prompt", "Is 3", "--max-new-tokens", "4", "--quiet")
    assert bayeslora("generate", trained, *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    (own,) = load_run(trained).generate(["Is 3"], Writing(max_new_tokens=4))
    assert told["text"] == own.text and told["probabilities"] == pytest.approx(own.probabilities)
    assert told["log_likelihood"] == pytest.approx(own.log_likelihood) and max(own.epistemic) > 0
    assert bayeslora("generate", trained, *words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(own.text) and f"{len(own.token_ids)} tokens; per token: log-likelihood" in shown
    for bad, reason in ((("--temperature", "-1"), "temperature is -1.0"), (("--chat",), "no chat template")):
        assert bayeslora("generate", trained, *words, *bad) == 2
        assert reason in refusal(capsys)


# Adapters that are not whole ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage, advice",
    [
        ("missing", "lacks a tensor of the adapter, 'base_model"),
        ("extra", "holds a tensor that is not the adapter's, 'stranger'"),
        ("pickle", r"has no adapter_model\.safetensors"),
        ("cut", "holds no adapter that can be loaded"),
        ("method", "its settings say method 'lora', but its adapter holds inducing"),
    ],
)
def test_an_adapter_that_is_not_whole_or_not_the_runs_is_refused(
    damage: str, advice: str, trained: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    weights = run / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    if damage == "missing":
        del tensors[min(tensors)]
        save_file(tensors, weights)
    elif damage == "extra":
        save_file({**tensors, "stranger": torch.zeros(1)}, weights)
    elif damage == "pickle":
        torch.save(tensors, weights.with_name("adapter_model.bin"))
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    else:
        config = read_json(run / "config.json") | {"method": "lora"}
        config["adapter"] |= {"settings": {}}
        (run / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=advice):
        load_run(run)


def test_it_shows_what_it_is_and_not_its_weights(trained: Path) -> None:
    model = load_run(trained)
    assert (
        repr(model).startswith("TrainedModel(bayesian-lora on ") and "\n" not in repr(model) and len(repr(model)) < 150
    )
    assert "million parameters, torch.float32, cpu)" in repr(model.loaded) and len(repr(model.loaded)) < 250
    frame = model.answers(model.predict([{"question": ASK[0], "choices": ASK[1]}])).to_pandas()
    assert frame["confidence"].tolist() == [model.ask(*ASK).confidence]
