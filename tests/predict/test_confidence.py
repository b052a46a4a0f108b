"""Answers with a confidence: agreement of draws, probability of a whole text, and its calibration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bayeslora.adapter.sampling import Sampling
from bayeslora.errors import InputError
from bayeslora.metrics import ece_from_confidence
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.calibrate.confidence import ConfidenceModel, fit_confidence
from bayeslora.predict.generation import Writing, generate, generate_apart, generate_by_draw
from bayeslora.predict.generation.agreement import find_agreement, group_answers
from bayeslora.predict.generation.confidence import FEATURES, AnswerWriter, feature_rows

from .test_generate import PROMPTS, SHORT, TOKENIZER, writer

# Agreement ------------------------------------------------------------------------------------------------------------


def test_answers_are_grouped_by_what_they_say() -> None:
    answers = ["Paris", "the paris.", "London", "Paris!", "12", "12.0"]
    assert group_answers(answers) == [[0, 1, 3], [4, 5], [2]]
    assert group_answers(answers, lambda a, b: a == b) == [[k] for k in range(6)]
    found = find_agreement("paris", answers)
    assert found.groups == (("Paris", 0.5), ("12", pytest.approx(1 / 3)), ("London", pytest.approx(1 / 6)))
    assert found.share == 0.5 and found.answers == tuple(answers)


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (3, 1), (1, 1, 1, 1)])
def test_semantic_entropy_is_the_entropy_of_the_groups(sizes: tuple[int, ...]) -> None:
    answers = [str(group) for group, size in enumerate(sizes) for _ in range(size)]
    shares = np.array(sizes) / sum(sizes)
    assert find_agreement("0", answers).semantic_entropy == pytest.approx(float(-(shares * np.log(shares)).sum()))


# Probability of a text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 3])
def test_the_probability_of_a_text_is_the_mean_of_what_every_draw_gives_it(samples: int) -> None:
    """Each draw writes the whole text: averages of products, not products of averages."""
    model = writer()
    sampling = Sampling(samples, SHORT.seed)
    [written] = generate(model, TOKENIZER, PROMPTS[:1], SHORT, samples=samples)
    prompt = TOKENIZER(PROMPTS[0]).input_ids
    ids = torch.tensor([[*prompt, *written.token_ids]])
    holder = model.base_model.holder
    with torch.no_grad(), holder.restoring():
        n = sampling.put_into_use(holder)
        logits = model(input_ids=ids.repeat(n, 1)).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
    taken = logits.gather(-1, ids[:, len(prompt) :].repeat(n, 1).unsqueeze(-1)).squeeze(-1).double()
    assert torch.tensor(written.draws).T.numpy() == pytest.approx(taken.numpy(), abs=1e-4)
    whole = float(torch.logsumexp(taken.sum(1), 0)) - math.log(n)
    assert written.log_probability == pytest.approx(whole, abs=1e-3)
    if n > 1:
        assert written.log_probability != pytest.approx(written.log_likelihood, abs=1e-6)


def test_every_draw_writes_every_prompt_as_it_would_alone() -> None:
    model = writer()
    together = generate_by_draw(model, TOKENIZER, PROMPTS, SHORT, Sampling(3, SHORT.seed))
    assert [len(texts) for texts in together] == [3] * len(PROMPTS)
    for prompt, texts in zip(PROMPTS, together, strict=True):
        assert generate_apart(model, TOKENIZER, prompt, SHORT, samples=3) == texts


# Answers --------------------------------------------------------------------------------------------------------------


def test_an_answer_says_how_sure_it_is_and_what_else_the_draws_say() -> None:
    model = writer()
    answering = AnswerWriter(model, TOKENIZER, Sampling(4), Writing(max_new_tokens=4))
    found = answering(PROMPTS)
    for answer in found:
        assert answer.confidence == pytest.approx(math.exp(answer.log_probability)) and not answer.abstains
        assert answer.entropy == pytest.approx(answer.aleatoric + answer.epistemic, abs=1e-4)
        assert set(answer.features) == set(FEATURES) and answer.agreement.share + sum(
            share for _, share in answer.alternatives
        ) == pytest.approx(1.0)
        shown = answer.to_dict()
        assert shown["answer"] == answer.text and shown["agreement"] == answer.agreement.share
        assert repr(answer).startswith(
            "WrittenAnswer('"
        ) and f", confidence {answer.confidence:.3f}, agreement" in repr(answer)
    frame = found.to_pandas()
    assert frame["answer"].tolist() == [it.text for it in found]
    assert frame["epistemic"].tolist() == [it.epistemic for it in found]
    assert frame["alternatives"].tolist() == [dict(it.alternatives) for it in found]
    assert feature_rows([it.features for it in found]).shape == (len(PROMPTS), len(FEATURES))


@pytest.mark.parametrize(("samples", "passes"), [(0, 1), (1, 1), (2, 2)])
def test_one_network_writes_its_answer_once(samples: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = writer()
    answering = AnswerWriter(model, TOKENIZER, Sampling(samples), Writing(max_new_tokens=4))
    calls = []
    written = type(model).generate
    monkeypatch.setattr(type(model), "generate", lambda *args, **given: calls.append(1) or written(*args, **given))
    found = answering(PROMPTS)
    assert len(calls) == passes
    again = answering.assess(PROMPTS, [answer.generation for answer in found])
    assert [answer.to_dict() for answer in again] == [answer.to_dict() for answer in found]


def test_calibration_decides_the_confidence_and_when_to_abstain() -> None:
    model = writer()
    flat = ConfidenceModel(FEATURES, (0.0,) * 6, (1.0,) * 6, (0.0,) * 6, math.log(0.3 / 0.7))
    for threshold, abstains in ((0.29, False), (0.31, True), (None, False)):
        calibration = Calibration(confidence=flat, threshold=threshold)
        [answer] = AnswerWriter(model, TOKENIZER, Sampling(2), Writing(max_new_tokens=3), calibration)(PROMPTS[:1])
        assert answer.confidence == pytest.approx(0.3) and answer.abstains is abstains
    choices = Calibration(threshold=1.0)  # of choices, and not of answers in free text
    [answer] = AnswerWriter(model, TOKENIZER, Sampling(2), Writing(max_new_tokens=3), choices)(PROMPTS[:1])
    assert not answer.abstains


def test_a_confidence_of_other_features_is_refused() -> None:
    other = ConfidenceModel(("length",), (0.0,), (1.0,), (1.0,), 0.0)
    writing = AnswerWriter(writer(), TOKENIZER, Sampling(2), Writing(max_new_tokens=2), Calibration(confidence=other))
    with pytest.raises(InputError, match=r"is computed from length, and answers have log_probability.*calibrate again"):
        writing(PROMPTS[:1])


# The fit --------------------------------------------------------------------------------------------------------------


def test_the_fit_is_that_of_logistic_regression() -> None:
    """Against scikit-learn, with Platt's targets as weighted copies of both classes."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3)) * [1.0, 5.0, 0.1] + [0.0, 2.0, -1.0]
    right = rng.random(200) < 1 / (1 + np.exp(-(x[:, 0] - 0.3 * x[:, 1])))
    model = fit_confidence(("a", "b", "c"), x, right)
    positives = right.sum()
    target = np.where(right, (positives + 1) / (positives + 2), 1 / (200 - positives + 2))
    standard = (x - x.mean(0)) / x.std(0)
    reference = linear_model.LogisticRegression(C=1.0, tol=1e-12, max_iter=10000)
    reference.fit(
        np.vstack([standard, standard]),
        np.r_[np.ones(200), np.zeros(200)],
        sample_weight=np.r_[target, 1 - target],
    )
    assert np.array(model.weights) == pytest.approx(reference.coef_[0], abs=1e-4)
    assert model.bias == pytest.approx(reference.intercept_[0], abs=1e-4)
    assert model.apply(x) == pytest.approx(reference.predict_proba(standard)[:, 1], abs=1e-4)


def test_a_fitted_confidence_is_calibrated_on_new_answers() -> None:
    rng = np.random.default_rng(1)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(count, 2))
        return x, rng.random(count) < 1 / (1 + np.exp(-(2 * x[:, 0] - x[:, 1])))

    model = fit_confidence(("a", "b"), *draw(2000))
    x, right = draw(20000)
    assert ece_from_confidence(model.apply(x), right) < 0.03


@pytest.mark.parametrize("telling", [True, False])
def test_features_after_the_first_count_as_far_as_they_help(telling: bool) -> None:
    """Of ten sets of answers, since in a single one a feature may happen to tell something."""
    features, kept, free = tuple("abcdef"), [], []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(150, 6))
        right = rng.random(150) < 1 / (1 + np.exp(-(x[:, 0] + 2 * telling * x[:, 1])))
        model = fit_confidence(features, x, right)
        assert abs(model.weights[0]) > 0.4
        kept.append(np.abs(model.weights[1:]).max())
        free.append(np.abs(fit_confidence(features, x, right, ridge=1.0).weights[1:]).max())
    share = np.mean(kept) / np.mean(free)
    assert share > 0.6 if telling else share < 0.5


@pytest.mark.parametrize("right", [[True] * 8, [False] * 8])
def test_answers_that_are_all_alike_do_not_make_it_certain(right: list[bool]) -> None:
    model = fit_confidence(("a",), np.arange(8.0)[:, None], right)
    expected = 9 / 10 if right[0] else 1 / 10
    assert model.apply([[3.5]])[0] == pytest.approx(expected, abs=0.01)
    constant = fit_confidence(("a",), np.ones((8, 1)), right)
    assert constant.apply([[1.0]])[0] == pytest.approx(expected, abs=1e-6)


def test_saved_and_loaded_it_is_the_same(tmp_path) -> None:
    model = fit_confidence(FEATURES, np.random.default_rng(0).normal(size=(20, 6)), [True, False] * 10)
    Calibration(confidence=model, threshold=0.4, questions=20).save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json").confidence == model


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weights": [1.0]}, "weights is .*; give 2 finite numbers"),
        ({"scales": [0.0, 1.0]}, "scales is .*; give numbers above 0"),
        ({"bias": float("nan")}, "bias is nan; give a finite number"),
        ({"means": "ab"}, "means is 'ab'; give a list"),
        ({"more": 1}, "confidence is .*; give features, means, scales, weights, bias"),
    ],
)
def test_a_damaged_file_is_refused(changes, message: str) -> None:
    good = {"features": ["a", "b"], "means": [0.0, 0.0], "scales": [1.0, 1.0], "weights": [1.0, 1.0], "bias": 0.0}
    with pytest.raises(InputError, match=message):
        ConfidenceModel.from_dict({**good, **changes})


def test_rows_must_fit() -> None:
    with pytest.raises(InputError, match="there are 2 answers with features"):
        fit_confidence(("a", "b"), [[1.0], [2.0]], [True, False])
