"""Methods that stand on LoRAs: which ones they train, which ones they accept, and what they make of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from bayeslora import find_holder
from bayeslora.errors import InputError
from bayeslora.methods import METHODS
from bayeslora.methods.laplace import STEPS
from bayeslora.predict.questions.predictions import read_predictions
from bayeslora.predict.questions.predictor import Predictor
from bayeslora.runs.load import load_run
from bayeslora.train import AdapterConfig, PredictionConfig, TrainingConfig, train
from bayeslora.train.origin import SEED_DISTANCE, lora_runs
from tiers import some
from train.tiny import (
    SIZES,
    bayeslora,
    finished,
    model_directory,
    options,
    outcome,
    question,
    read_json,
    run_config,
    without_intervals,
    write_task,
)

MADE = [name for name, method in METHODS.items() if method.fit_post_hoc is not None and method.loras({})]


@pytest.fixture(autouse=True)
def quick():
    with without_intervals():
        yield


@pytest.fixture(scope="module")
def loras() -> list[Path]:
    """Three LoRA runs, the members of a deep ensemble of seed 0."""
    return [finished("lora", seed=SEED_DISTANCE * k) for k in range(3)]


def test_the_loras_of_a_method_are_lora_runs_of_the_same_settings():
    config = run_config("deep-ensemble", seed=7, adapter=AdapterConfig(rank=3, settings={"members": 2}))
    first, second = lora_runs(config)
    assert (first.method, first.seed, second.seed) == ("lora", 7, 7 + SEED_DISTANCE)
    assert first.adapter == AdapterConfig(rank=3, posterior="point") and first.training.epochs == 2
    assert lora_runs(run_config("lora")) == []


def test_methods_on_one_lora_share_it_with_the_lora_run_itself():
    from bayeslora.train import resolve

    for name in MADE:
        assert lora_runs(run_config(name))[0] == replace(
            resolve(run_config("lora")), prediction=lora_runs(run_config(name))[0].prediction
        )


@pytest.mark.parametrize("name", some(MADE, ["temperature"]))
def test_given_loras_give_what_trained_ones_give_and_are_not_touched(name, loras, tmp_path):
    count = METHODS[name].loras({})
    given = tuple(str(path) for path in loras[:count])
    before = [outcome(path) for path in loras]
    train(run_config(name), tmp_path / "alone")
    train(run_config(name, start_from=given), tmp_path / "given")
    alone, with_given = outcome(tmp_path / "alone"), outcome(tmp_path / "given")
    assert {k: v for k, v in alone.items() if k != "config"} == {k: v for k, v in with_given.items() if k != "config"}
    assert [outcome(path) for path in loras] == before
    assert sorted(p.name for p in (tmp_path / "alone").glob("lora-*")) == [f"lora-{k}" for k in range(count)]
    assert not list((tmp_path / "given").glob("lora-*"))


def test_a_deep_ensemble_averages_the_probabilities_of_its_members(loras, tmp_path):
    train(run_config("deep-ensemble", start_from=tuple(map(str, loras))), tmp_path / "run")
    members = [read_predictions(path / "predictions.jsonl.gz")[1] for path in loras]
    ours = read_predictions(tmp_path / "run" / "predictions.jsonl.gz")[1]
    np.testing.assert_allclose(ours, np.mean(members, axis=0), atol=1e-6)


def test_temperature_changes_no_answer_and_is_used_by_whoever_loads_the_run(loras, tmp_path):
    result = train(run_config("temperature", start_from=(str(loras[0]),)), tmp_path / "run")
    plain, soft = (read_predictions(path / "predictions.jsonl.gz")[1] for path in (loras[0], tmp_path / "run"))
    assert (plain.argmax(1) == soft.argmax(1)).all()
    temperature = result["found"]["temperature"]
    scaled = np.where(plain > 0, plain, 0) ** (1 / temperature)
    np.testing.assert_allclose(soft, scaled / scaled.sum(1, keepdims=True), atol=1e-6)
    assert load_run(tmp_path / "run").calibration.temperature == temperature
    assert load_run(tmp_path / "run").evaluate().metrics() == pytest.approx(result["metrics"])


def test_a_lora_from_before_a_setting_existed_will_do(loras, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(loras[0], old)
    config = json.loads((old / "config.json").read_text())
    del config["training"]["aim"]
    (old / "config.json").write_text(json.dumps(config))
    found, want = (
        train(run_config("temperature", start_from=(str(p),)), tmp_path / f"from-{p.name}") for p in (old, loras[0])
    )
    assert found["metrics"] == want["metrics"]


def test_the_temperature_is_the_best_of_a_grid_on_the_validation_split(loras, tmp_path):
    task = tmp_path / "task"
    from train.tiny import question, write_task

    noisy = [question(k, answer=(k // 3) % 2) for k in range(40)]  # so that the best temperature is inside its range
    write_task(task, validation=noisy)
    lora = run_config("lora", task=str(task))
    train(lora, tmp_path / "lora")
    found = train(replace(lora, method="temperature", start_from=(str(tmp_path / "lora"),)), tmp_path / "run")["found"]
    log_p = np.log(np.maximum(load_run(tmp_path / "lora").evaluate(split="validation").probabilities, 1e-300))
    gold = np.array([(k // 3) % 2 for k in range(40)])

    def nll(t):
        z = log_p / t
        z = z - np.log(np.exp(z).sum(1, keepdims=True))
        return -z[np.arange(40), gold].mean()

    grid = np.exp(np.linspace(np.log(0.05), np.log(20), 4001))
    best = grid[np.argmin([nll(t) for t in grid])]
    assert found["temperature"] == pytest.approx(best, rel=2e-3)


def test_tfb_stays_within_its_tolerance_on_the_anchors_and_keeps_the_mean(loras, tmp_path):
    adapter = AdapterConfig(rank=2, targets=("q_proj", "v_proj"), settings={"tolerance": 0.2})
    result = train(run_config("tfb", adapter=adapter, start_from=(str(loras[0]),)), tmp_path / "run")
    assert 0 < result["found"]["change"] <= 0.2 and result["found"]["width"] > 0
    assert result["metrics"]["epistemic"] > 0
    mean = load_run(tmp_path / "run", samples=0).evaluate().probabilities
    np.testing.assert_allclose(mean, read_predictions(loras[0] / "predictions.jsonl.gz")[1], atol=1e-5)


@pytest.fixture(scope="module")
def often_wrong(loras: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Validation questions of which the first LoRA answers three in five: neither certainty nor guessing is best there."""
    model, rows = load_run(loras[0]), [question(k) for k in range(40, 60)]
    for k, row in enumerate(rows):
        right = row["choices"].index(model.ask(row["question"], row["choices"]).answer)
        row["answer"] = right if k % 5 > 1 else (right + 1) % len(row["choices"])
    return write_task(tmp_path_factory.mktemp("often wrong"), validation=rows)


@pytest.mark.parametrize("predictive", some(["mc", "draws"], ["mc"]))
def test_the_prior_of_least_validation_nll_is_that_of_a_search_by_hand(loras, often_wrong, tmp_path, predictive):
    def run(name, **settings):
        adapter = AdapterConfig(rank=2, targets=("q_proj", "v_proj"), settings={"predictive": predictive, **settings})
        origin = (str(loras[0] / "adapter"),)  # of the same training questions
        config = run_config(
            "laplace", task=str(often_wrong), adapter=adapter, start_from=origin, report_split="validation"
        )
        result = train(config, tmp_path / name)
        return result["found"]["prior_precision"], result["metrics"]["nll"]

    centre, _ = run("evidence", prior="evidence")
    chosen, nll = run("chosen")
    (at,) = [k for k, step in enumerate(STEPS) if chosen == pytest.approx(centre * step, rel=1e-5)]
    assert 1 < at < len(STEPS) - 2  # the optimum is not at the end of what is tried
    tried = {k: run(f"{k}", prior="given", prior_precision=centre * STEPS[k])[1] for k in (0, at - 1, at, at + 1, -1)}
    assert min(tried, key=tried.__getitem__) == at and nll == pytest.approx(tried[at], rel=1e-5)


def test_draws_choose_the_prior_though_predictions_use_the_mean(loras, often_wrong, tmp_path):
    """The mean is the same at every precision. They are as many as predictions have by default."""
    adapter = AdapterConfig(rank=2, targets=("q_proj", "v_proj"), settings={"predictive": "draws"})
    given = {"task": str(often_wrong), "adapter": adapter, "start_from": (str(loras[0] / "adapter"),)}
    found = [
        train(run_config("laplace", **given, prediction=PredictionConfig(samples=samples)), tmp_path / f"{samples}")[
            "found"
        ]
        for samples in (0, PredictionConfig().samples)
    ]
    assert found[0] == found[1]
    posterior = find_holder(load_run(tmp_path / "0").model).posterior("default")
    assert found[0] == {
        "prior_precision": pytest.approx(posterior.prior_precision, rel=1e-5),
        "log_occam_factor": pytest.approx(posterior.log_evidence(), rel=1e-5),
    }


def test_tfb_does_not_look_at_answers(loras, tmp_path):
    """Its anchors are training questions, whose right answers change nothing."""
    widths = []
    for shift in (0, 1):
        rows = [question(k) for k in range(SIZES["train"])]
        for row in rows:
            row["answer"] = (row["answer"] + shift) % 2
        task = write_task(tmp_path / f"task-{shift}", train=rows)
        config = run_config("tfb", task=str(task), start_from=(str(loras[0] / "adapter"),))
        widths.append(train(config, tmp_path / f"run-{shift}")["found"])
    assert widths[0]["width"] > 0 and widths[0] == widths[1]


def test_tfb_searches_with_anchors_and_draws_of_its_own(loras, tmp_path, monkeypatch):
    asked: list[tuple[int, int]] = []
    score = Predictor.score

    def noted(predictor, encoded, *more):
        asked.append((predictor.sampling.samples, len(encoded)))
        return score(predictor, encoded, *more)

    monkeypatch.setattr(Predictor, "score", noted)
    settings = {"samples": 5, "anchors": 4, "tolerance": 0.3}
    adapter = AdapterConfig(rank=2, targets=("q_proj", "v_proj"), settings=settings)
    train(run_config("tfb", adapter=adapter, start_from=(str(loras[0]),)), tmp_path / "run")
    *tried, reported = asked
    assert len(tried) > 4 and set(tried) == {(5, 4)}
    assert reported == (3, SIZES["test"])


@pytest.mark.parametrize("predictive", some(["mc", "probit"], ["probit"]))
def test_a_linearised_model_has_a_scale_to_calibrate_and_no_layers_to_cut(loras, tmp_path, predictive):
    settings = {"predictive": predictive, "prior": "given", "prior_precision": 1e-3}  # far too wide
    adapter = AdapterConfig(rank=2, targets=("q_proj", "v_proj"), settings=settings)
    train(run_config("laplace", adapter=adapter, start_from=(str(loras[0]),)), tmp_path / "run")
    model = load_run(tmp_path / "run")
    for refused in ({"tolerance": 0.1}, {}):
        model.draw_layers = "all" if refused else "last:1"
        with pytest.raises(InputError, match=r"draw_layers is '.*', but this Laplace .* predictive=draws"):
            model.calibrate(**refused)
    model.draw_layers = "all"
    assert model.calibrate().posterior_scale < 1


def test_a_set_of_points_has_no_scale_to_try(loras, tmp_path, monkeypatch):
    train(run_config("deep-ensemble", start_from=tuple(map(str, loras))), tmp_path / "run")
    model, passes = load_run(tmp_path / "run"), []
    score = Predictor.score
    monkeypatch.setattr(Predictor, "score", lambda *args: passes.append(1) or score(*args))
    assert model.calibrate().posterior_scale == 1 and len(passes) <= 4


# LoRAs of others ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ordinary LoRA adapter, as PEFT saves it."""
    path = tmp_path_factory.mktemp("foreign") / "adapter"
    base = AutoModelForCausalLM.from_pretrained(model_directory())
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(str(path))
    return path


ON_ONE = [name for name in MADE if METHODS[name].loras({}) == 1]


@pytest.mark.parametrize("name", some(ON_ONE, ["tfb"]))
def test_any_lora_adapter_will_do(name, foreign, tmp_path):
    train(run_config(name, start_from=(str(foreign),)), tmp_path / "run")
    mean = load_run(tmp_path / "run", samples=0, raw=True).evaluate().probabilities
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model_directory())
    merged = PeftModel.from_pretrained(base, str(foreign)).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    for file in Path(model_directory()).glob("token*"):
        (tmp_path / "merged" / file.name).write_bytes(file.read_bytes())
    zero = TrainingConfig(epochs=1, batch_size=12, learning_rate=1e-30)
    train(run_config("lora", model=str(tmp_path / "merged"), training=zero), tmp_path / "plain")
    np.testing.assert_allclose(mean, read_predictions(tmp_path / "plain" / "predictions.jsonl.gz")[1], atol=1e-4)


def test_a_trained_method_may_start_from_a_lora_too(foreign, tmp_path):
    still = TrainingConfig(epochs=1, batch_size=12, learning_rate=1e-30)
    train(run_config("lora", training=still, start_from=(str(foreign),)), tmp_path / "lora")
    train(run_config("temperature", start_from=(str(foreign),)), tmp_path / "temperature")
    start = load_run(tmp_path / "temperature", raw=True).evaluate().probabilities
    np.testing.assert_allclose(read_predictions(tmp_path / "lora" / "predictions.jsonl.gz")[1], start, atol=1e-5)


# On the command line --------------------------------------------------------------------------------------------------


def test_a_run_to_start_from_also_says_model_task_and_training(loras, tmp_path):
    words = ["train", "--start-from", loras[1], "--method", "temperature", "--out", tmp_path / "run", "--quiet"]
    assert bayeslora(*words) == 0
    config = read_json(tmp_path / "run" / "config.json")
    assert config["model"] == model_directory() and config["training"]["epochs"] == 2
    assert config["method"] == "temperature" and config["start_from"] == [str(loras[1])]
    assert read_json(loras[1] / "config.json")["seed"] == SEED_DISTANCE and config["seed"] == 0  # which is its own


@pytest.mark.parametrize("method", ["tfb", "bayesian-lora"])
def test_a_run_to_start_from_does_not_say_the_posterior(method, loras, tmp_path):
    words = ["train", "--start-from", loras[1], "--method", method, "--out", tmp_path / "run", "--quiet"]
    assert bayeslora(*words) == 0
    adapter = read_json(tmp_path / "run" / "config.json")["adapter"]
    assert (
        adapter["posterior"] == METHODS[method].posterior_name
        and read_json(loras[1] / "config.json")["adapter"]["posterior"]
    )


def test_an_adapter_to_start_from_says_model_and_shape(foreign, tmp_path):
    task = read_json_task()
    words = ["train", "--start-from", foreign, "--task", task, "--method", "tfb", "--out", tmp_path / "run", "--quiet"]
    assert bayeslora(*words) == 0
    adapter = read_json(tmp_path / "run" / "config.json")["adapter"]
    assert adapter["rank"] == 2 and sorted(adapter["targets"]) == ["q_proj", "v_proj"]


def read_json_task() -> str:
    from train.tiny import task_directory

    return task_directory()


def test_what_a_lora_was_evaluated_on_does_not_matter(loras, tmp_path):
    config = run_config("temperature", start_from=(str(loras[0]),), report_split="validation")
    assert train(config, tmp_path / "run")["split"] == "validation"


# What is refused ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_started_from_is_refused(loras, foreign, tmp_path):
    def refused(match: str, **changes):
        config = run_config("temperature", **changes)
        with pytest.raises(InputError, match=match):
            train(config, tmp_path / "run")
        assert not (tmp_path / "run" / "config.json").exists()

    refused("names 2 LoRAs, but method 'temperature' stands on 1", start_from=tuple(map(str, loras[:2])))
    refused("neither a finished run nor", start_from=(str(tmp_path / "nothing"),))
    trained = TrainingConfig(epochs=1, batch_size=4, learning_rate=0.01)
    refused("was trained otherwise.*epochs is 2 there and 1 here", start_from=(str(loras[0]),), training=trained)
    refused(
        "has rank 2.*above ours, 1",
        start_from=(str(foreign),),
        adapter=AdapterConfig(rank=1, targets=("q_proj", "v_proj")),
    )
    refused(
        "adapts 6 layers and this one 3", start_from=(str(foreign),), adapter=AdapterConfig(rank=2, targets=("q_proj",))
    )
    refused("is a run of method 'bbb'; give one of method 'lora'", start_from=(str(finished("bbb")),))


@pytest.mark.system
def test_an_interrupted_method_goes_on_with_its_loras(tmp_path, monkeypatch):
    """Whole members are kept; the directory is the run's from the first moment on."""
    from bayeslora.train import run

    read, calls = run.read_lora, []

    def broken(*args):
        calls.append(args)
        raise KeyboardInterrupt

    config = run_config(
        "deep-ensemble", adapter=AdapterConfig(rank=2, targets=("q_proj", "v_proj"), settings={"members": 2})
    )
    monkeypatch.setattr(run, "read_lora", broken)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run")
    kept = [outcome(tmp_path / "run" / f"lora-{k}") for k in range(2)]
    monkeypatch.setattr(run, "read_lora", read)
    train(config, tmp_path / "run")
    assert [outcome(tmp_path / "run" / f"lora-{k}") for k in range(2)] == kept
    train(config, tmp_path / "whole")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_options_of_the_tiny_run_are_what_run_config_says(tmp_path):
    assert bayeslora(*options(tmp_path / "run", "--method", "temperature")) == 0
    assert read_json(tmp_path / "run" / "lora-0" / "config.json")["method"] == "lora"
