"""Runs on questions with free answers: what is written, evaluated and calibrated, and how they are asked."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayeslora import load_run, metrics
from bayeslora.errors import InputError
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.generation import Writing
from bayeslora.predict.generation.confidence import FEATURES, WrittenAnswer, feature_rows
from bayeslora.progress import reporter
from bayeslora.runs.free_answers import answer_metrics, calibrate_answers, with_confidence
from bayeslora.runs.trained import TrainedModel
from bayeslora.tasks.answers import answer_f1, exact_match
from bayeslora.train import AdapterConfig, DataConfig, PredictionConfig, RunContext, TrainingConfig, train
from tasks.cases import write_lines
from train.tiny import bayeslora, contents, model_directory, read_json, run_config, task_directory


def question(number: int) -> dict[str, Any]:
    return {"id": f"q{number}", "question": f"Is {number} even?", "answer": ["yes", "no"][number % 2]}


def config(task: str, method: str = "bayesian-lora", **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "task": task,
        "data": DataConfig(max_tokens=64),
        "adapter": AdapterConfig(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")),
        "training": TrainingConfig(epochs=12, batch_size=4, learning_rate=0.005, eval_every=6),
        "prediction": PredictionConfig(samples=3, max_new_tokens=1, batch_tokens=400),
    }
    return run_config(method, **(settings | changes))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    place, start = tmp_path_factory.mktemp("answers"), 0
    for split, count in (("train", 24), ("validation", 14), ("test", 12)):
        write_lines(place / f"{split}.jsonl", [question(start + k) for k in range(count)])
        start += count
    return str(place)


@pytest.fixture(scope="module")
def run(task: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with free answers; not to be changed."""
    out = tmp_path_factory.mktemp("runs") / "run"
    train(config(task), out)
    return out


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_holds_answers_with_their_confidence(run: Path) -> None:
    result, answers = read_json(run / "result.json"), records(run / "answers.jsonl")
    assert result["kind"] == "answers" and result["solutions"] == len(answers) == 12
    for record in answers:
        assert record["right"] == exact_match(record["answer"], record["accepted"])
        assert record["f1"] == answer_f1(record["answer"], record["accepted"]) and 0 <= record["confidence"] <= 1
        assert record["question"].startswith("Is ") and set(FEATURES) <= set(record)
    assert sum(record["right"] for record in answers) > 0, "the tiny model has learnt to say yes or no"
    figures = answer_metrics(answers)
    assert {name: result["metrics"][name] for name in figures} == pytest.approx(figures)
    assert result["metrics"]["nll"] > 0


def test_a_model_for_inference_that_is_not_there_is_told_before_training(task: str, tmp_path: Path) -> None:
    wrong = PredictionConfig(samples=3, max_new_tokens=6, nli=str(tmp_path / "nothing"))
    with pytest.raises(InputError, match=r"nli is '.*nothing', which cannot be loaded"):
        train(config(task, prediction=wrong), tmp_path / "run")
    assert not list((tmp_path / "run").glob("checkpoint*"))


def test_the_confidence_is_calibrated_on_the_validation_questions(run: Path) -> None:
    calibration = Calibration.load(run / "adapter" / "calibration.json")
    assert calibration.automatic and calibration.questions == 14 and calibration.split == "validation"
    result, answers = read_json(run / "result.json"), records(run / "answers.jsonl")
    after = answer_metrics(with_confidence(answers, calibration))
    assert {name: result["calibrated"]["metrics"][name] for name in after} == pytest.approx(after)
    assert result["calibrated"]["metrics"]["nll"] == result["metrics"]["nll"]


def test_evaluating_again_gives_the_same(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("evaluate", run, "--json", "--quiet", "--out", tmp_path / "out") == 0
    again, result = json.loads(capsys.readouterr().out), read_json(run / "result.json")
    assert again["metrics"] == pytest.approx(result["metrics"], abs=1e-6)
    assert again["calibrated"]["metrics"] == pytest.approx(result["calibrated"]["metrics"], abs=1e-6)
    assert [it["answer"] for it in records(tmp_path / "out" / "answers.jsonl")] == [
        it["answer"] for it in records(run / "answers.jsonl")
    ]


def test_an_evaluation_replaces_one_of_another_kind(run: Path, tmp_path: Path) -> None:
    texts, place = tmp_path / "texts.txt", tmp_path / "out"
    texts.write_text("".join(f"Line {k} of a text.\n" for k in range(30)), encoding="utf-8")
    kinds = {"text": texts, "answers": None, "questions": task_directory()}
    for kind in ("questions", "answers", "text", "questions"):
        named = () if kinds[kind] is None else ("--task", kinds[kind])
        assert bayeslora("evaluate", run, *named, "--out", place, "--force", "--quiet") == 0
        assert bayeslora("report", place, "--out", tmp_path / "page") == 0
    assert sorted(path.name for path in place.iterdir()) == [
        "calibrated.jsonl.gz",
        "predictions.jsonl.gz",
        "result.json",
    ]


def test_calibrating_chooses_a_threshold(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    assert bayeslora("calibrate", copied, "--coverage", 0.5, "--quiet") == 0
    out = capsys.readouterr().out
    assert out.startswith("the confidence weighs log_probability ") and "-0.00" not in out
    assert "(target: coverage of at least 0.5)\n" in out
    found = Calibration.load(copied / "adapter" / "calibration.json")
    assert found.threshold is not None and not found.automatic
    trained = load_run(copied)
    answers = trained.answer([row["question"] for row in map(question, range(24, 38))], max_new_tokens=1)
    assert 0.4 <= np.mean([not answer.abstains for answer in answers]) <= 0.7
    assert bayeslora("calibrate", copied, "--tolerance", 0.1, "--force", "--quiet") == 2
    assert "tolerance is for questions with options" in capsys.readouterr().err


def test_the_confidence_belongs_to_the_scale_that_it_was_fitted_at(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    model = load_run(tmp_path / "run")
    model.set_posterior_scale(4.0)
    assert model.calibrate().posterior_scale == 4.0
    back = load_run(tmp_path / "run")
    assert back.calibration == model.calibration and back.model.base_model.posterior_scale == 4.0


def test_too_few_questions_are_told_before_any_is_answered(
    run: Path, task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bayeslora.predict.generation.confidence import AnswerWriter

    monkeypatch.setattr(AnswerWriter, "__call__", lambda self, prompts: 1 / 0)
    model = load_run(run)
    few = replace(model, config=replace(model.config, prediction=replace(model.config.prediction, solutions=9)))
    with pytest.raises(InputError, match="has 9 questions to calibrate on, and it takes at least 10"):
        few.calibrate()


def test_a_run_says_that_it_is_not_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "few"
    for start, (split, count) in enumerate((("train", 6), ("validation", 4), ("test", 2))):
        write_lines(place / f"{split}.jsonl", [question(100 * start + k) for k in range(count)])
    quick = TrainingConfig(epochs=1, batch_size=4, learning_rate=0.01)
    words = run_config(
        task=str(place), data=DataConfig(max_tokens=64), training=quick, prediction=PredictionConfig(samples=2)
    )
    with reporter(quiet=False) as report:
        train(words, tmp_path / "run", RunContext(report=report))
    assert "not calibrated: it takes at least 10 validation questions, and the task has 4;" in capsys.readouterr().err


def test_questions_are_asked_as_in_training(run: Path) -> None:
    trained = load_run(run)
    answer = trained.answer("Is 38 even?", max_new_tokens=1)
    assert isinstance(answer, WrittenAnswer)
    [told] = [record for record in records(run / "answers.jsonl") if record["id"] == "q38"]
    assert answer.text == told["answer"]
    calibration = Calibration.load(run / "adapter" / "calibration.json")
    assert calibration.confidence is not None
    expected = calibration.confidence.apply(feature_rows([told]))[0]
    assert answer.confidence == pytest.approx(float(expected), abs=1e-3)
    plain = trained.answer(["Is 38 even?"], max_new_tokens=1)
    assert [it.text for it in plain] == [answer.text]
    assert trained.answer(" Is\u00a038  even?\n", max_new_tokens=1).confidence == answer.confidence
    passages = ("A “number”\nof  hens.\n\n", 'A "number" of hens.\n\n', 'A "number" of hens. ')
    about, same, joined = (trained.answer(f"{it}Is 38 even?", max_new_tokens=1).features for it in passages)
    assert about == same != joined


def test_what_is_calibrated_is_asked_as_the_calibration_asked(run: Path, tmp_path: Path) -> None:
    """Also by an adapter whose own task has no free answers. A chat of several messages has no calibration."""
    shutil.copytree(run, tmp_path / "run")
    own, trained = load_run(run), load_run(tmp_path / "run")
    for model in (own, trained):
        model.loaded.tokenizer.chat_template = "{% for it in messages %}{{ it['content'] }}\n{% endfor %}"
    trained.__dict__["result"] = None  # as of an adapter that PEFT or TRL saved
    single = [{"role": "user", "content": "Is 38 even?"}]
    want = own.answer("Is 38 even?", max_new_tokens=1)
    for prompt in ("Is 38 even?", single):
        [found] = trained.answer([prompt], max_new_tokens=1)
        assert found.to_dict() == want.to_dict() and trained.asked(prompt) == trained.asked("Is 38 even?")
    chat = [{"role": "user", "content": "Is 38 odd?"}, {"role": "assistant", "content": "No."}, *single]
    trained.calibration = replace(trained.calibration, threshold=1.0)
    told, bare = trained.answer(["Is 38 even?", chat], max_new_tokens=1)
    assert trained.asked(chat) == chat and told.abstains and not bare.abstains
    assert bare.confidence == pytest.approx(math.exp(bare.log_probability))


@pytest.mark.parametrize(
    "question, settings, message",
    [
        (" ", {}, "a question is empty; give some text"),
        ("Is 38 even?", {"temperature": 1.0}, "is the most probable one, not a sample; leave out temperature"),
    ],
)
def test_what_cannot_be_answered_is_refused(run: Path, question: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_run(run).answer(question, **settings)


def test_the_command_line_tells_confidence_and_alternatives(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", run, "--prompt", "Is 38 even?", "--max-new-tokens", 6, "--confidence", "--quiet"]
    assert bayeslora(*words) == 0
    assert "% (calibrated); " in (out := capsys.readouterr().out) and "of the draws say the same" in out
    assert bayeslora(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {"answer", "confidence", "abstains", "alternatives", *FEATURES} <= set(found)


def test_the_seed_of_texts_is_that_of_the_run_unless_another_is_given(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeded = Path(shutil.copytree(run, tmp_path / "run"))
    settings = read_json(seeded / "config.json")
    (seeded / "config.json").write_text(json.dumps(settings | {"seed": 5}), encoding="utf-8")
    trained, question, wanted = load_run(seeded), "Is 38 even?", {"max_new_tokens": 6}
    words = ["generate", seeded, "--prompt", question, "--max-new-tokens", 6, "--quiet", "--json"]

    def told(*more: object) -> Any:
        assert bayeslora(*words, *more) == 0
        return json.loads(capsys.readouterr().out)

    for given, seed in (((), 5), (("--seed", 0), 0)):
        answer = trained.answer(question, Writing(seed=seed, **wanted))
        written = trained.generate(question, Writing(seed=seed, **wanted))
        assert told(*given, "--confidence")["epistemic"] == pytest.approx(answer.features["epistemic"])
        assert told(*given)["probabilities"] == pytest.approx(written.probabilities)
    own, other = trained.answer(question, **wanted), trained.answer(question, seed=0, **wanted)
    assert own.features == trained.answer(question, seed=5, **wanted).features != other.features
    assert trained.generate(question, **wanted) == trained.generate(question, seed=5, **wanted)


@pytest.mark.system
def test_interrupted_answering_goes_on_where_it_was(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bayeslora.predict.generation.confidence import AnswerWriter

    class Stop(Exception):
        pass

    settings = {"training": TrainingConfig(epochs=1, batch_size=8, learning_rate=0.05)}
    prediction = PredictionConfig(samples=2, max_new_tokens=3, batch_tokens=60, calibrate="none")
    run = config(task, "lora", prediction=prediction, **settings)
    train(run, tmp_path / "whole")
    own, calls = AnswerWriter.__call__, []

    def once(self: Any, prompts: Any) -> Any:
        calls.append(len(prompts))
        if len(calls) == 3:
            raise Stop
        return own(self, prompts)

    with monkeypatch.context() as patched:
        patched.setattr(AnswerWriter, "__call__", once)
        with pytest.raises(Stop):
            train(run, tmp_path / "parts")
    done = sum(calls[:2])
    assert len(records(tmp_path / "parts" / "answers.jsonl.partial")) == done > 0
    train(run, tmp_path / "parts")
    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    assert {name for name in whole if whole[name] != parts[name]} == {"result.json"}


@pytest.mark.system
def test_answers_of_other_weights_or_questions_are_not_continued(
    run: Path, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation that was interrupted, and then a run that was trained again, or a file of other questions."""
    from bayeslora.predict.generation.confidence import AnswerWriter
    from bayeslora.runs.evaluation import evaluate

    copied, questions = tmp_path / "run", tmp_path / "questions"
    shutil.copytree(run, copied)
    shutil.copytree(task, questions)

    own, calls = AnswerWriter.__call__, []

    def stop(self: Any, prompts: Any) -> Any:
        calls.append(len(prompts))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return own(self, prompts)

    def interrupted() -> None:
        calls.clear()
        (tmp_path / "out/answers.jsonl.partial").unlink(missing_ok=True)
        with monkeypatch.context() as patched:
            patched.setattr(AnswerWriter, "__call__", stop)
            with pytest.raises(KeyboardInterrupt):
                evaluate(load_run(copied), str(questions), "test", out=tmp_path / "out")

    interrupted()
    lines = (questions / "test.jsonl").read_text().splitlines(keepends=True)
    (questions / "test.jsonl").write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(InputError, match=r"answers\.jsonl\.partial: holds answers made with other settings"):
        evaluate(load_run(copied), str(questions), "test", out=tmp_path / "out")
    interrupted()
    train(replace(config(task), seed=1), copied, force=True)
    with pytest.raises(InputError, match=r"answers\.jsonl\.partial: holds answers made with other settings"):
        evaluate(load_run(copied), str(questions), "test", out=tmp_path / "out")


def test_metrics_of_answers_by_hand() -> None:
    right, confidence = [True, False, True, False], [0.9, 0.6, 0.5, 0.1]
    rows = [{"right": r, "confidence": c, "f1": float(r)} for r, c in zip(right, confidence, strict=True)]
    figures = answer_metrics(rows)
    assert figures["acc"] == 0.5 and figures["f1"] == 0.5 and figures["confidence"] == pytest.approx(0.525)
    assert figures["auroc"] == 0.75 and figures["acc_at_50"] == 0.5
    assert figures["ece"] == metrics.ece_from_confidence(confidence, right)
    assert "auroc" not in answer_metrics([row for row in rows if row["right"]])


def test_all_right_or_all_wrong_is_a_doubt() -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"right": True, "confidence": 0.5, "f1": 1.0, **dict(zip(FEATURES, rng.normal(size=6), strict=True))}
        for _ in range(12)
    ]
    assert calibrate_answers(rows).warnings == ("all answers are right",)
    wrong = [{**row, "right": False} for row in rows]
    found = calibrate_answers(wrong, error_rate=0.1)
    assert found.threshold is None and "there is no threshold" in found.warnings[-1]


# Pages and tables -----------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_the_page_of_a_run_shows_confident_wrong_answers(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    assert bayeslora("report", copied, "--quiet") == 0
    page = (copied / "report" / "index.html").read_text(encoding="utf-8")
    wrong = [record for record in records(copied / "answers.jsonl") if not record["right"]]
    assert f"Wrong answers, the most confident first: {len(wrong)} of {len(wrong)}, among 12 answers." in page
    assert "Reliability of the confidence, calibrated" in page and "sure on average, and is right in" in page
    lines = (copied / "answers.jsonl").read_text(encoding="utf-8").replace('"confidence": 0', '"confidence": 0.9', 1)
    (copied / "answers.jsonl").write_text(lines.replace('"right": true', '"right": false'), encoding="utf-8")
    assert bayeslora("report", copied, "--quiet") == 2


@pytest.mark.system
def test_a_comparison_has_columns_of_answers(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", model_directory(), "--tasks", task, "--methods", "lora", "bayesian-lora", "--seeds", 0]
    words += [
        "--rank",
        2,
        "--targets",
        "q_proj",
        "--epochs",
        1,
        "--samples",
        2,
        "--max-new-tokens",
        2,
        "--calibrate",
        "none",
    ]
    assert bayeslora("compare", *words, "--max-tokens", 64, "--quiet", "--out", tmp_path / "study") == 0
    assert "| method | ACC ↑ | F1 ↑ | NLL ↓ | ECE ↓ | AUROC ↑ | AURC ↓ |" in capsys.readouterr().out
    assert bayeslora("report", tmp_path / "study", "--quiet") == 0
    assert "AUROC ↑" in (tmp_path / "study" / "report" / "index.html").read_text(encoding="utf-8")


# Classification -------------------------------------------------------------------------------------------------------


def test_texts_are_classified_by_their_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": f"the number {k}", "label": ["even", "odd"][k % 2]} for k in range(40)]
    path = write_lines(tmp_path / "mine.jsonl", rows)
    result = train(config(str(path), "lora", prediction=PredictionConfig(samples=2)), tmp_path / "run")
    assert result.kind == "labels" and list(result.labels or ()) == ["even", "odd"]
    trained = load_run(tmp_path / "run")
    [answer] = trained.classify(["the number 7"])
    assert trained.classify("the number 7").probabilities == answer.probabilities
    for text in ("", "  ", None, "\ud800"):
        with pytest.raises(InputError, match=r"the text cannot be used: .*; give one with words"):
            trained.classify([text])  # type: ignore[list-item]
    assert set(answer.choices) == {"even", "odd"} and sum(answer.probabilities) == pytest.approx(1.0)
    assert bayeslora("predict", tmp_path / "run", "--text", "the number 7", "--json", "--quiet") == 0
    assert json.loads(capsys.readouterr().out)["probabilities"] == pytest.approx(list(answer.probabilities))
    words = ["--text", "x", "--choice", "a"]
    assert bayeslora("predict", tmp_path / "run", *words) == 2
    assert "belong to --question" in capsys.readouterr().err
    _check_a_file_of_texts(tmp_path, trained, capsys)


def _check_a_file_of_texts(place: Path, trained: TrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is answered as it is alone, whatever its own label and its fellows; bad ones are told by their line."""
    texts = ["the number 7", " the  number\t12", "number of the house"]
    file = write_lines(
        place / "texts.jsonl", [{"text": texts[0], "id": "x"}, {"text": texts[1], "label": "new"}, {"text": texts[2]}]
    )
    assert bayeslora("predict", place / "run", "--input", file, "--quiet") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["line"] for line in lines] == [1, 2, 3] and lines[0]["id"] == "x"
    for line, text in zip(lines, texts, strict=True):
        assert bayeslora("predict", place / "run", "--text", text, "--json", "--quiet") == 0
        alone = json.loads(capsys.readouterr().out)
        assert line["answer"] == alone["answer"] and line["choices"] == alone["choices"]
        for name in ("probabilities", "confidence", "entropy", "epistemic"):
            assert line[name] == pytest.approx(alone[name])
    assert trained.predict([{"text": texts[0]}]).probabilities[0] == pytest.approx(lines[0]["probabilities"])
    own = {"question": "Is it even?", "choices": ["yes", "no", "both"]}
    assert trained.predict([{**own, "text": texts[0]}]).probabilities.shape == (1, 3)  # a question with its own choices
    bad = write_lines(place / "bad.jsonl", [{"text": 3}, {"text": " "}, {"question": "x?"}])
    assert bayeslora("predict", place / "run", "--input", bad, "--quiet") == 1
    told = [json.loads(line)["error"] for line in capsys.readouterr().out.splitlines()]
    assert told[:2] == [
        f"{bad}, line 1: the text cannot be used: text is no text: 3; give one with words",
        f"{bad}, line 2: the text cannot be used: empty text; give one with words",
    ]
    assert "no choices" in told[2]


@pytest.mark.parametrize(
    "given, told",
    [
        ("x", "questions are str; give a list"),
        ({"text": "x"}, "questions are dict; give a list"),
        (["x"], "a question is 'x'; give its"),
    ],
)
def test_what_is_no_list_of_questions_is_refused(run: Path, given: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        load_run(run).predict(given)


def test_other_runs_cannot_classify(run: Path) -> None:
    with pytest.raises(InputError, match="was not trained to classify"):
        load_run(run).classify(["x"])
    with pytest.raises(InputError, match="was not trained to classify"):
        load_run(run).predict([{"text": "x"}])


# In Python ------------------------------------------------------------------------------------------------------------


def test_short_calls(run: Path) -> None:
    trained = load_run(run)
    one = trained.generate("Is 3 even?", max_new_tokens=3)
    assert one.text == trained.generate(["Is 3 even?"], max_new_tokens=3)[0].text and len(one.token_ids) <= 3
    with pytest.raises(InputError, match=r"no setting 'max_tokens' \(did you mean 'max_new_tokens'\?\)"):
        trained.generate("x", max_tokens=3)
    found = trained.predict([{"question": "Is 3 even?", "choices": ["yes", "no"]}])
    assert found.probabilities.shape == (1, 2)
