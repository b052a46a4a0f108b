"""Runs that tell questions unlike those of training: fitted with the calibration, in answers, files and evaluations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from bayeslora import load_run
from bayeslora.errors import InputError
from bayeslora.predict.questions.familiarity import Familiarity
from bayeslora.predict.questions.predictions import read_distances, read_scores
from bayeslora.runs import familiarity as fitting
from bayeslora.runs.directory import RunDirectory
from bayeslora.tasks import load_task
from bayeslora.train import PredictionConfig, train
from tasks.cases import write_lines
from train import tiny
from train.tiny import bayeslora, contents, question, read_json, run_config, without_intervals

STRANGE = "Name the largest river of the northern continent, if there is one at all"
CALIBRATED = PredictionConfig(samples=3)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with without_intervals():
        yield


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Splits of the same kind of questions: those of the tiny task differ in the length of their numbers."""
    numbers = [int(k) for k in np.random.default_rng(0).permutation(90)]
    sizes = {"train": 50, "validation": 20, "test": 20}
    path = tmp_path_factory.mktemp("task") / "task"
    for split, size in sizes.items():
        write_lines(path / f"{split}.jsonl", [question(numbers.pop() + 10) for _ in range(size)])
    return path


@pytest.fixture(scope="module")
def trained(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated run; not to be changed."""
    out = tmp_path_factory.mktemp("trained") / "run"
    train(run_config(task=str(task), prediction=CALIBRATED), out)
    return out


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The same for a test to change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions of another kind."""
    rows = [question(k, question=f"{STRANGE} {k}?", choices=["red", "blue"]) for k in range(9)]
    path = tmp_path_factory.mktemp("shift") / "other"
    for split in ("train", "validation", "test"):
        write_lines(path / f"{split}.jsonl", rows)
    return path


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert bayeslora(*words, "--quiet") == 0
    return capsys.readouterr().out


# Training -------------------------------------------------------------------------------------------------------------


def test_training_fits_it_with_the_calibration(trained: Path, task: Path) -> None:
    directory = RunDirectory(trained)
    found, model = Familiarity.load(directory.familiarity), load_run(trained)
    assert directory.familiarity.parent == directory.adapter and (found.decides, found.quantile) == ("distance", 0.99)
    parts = {split: load_task(str(task)).load(split).items for split in ("train", "validation", "test")}
    predictor = model.predictor()
    features = {split: predictor.features(predictor.encode(items)) for split, items in parts.items()}
    np.testing.assert_allclose(found.gaussian.mean, features["train"].mean(0), atol=1e-5)
    want = found.gaussian.distances(features["validation"])
    np.testing.assert_allclose(found.validation["distance"], np.sort(want), rtol=1e-3)
    validated = model.predict(parts["validation"])
    np.testing.assert_allclose(found.validation["entropy"], np.sort(validated.entropies), atol=1e-5)
    assert validated.epistemic is not None
    np.testing.assert_allclose(found.validation["epistemic"], np.sort(validated.epistemic), atol=1e-5)
    for path in (directory.predictions, directory.calibrated):
        np.testing.assert_allclose(read_distances(path), found.gaussian.distances(features["test"]), rtol=1e-3)


def test_a_run_that_is_not_calibrated_has_none() -> None:
    directory = RunDirectory(tiny.finished())
    assert not directory.familiarity.exists() and read_distances(directory.predictions) is None
    assert load_run(directory.path).familiarity is None


@pytest.mark.system
def test_few_training_questions_are_enough_and_many_are_not_all_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fitting, "MOST", 5)
    train(run_config(prediction=CALIBRATED), tmp_path / "run")
    found = Familiarity.load(RunDirectory(tmp_path / "run").familiarity)
    assert found.gaussian.directions.shape == (5, 32) and found.gaussian.shrinkage < 1


@pytest.mark.parametrize("method", ["temperature", "deep-ensemble", "lora"])
@pytest.mark.system
def test_every_kind_of_method_has_it(method: str, tmp_path: Path) -> None:
    train(run_config(method, prediction=CALIBRATED), tmp_path / "run")
    assert Familiarity.load(RunDirectory(tmp_path / "run").familiarity).validation.keys() >= {"distance", "entropy"}
    assert load_run(tmp_path / "run").ask("Is 33 even?", ["yes", "no"]).distance is not None


@pytest.mark.system
def test_the_same_run_gives_the_same_file(trained: Path, task: Path, tmp_path: Path) -> None:
    config = run_config(task=str(task), prediction=CALIBRATED)
    train(config, tmp_path / "run")
    name = "adapter/familiarity.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (trained / name).read_bytes()
    before = contents(tmp_path / "run")
    train(config, tmp_path / "run")
    assert contents(tmp_path / "run") == before


# Answers --------------------------------------------------------------------------------------------------------------


def test_answers_carry_it(trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = load_run(trained)
    near, far = model.ask("Is 33 even?", ["yes", "no"]), model.ask(f"{STRANGE}?", ["red", "blue"])
    assert near.distance is not None and near.distance < 1 and near.unfamiliar is False
    assert far.distance == 1 and far.unfamiliar is True
    words = ["predict", trained, "--question", f"{STRANGE}?", "--choice", "red", "--choice", "blue"]
    told = json.loads(printed(capsys, *words, "--json"))
    assert (told["distance"], told["unfamiliar"]) == (1, True)
    assert "unfamiliar question (farther from the training questions than 100.0% of" in printed(capsys, *words)
    write_lines(tmp_path / "asked.jsonl", [{"question": "Is 33 even?", "choices": ["yes", "no"]}])
    (line,) = printed(capsys, "predict", trained, "--input", tmp_path / "asked.jsonl").splitlines()
    assert json.loads(line)["distance"] == pytest.approx(near.distance)


def test_it_is_left_out_with_the_calibration(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_run(trained, raw=True).ask("Is 33 even?", ["yes", "no"]).distance is None
    words = ["predict", trained, "--question", "Is 33 even?", "--choice", "yes", "--choice", "no", "--raw"]
    assert "familiar" not in printed(capsys, *words)


def test_a_run_without_the_file_works_as_before(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = RunDirectory(copied).fingerprint()
    RunDirectory(copied).familiarity.unlink()
    assert RunDirectory(copied).fingerprint() != before
    answer = load_run(copied).ask(f"{STRANGE}?", ["red", "blue"])
    assert answer.distance is None and answer.unfamiliar is None and answer.prediction_set is not None


def test_a_damaged_file_is_refused_with_advice(copied: Path) -> None:
    RunDirectory(copied).familiarity.write_bytes(b"nothing")
    with pytest.raises(InputError, match="remove it, or run bayeslora calibrate again"):
        load_run(copied)


# Calibrate ------------------------------------------------------------------------------------------------------------


def test_calibrate_fits_it_for_runs_that_lack_it(trained: Path, copied: Path) -> None:
    place = RunDirectory(copied).familiarity
    place.unlink()
    assert bayeslora("calibrate", copied, "--quiet") == 0
    found, want = Familiarity.load(place), Familiarity.load(RunDirectory(trained).familiarity)
    np.testing.assert_allclose(found.validation["distance"], want.validation["distance"], rtol=1e-3)
    assert load_run(copied).ask(f"{STRANGE}?", ["red", "blue"]).unfamiliar is True


@pytest.mark.system
def test_calibrate_chooses_another_score_and_share(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = RunDirectory(copied).familiarity
    before = Familiarity.load(place)
    assert bayeslora("calibrate", copied, "--unfamiliar-by", "entropy", "--unfamiliar-from", 0.5, "--quiet") == 0
    found = Familiarity.load(place)
    assert (found.decides, found.quantile) == ("entropy", 0.5)
    np.testing.assert_array_equal(found.gaussian.directions, before.gaussian.directions)
    for number in range(12, 18):
        asked = tiny.question(number)
        answer = load_run(copied).ask(asked["question"], asked["choices"])
        assert answer.unfamiliar == ((found.validation["entropy"] < answer.entropy).mean() >= 0.5)
    capsys.readouterr()
    assert bayeslora("calibrate", copied, "--unfamiliar-from", 1.5, "--force", "--quiet") == 2
    assert "unfamiliar_from is 1.5" in capsys.readouterr().err


@pytest.mark.system
def test_calibrate_fits_it_again_where_it_is_damaged_or_of_an_earlier_version(copied: Path) -> None:
    """As the message on loading advises."""
    place = RunDirectory(copied).familiarity
    want = Familiarity.load(place)
    place.write_bytes(b"nothing")
    with pytest.raises(InputError, match="calibrate again"):
        load_run(copied)
    assert bayeslora("calibrate", copied, "--quiet") == 0
    np.testing.assert_allclose(Familiarity.load(place).gaussian.mean, want.gaussian.mean, atol=1e-5)


def test_it_can_be_left_out_and_taken_away(task: Path, copied: Path, tmp_path: Path) -> None:
    plain = PredictionConfig(samples=3, unfamiliar_by="none")
    train(run_config(task=str(task), prediction=plain), tmp_path / "plain")
    assert not RunDirectory(tmp_path / "plain").familiarity.exists()
    assert load_run(tmp_path / "plain").calibration.automatic
    assert bayeslora("calibrate", copied, "--unfamiliar-by", "none", "--quiet") == 0
    assert not RunDirectory(copied).familiarity.exists()
    assert load_run(copied).ask("Is 3 even?", ["yes", "no"]).unfamiliar is None


def test_calibrate_goes_without_training_questions(copied: Path, tmp_path: Path, other: Path) -> None:
    """As for an adapter that was fetched: the task of the run is not here."""
    RunDirectory(copied).familiarity.unlink()
    rows = [question(k) for k in range(12, 24)]
    write_lines(tmp_path / "held-out" / "validation.jsonl", rows)
    config = read_json(copied / "config.json")
    (copied / "config.json").write_text(json.dumps({**config, "task": "nowhere/questions.jsonl"}))
    assert bayeslora("calibrate", copied, "--task", tmp_path / "held-out", "--quiet") == 0
    assert not RunDirectory(copied).familiarity.exists() and load_run(copied).familiarity is None


# Evaluate on another task ---------------------------------------------------------------------------------------------


def evaluated(run: Path, other: Path, out: Path, *words: object) -> dict[str, Any]:
    assert bayeslora("evaluate", run, "--task", other, "--out", out, "--quiet", *words) == 0
    return dict(read_json(out / "result.json"))


def test_another_task_is_told_from_the_own_by_each_score(trained: Path, other: Path, tmp_path: Path) -> None:
    found = evaluated(trained, other, tmp_path / "out")["shift"]
    own, shifted = read_scores(trained / "predictions.jsonl.gz"), read_scores(tmp_path / "out" / "predictions.jsonl.gz")
    assert set(found) == {"distance", "entropy", "epistemic"} and found["distance"] > 0.9
    for name, value in found.items():
        labels = [0] * len(own[name]) + [1] * len(shifted[name])
        assert value == pytest.approx(roc_auc_score(labels, [*own[name], *shifted[name]]))


def test_it_is_printed(trained: Path, other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = printed(capsys, "evaluate", trained, "--task", other)
    assert "AUROC of telling these questions from the run's own: distance " in told


@pytest.mark.system
def test_scores_that_were_made_otherwise_are_not_compared(trained: Path, other: Path, tmp_path: Path) -> None:
    assert "shift" not in evaluated(trained, other, tmp_path / "draws", "--samples", 2)
    assert bayeslora("evaluate", trained, "--out", tmp_path / "own", "--quiet") == 0
    assert "shift" not in read_json(tmp_path / "own" / "result.json")


def test_a_run_without_distances_has_the_other_two(other: Path, tmp_path: Path) -> None:
    found = evaluated(tiny.finished(), other, tmp_path / "out")["shift"]
    assert set(found) == {"entropy", "epistemic"}
