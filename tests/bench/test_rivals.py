"""The benchmark of free answers: its questions, the formulas of other packages' scores, and the whole way with a tiny model."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bayeslora import load_run
from bayeslora.adapter.sampling import Sampling, sampled
from bayeslora.errors import InputError
from bayeslora.predict.generation import encode_prompts
from bayeslora.tasks.answers import FreeQuestion, ask_freely
from bayeslora.train import AdapterConfig, DataConfig, PredictionConfig, TrainingConfig, train
from tasks.cases import write_lines
from train.tiny import run_config

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    """A script as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        return importlib.import_module(name)


NAMES = ("hidden_options", "rival_scores", "rival_packages", "rival_answers", "rivals")
hidden, scores, packages, writing, rivals = map(script, NAMES)


def call(module: ModuleType, *given: object) -> None:
    """Run a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__name__, *map(str, given)])
        module.main()


# Questions ------------------------------------------------------------------------------------------------------------


def row(question: str, answer: str = "a mirror") -> dict[str, Any]:
    return {"id": "1", "question": question, "choices": ["a stone", answer], "labels": ["A", "B"], "answer": "B"}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (row("Which object reflects light?"), None),
        (row("Which of these reflects light?"), "asks about its options"),
        (row("Which of the following reflects light?"), "asks about its options"),
        (row("Which statement is true?"), "asks about its options"),
        (row("Which object is not a mirror?"), "asks about its options"),
        (row("What reflects light?", "all of these"), "is answered by other options"),
        (row("What reflects light?", "a very smooth and shiny thing"), "answer of more than 3 words"),
    ],
)
def test_questions_that_need_their_options_are_left_out(given: dict[str, Any], why: str | None) -> None:
    assert hidden.flaw(given, 3) == why


def test_questions_are_asked_once_and_answers_lose_their_full_stop() -> None:
    seen = {"What is wet?"}
    kept, left_out = hidden.hide([row("What is wet?"), row("What shines?", "the sun."), row("What shines?")], 3, seen)
    assert kept == [{"id": "1", "question": "What shines?", "answer": "the sun"}] and left_out == {"asked before": 2}


# Formulas -------------------------------------------------------------------------------------------------------------


def logs(*probabilities: float) -> tuple[float, ...]:
    return tuple(map(math.log, probabilities))


ANSWERED = scores.Answered(
    id="q",
    answer=scores.Sample("red fox", logs(0.5, 0.25)),
    right=True,
    f1=1.0,
    entropies=(0.2, 0.6),
    top=(logs(0.4, 0.4), logs(0.75, 0.25)),
    samples=(
        scores.Sample("red fox", logs(0.5, 0.5)),
        scores.Sample("Red fox", logs(0.25, 0.25)),
        scores.Sample("blue", logs(0.125)),
    ),
    log_true=-1.5,
)
LN2 = math.log(2)
MEAN = math.sqrt(0.125)
WEIGHTS = ((MEAN + 0.5 + 0.25) / (MEAN + 0.875), 0.125 / (MEAN + 0.875))


def entropy(*shares: float) -> float:
    return -sum(p * math.log(p) for p in shares)


EXPECTED = {
    "uqlm: sequence_probability": MEAN,
    "uqlm: min_probability": 0.25,
    "uqlm: mean_token_negentropy": (0 + 1 - entropy(0.75, 0.25) / LN2) / 2,
    "uqlm: min_token_negentropy": 0.0,
    "uqlm: probability_margin": 0.25,
    "uqlm: exact_match": 1 / 3,
    "uqlm: semantic_negentropy": 1 - entropy(0.75, 0.25) / math.log(4),
    "uqlm: white-box semantic_negentropy": 1 - entropy(*WEIGHTS) / math.log(4),
    "uqlm: semantic_sets_confidence": 2 / 3,
    "uqlm: monte_carlo_probability": (MEAN + 0.875) / 4,
    "uqlm: consistency_and_confidence": 2 / 3 * MEAN,
    "lm-polygraph: MaximumSequenceProbability": -3 * LN2,
    "lm-polygraph: Perplexity": -1.5 * LN2,
    "lm-polygraph: MeanTokenEntropy": -0.4,
    "lm-polygraph: PTrue": -1.5,
    "lm-polygraph: MonteCarloSequenceEntropy": -3 * LN2,
    "lm-polygraph: MonteCarloNormalizedSequenceEntropy": -2 * LN2,
    "lm-polygraph: SemanticEntropy": (2 * math.log(0.25 + 0.0625) + math.log(0.125)) / 3,
    "lm-polygraph: SemanticEntropyEmpirical": -entropy(2 / 3, 1 / 3),
    "lm-polygraph: LexicalSimilarity_rougeL": 1 / 3,
    "lm-polygraph: NumSemSets": -2.0,
    "lm-polygraph: DegMat_Jaccard_score": 5 / 9 - 1,
    "lm-polygraph: Eccentricity_Jaccard_score": -1.0,
    "lm-polygraph: EigValLaplacian_Jaccard_score": -2.0,
    "lm-polygraph: CocoaMSP": -LN2,
    "lm-polygraph: CocoaPPL": -LN2 / 2,
}


@pytest.mark.parametrize("score", scores.SCORES, ids=lambda score: score.key)
def test_scores_are_as_computed_by_hand(score: Any) -> None:
    assert score.score(ANSWERED) == pytest.approx(EXPECTED[score.key], abs=1e-12)


def test_every_score_has_a_name_of_its_own() -> None:
    assert len({score.key for score in scores.SCORES}) == len(scores.SCORES) == len(EXPECTED)


def made(number: int) -> Any:
    """An answer that a model might have given, some of them empty."""
    rng = random.Random(number)
    words = ["the sun", "a star", "Sun", "sun.", "", "a bright yellow star", "moon light", "the moon"]

    def sample() -> Any:
        return scores.Sample(rng.choice(words), logs(*(rng.uniform(0.01, 1) for _ in range(rng.randint(1, 4)))))

    answer = sample()
    tokens = len(answer.log_probabilities)
    top = tuple(logs(*sorted((rng.uniform(0.01, 0.3) for _ in range(3)), reverse=True)) for _ in range(tokens))
    entropies = tuple(rng.uniform(0, 2) for _ in range(tokens))
    samples = tuple(sample() for _ in range(5))
    right = answer.text.lower().strip(".").endswith("sun") or rng.random() < 0.2
    return scores.Answered(f"q{number}", answer, right, float(right), entropies, top, samples, rng.uniform(-5, 0))


@pytest.mark.parametrize("score", scores.SCORES, ids=lambda score: score.key)
def test_scores_are_finite_and_probabilities_within_their_bounds(score: Any) -> None:
    values = [score.score(made(number)) for number in range(50)]
    assert np.isfinite(values).all() and len(set(values)) > 1
    assert not score.probability or (min(values) >= -1e-12 and max(values) <= 1 + 1e-12)


@pytest.mark.parametrize(("package", "module"), [("uqlm", "uqlm"), ("lm-polygraph", "lm_polygraph")])
def test_formulas_are_the_packages_functions(package: str, module: str) -> None:
    pytest.importorskip(module)
    rows = [made(number) for number in range(40)]
    found = packages.find_packages()
    held = [score for score in scores.SCORES if score.key in found and score.name != "LexicalSimilarity_rougeL"]
    assert any(score.package == package for score in held)
    for score in (it for it in held if it.package == package):
        assert [score.score(it) for it in rows] == pytest.approx(list(found[score.key](rows)), abs=1e-9), score.key


def test_common_sequences_are_those_of_rouge() -> None:
    assert scores.common_sequence("The cat sat down", "the cat lay down") == 0.75
    assert scores.common_sequence("a b c", "c b a") == pytest.approx(1 / 3)
    assert scores.common_sequence("", "a") == scores.common_sequence("", "") == 0.0


def test_common_sequences_are_those_of_the_package_without_stems() -> None:
    rouge = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=False)
    texts = [it.text for number in range(5) for it in made(number).samples]
    for left, right in itertools.product(texts, repeat=2):
        assert scores.common_sequence(left, right) == pytest.approx(rouge.score(left, right)["rougeL"].fmeasure)


def test_answers_survive_json() -> None:
    assert scores.Answered.from_dict(json.loads(json.dumps(ANSWERED.to_dict()))) == ANSWERED


# Table ----------------------------------------------------------------------------------------------------------------


def our_record(it: Any) -> dict[str, Any]:
    mean = it.answer.mean
    features = dict(zip(rivals.FEATURES, (it.answer.log_probability, mean, mean, 0.1, 0.5, 0.3), strict=True))
    return {
        "id": it.id,
        "answer": it.answer.text,
        "confidence": math.exp(mean),
        "right": it.right,
        "f1": it.f1,
    } | features


def write_answers(path: Path, method: str, draws: list[int]) -> Path:
    splits = {}
    for split, start in (("validation", 0), ("test", 100)):
        rows = [made(start + k) for k in range(60)]
        ours = {str(n): [our_record(it) for it in rows] for n in draws}
        splits[split] = {"ours": ours, "answered": [it.to_dict() for it in rows]}
    stages = {stage: 0.25 for n in draws for stage in (f"answers {n}", f"agreement {n}")}
    seconds = {split: stages | {"samples": 1.0, "asking": 0.125} for split in splits}
    record = {"schema": 1, "method": method, "draws": draws, "samples": 5, "splits": splits, "seconds": seconds}
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def test_all_scores_are_in_one_table_with_their_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        write_answers(tmp_path / "bayes.json", "bayesian-lora", [2, 5]),
        write_answers(tmp_path / "lora.json", "lora", [0]),
    ]
    words = ("--out", tmp_path / "result.json", "--table", tmp_path / "table.md", "--resamples", 4)
    call(rivals, "score", *given, *words)
    record = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert len(record["rows"]) == 2 + 1 + 2 * (len(scores.SCORES) + 2)
    rows = {(row["package"], row["score"], row["model"]): row for row in record["rows"]}
    own = rows["bayeslora", "confidence, 5 draws", "bayesian-lora"]
    assert (own["sequences"], own["seconds"]) == (10, 0.5)
    match = rows["uqlm", "exact_match", "lora"]
    assert match["sequences"] == 6 and match["seconds"] == pytest.approx(1.25, abs=0.01)
    asked = rows["lm-polygraph", "PTrue", "bayesian-lora"]
    assert (
        asked["sequences"] == 6
        and "raw_ece" not in asked
        and asked["auroc_gain"]["low"] <= own["auroc"] - asked["auroc"]
    )
    for row in rows.values():
        assert row["auroc_low"] <= row["auroc_high"] and 0 <= row["ece"] <= 1 and "confidences" not in row
    (standing, *_) = record["standing"]
    assert standing["rivals"] == 2 * (len(scores.SCORES) + 2)
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert table == capsys.readouterr().out and len(table.splitlines()) == 2 + len(rows)


def test_scores_of_impossible_answers_are_bounded_and_those_that_are_no_numbers_are_refused() -> None:
    assert rivals.bounded([-np.inf, -2.5, np.inf]).tolist() == [-1e6, -2.5, 1e6]
    with pytest.raises(InputError, match="no number for 1 of 2 answers"):
        rivals.bounded([0.0, np.nan])


def test_a_file_that_is_not_of_answers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="is not as bayeslora wrote it"):
        call(rivals, "score", path, "--out", tmp_path / "result.json")


# With a model ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("answers")
    for split, start in (("train", 0), ("validation", 24), ("test", 40)):
        rows = [{"question": f"Is {k} even?", "answer": ["yes", "no"][k % 2]} for k in range(start, start + 16)]
        write_lines(place / f"{split}.jsonl", rows)
    return place


def trained(task: Path, method: str, out: Path) -> Path:
    adapter = AdapterConfig(rank=4, targets=("q_proj", "k_proj", "v_proj", "o_proj", "lm_head"))
    config = run_config(
        method,
        task=str(task),
        data=DataConfig(max_tokens=64),
        adapter=adapter,
        training=TrainingConfig(epochs=12, batch_size=4, learning_rate=0.02, eval_every=6),
        prediction=PredictionConfig(samples=3, solutions=0, calibrate="none"),
    )
    train(config, out)
    return out


@pytest.mark.system
def test_the_whole_way_with_a_tiny_model(task: Path, tmp_path: Path) -> None:
    files = []
    for method, draws in (("bayesian-lora", ("--draws", 2, 4)), ("lora", ())):
        run, out = trained(task, method, tmp_path / method), tmp_path / f"{method}.json"
        call(rivals, "generate", run, *draws, "--samples", 4, "--max-new-tokens", 6, "--rows", 20, "--out", out)
        files.append(out)
    call(rivals, "score", *files, "--resamples", 0, "--out", tmp_path / "result.json")
    bayesian, lora = (json.loads(path.read_text(encoding="utf-8")) for path in files)
    assert bayesian["draws"] == [2, 4] and lora["draws"] == [0] and bayesian["environment"]["device"] == "cpu"
    given = bayesian["splits"]["test"]
    assert [row["answer"]["text"] for row in given["answered"]] == [row["answer"] for row in given["ours"]["4"]]
    assert [row["right"] for row in given["answered"]] == [row["right"] for row in given["ours"]["4"]]
    assert all(len(row["samples"]) == 4 for row in given["answered"])
    record = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert {row["model"] for row in record["rows"]} == {"bayesian-lora", "lora"}
    assert all(row["seconds"] > 0 for row in record["rows"])


@pytest.mark.system
def test_log_probabilities_of_samples_are_those_of_their_draw(task: Path, tmp_path: Path) -> None:
    run = load_run(trained(task, "bayesian-lora", tmp_path / "run"), raw=True, device="cpu")
    model = writing.Generating(run, rows=8, tokens=5, seed=3)
    tokenizer = run.loaded.tokenizer
    prompts = [ask_freely(FreeQuestion(str(k), f"Is {k} even?"), tokenizer) for k in (2, 31, 444)]
    found = model.samples(prompts, 2, one_network=False)
    for prompt, pair in zip(encode_prompts(tokenizer, prompts), found, strict=True):
        for draw, generation in enumerate(pair):
            ids = torch.tensor([[*prompt, *generation.token_ids]])
            with torch.no_grad(), sampled(run.model, Sampling(2, 4, run.draw_layers)):
                logits = run.model(input_ids=ids.repeat(2, 1)).logits[draw]
            steps = logits[len(prompt) - 1 : -1].log_softmax(-1)
            own = steps.gather(-1, torch.tensor(generation.token_ids)[:, None]).squeeze(-1)
            assert writing.logs(generation) == pytest.approx(own.tolist(), abs=1e-4)


@pytest.mark.system
def test_draws_must_hold_the_number_of_samples(task: Path, tmp_path: Path) -> None:
    run = trained(task, "bayesian-lora", tmp_path / "run")
    with pytest.raises(InputError, match="without 4; add it"):
        call(rivals, "generate", run, "--draws", 2, "--samples", 4, "--out", tmp_path / "out.json")
