"""Metrics and files of predictions: against plain formulas, and the same when read back."""

import gzip
import hashlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss

from adapter.cases import adapted
from bayeslora import metrics
from bayeslora.adapter.sampling import Sampling
from bayeslora.errors import InputError
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.questions.answers import make_answers
from bayeslora.predict.questions.predictions import (
    INTERVALS,
    Predictions,
    main_metrics,
    read_epistemic,
    read_predictions,
)
from bayeslora.predict.questions.predictor import Predictor
from bayeslora.predict.questions.scorer import DrawScores, Scorer
from bayeslora.tasks import EncodedItem, Item, Prompt
from predict.test_options import questions


def item(number, options=3, gold=0, **settings):
    texts = tuple(f" option {k} of {number}" for k in range(options))
    return Item(f"q{number}-é", Prompt(f"Question {number}?"), texts, tuple("ABCDEF"[:options]), gold, **settings)


def random_predictions(seed=0, count=40, draws=3, **settings):
    """Questions of two to five options, with draws whose mean is the prediction."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(2, 6, size=count)
    present = np.arange(5) < counts[:, None]
    each = np.stack([rng.dirichlet(np.ones(5), size=count) * present for _ in range(draws)])
    each /= each.sum(-1, keepdims=True)
    items = tuple(item(k, int(n), int(rng.integers(n)), **settings) for k, n in enumerate(counts))
    probabilities = each.mean(0)
    return Predictions(items, probabilities, probabilities.argmax(1), each)


def read_lines(path):
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def test_epistemic_uncertainty_is_read_back(tmp_path):
    predictions = random_predictions()
    predictions.write(tmp_path / "p.jsonl.gz")
    found = read_epistemic(tmp_path / "p.jsonl.gz")
    np.testing.assert_array_equal(found, predictions.epistemic)
    np.testing.assert_allclose(found, metrics.entropy_split(predictions.draws).epistemic, rtol=1e-12)
    assert found.shape == (40,) and (found > 0).all()


def test_a_file_without_epistemic_uncertainty_is_refused(tmp_path):
    predictions = random_predictions()
    Predictions(predictions.items, predictions.probabilities, predictions.choices).write(tmp_path / "p.jsonl.gz")
    with pytest.raises(InputError, match="epistemic"):
        read_epistemic(tmp_path / "p.jsonl.gz")


def test_metrics_are_the_plain_formulas():
    predictions = random_predictions()
    p, gold = predictions.probabilities, np.array([item.gold for item in predictions.items])
    got = predictions.metrics()
    assert got["acc"] == pytest.approx(accuracy_score(gold, p.argmax(1)))
    assert got["nll"] == pytest.approx(log_loss(gold, p, labels=range(5)))
    assert got["brier"] == pytest.approx(((p - np.eye(5)[gold]) ** 2).sum(1).mean())
    assert got["confidence"] == pytest.approx(p.max(1).mean())

    def entropy(q):
        return -np.where(q > 0, q * np.log(np.where(q > 0, q, 1.0)), 0.0).sum(-1)

    assert got["entropy"] == pytest.approx(entropy(p).mean())
    assert got["epistemic"] == pytest.approx((entropy(p) - entropy(predictions.draws).mean(0)).mean())
    right = (p.argmax(1) == gold)[np.argsort(-p.max(1), kind="stable")]
    assert got["aurc"] == pytest.approx(np.mean(np.cumsum(~right) / np.arange(1, len(p) + 1)))
    assert "distance_to_truth" not in got


@pytest.mark.parametrize("seed", [0, 1])
def test_metrics_computed_again_from_the_file_are_the_same_to_the_bit(tmp_path, seed):
    predictions = random_predictions(seed)
    predictions.write(tmp_path / "p.jsonl.gz")
    ids, p, gold = read_predictions(tmp_path / "p.jsonl.gz")
    assert ids == [item.id for item in predictions.items]
    assert np.array_equal(p, predictions.probabilities)
    figures = predictions.metrics()
    for name, metric in {**INTERVALS, "adaptive_ece": metrics.adaptive_ece}.items():
        assert metric(p, gold) == figures[name], name
    assert metrics.classwise_ece(p, gold, present=predictions.present) == figures["classwise_ece"]


def test_rows_of_the_file_hold_as_many_probabilities_as_options(tmp_path):
    predictions = random_predictions()
    predictions.write(tmp_path / "p.jsonl.gz")
    lines = read_lines(tmp_path / "p.jsonl.gz")
    for line, own, choice in zip(lines, predictions.items, predictions.choices, strict=True):
        assert line["id"] == own.id and line["gold"] == own.gold and line["choice"] == choice
        assert len(line["probabilities"]) == len(own.options)
        assert math.fsum(line["probabilities"]) == pytest.approx(1.0)
    assert np.mean([line["epistemic"] for line in lines]) == pytest.approx(predictions.metrics()["epistemic"])
    assert not any("truth" in line for line in lines)


def test_the_same_predictions_give_the_same_bytes(tmp_path):
    """Neither the time nor the name of the file is in it."""
    digests = set()
    for name in ("a.jsonl.gz", "another.jsonl.gz"):
        random_predictions().write(tmp_path / name)
        data = (tmp_path / name).read_bytes()
        digests.add(hashlib.sha256(data).hexdigest())
        assert data[4:8] == bytes(4)  # where gzip keeps the time
    assert len(digests) == 1


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "p.jsonl.gz"
    random_predictions().write(path)
    before = path.read_bytes()
    bad = Predictions((item(0),), np.array([[0.2, 0.3, 0.5]]), np.array([math.nan]))
    with pytest.raises(ValueError, match="NaN"):
        bad.write(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_accuracy_counts_the_choice_and_not_the_first_of_equals():
    """Two options of one probability: the tie was decided by what the file of predictions does not hold."""
    probabilities = np.array([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1]])
    items = tuple(item(k, 2, gold) for k, gold in enumerate([1, 1, 1]))
    predictions = Predictions(items, probabilities, np.array([1, 1, 0]))
    assert predictions.metrics()["acc"] == pytest.approx(2 / 3)
    interval = predictions.intervals()["acc"]
    assert interval["value"] == pytest.approx(2 / 3) and interval["low"] <= 2 / 3 <= interval["high"]


def test_intervals_are_the_bootstrap_of_the_metrics():
    predictions = random_predictions()
    figures, intervals = predictions.metrics(), predictions.intervals()
    gold = np.array([item.gold for item in predictions.items])
    for name, interval in intervals.items():
        assert interval["value"] == figures[name]
        assert interval["low"] < interval["value"] < interval["high"]
    rows = np.random.default_rng(0).integers(len(gold), size=(1000, len(gold)))
    accuracies = np.sort([(predictions.choices[k] == gold[k]).mean() for k in rows])
    assert (intervals["acc"]["low"], intervals["acc"]["high"]) == (accuracies[24], accuracies[974])


def test_the_truth_is_compared_with_where_it_is_known(tmp_path):
    items = (item(0, 2, 0, probabilities=(0.25, 0.75)), item(1, 3, 2, probabilities=(0.5, 0.25, 0.25)))
    p = np.array([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5]])
    predictions = Predictions(items, p, p.argmax(1))
    predictions.write(tmp_path / "p.jsonl.gz")
    lines = read_lines(tmp_path / "p.jsonl.gz")
    assert [line["truth"] for line in lines] == [[0.25, 0.75], [0.5, 0.25, 0.25]]
    assert not any("epistemic" in line for line in lines)
    got = predictions.metrics()
    assert got["distance_to_truth"] == pytest.approx((0.25 + 0.25) / 2)
    entropies = [-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), 1.5 * math.log(2)]
    assert got["truth_entropy"] == pytest.approx(sum(entropies) / 2)
    assert "epistemic" not in got


def test_classwise_calibration_knows_which_options_exist():
    predictions = random_predictions()
    counts = [len(item.options) for item in predictions.items]
    assert predictions.present.sum(1).tolist() == counts
    assert np.array_equal(predictions.present, predictions.probabilities > 0)


def test_questions_without_answers_have_no_metrics_but_are_written(tmp_path):
    predictions = Predictions((item(0, gold=None),), np.array([[0.2, 0.3, 0.5]]), np.array([2]))
    for ask in (predictions.metrics, predictions.intervals):
        with pytest.raises(InputError, match="has no answer"):
            ask()
    predictions.write(tmp_path / "p.jsonl.gz")
    with pytest.raises(InputError, match="no complete file of predictions with answers"):
        read_predictions(tmp_path / "p.jsonl.gz")


def test_files_that_are_not_whole_are_refused(tmp_path):
    path = tmp_path / "p.jsonl.gz"
    random_predictions(count=6).write(path)
    data = path.read_bytes()
    for content in (b"", b"not gzip", data[:1], data[:30], data[:-20], data[:-1]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"p\.jsonl\.gz: is no complete file of predictions with answers"):
            read_predictions(path)


def test_a_file_with_any_wrong_byte_is_refused(tmp_path):
    path = tmp_path / "p.jsonl.gz"
    random_predictions(count=6).write(path)
    data = path.read_bytes()
    for k in range(10, len(data), 7):  # behind the header, which says nothing about the content
        path.write_bytes(data[:k] + bytes([data[k] ^ 0xFF]) + data[k + 1 :])
        with pytest.raises(InputError, match="no complete file"):
            read_predictions(path)


@pytest.mark.parametrize(
    "line",
    ["[]", "3", "{}", '{"id": "a", "probabilities": 3, "gold": 0}', '{"id": "a", "probabilities": ["x"], "gold": 0}'],
)
def test_lines_that_are_no_predictions_are_refused(tmp_path, line):
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(f"{line}\n".encode()))
    with pytest.raises(InputError, match="no complete file of predictions"):
        read_predictions(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.jsonl\.gz"):
        read_predictions(tmp_path / "none.jsonl.gz")


def test_the_main_metrics():
    assert main_metrics(random_predictions().metrics()).keys() == {"acc", "nll", "ece"}


# From questions to predictions ----------------------------------------------------------------------------------------


def predictor_and_items(**settings):
    """A predictor that is given token ids, for items of as many options."""
    encoded = [EncodedItem(q.prompt_ids, q.option_ids) for q in questions(count=6)]
    items = [item(k, len(one.option_ids), 0) for k, one in enumerate(encoded)]
    draws = {name: settings.pop(name) for name in ("samples", "seed", "layers") if name in settings}
    return Predictor(Scorer(adapted()), None, sampling=Sampling(**draws), **settings), items, encoded


def test_predictions_are_the_average_of_the_draws():
    predictor, items, encoded = predictor_and_items(samples=3, seed=2)
    predictions = predictor(items, encoded)
    assert predictions.draws.shape == (3, 6, 4) and predictions.items == tuple(items)
    np.testing.assert_allclose(predictions.probabilities, predictions.draws.mean(0), atol=1e-12)
    np.testing.assert_allclose(predictions.probabilities.sum(1), 1.0, atol=1e-6)
    assert np.array_equal(predictions.choices, predictions.probabilities.argmax(1))
    assert np.array_equal(predictions.present, predictions.probabilities > 0)


def test_a_temperature_softens_the_average_and_leaves_the_draws():
    plain, items, encoded = predictor_and_items(samples=3)
    soft, *_ = predictor_and_items(samples=3, calibration=Calibration(temperature=2.0))
    cold, warm = plain(items, encoded), soft(items, encoded)
    roots = np.sqrt(cold.probabilities)
    np.testing.assert_allclose(warm.probabilities, roots / roots.sum(1, keepdims=True), atol=1e-9)
    assert np.array_equal(cold.draws, warm.draws) and np.array_equal(cold.choices, warm.choices)


def test_a_low_temperature_leaves_every_option_possible():
    """Probabilities that float64 cannot hold would be those of options that a question lacks, and their NLL infinite."""
    predictor, items, encoded = predictor_and_items(samples=1, calibration=Calibration(temperature=1e-5))
    predictions = predictor(items, encoded)
    assert (predictions.present == (predictor_and_items()[0](items, encoded).probabilities > 0)).all()
    assert np.isfinite(predictions.metrics()["nll"])


def test_equal_options_are_answered_with_the_same_text_in_any_order():
    """Two options of the same tokens have the same probability and the same total."""
    predictor, *_ = predictor_and_items(samples=2)
    for texts, chosen in (((" b", " a"), 1), ((" a", " b"), 0)):
        tied = Item("tie", Prompt("?"), texts, ("A", "B"), 0)
        assert predictor([tied], [EncodedItem([1, 2], [[3, 4], [3, 4]])]).choices.tolist() == [chosen]


def test_of_options_equal_per_token_the_likelier_one_as_a_whole_is_the_answer():
    """A model to which all tokens are alike: the shorter option loses less, whatever its text and place."""
    model = adapted(posterior="point", target_modules=["q_proj"])
    with torch.no_grad():
        model.get_base_model().lm_head.weight.zero_()
    predictor = Predictor(Scorer(model), None)
    for option_ids, chosen in (([[3, 4], [5]], 1), ([[5], [3, 4]], 0), ([[1, 2, 3, 4], [5, 6]], 1)):
        for texts in ((" a", " b"), (" b", " a")):
            predictions = predictor([Item("tie", Prompt("?"), texts, ("A", "B"), 0)], [EncodedItem([1, 2], option_ids)])
            assert predictions.probabilities.tolist() == [[0.5, 0.5]] and predictions.choices.tolist() == [chosen]


def test_no_questions_are_refused():
    predictor, *_ = predictor_and_items()
    with pytest.raises(InputError, match="no questions to predict"):
        predictor([])


def test_ties_are_broken_by_the_totals_of_all_draws_and_not_of_one(monkeypatch):
    """Equal probabilities under both draws; of the totals the first draw prefers one option and the average the other."""
    predictor, items, encoded = predictor_and_items(samples=2)
    options = max(len(item.options) for item in items)
    log_p = torch.full((2, len(items), options), -torch.inf, dtype=torch.float64)
    totals = log_p.clone()
    for row, item in enumerate(items):
        log_p[:, row, : len(item.options)] = -float(np.log(len(item.options)))
        totals[:, row, : len(item.options)] = -50.0
    totals[0, :, :2] = torch.tensor([-3.0, -4.0], dtype=torch.float64)
    totals[1, :, :2] = torch.tensor([-9.0, -2.0], dtype=torch.float64)
    monkeypatch.setattr(Predictor, "score", lambda *args: DrawScores(log_p, totals))
    assert predictor(items, encoded).choices.tolist() == [1] * len(items)


def test_they_are_a_table():
    predictions = random_predictions(seed=4, count=6)
    frame = predictions.to_pandas()
    assert frame["id"].tolist() == [it.id for it in predictions.items]
    assert frame["correct"].mean() == predictions.metrics()["acc"]
    assert frame["confidence"].mean() == pytest.approx(predictions.metrics()["confidence"])
    assert frame["entropy"].mean() == pytest.approx(predictions.metrics()["entropy"])
    assert frame["epistemic"].tolist() == predictions.epistemic.tolist()
    for row, it in zip(frame.itertuples(), predictions.items, strict=True):
        assert row.choice == it.options[int(np.argmax(row.probabilities))].strip()
        assert row.gold == it.options[it.gold].strip() and len(row.probabilities) == len(it.options)
    unknown = Predictions((item(0, gold=None),), np.array([[0.2, 0.5, 0.3]]), np.array([1]))
    assert list(unknown.to_pandas().columns) == ["id", "choice", "confidence", "entropy", "probabilities"]
    assert repr(unknown) == "Predictions(1 questions, mean confidence 0.500)"


def test_they_show_their_main_figures_on_one_line():
    predictions = random_predictions()
    figures = predictions.metrics()
    expected = f"mean confidence {figures['confidence']:.3f}, acc {figures['acc']:.3f}, nll {figures['nll']:.3f}"
    assert repr(predictions) == f"Predictions(40 questions, 3 draws, {expected}, ece {figures['ece']:.3f})"


def test_answers_tell_how_far_the_draws_agree():
    draws = np.array(
        [[[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]], [[0.1, 0.5, 0.4], [0.3, 0.1, 0.6]], [[0.8, 0.1, 0.1], [0.1, 0.4, 0.5]]]
    )
    items = (item(0), item(1))
    split, agreed = make_answers(Predictions(items, draws.mean(0), np.array([0, 2]), draws), Calibration())
    assert split.agreement == pytest.approx(2 / 3)
    assert split.semantic_entropy == pytest.approx(-(2 / 3) * np.log(2 / 3) - (1 / 3) * np.log(1 / 3))
    assert agreed.agreement == 1 and agreed.semantic_entropy == 0
    [alone] = make_answers(Predictions(items[:1], draws[0, :1], np.array([0])), Calibration())
    assert alone.agreement == 1 and alone.semantic_entropy == 0


def test_answers_are_a_table_each_and_all_together():
    predictions = random_predictions(count=5)
    answers = make_answers(predictions, Calibration())
    frame = answers.to_pandas()
    assert frame["confidence"].tolist() == predictions.to_pandas()["confidence"].tolist()
    assert frame["answer"].tolist() == predictions.to_pandas()["choice"].tolist()
    one = answers[0]
    assert one.to_pandas()["probability"].tolist() == list(one.probabilities)
    assert one.to_pandas()["choice"].tolist() == list(one.choices)
    doubt = f"epistemic {one.epistemic:.3f} of {one.entropy:.3f} nats"
    assert repr(one) == f"Answer({one.answer!r}, confidence {one.confidence:.3f}, {doubt})"
    quiet = replace(one, answer=None, abstains=True, prediction_set=one.choices[:1])
    assert repr(quiet).startswith("Answer(abstains, confidence")
    assert quiet.to_pandas()["in_set"].tolist() == [True] + [False] * (len(one.choices) - 1)
