"""The kept trunk against the whole model: values, gradients, what is shared and what is refused."""

import copy
import functools
import warnings
from dataclasses import dataclass

import pytest
import torch
from peft import get_peft_model
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from adapter.cases import SIZES, VOCABULARY, config, generator
from bayeslora import find_holder
from bayeslora.adapter.sampling import Sampling
from bayeslora.errors import InputError
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.predict.questions.scores import score_questions
from bayeslora.predict.questions.sharing import may_share_rows
from bayeslora.predict.trunk import TrunkCache, TrunkScorer
from predict.test_options import Question, questions
from tiers import some

DEEP = {**SIZES, "num_hidden_layers": 4}
MIXED = {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 2}
ROTATIONS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**DEEP)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**DEEP, head_dim=8, tie_word_embeddings=True)),
    "qwen3_mixed": lambda: Qwen3ForCausalLM(Qwen3Config(**DEEP, head_dim=8, **MIXED)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**DEEP, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**DEEP, head_dim=8)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**DEEP, head_dim=8, layer_types=ROTATIONS)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**DEEP, embedding_multiplier=12.0)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=VOCABULARY, n_positions=64, embd_pdrop=0, resid_pdrop=0)
    ),
}
EXACT = ["llama", "qwen3", "qwen3_moe"]


@functools.cache
def _built(architecture, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[architecture]().eval()


def upper(architecture="llama", *, layers=(2, 3), seed=0, **settings):
    """A model of four layers that is adapted in the upper ones."""
    targets = ["c_attn"] if architecture == "gpt2" else ["q_proj", "v_proj"]
    given = config(**{"target_modules": targets, "layers_to_transform": list(layers), **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(copy.deepcopy(_built(architecture, seed)), given).eval()


def with_head(architecture="llama"):
    """Layers 2 and 3 and the head above them."""
    return upper(
        architecture,
        target_modules=r"model\.layers\.[23]\.self_attn\.(q|k)_proj|lm_head",
        layers_to_transform=None,
    )


def gradients(model, scorer, items, draws, seed=0):
    """Scores in training mode, and the gradient of a loss that weighs all of them differently."""
    model.train()
    model.zero_grad()
    find_holder(model).draw(draws, generator(seed))
    scores = scorer(items, draws)
    values = scores.log_probabilities[scores.present]
    (values * torch.linspace(0.5, 2.0, len(values))).sum().backward()
    return scores, {name: p.grad.clone() for name, p in find_holder(model).named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", some(EXACT, ["llama"]))
@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("make", [upper, with_head])
def test_values_and_gradients_equal_those_of_the_whole_model(architecture, draws, make):
    model, items = make(architecture), questions(count=3)
    want, wanted = gradients(model, Scorer(model), items, draws)
    trunk = TrunkScorer(model)
    for _ in range(2):  # the second time from what was kept
        got, gotten = gradients(model, trunk, items, draws)
        torch.testing.assert_close(got.total, want.total, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(got.mean, want.mean, atol=1e-5, rtol=0)
        assert gotten.keys() == wanted.keys() == dict(find_holder(model).named_parameters()).keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(gotten[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert not any(parameter.grad is not None for name, parameter in model.named_parameters() if "layers" in name)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("layers", [(1,), (3,), (1, 3)])
def test_wherever_the_cut_is(architecture, layers):
    model, items = upper(architecture, layers=layers), questions(count=5)
    model.deterministic()
    with torch.no_grad():
        torch.testing.assert_close(TrunkScorer(model)(items).total, Scorer(model)(items).total, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("samples", [0, 3])
def test_questions_are_scored_as_without_a_trunk_in_any_batches(samples):
    model, items = upper(), questions(count=8)
    sampling = Sampling(samples, 3)
    want = score_questions(Scorer(model), items, sampling, batch_tokens=10_000)
    trunk = TrunkScorer(model)
    for batch_tokens in (30, 120, 10_000):
        got = score_questions(trunk, items, sampling, batch_tokens=batch_tokens)
        torch.testing.assert_close(got.totals, want.totals, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got.log_probabilities, want.log_probabilities, atol=1e-5, rtol=1e-5)


def count_calls(model, index=0):
    calls = []
    model.get_base_model().model.layers[index].register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(args[0] if args else kwargs["hidden_states"])), with_kwargs=True
    )
    return calls


def test_the_trunk_is_computed_once_for_every_question():
    model, items = upper(), questions(count=6)
    trunk, calls = TrunkScorer(model), count_calls(model)
    find_holder(model).draw(3, generator())
    trunk(items[:4], draws=3)
    first = len(calls)
    assert max(calls) == len(trunk.pack(items[:4]).input_ids)  # never once per draw
    for _ in range(3):
        trunk(items[:4], draws=3)
        trunk([items[2], items[0]], draws=3)
    assert len(calls) == first
    trunk(items, draws=3)
    assert calls[first:] == [len(trunk.pack(items[4:]).input_ids)]  # those of the six that were not there


def test_a_question_that_stands_twice_in_a_batch_is_computed_once():
    model, items = upper(), questions(count=3)
    model.deterministic()
    trunk = TrunkScorer(model)
    with torch.no_grad():
        twice = trunk([*items, items[0]]).total
        torch.testing.assert_close(twice, Scorer(model)([*items, items[0]]).total, atol=1e-5, rtol=1e-6)
    assert len(trunk._cache) == 3


def test_questions_that_share_a_prompt_are_told_apart():
    model = upper()
    model.deterministic()
    alike = [Question([1, 2, 3], options) for options in ([[4], [5, 6]], [[4, 5], [6]], [[4], [5, 7]])]
    trunk = TrunkScorer(model)
    with torch.no_grad():
        for item in alike:
            torch.testing.assert_close(trunk([item]).total, Scorer(model)([item]).total, atol=1e-5, rtol=1e-6)
    assert len(trunk._cache) == 3


@pytest.mark.parametrize("other", [{"posterior": "point"}, {"posterior": "ensemble", "r": 2}, {"seed": 0}])
def test_what_one_adapter_kept_serves_another_above_the_same_cut(other):
    cache, items = TrunkCache(), questions(count=5)
    first, second = upper(), upper(target_modules=["k_proj"], **other)
    for model in (first, second):
        model.deterministic()
    with torch.no_grad():
        TrunkScorer(first, cache=cache)(items)
        assert len(cache) == 5
        calls = count_calls(second)
        trunk = TrunkScorer(second, cache=cache)
        got = trunk(items).total
        tried = len(calls)
        trunk(items[:2])
        assert 5 not in calls and len(calls) == tried  # one question is tried; all others come from the cache
        torch.testing.assert_close(got, Scorer(second)(items).total, atol=1e-5, rtol=1e-6)
    assert len(cache) == 5


def test_a_cache_of_another_cut_is_refused():
    cache = TrunkCache()
    TrunkScorer(upper(layers=(2, 3)), cache=cache)
    with pytest.raises(InputError, match="was kept for 2 layers and this adapter has 3 below it"):
        TrunkScorer(upper(layers=(3,)), cache=cache)


def test_an_adapter_on_the_lowest_layer_is_refused():
    with pytest.raises(InputError, match="the lowest layer is adapted, so there is no trunk to keep"):
        TrunkScorer(upper(layers=(0, 3)))


def test_an_adapter_on_the_head_alone_is_refused():
    with pytest.raises(InputError, match="cannot tell the trunk from the adapted layers lm_head"):
        TrunkScorer(upper(target_modules=["lm_head"], layers_to_transform=None))


SHORT = Question([3], [[4], [5]])


@pytest.mark.parametrize("architecture", ["gpt2", "granite", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", some(range(3), [0]))
def test_models_that_give_their_layers_more_are_refused_however_little_it_shows(architecture, dtype, seed):
    """GPT-2 adds positions, Granite scales embeddings, Gemma 3 rotates by the index of a layer."""
    model = upper(architecture, seed=seed).to(dtype)
    for items in (questions(seed), [SHORT]):
        with pytest.raises(InputError, match=rf"the trunk of a {type(_built(architecture)).__name__} cannot be kept"):
            TrunkScorer(model)(items)


@pytest.mark.parametrize("architecture", ["gemma", "qwen3_mixed"])
def test_models_that_scale_embeddings_or_mix_kinds_of_attention_are_exact(architecture):
    model, items = upper(architecture), questions()
    model.deterministic()
    with torch.no_grad():
        torch.testing.assert_close(TrunkScorer(model)(items).total, Scorer(model)(items).total, atol=1e-5, rtol=1e-6)


def test_gemma3_is_exact_where_the_kinds_of_layers_repeat():
    model, items = upper("gemma3", layers=(3,)), questions()
    model.deterministic()
    with torch.no_grad():
        torch.testing.assert_close(TrunkScorer(model)(items).total, Scorer(model)(items).total, atol=1e-5, rtol=1e-6)


@dataclass
class Snapshot:
    """Everything of a model that a scorer could leave behind."""

    layers: torch.nn.Module
    members: list
    hooks: list
    training: list
    mode: object

    @classmethod
    def of(cls, model):
        decoder = model.get_base_model().model
        return cls(
            decoder.layers,
            list(decoder.layers),
            [len(module._forward_pre_hooks) for module in model.modules()],
            [module.training for module in model.modules()],
            find_holder(model)._mode,
        )

    def __eq__(self, other):
        same = self.layers is other.layers and all(a is b for a, b in zip(self.members, other.members, strict=True))
        return same and self.mode is other.mode and (self.hooks, self.training) == (other.hooks, other.training)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = upper().train(training)
    find_holder(model).draw(2, generator())
    before, names = Snapshot.of(model), list(model.state_dict())
    TrunkScorer(model)(questions(), draws=2)
    assert Snapshot.of(model) == before and list(model.state_dict()) == names


@pytest.mark.parametrize(
    "index, calls_before",
    some([(index, calls) for index in range(4) for calls in range(4)], lambda case: case[0] == case[1]),
)
def test_the_model_is_left_as_it_was_by_a_pass_that_fails(index, calls_before):
    model = upper().train()
    assert may_share_rows(model, questions())  # which takes a pass to find out
    find_holder(model).draw(1, generator())
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) > calls_before:
            raise RuntimeError("out of memory")

    model.get_base_model().model.layers[index].register_forward_hook(fail)
    before = Snapshot.of(model)
    trunk = TrunkScorer(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        [trunk(questions(seed)) for seed in range(3)]
    assert len(calls) == calls_before + 1
    assert Snapshot.of(model) == before


def test_the_kl_is_still_taken_at_the_draw_of_the_pass():
    """Filling the cache runs the model with its mean, which must not come between a draw and its KL."""
    model = upper()
    holder = find_holder(model)
    holder.draw(2, generator(4))
    TrunkScorer(model.train())(questions(), draws=2)
    posterior = holder.posterior("default")
    want = posterior.kl(posterior.draw(2, generator(4)))
    torch.testing.assert_close(holder.kl().total, want.total)


def test_what_is_kept_belongs_to_no_graph_and_lies_on_the_cpu():
    model = upper().train()
    find_holder(model).draw(1, generator())
    trunk = TrunkScorer(model)
    trunk(questions())
    for item, state in zip(questions(), trunk._cache.states.values(), strict=True):
        assert not state.requires_grad and state.device.type == "cpu"
        assert state.shape == (len(item.prompt_ids) + sum(map(len, item.option_ids)), 32)
