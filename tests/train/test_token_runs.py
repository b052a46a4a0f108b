"""Runs on text and on problems with a tiny model: what is written, what is refused, what is resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayeslora import load_run, metrics
from bayeslora.errors import InputError
from bayeslora.methods import METHODS
from bayeslora.predict.calibrate import fit_temperature
from bayeslora.predict.generation import Generation, Writing, generate
from bayeslora.predict.tokens.predictor import read_token_predictions
from bayeslora.runs import solving
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.evaluation import evaluate
from bayeslora.tasks import find_task
from bayeslora.tasks.problems import ask
from bayeslora.train import DataConfig, PredictionConfig, RunContext, TrainingConfig, train
from tasks.cases import write_lines
from tiers import some
from train.tiny import bayeslora, contents, make_tokenizer, model_directory, read_json, run_config

WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text in three splits."""
    rng, place = np.random.default_rng(0), tmp_path_factory.mktemp("text")
    for split, lines in (("train", 24), ("validation", 8), ("test", 8)):
        rows = [" ".join(rng.choice(WORDS, size=6)) + " .\n" for _ in range(lines)]
        (place / f"{split}.txt").write_text("".join(rows))
    return str(place)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with problems."""
    place = tmp_path_factory.mktemp("data")
    for split, count in (("train", 15), ("test", 5)):
        rows = [
            {"id": f"{split}-{k}", "problem": f"Is {k} even?", "solution": rf"It is $\boxed{{{k % 2}}}$."}
            for k in range(count)
        ]
        write_lines(place / f"math/{split}.jsonl", rows)
    return place


def text_config(task: str, method: str = "lora", **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "data": DataConfig(max_tokens=48),
        "training": TrainingConfig(epochs=1, batch_size=4, learning_rate=0.01),
        "prediction": PredictionConfig(samples=2, max_new_tokens=6),
    }
    return run_config(method, task=task, **(settings | changes))


def math_config(method: str = "bayesian-lora", **changes: Any) -> Any:
    prediction = PredictionConfig(samples=2, max_new_tokens=6, batch_tokens=700)
    return text_config("math", method, **({"prediction": prediction, "data": DataConfig(max_tokens=200)} | changes))


@pytest.fixture(scope="module")
def lora(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA on the text; not to be changed."""
    out = tmp_path_factory.mktemp("runs") / "lora"
    train(text_config(text), out)
    return out


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("bayeslora: ") and err.count("\n") == 1 and "Traceback" not in err, err
    return err


# Text -----------------------------------------------------------------------------------------------------------------


def test_a_run_on_text_holds_what_it_promises(lora: Path, text: str) -> None:
    result = read_json(lora / "result.json")
    names = {"nll", "brier", "ece", "acc", "uncertain_nll", "uncertain_brier", "uncertain_ece"}
    assert names <= result["metrics"].keys() and names <= result["validation"]["metrics"].keys()
    assert sorted(path.name for path in lora.iterdir() if path.name != ".lock") == [
        "adapter", "config.json", "result.json", "tokens-test.safetensors", "tokens-validation.safetensors",
    ]  # fmt: skip
    tokens = {split: it["tokens"] for split, it in result["counts"].items()}
    task, tokenizer = find_task(text), load_run(lora).loaded.tokenizer
    assert tokens == {split: len(tokenizer(task.load(split)).input_ids) - 1 for split in tokens}
    assert result["tokens"] == tokens["test"] and result["history"][0]["validation"]["nll"] > 0
    assert result["history"][0]["validation"]["nll"] == pytest.approx(result["validation"]["metrics"]["nll"])
    for split in ("validation", "test"):
        kept = read_token_predictions(lora / f"tokens-{split}.safetensors")
        figures = result["metrics"] if split == "test" else result["validation"]["metrics"]
        assert kept.metrics() == pytest.approx(figures)
        assert kept.uncertain.sum() == np.ceil(0.05 * tokens[split])
        assert (kept.uncertain == metrics.top_entropy(kept.scores.entropy)).all()


def test_training_on_text_learns_it(lora: Path, text: str, tmp_path: Path) -> None:
    before = train(text_config(text, "zero-shot"), tmp_path / "base")["metrics"]["nll"]
    after = read_json(lora / "result.json")["metrics"]["nll"]
    assert after < before - 0.1
    longer = train(
        text_config(text, training=TrainingConfig(epochs=4, batch_size=4, learning_rate=0.01)), tmp_path / "l"
    )
    assert longer["metrics"]["nll"] < after - 0.1


@pytest.mark.parametrize(
    "method",
    some(
        [name for name, it in METHODS.items() if not it.needs_options],
        ["lora", "temperature", "bayesian-lora"],
    ),
)
def test_every_method_that_needs_no_options_runs_on_text(method: str, text: str, lora: Path, tmp_path: Path) -> None:
    start = (str(lora),) if method == "temperature" else ()
    changes = {"adapter": replace(run_config().adapter, settings={"members": 2})} if method == "deep-ensemble" else {}
    result = train(text_config(text, method, start_from=start, **changes), tmp_path / "run")
    assert np.isfinite(result["metrics"]["nll"]) and ("uncertain_nll" in result["metrics"]) == (method == "lora")
    again = evaluate(load_run(tmp_path / "run"), None, "test")
    assert again["metrics"] == pytest.approx(result["metrics"], rel=1e-4)


def test_the_temperature_is_fitted_on_validation_tokens(lora: Path, text: str, tmp_path: Path) -> None:
    result = train(text_config(text, "temperature", start_from=(str(lora),)), tmp_path / "run")
    trained = load_run(lora)
    texts = find_task(text).encode("validation", trained.loaded.tokenizer, 48)
    chunks = list(trained.token_predictor()._chunks(texts, None))
    log_p = np.concatenate([chunk[1].numpy() for chunk in chunks])
    labels = np.concatenate([chunk[2].numpy() for chunk in chunks])
    assert result["found"]["temperature"] == pytest.approx(fit_temperature(log_p, labels), rel=1e-3)
    plain, soft = (read_token_predictions(path / "tokens-test.safetensors") for path in (lora, tmp_path / "run"))
    assert (plain.scores.correct == soft.scores.correct).all()
    assert result["validation"]["metrics"]["nll"] <= read_json(lora / "result.json")["validation"]["metrics"]["nll"]


def test_evaluation_against_a_reference(
    lora: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(text_config(text, "bbb"), tmp_path / "bbb")
    command = ["evaluate", tmp_path / "bbb", "--samples", 1, "--reference", lora, "--quiet"]
    for split in ("validation", "test"):
        assert bayeslora(*command, "--split", split, "--out", tmp_path / split) == 0
        kept = read_token_predictions(tmp_path / split / f"tokens-{split}.safetensors")
        reference = read_token_predictions(lora / f"tokens-{split}.safetensors")
        result = read_json(tmp_path / split / "result.json")
        assert (kept.uncertain == reference.uncertain).all() and result["reference"] == str(lora)
        assert result["metrics"]["uncertain_nll"] == pytest.approx(kept.scores.subset(reference.uncertain).nll)
        assert result["samples"] == 1
    capsys.readouterr()
    assert bayeslora(*command, "--split", "test", "--out", tmp_path / "test") == 2  # nothing is replaced unasked
    assert "holds an evaluation already" in refusal(capsys)


def test_references_that_cannot_be_used(
    lora: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(text_config(text, "mc-dropout"), tmp_path / "run")
    (tmp_path / "empty").mkdir()
    for reference, split, message in (
        (tmp_path / "run", "test", "is of method 'mc-dropout'; give a run of method 'lora'"),
        (lora, "train", "has no scores of the tokens of split 'train'"),
        (tmp_path / "empty", "test", "no such file"),
        (tmp_path / "nowhere", "test", "nowhere: no such directory; give that of a LoRA's run"),
    ):
        assert bayeslora("evaluate", tmp_path / "run", "--reference", reference, "--split", split, "--quiet") == 2
        assert message in refusal(capsys)
    train(text_config(text, data=DataConfig(max_tokens=40)), tmp_path / "other")
    assert bayeslora("evaluate", tmp_path / "run", "--reference", tmp_path / "other", "--quiet") == 2
    assert "was evaluated on other tokens" in refusal(capsys)


def test_a_run_on_questions_can_be_evaluated_on_text_and_the_other_way(lora: Path, text: str, tmp_path: Path) -> None:
    train(run_config("lora"), tmp_path / "questions")
    crossed = evaluate(load_run(tmp_path / "questions"), text, "test", out=tmp_path / "crossed")
    assert crossed["metrics"]["nll"] > 0 and (tmp_path / "crossed" / "tokens-test.safetensors").exists()
    assert "aurc" in evaluate(load_run(lora), run_config().task, "test")["metrics"]


def test_an_interrupted_run_on_text_goes_on_to_the_same_end(text: str, tmp_path: Path) -> None:
    config = text_config(text, "bayesian-lora", training=TrainingConfig(epochs=2, batch_size=4, learning_rate=0.01))
    train(config, tmp_path / "whole")

    class Stop(Exception):
        pass

    class Interrupting:
        def stage(self, label: str) -> Any:
            def advance(done: int, total: int) -> None:
                if label == "training" and done == total - 1:
                    raise Stop

            return advance

        def say(self, text: str) -> None:
            pass

    with pytest.raises(Stop):
        train(config, tmp_path / "cut", RunContext(report=Interrupting(), checkpoint_seconds=0))
    assert RunDirectory(tmp_path / "cut").checkpoint.exists()
    train(config, tmp_path / "cut")
    for name in ("adapter/adapter_model.safetensors", "tokens-test.safetensors", "tokens-validation.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_that_is_done_is_not_done_again_and_force_clears_it(lora: Path, text: str, tmp_path: Path) -> None:
    before = contents(lora)
    assert train(text_config(text), lora)["metrics"] == read_json(lora / "result.json")["metrics"]
    assert contents(lora) == before
    train(text_config(text), tmp_path / "run")
    train(run_config("lora"), tmp_path / "run", force=True)
    assert not list((tmp_path / "run").glob("tokens-*"))


def test_max_train_limits_the_blocks(text: str, tmp_path: Path) -> None:
    result = train(text_config(text, data=DataConfig(max_tokens=48, max_train=3)), tmp_path / "run")
    assert result["counts"]["train"]["texts"] == 3


@pytest.mark.parametrize(
    "options, message",
    [
        (["--method", "laplace"], "method 'laplace' is made from questions with options, and task "),
        (["--method", "tfb"], "method 'tfb' is made from questions with options"),
        (["--cache-trunk"], "cache_trunk is for questions with choices and for labels"),
        (["--max-tokens", 1], "max_tokens is 1; give a whole number of at least 2"),
        (["--max-new-tokens", 0], "max_new_tokens is 0; give a whole number of at least 1"),
        (["--solutions", -1], "solutions is -1; give a whole number of at least 0"),
        (["--task", "wikitext"], "unknown task 'wikitext' (did you mean 'wikitext2'?)"),
        (["--task", "no.txt"], "no.txt: no such file or directory"),
        (["--task", "wikitext2", "--data-dir", "/"], "has no wikitext2/train.txt.gz or wikitext2/train.txt"),
    ],
)
def test_bad_input_is_one_line_and_touches_nothing(
    options: list[Any], message: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--model", model_directory(), "--task", text, "--quiet", "--out", tmp_path / "run", *options]
    assert bayeslora(*words) == 2
    assert message in refusal(capsys)
    assert not (tmp_path / "run" / "config.json").exists()


def test_verbs_that_need_questions_say_so(lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bayeslora("calibrate", lora, "--quiet") == 2
    assert "cannot be used for calibration; choose one of questions with choices or with short answers" in refusal(
        capsys
    )
    assert bayeslora("evaluate", lora, "--task", "urns", "--reference", lora, "--quiet") == 2
    assert "reference belongs to tasks of text" in refusal(capsys)


# Problems -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch, data: Path) -> list[int]:
    """Problems are solved rightly, but for the one in four whose answer is left out; gives the sizes of batches."""
    solutions = {p.text: p.solution for p in find_task("math", data).load("test")}
    sizes: list[int] = []

    def write(model: Any, tokenizer: Any, prompts: list[Any], writing: Any, **settings: Any) -> list[Generation]:
        sizes.append(len(prompts))
        found = [next(solutions[text] for text in solutions if text in str(prompt)) for prompt in prompts]
        return [Generation(text.replace("boxed{0}", "x"), (1, 2), *[(0.5, 0.5)] * 4) for text in found]

    monkeypatch.setattr(solving, "generate", write)
    return sizes


@pytest.mark.parametrize("method", some(["zero-shot", "temperature", "bayesian-lora"], ["bayesian-lora"]))
def test_a_run_on_problems_holds_what_it_promises(method: str, data: Path, tmp_path: Path) -> None:
    result = train(math_config(method), tmp_path / "run", RunContext(data_dir=data))
    assert {"acc", "answered", "cot_nll", "cot_ece", "cot_brier"} <= result["metrics"].keys()
    assert result["counts"]["train"]["texts"] == 12 and result["counts"]["test"]["texts"] == result["solutions"] == 5
    kept = read_token_predictions(tmp_path / "run" / "tokens-test.safetensors")
    assert kept.scores.nll == pytest.approx(result["metrics"]["cot_nll"])
    records = [json.loads(line) for line in (tmp_path / "run" / "solutions.jsonl").read_text().splitlines()]
    assert {record["id"] for record in records} == {f"test-{k}" for k in range(5)}
    trained, task = load_run(tmp_path / "run"), find_task("math", data)
    problem = next(p for p in task.load("test") if p.id == records[0]["id"])
    prompt = ask(problem, trained.loaded.tokenizer)
    [written] = generate(
        trained.model, trained.loaded.tokenizer, [prompt], Writing(max_new_tokens=6), samples=trained.samples
    )
    assert records[0]["solution"] == written.text and records[0]["tokens"] <= 6
    tokens = sum(len(t.target_ids) for t in task.encode("test", trained.loaded.tokenizer, 200))
    assert len(kept.scores) == tokens  # the token that ends a solution is learnt, but not scored


def test_answers_are_taken_from_boxes_and_checked(data: Path, tmp_path: Path, solved: list[int]) -> None:
    result = train(math_config(), tmp_path / "run", RunContext(data_dir=data))
    assert result["metrics"]["acc"] == result["metrics"]["answered"] == 2 / 5  # of 0 to 4, the odd ones
    assert sum(solved) == 5 and len(solved) > 1


def test_problems_that_are_too_long_are_not_learnt_but_counted(data: Path, tmp_path: Path) -> None:
    lessons = find_task("math", data).encode_lessons("train", make_tokenizer(), 10**6).texts
    limit = min(map(len, lessons))
    config = math_config(data=DataConfig(max_tokens=limit), prediction=PredictionConfig(samples=2, solutions=0))
    result = train(config, tmp_path / "run", RunContext(data_dir=data))
    counts = result["counts"]["train"]
    assert counts["texts"] + counts["left_out"][f"longer than {limit} tokens"] == 12 and counts["texts"] > 0
    assert result["counts"]["test"]["texts"] == 5 and "acc" not in result["metrics"] and result["solutions"] == 0
    assert not (tmp_path / "run" / "solutions.jsonl").exists()


def test_solutions_to_some_problems_are_the_same_ones_for_every_run(data: Path, tmp_path: Path) -> None:
    prediction = PredictionConfig(samples=0, max_new_tokens=2, solutions=2)
    ids = []
    for seed in (0, 1):
        out = tmp_path / str(seed)
        train(math_config("zero-shot", prediction=prediction, seed=seed), out, RunContext(data_dir=data))
        ids.append([json.loads(line)["id"] for line in (out / "solutions.jsonl").read_text().splitlines()])
    assert ids[0] == ids[1] and len(ids[0]) == 2


def test_interrupted_solving_goes_on_where_it_was(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prediction = PredictionConfig(samples=0, max_new_tokens=4, batch_tokens=1)
    config, place = math_config("zero-shot", prediction=prediction), RunContext(data_dir=data)
    train(config, tmp_path / "whole", place)
    real, calls = solving.generate, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(solving, "generate", failing)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "cut", place)
    partial = tmp_path / "cut" / "solutions.jsonl.partial"
    assert len(partial.read_text().splitlines()) == 3
    with partial.open("a") as file:
        file.write('{"id": "torn')  # as a process leaves it that dies while it writes
    train(config, tmp_path / "cut", place)
    assert calls == 4 + 2
    for name in ("solutions.jsonl", "tokens-test.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "cut").glob("*.partial*"))


def test_problems_of_a_run_are_evaluated_anew_and_elsewhere(data: Path, text: str, lora: Path, tmp_path: Path) -> None:
    assert bayeslora("evaluate", lora, "--task", "math", "--data-dir", data, "--out", tmp_path / "out", "--quiet") == 0
    result = read_json(tmp_path / "out" / "result.json")
    assert result["metrics"]["cot_nll"] > 0 and result["solutions"] == 5


def test_what_solving_needs_is_asked_for_before_training(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "--model",
        model_directory(),
        "--task",
        "math",
        "--data-dir",
        data,
        "--out",
        tmp_path / "run",
        "--quiet",
    ]
    assert bayeslora(*words, "--method", "monteclora") == 2
    assert "cannot average draws while it writes solutions; use --samples 1" in refusal(capsys)
    monkeypatch.setattr("bayeslora.tasks.boxed.importlib.util.find_spec", lambda name: None)
    assert bayeslora(*words) == 2
    assert "checking answers needs math-verify; run: pip install math-verify" in refusal(capsys)
    with pytest.raises(InputError, match="needs math-verify"):
        train(math_config(), tmp_path / "run", RunContext(data_dir=data))
