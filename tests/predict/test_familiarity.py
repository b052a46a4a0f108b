"""Features of questions against transformers' own hidden states; scores as shares of validation questions; the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from sklearn.metrics import roc_auc_score

from adapter.cases import MODELS, adapted, base_model
from bayeslora import find_holder
from bayeslora.errors import InputError
from bayeslora.metrics import fit_gaussian
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.questions.answers import make_answers
from bayeslora.predict.questions.familiarity import Familiarity, tell_apart, uncertainty_scores
from bayeslora.predict.questions.features import has_features, prompt_features
from bayeslora.predict.questions.predictions import Predictions, read_distances, read_scores
from predict.test_options import questions
from predict.test_predictions import random_predictions


def hidden_states(model: Any, items: Any) -> NDArray[np.float64]:
    """At the last token of every prompt, one prompt at a time."""
    rows = []
    with torch.no_grad():
        for item in items:
            output = model(input_ids=torch.tensor([item.prompt_ids]), output_hidden_states=True)
            rows.append(output.hidden_states[-1][0, -1].double().numpy())
    return np.stack(rows)


@pytest.mark.parametrize("architecture", MODELS)
def test_features_are_the_last_hidden_states_of_prompts(architecture: str) -> None:
    model, items = adapted(architecture), questions(count=6)
    model.train().draw(2)  # whatever is in use, features are those of the base model, and it stays in use
    mode = find_holder(model)._mode
    found = prompt_features(model, items)
    assert found.dtype == np.float64 and has_features(model)
    assert find_holder(model)._mode is mode and model.training and not find_holder(model).disable_adapters
    np.testing.assert_allclose(found, hidden_states(base_model(architecture), items), atol=1e-4, rtol=1e-4)


def test_files_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    """Its features are of another network, with which distances would mean nothing."""
    fitted().save(tmp_path / "familiarity.safetensors")
    arrays = load_file(tmp_path / "familiarity.safetensors")
    for metadata in ({"decides": "distance"}, {"told": "[]"}, {"told": '{"features": "mean"}'}):
        save_file(arrays, tmp_path / "old.safetensors", metadata=metadata)
        with pytest.raises(InputError, match=r"its features are not those of the base model.*calibrate again"):
            Familiarity.load(tmp_path / "old.safetensors")


@pytest.mark.parametrize("batch_tokens", [1, 30, 10_000])
def test_features_do_not_depend_on_batches_and_order(batch_tokens: int) -> None:
    model, items = adapted(), questions(count=9)
    want, told = prompt_features(model, items), []
    found = prompt_features(model, items[::-1], batch_tokens=batch_tokens, advance=lambda *it: told.append(it))
    np.testing.assert_allclose(found[::-1], want, atol=1e-5)
    assert told[-1] == (9, 9)


def test_models_without_a_head_have_no_features() -> None:
    assert not has_features(torch.nn.Linear(2, 2))


# Shares and flags -----------------------------------------------------------------------------------------------------


def measured(seed: int = 0, count: int = 40, offset: float = 0.0) -> tuple[Predictions, NDArray[np.float64]]:
    """Predictions and features; with an offset, of questions of another kind."""
    features = np.random.default_rng(seed).normal(size=(count, 6)) + offset
    return random_predictions(seed=seed, count=count), features


def fitted(decides: str = "distance", quantile: float = 0.9) -> Familiarity:
    train = np.random.default_rng(9).normal(size=(300, 6))
    return Familiarity.of(fit_gaussian(train), measured()[0], decides, quantile, measured()[1])


def with_distances(familiarity: Familiarity, **settings: Any) -> Predictions:
    predictions, features = measured(**settings)
    return replace(predictions, distances=familiarity.gaussian.distances(features))


def test_shares_are_those_of_the_validation_questions_below() -> None:
    familiarity = fitted()
    known = familiarity.validation["distance"]
    assert len(known) == 40 and (np.diff(known) >= 0).all()
    middle = (known[9] + known[10]) / 2
    assert familiarity.shares("distance", [0.0, known[0], middle, known[-1], 1e9]).tolist() == [0, 0, 0.25, 39 / 40, 1]


@pytest.mark.parametrize("decides", ["distance", "entropy", "epistemic"])
@pytest.mark.parametrize("quantile", [0.5, 0.9, 1.0])
def test_the_chosen_score_decides_from_the_chosen_share_on(decides: str, quantile: float) -> None:
    familiarity = fitted(decides, quantile)
    asked = with_distances(familiarity, seed=3, count=60, offset=1.0)
    values = uncertainty_scores(asked)[decides]
    want = [(familiarity.validation[decides] < value).mean() >= quantile for value in values]
    answers = make_answers(asked, Calibration(), familiarity=familiarity)
    assert [answer.unfamiliar for answer in answers] == want and (quantile == 1.0 or any(want))
    shares = familiarity.shares("distance", asked.distances)
    assert [answer.distance for answer in answers] == shares.tolist()


def test_few_of_the_validation_questions_are_flagged_themselves() -> None:
    familiarity = fitted()
    own = with_distances(familiarity)
    assert familiarity.unfamiliar(own).sum() == 4  # from the share 0.9 on
    far = with_distances(familiarity, offset=9.0)
    assert familiarity.unfamiliar(far).all()


def test_answers_without_it_say_nothing_of_it() -> None:
    (answer,) = make_answers(random_predictions(count=1), Calibration())
    assert answer.distance is None and answer.unfamiliar is None
    (answer,) = make_answers(random_predictions(count=1), Calibration(), familiarity=fitted())
    assert answer.distance is None and answer.unfamiliar is None


# AUROC ----------------------------------------------------------------------------------------------------------------


def test_each_score_tells_shifted_questions_from_own() -> None:
    familiarity = fitted()
    own, shifted = with_distances(familiarity, seed=1), with_distances(familiarity, seed=2, offset=1.5)
    found = tell_apart(uncertainty_scores(own), uncertainty_scores(shifted))
    assert list(found) == ["distance", "entropy", "epistemic"]
    for name, value in found.items():
        scores = [*uncertainty_scores(own)[name], *uncertainty_scores(shifted)[name]]
        assert value == pytest.approx(roc_auc_score([0] * 40 + [1] * 40, scores))
    assert found["distance"] > 0.9


def test_scores_that_are_missing_or_all_zero_are_left_out() -> None:
    own = {"distance": np.ones(3), "entropy": np.ones(3), "epistemic": np.zeros(3)}
    assert tell_apart(own, {name: own[name] for name in ("entropy", "epistemic")}) == {"entropy": 0.5}


# Files ----------------------------------------------------------------------------------------------------------------


def test_it_is_the_same_when_read_back(tmp_path: Path) -> None:
    familiarity, path = fitted("entropy", 0.95), tmp_path / "deep" / "familiarity.safetensors"
    familiarity.save(path)
    again = Familiarity.load(path)
    assert (again.decides, again.quantile) == ("entropy", 0.95)
    _, features = measured(seed=5)
    found, before = again.gaussian.distances(features), familiarity.gaussian.distances(features)
    np.testing.assert_allclose(found, before, rtol=1e-6)  # directions are kept as float32
    assert {name: it.tolist() for name, it in again.validation.items()} == {
        name: it.tolist() for name, it in familiarity.validation.items()
    }
    before = path.read_bytes()
    again.save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda arrays: arrays.pop("mean"),
        lambda arrays: arrays.pop("validation.distance"),
        lambda arrays: arrays.update({"validation.distance": np.array([2.0, 1.0])}),
        lambda arrays: arrays.update({"validation.entropy": np.array([np.nan])}),
        lambda arrays: arrays.update(quantile=np.array([2.0])),
        lambda arrays: arrays.update(shrinkage=np.array([0.1, 0.1])),
        lambda arrays: arrays.update(variances=np.ones(2)),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "familiarity.safetensors"
    fitted().save(path)
    arrays = load_file(path)
    damage(arrays)
    save_file(arrays, path, metadata={"decides": "distance"})
    with pytest.raises(InputError, match=r"familiarity\.safetensors: .*calibrate again"):
        Familiarity.load(path)


@pytest.mark.parametrize("content", [b"", b"nothing of the kind"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match="calibrate again"):
        Familiarity.load(tmp_path / "file")


def test_a_score_that_there_is_not_cannot_decide() -> None:
    with pytest.raises(InputError, match="no score 'luck'"):
        fitted("luck")


def test_predictions_keep_their_distances(tmp_path: Path) -> None:
    predictions, path = with_distances(fitted()), tmp_path / "p.jsonl.gz"
    predictions.write(path)
    np.testing.assert_array_equal(read_distances(path), predictions.distances)
    scores = read_scores(path)
    assert scores.keys() == uncertainty_scores(predictions).keys()
    for name, values in uncertainty_scores(predictions).items():
        np.testing.assert_allclose(scores[name], values, rtol=1e-12)
    assert predictions.to_pandas()["feature_distance"].tolist() == predictions.distances.tolist()
    random_predictions().write(path)
    assert read_distances(path) is None and read_scores(path).keys() == {"entropy", "epistemic"}
