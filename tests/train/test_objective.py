"""Cross-entropy over options and the weight of the KL, against torch and by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adapter.cases import adapted
from bayeslora import find_holder
from bayeslora.posterior import kl_weight
from bayeslora.tasks import EncodedText
from bayeslora.train.checkpoint import TrainingState
from bayeslora.train.fit import Fit, _mix
from bayeslora.train.objective import Example, KLWeight, QuestionObjective, TokenObjective, cross_entropy
from posterior.cases import NoLooking
from rounding import summed
from train.test_fit import settings


def case(seed=0, rows=6, options=4):
    source = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, options, generator=source, dtype=torch.float64)
    return scores, torch.randint(0, options, (rows,), generator=source)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_full_rows_agree_with_torch(seed, smoothing):
    scores, gold = case(seed)
    present = torch.ones_like(scores, dtype=torch.bool)
    got = cross_entropy(scores.log_softmax(-1), gold, present, smoothing)
    want = F.cross_entropy(scores, gold, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_by_hand_with_options_that_are_not_there(smoothing):
    probabilities = [[0.2, 0.8, 0.0], [0.5, 0.3, 0.2]]
    present = torch.tensor([[True, True, False], [True, True, True]])
    got = cross_entropy(torch.tensor(probabilities).log(), torch.tensor([0, 2]), present, smoothing)
    first = -(1 - smoothing) * math.log(0.2) - smoothing * (math.log(0.2) + math.log(0.8)) / 2
    second = -(1 - smoothing) * math.log(0.2) - smoothing * (math.log(0.5) + math.log(0.3) + math.log(0.2)) / 3
    torch.testing.assert_close(got, torch.tensor([first, second]))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_absent_options_change_neither_the_loss_nor_its_gradient(smoothing):
    scores, gold = case(options=3)
    wide = torch.cat([scores, torch.full((6, 2), -torch.inf, dtype=scores.dtype)], dim=1)
    gradients = []
    for values in (scores, wide):
        values.requires_grad_(True)
        present = values.detach() > -torch.inf
        cross_entropy(values.log_softmax(-1), gold, present, smoothing).sum().backward()
        gradients.append(values.grad)
    torch.testing.assert_close(gradients[1][:, :3], gradients[0])
    assert torch.equal(gradients[1][:, 3:], torch.zeros(6, 2, dtype=scores.dtype))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_through_masked_scores_is_finite(smoothing):
    """As a scorer masks: the scores that are filled with -inf depend on parameters too."""
    weights = torch.tensor([0.3, -2.0, 1.0, 0.5], requires_grad=True)
    present = torch.tensor([[True, False, True, False], [True, True, True, True], [True, False, False, False]])
    scores = weights.expand(3, 4).masked_fill(~present, -torch.inf)
    loss = cross_entropy(scores.log_softmax(-1), torch.tensor([2, 1, 0]), present, smoothing)
    assert torch.isfinite(loss).all() and float(loss.detach()[2]) == 0.0  # one option is certain
    loss.sum().backward()
    assert torch.isfinite(weights.grad).all() and weights.grad.abs().sum() > 0


def test_smoothing_spreads_over_the_right_option_too():
    """A certain and right answer costs nothing without smoothing, and a uniform one the same with any."""
    uniform = torch.full((1, 4), 0.25).log()
    present = torch.ones(1, 4, dtype=torch.bool)
    for smoothing in (0.0, 0.1, 0.9):
        got = cross_entropy(uniform, torch.tensor([1]), present, smoothing)
        torch.testing.assert_close(got, torch.tensor([math.log(4)]))


# Weight of the KL -----------------------------------------------------------------------------------------------------

SIZES = {"examples": 200, "batch_size": 16}


@pytest.mark.parametrize("scaling, full", [("elbo", 3.0 / 200), ("paper", 3.0 * 0.2 / 13)])
def test_without_warm_up_the_weight_is_full_from_the_start(scaling, full):
    weight = KLWeight(scaling, beta=3.0)
    assert full == pytest.approx(kl_weight(scaling, beta=3.0, **SIZES))
    assert [weight.at(step, 26, **SIZES) for step in range(26)] == pytest.approx([full] * 26)


@pytest.mark.parametrize("scaling", ["elbo", "paper"])
@pytest.mark.parametrize("steps, warmup", [(26, 0.5), (26, 0.1), (7, 0.3), (100, 0.99)])
def test_warm_up_is_a_line_from_above_zero_to_the_full_weight(scaling, steps, warmup):
    full = kl_weight(scaling, **SIZES)
    weights = [KLWeight(scaling, warmup=warmup).at(step, steps, **SIZES) for step in range(steps)]
    rising = warmup * steps
    assert weights == pytest.approx([full * min(1.0, (step + 1) / rising) for step in range(steps)])
    assert 0 < weights[0] < full or rising <= 1
    assert weights == sorted(weights) and weights[-1] == pytest.approx(full)
    assert sum(weight < full for weight in weights) == math.ceil(rising) - 1


def test_a_warm_up_shorter_than_a_step_is_none():
    assert KLWeight(warmup=0.01).at(0, 10, **SIZES) == pytest.approx(1 / 200)


def test_no_weight_at_all():
    assert KLWeight(beta=0.0, warmup=0.5).at(3, 10, **SIZES) == 0.0


# Tokens ---------------------------------------------------------------------------------------------------------------


def texts(count=5):
    rng = np.random.default_rng(3)
    return [
        EncodedText(f"t{k}", rng.integers(1, 60, size=1 + k % 3).tolist(), rng.integers(1, 60, size=2 + k).tolist())
        for k in range(count)
    ]


class Unigrams(nn.Module):
    """Takes part in a batch as a language model does. Those of transformers look at the positions or the mask."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 64).requires_grad_(False)

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.head(self.table(input_ids)))


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("sliced", [False, True])
def test_the_host_never_waits_for_losses_of_texts(draws, sliced):
    model = Unigrams()
    with NoLooking():
        TokenObjective(model, head=model.head if sliced else None).losses(texts(), draws).sum().backward()


@pytest.mark.parametrize("draws", [1, 2, 3, 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_of_texts_are_sums_over_their_tokens_and_texts_are_divided_among_draws(draws, smoothing):
    model, given = adapted(posterior="meanfield").eval(), texts()
    holder = find_holder(model)
    with torch.no_grad(), holder.restoring():
        holder.draw(draws, torch.Generator().manual_seed(0))
        got = TokenObjective(model, label_smoothing=smoothing).losses(given, draws)
        for k, text in enumerate(given):
            ids = torch.tensor([text.prompt_ids + text.target_ids]).repeat(draws, 1)
            log_p = model(input_ids=ids).logits[k % draws].log_softmax(-1)[len(text.prompt_ids) - 1 : -1]
            right = log_p.gather(-1, torch.tensor(text.target_ids).unsqueeze(-1)).squeeze(-1)
            want = -((1 - smoothing) * right + smoothing * log_p.mean(-1)).sum()
            torch.testing.assert_close(got[k], want, rtol=1e-4, atol=1e-4)
    assert got.shape == (len(given),)


def test_a_step_on_texts_is_a_step_along_the_elbo_per_token():
    """Gradients of all micro-batches against ``(Σ nll of the batch · N / B + KL) / tokens`` written out."""
    given = texts(6)
    tokens = sum(len(text.target_ids) for text in given)
    model = adapted(posterior="meanfield", target_modules=["q_proj"])
    fit = Fit(TokenObjective(model), given, settings(batch_size=4, clip=1e9, epochs=1), 0, lambda: {"nll": 0.0})
    batch = fit._examples_of(0)
    state = TrainingState()
    fit._step(state)
    fit._note_last(state)
    got = {name: p.grad.clone() for name, p in find_holder(model).named_parameters() if p.grad is not None}
    assert state.train_nll[1] == sum(len(text.target_ids) for text in batch)

    model = adapted(posterior="meanfield", target_modules=["q_proj"]).train()
    holder = find_holder(model)
    torch.manual_seed(_mix(0, 0, 0, 1))
    with holder.restoring():
        holder.draw(1, torch.Generator().manual_seed(_mix(0, 0, 0)))
        nll = TokenObjective(model).losses(batch, 1).sum()
        elbo = (nll * len(given) / len(batch) + holder.kl().total) / tokens
        elbo.backward()
    want = {name: p.grad for name, p in holder.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys() and want
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, **summed(value), msg=lambda m, n=name: f"{n}: {m}")
    assert state.train_nll[0] == pytest.approx(nll.item(), rel=1e-5)


@pytest.mark.parametrize("scaling", ["elbo", "paper", "blob"])
def test_only_the_elbo_counts_the_terms_of_an_example(scaling):
    weight, of_what = KLWeight(scaling), {"examples": 10, "batch_size": 5}
    plain, many = weight.at(0, 4, **of_what), weight.at(0, 4, **of_what, terms=20.0)
    assert many == pytest.approx(plain / 20 if scaling == "elbo" else plain)


def test_a_guess_is_among_the_options_of_a_question_and_no_text_is_guessed():
    example = Example("q", SimpleNamespace(option_ids=[[1], [2], [3]]), 0)
    assert QuestionObjective(None).guess(example) == pytest.approx(math.log(3))
    assert TokenObjective(None).guess(None) == math.inf
