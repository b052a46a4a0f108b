"""Draws that begin to differ at some layer: the batch is given once, and what lies below is computed once."""

import copy
import warnings

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from adapter import cases
from adapter.cases import MODELS, VOCABULARY, adapted, generator, logits, tokens
from bayeslora import find_holder
from bayeslora.adapter.draw_expansion import DrawExpansion, Stack
from bayeslora.adapter.sampling import Sampling, sampled
from bayeslora.errors import InputError
from bayeslora.predict.mc import posterior_predictive

ALL = pytest.mark.parametrize("architecture", MODELS)
LAYERS = pytest.mark.parametrize("layers", ["all", "last:1", "0.5", "last:2"])


def decoder(model):
    holder = find_holder(model)
    return Stack.find(model.get_base_model(), holder.layer_names).layers


def late_factors(model, n, cut, seed=0):
    """The factors that draws beginning at layer ``cut`` must have, as ``n`` whole draws, computed apart."""
    posterior = find_holder(model).posterior("default")
    with torch.no_grad():
        draws, mean = posterior.draw(n, generator(seed)), posterior.mean()
    stack = Stack.find(model.get_base_model(), draws)

    def pick(side):
        return tuple(
            torch.stack(
                [
                    (getattr(mean, side)[g][row].expand_as(stacked[row]) if stack.index(name) < cut else stacked[row])
                    for row, name in enumerate(group.names)
                ]
            )
            for g, (group, stacked) in enumerate(zip(draws.groups, getattr(draws, side), strict=True))
        )

    return type(draws)(draws.groups, pick("A"), pick("B"))


@ALL
@LAYERS
def test_a_batch_given_once_equals_one_given_in_blocks(architecture, layers):
    """At all layers the blocks are those of ordinary draws; at fewer, of draws whose lower layers are the mean."""
    model, ids = adapted(architecture), tokens(batch=3)
    cut = {"all": 0, "last:2": 0, "last:1": 1, "0.5": 1}[layers]
    with model.draws(4, generator(), layers=layers, fan_out=True):
        once = logits(model, ids)
    holder = find_holder(model)
    with holder.restoring():
        holder.use({"default": late_factors(model, 4, cut)})
        blocks = logits(model, ids.repeat(4, 1))
    torch.testing.assert_close(once, blocks, atol=2e-5, rtol=1e-4)
    assert (once[:3] - once[3:6]).abs().max() > 1e-3
    if cut == 0:
        with model.draws(4, generator()):
            torch.testing.assert_close(once, logits(model, ids.repeat(4, 1)), atol=2e-5, rtol=1e-4)


@ALL
def test_what_lies_below_is_computed_once(architecture):
    model, rows = adapted(architecture), []
    for layer in decoder(model):
        layer.register_forward_hook(
            lambda _layer, args, out: rows.append((out if torch.is_tensor(out) else out[0]).shape[0])
        )
    with model.draws(5, generator(), layers="last:1", fan_out=True):
        logits(model)  # finds out whether the batch may be repeated between layers
        rows.clear()
        assert len(logits(model, tokens(batch=2))) == 10
        assert len(logits(model, tokens(batch=3))) == 15
    assert rows == [2, 10, 3, 15]


@ALL
@pytest.mark.parametrize("batch, length", [(1, 6), (2, 2), (6, 6), (1, 1)])
def test_rows_are_never_taken_for_anything_else(architecture, batch, length):
    """Batches as large as they are long, as the number of draws, or of one row; padded, with positions of their own."""
    model, ids = adapted(architecture), tokens(batch=batch, length=length)
    given = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(length).expand_as(ids)}
    if length > 1:
        given["attention_mask"][0, 0] = 0
    with model.draws(batch, generator(), layers="last:1", fan_out=True):
        once = logits(model, ids, **given)
    with model.draws(batch, generator(), layers="last:1"):
        blocks = logits(model, ids.repeat(batch, 1), **{k: v.repeat(batch, 1) for k, v in given.items()})
    torch.testing.assert_close(once, blocks, atol=2e-5, rtol=1e-4)


@ALL
def test_a_cache_keeps_the_rows_of_every_layer_apart(architecture):
    model, ids = adapted(architecture), tokens(batch=2, length=5)
    with torch.no_grad(), model.draws(3, generator(), layers="last:1", fan_out=True):
        whole = model(ids).logits
        first = model(ids[:, :3], use_cache=True)
        second = model(ids[:, 3:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, atol=2e-5, rtol=1e-4)


# Models whose layers cannot be given more rows ------------------------------------------------------------------------

HEADS = 4
ODD = {
    "bloom": ("query_key_value", {"n_layer": 2, "n_head": HEADS}),
    "gpt_bigcode": ("c_attn", {"n_layer": 2, "n_head": HEADS}),
    "mpt": ("Wqkv", {"n_layers": 2, "n_heads": HEADS, "max_seq_len": 32}),
    "openai-gpt": ("c_attn", {"n_layer": 2, "n_head": HEADS}),
}


def odd(kind):
    target, sizes = ODD[kind]
    config = AutoConfig.for_model(kind, hidden_size=32, vocab_size=VOCABULARY, **sizes)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(config).eval()
        return get_peft_model(base, cases.config(target_modules=[target])).eval()


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("layers", ["all", "last:1"])
@pytest.mark.parametrize("rows", [2, HEADS])
def test_models_whose_layers_take_no_more_rows_are_given_them_from_the_start(kind, layers, rows):
    """Layers with biases by head, and models that restore the shape of the batch after the last layer."""
    model, ids = odd(kind), tokens(batch=rows)
    with model.draws(3, generator(), layers=layers, fan_out=True):
        once = logits(model, ids)
    with model.draws(3, generator(), layers=layers):
        torch.testing.assert_close(once, logits(model, ids.repeat(3, 1)), atol=2e-5, rtol=1e-4)
    assert (once[:rows] - once[rows : 2 * rows]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_they_write_by_the_average_of_all_draws(kind):
    """With a cache in every layer, of as many rows as there are heads."""
    model, ids = odd(kind), tokens(batch=HEADS)
    with torch.no_grad(), posterior_predictive(model, samples=2, layers="last:1"):
        written = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    sampling = Sampling(2, layers="last:1")
    for _ in range(4):
        with sampled(model, sampling):
            predicted = logits(model, ids.repeat(2, 1))[:, -1].unflatten(0, (2, -1)).softmax(-1).mean(0)
        ids = torch.cat([ids, predicted.argmax(-1, keepdim=True)], 1)
    assert torch.equal(written, ids)


def test_generate_is_refused_where_the_model_returns_more_rows_than_it_is_given():
    model, ids = adapted(), tokens(batch=2)
    greedy = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    mean = model.generate(input_ids=ids, **greedy)
    with model.draws(3, generator(), fan_out=True):
        with pytest.raises(ValueError, match=r"3 draws .* leave out fan_out and give the batch 3 times"):
            model.generate(input_ids=ids, **greedy)
        with model.disable_adapter():
            assert model.generate(input_ids=ids, **greedy).shape == (2, 9)
        with posterior_predictive(model, samples=2):
            assert model.generate(input_ids=ids, **greedy).shape == (2, 9)
        with pytest.raises(ValueError, match="3 draws"):
            model.generate(input_ids=ids, **greedy)
        model.deterministic()
        assert torch.equal(model.generate(input_ids=ids, **greedy), mean)
    greedy["attention_mask"] = greedy["attention_mask"].repeat(3, 1)
    with model.draws(3, generator()):  # as it says
        assert model.generate(input_ids=ids.repeat(3, 1), **greedy).shape == (6, 9)


def test_what_a_model_takes_is_found_out_once_and_without_a_trace():
    """For late draws only, in evaluation mode, and not by the rows of the batch."""
    model, ids = odd("bloom").train(), tokens(batch=2)
    before, hooks, modes = torch.get_rng_state(), [], []
    model.get_base_model().transformer.h[0].register_forward_pre_hook(lambda layer, args: modes.append(layer.training))
    model.get_base_model().register_forward_hook(lambda *given: hooks.append(1))
    with model.draws(2, generator(), fan_out=True):
        logits(model, ids)
    assert modes == [True]
    for _ in range(2):
        with model.draws(2, generator(), layers="last:1", fan_out=True):
            logits(model, ids)
    assert modes == [True, False, True, True] and len(hooks) == 3
    assert model.training and torch.equal(torch.get_rng_state(), before)


def test_a_model_that_returns_the_rows_it_was_given_is_given_all_of_them(monkeypatch):
    model, ids = adapted(), tokens(batch=2)
    inner = model.get_base_model().model
    forward = inner.forward

    def first_rows(input_ids, **kwargs):
        output = forward(input_ids=input_ids, **kwargs)
        output.last_hidden_state = output.last_hidden_state[: len(input_ids)]
        return output

    monkeypatch.setattr(inner, "forward", first_rows)
    with model.draws(3, generator(), layers="last:1", fan_out=True):
        once = logits(model, ids)
    with model.draws(3, generator(), layers="last:1"):
        torch.testing.assert_close(once, logits(model, ids.repeat(3, 1)), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("target, layers", [("q_proj", "all"), ("q_proj", "last:1"), ("score", "all")])
@pytest.mark.parametrize("rows", [3, 4])
def test_a_class_for_each_row_comes_from_every_draw(target, layers, rows):
    """A classifier picks one token of each row that it was given, here of as many rows as there are draws, or of fewer."""
    torch.manual_seed(0)
    base = LlamaForSequenceClassification(LlamaConfig(**cases.SIZES, num_labels=3, pad_token_id=0)).eval()
    config = cases.config(target_modules=[target], task_type=None)
    model, ids = get_peft_model(base, config).eval(), tokens(batch=rows)
    with torch.no_grad(), posterior_predictive(model, samples=4, layers=layers):
        averaged = logits(model, ids).softmax(-1)
    with torch.no_grad(), sampled(model, Sampling(4, layers=layers), fan_out=True):
        once = logits(model, ids)
    with torch.no_grad(), sampled(model, Sampling(4, layers=layers)):
        wanted = logits(model, ids.repeat(4, 1))
    by_draw = wanted.unflatten(0, (4, rows)).softmax(-1)
    assert by_draw.std(0).max() > 1e-4
    torch.testing.assert_close(once, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(averaged, by_draw.mean(0), atol=2e-5, rtol=1e-4)


def test_memory_that_has_run_out_says_nothing_of_the_model(monkeypatch):
    model, ids = adapted(), tokens(batch=2)

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with model.draws(2, generator(), layers="last:1", fan_out=True):
        with monkeypatch.context() as patch:
            patch.setattr(model.get_base_model().model, "forward", fail)
            with pytest.raises(torch.OutOfMemoryError):
                logits(model, ids)
        logits(model, ids)
        assert find_holder(model)._mode.expansion.modules == tuple(decoder(model))[1:]


def test_gradients_of_checkpointed_layers_are_kept():
    """Re-entrant checkpointing needs the embeddings of the batch that the model has repeated."""
    found = []
    for checkpointing in (False, True):
        model, ids = adapted(target_modules=["q_proj"]).train(), tokens(batch=2)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        with model.draws(3, generator(), fan_out=True):
            model(ids, labels=ids).loss.backward()
        found.append([p.grad for p in find_holder(model).parameters() if p.grad is not None])
    assert found[0] and len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_draws_of_the_head_alone_share_the_whole_model():
    model, rows = adapted(target_modules=["lm_head"]), []
    ids = tokens(batch=2)
    with model.draws(2, generator(1), fan_out=True):
        logits(model, ids)  # finds out that the head takes more rows
    for layer in model.get_base_model().model.layers:
        layer.register_forward_hook(lambda _layer, args, out: rows.append(out.shape[0]))
    with model.draws(3, generator(), fan_out=True):
        once = logits(model, ids)
    with model.draws(3, generator()):
        torch.testing.assert_close(once, logits(model, ids.repeat(3, 1)), atol=2e-5, rtol=1e-4)
    assert rows == [2, 2, 6, 6]


def test_a_model_without_a_list_of_layers_is_given_blocks_from_the_start(monkeypatch):
    model, ids = adapted(), tokens(batch=2)
    with model.draws(3, generator()):
        want = logits(model, ids.repeat(3, 1))
    monkeypatch.setattr(Stack, "find", classmethod(lambda *args: None))
    with model.draws(3, generator(), fan_out=True):
        torch.testing.assert_close(logits(model, ids), want, atol=2e-5, rtol=1e-4)
    with model.draws(3, generator(), layers="last:1"), pytest.raises(InputError, match="not in one list of layers"):
        logits(model, ids)


def test_some_of_the_draws_in_use():
    model, ids = adapted(), tokens(batch=2)
    holder = find_holder(model)
    with model.draws(5, generator(), layers="last:1", fan_out=True):
        whole = logits(model, ids)
        with holder.restoring():
            holder.narrow(1, 3)
            torch.testing.assert_close(logits(model, ids), whole[2:8], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits(model, ids), whole)


def test_nothing_is_left_behind():
    """Other modes, copies, and the base model after unloading know nothing of it."""
    model, ids = adapted(), tokens(batch=2)
    mean = logits(model, ids)
    for _ in range(2):
        with model.draws(3, generator(), fan_out=True):
            drawn = logits(model, ids)
        assert torch.equal(logits(model, ids), mean)
    twin = copy.deepcopy(model)
    with twin.draws(3, generator(), fan_out=True):
        torch.testing.assert_close(logits(twin, ids), drawn)
    with model.draws(3, generator(), fan_out=True), model.disable_adapter():
        assert len(logits(model, ids)) == 2
    base = model.unload()
    assert not any(module._forward_pre_hooks for module in base.modules())


@pytest.mark.parametrize(
    "layers, message", [("last:3", "has 2 layers; give at most last:2"), ("first:1", "give 'all', ")]
)
def test_layers_that_do_not_exist(layers, message):
    model = adapted()
    with pytest.raises(InputError, match=r"^draw_layers is") as error, model.draws(2, layers=layers):
        logits(model, tokens(batch=2))
    assert message in str(error.value)


def test_only_what_has_rows_of_the_batch_is_repeated():
    """Positions are a vector, of as many entries as there are rows by chance. Masks may be several, by kind of layer."""
    block = torch.nn.Identity()
    batch, positions = torch.randn(3, 5), torch.arange(3)
    masks = {"mask": (batch, None), "masks": {"full": batch}}
    (given,), named = DrawExpansion((block,), 2).enter(block, (batch,), {"positions": positions, **masks})
    assert torch.equal(given, torch.cat([batch, batch])) and named["positions"] is positions
    assert named["mask"][0] is given and named["mask"][1] is None and named["masks"]["full"] is given


def test_rows_are_those_of_the_tokens():
    """Whatever else a model is given first, such as the places of the tokens, or one mask for all."""
    root, ids, mask = torch.nn.Identity(), torch.zeros(3, 5, dtype=torch.long), torch.ones(1, 1, 5, 5)
    _, named = DrawExpansion((root,), 2).enter(root, (torch.arange(5),), {"mask": mask, "input_ids": ids})
    assert len(named["input_ids"]) == 6 and named["mask"] is mask
