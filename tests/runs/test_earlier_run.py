"""A run and an adapter that an earlier version wrote, kept in tests/fixtures, load and predict as they did then."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from bayeslora import load_run
from bayeslora.adapter import find_holder
from bayeslora.predict.questions.predictions import read_predictions
from bayeslora.report import make_report
from bayeslora.runs.directory import RunDirectory
from bayeslora.runs.saved_config import saved_run
from bayeslora.tasks import find_task
from bayeslora.train import train
from train import tiny

KEPT = Path(__file__).parents[1] / "fixtures" / "earlier-run"


@pytest.fixture
def run(tmp_path):
    """A copy whose model and task are those of this machine; both are made from seeds."""
    place = tmp_path / "run"
    shutil.copytree(KEPT, place)
    for path in (place / "config.json", place / "result.json", place / "adapter" / "adapter_config.json"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("MODEL", tiny.model_directory()).replace("TASK", tiny.task_directory()))
    return RunDirectory(place)


def test_the_run_predicts_as_it_did(run):
    """Sums of a few hundred float32 products differ by rounding from machine to machine.

    Its predictions were made again when seeds began to give other draws; the tensors are the earlier ones.
    """
    trained = load_run(run.path)
    again = trained.predict_task(find_task(trained.config.task), "test")
    ids, probabilities, _ = read_predictions(run.predictions)
    assert [item.id for item in again.items] == list(ids)
    np.testing.assert_allclose(again.probabilities, probabilities, atol=1e-4)
    assert again.metrics()["nll"] == pytest.approx(run.read_result().metrics["nll"], abs=1e-4)


@pytest.mark.system
def test_the_run_is_done_and_can_be_reported(run, tmp_path):
    config = saved_run(json.loads(run.config.read_text(encoding="utf-8")))
    before = run.result.read_bytes()
    assert train(config, run.path) == run.read_result() and run.result.read_bytes() == before
    page = make_report(run.path, tmp_path / "page")
    assert "bayesian-lora" in page.read_text(encoding="utf-8")


def test_the_adapter_alone_gives_its_draws(run):
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny.model_directory()), run.adapter, is_trainable=False
    )
    posterior = find_holder(model).posterior("default")
    assert posterior.name == "inducing" and posterior.draw(2).n == 2


def test_what_is_kept_names_no_machine():
    for path in KEPT.rglob("*"):
        if path.is_file():
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            assert b"/tmp" not in data and b"/home" not in data and b"/root" not in data
