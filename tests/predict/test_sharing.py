"""Models that cannot be told what sees what get one sequence per option, and their scores are right all the same."""

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from adapter.cases import MODELS, adapted, base_model, config
from bayeslora import BayesLoraConfig, find_holder
from bayeslora.adapter.sampling import Sampling
from bayeslora.errors import InputError
from bayeslora.predict.questions.options import packed_length
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.predict.questions.scores import score_questions
from bayeslora.predict.questions.sharing import may_share_rows, same_up_to_round_off
from bayeslora.predict.trunk import TrunkScorer
from predict.test_options import Question, naive, questions

LLAMA_LIKE = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
OTHERS = {
    "recurrent layers": ("lfm2", {**LLAMA_LIKE, "layer_types": ["conv", "full_attention"]}, ["w1", "q_proj"]),
    "a state space": ("mamba", {"num_hidden_layers": 2, "state_size": 4}, ["in_proj"]),
    "biases by column": ("mpt", {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64}, ["Wqkv"]),
    "no mask of this form": ("bloom", {"n_head": 2, "n_layer": 2}, ["query_key_value"]),
    "a window by column": (
        "gpt_neo",
        {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 5},
        ["q_proj"],
    ),
    "a window": ("mistral", {**LLAMA_LIKE, "sliding_window": 6}, ["q_proj"]),
}


def other(name, **changes):
    kind, sizes, targets = OTHERS[name]
    sizes = {**sizes, **changes}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, hidden_size=16, vocab_size=64, **sizes))
        for parameter in base.parameters():
            parameter.data.mul_(3)  # so that what a token sees matters
        return get_peft_model(
            base, BayesLoraConfig(posterior="inducing", target_modules=targets, task_type="CAUSAL_LM", r=2)
        ).eval()


@pytest.mark.parametrize("name", OTHERS)
def test_scores_are_those_of_one_sequence_per_option(name):
    model, items = other(name), questions(vocabulary=64)
    assert not may_share_rows(model, items)
    with torch.no_grad():
        found = Scorer(model)(items)
    for row, item in enumerate(items):
        want = naive(model, item)
        torch.testing.assert_close(found.total[row, : len(want)], want, atol=1e-4, rtol=1e-5)
        assert torch.isinf(found.total[row, len(want) :]).all()


@pytest.mark.parametrize("name", ["recurrent layers", "biases by column"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_hide_what_an_option_sees_of_another(name, dtype):
    model = other(name).to(dtype)
    assert not may_share_rows(model, questions(vocabulary=64))


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_logits_that_are_rounded_are_the_same_even_if_a_second_way_rounds_alike(precision):
    """What is ten times as large as that rounding is something else."""
    exact = 10 * torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    noise = torch.finfo(precision).eps * exact.std() * torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    one, rounded, other = exact, exact.to(precision).float(), exact + 10 * noise
    assert same_up_to_round_off(one, rounded, lambda: one, precision)
    assert not same_up_to_round_off(one, other, lambda: one, precision)
    assert same_up_to_round_off(one, other, lambda: exact + 5 * noise, precision)


@pytest.mark.parametrize("name", ["recurrent layers", "biases by column"])
def test_draws_too(name):
    """Of a batch that the model repeats by itself, and of one that is divided among draws."""
    model, items = other(name), questions(vocabulary=64)
    scores = score_questions(Scorer(model), items, Sampling(2), batch_tokens=64)
    with torch.no_grad(), model.draws(2, torch.Generator().manual_seed(0)):
        divided = Scorer(model)(items, blocks=2).total
    assert not torch.equal(scores.totals[0], scores.totals[1])
    for number, item in enumerate(items):
        wide = len(item.option_ids)
        for draw in range(2):
            with model.draws(2, torch.Generator().manual_seed(0)):
                find_holder(model).narrow(draw, 1)
                want = naive(model, item)
            torch.testing.assert_close(scores.totals[draw, number, :wide].float(), want, atol=1e-4, rtol=1e-5)
            if draw == number % 2:
                torch.testing.assert_close(divided[number, :wide], want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", MODELS)
def test_models_of_attention_share_rows(architecture, dtype):
    """Found out once per base model, at the mean, and without a trace."""
    model = get_peft_model(base_model(architecture).to(dtype), config(architecture)).train()
    find_holder(model).draw(2)
    mode, state = find_holder(model)._mode, torch.get_rng_state()
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(model.training))
    for _ in range(2):
        assert may_share_rows(model, questions())
        assert not Scorer(model).pack(questions()).apart
    assert passes == [False] and model.training
    assert find_holder(model)._mode is mode and torch.equal(torch.get_rng_state(), state)


def test_within_its_window_a_model_shares_rows():
    model = other("a window", sliding_window=30)
    items = questions(vocabulary=64)
    assert may_share_rows(model, items) and max(map(packed_length, items)) <= 30
    assert not may_share_rows(model, [Question(list(range(20)), [[1] * 6, [2] * 6])])


def test_a_trunk_is_not_kept_for_them():
    model = other("recurrent layers")
    model = get_peft_model(
        model.unload(), BayesLoraConfig(posterior="inducing", target_modules=r".*layers\.1\..*q_proj", r=2)
    ).eval()
    with pytest.raises(InputError, match=r"Lfm2ForCausalLM cannot be kept: the options .* leave --cache-trunk out"):
        TrunkScorer(model)(questions(vocabulary=64))


def test_a_model_that_fails_at_everything_is_not_taken_for_one_of_them():
    model = adapted()

    def fail(*_):
        raise RuntimeError("out of memory")

    hook = model.get_base_model().register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        may_share_rows(model, questions())
    hook.remove()
    assert may_share_rows(model, questions())
