"""Draws that begin to differ at some layer: the batch is given once, and what lies below is computed once."""

import copy

import pytest
import torch

from adapter.cases import MODELS, adapted, generator, logits, tokens
from bayeslora import find_holder
from bayeslora.adapter.draw_expansion import DrawExpansion, Stack
from bayeslora.errors import InputError

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


def test_draws_of_the_head_alone_share_the_whole_model():
    model, rows = adapted(target_modules=["lm_head"]), []
    for layer in model.get_base_model().model.layers:
        layer.register_forward_hook(lambda _layer, args, out: rows.append(out.shape[0]))
    ids = tokens(batch=2)
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
    """Positions are a vector, of as many entries as there are rows by chance."""
    block = torch.nn.Identity()
    batch, positions = torch.randn(3, 5), torch.arange(3)
    (given,), named = DrawExpansion((block,), 2).enter(block, (batch,), {"positions": positions, "mask": (batch, None)})
    assert torch.equal(given, torch.cat([batch, batch])) and named["positions"] is positions
    assert named["mask"][0] is given and named["mask"][1] is None
