"""Passes between a training pass and its backward pass, and what uses the draws of which."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from adapter.cases import adapted, config, generator, logits, tokens
from bayeslora import find_holder

KINDS = pytest.mark.parametrize(
    "told",
    [
        {"posterior": "inducing"},
        {"posterior": "inducing", "settings": {"flow_depth": 1}},
        {"posterior": "decoupled"},
        {"posterior": "meanfield"},
    ],
    ids=["inducing", "flow", "decoupled", "meanfield"],
)
CHECKPOINTING = pytest.mark.parametrize("checkpointing", [None, False, True], ids=["kept", "anew", "re-entrant"])


def made(told, checkpointing=None):
    model = adapted(**told).train()
    model.seed_draws(3)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    return model


def loss_of(model, seed=0):
    ids = tokens(seed=seed)
    return model(input_ids=ids, labels=ids).loss


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def without(model):
    with torch.no_grad():
        loss_of(model, seed=1)


def evaluation(model):
    model.eval()
    without(model)
    model.train()


@KINDS
@CHECKPOINTING
@pytest.mark.parametrize("between", [without, evaluation])
def test_a_pass_in_between_changes_no_gradient(told, checkpointing, between):
    """Neither that of the loss nor that of the KL, which belongs to the draw of the pass that is learnt from."""
    model = made(told)
    want = gradients(model, loss_of(model) + 1e-3 * model.kl().total)
    model = made(told, checkpointing)
    loss = loss_of(model)
    if between is without:  # an evaluation has no draw, and the KL is to be asked for before it
        between(model)
        loss = loss + 1e-3 * model.kl().total
    else:
        loss = loss + 1e-3 * model.kl().total
        between(model)
    found = gradients(model, loss)
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7)


@KINDS
def test_after_the_backward_pass_every_pass_draws_anew(told):
    model = made(told)
    loss = loss_of(model)
    loss.backward()
    one, other = logits(model), logits(model)
    assert loss.isfinite() and not torch.equal(one, other)  # though its graph is kept


def test_a_pass_without_gradients_draws_for_its_own_number_of_rows():
    """Eight draws share eight rows, and cannot share three."""
    model = made({"posterior": "decoupled"})
    ids = tokens(batch=8)
    model(input_ids=ids, labels=ids)
    assert logits(model, tokens(batch=3)).shape[0] == 3


@KINDS
@CHECKPOINTING
@pytest.mark.parametrize("shared", [False, True])
def test_several_passes_may_come_before_one_backward_pass(told, checkpointing, shared):
    """Each with draws of its own, or all with the same."""

    def found(model):
        with model.draws(2, generator(5)) if shared else nullcontext():
            return gradients(model, loss_of(model) + loss_of(model, seed=1))

    want = found(made(told))
    for name, value in found(made(told, checkpointing)).items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-7)


@KINDS
@pytest.mark.parametrize("checkpointing", [False, True])
def test_passes_that_were_given_up_do_no_harm(told, checkpointing):
    """As after memory ran out in one, or where a loss is kept and not learnt from."""
    want = []
    for given_up in (False, True):
        model = made(told, checkpointing)
        kept = loss_of(model)
        model.seed_draws(7)
        if not given_up:
            del kept
        want.append(gradients(model, loss_of(model)))
    for name, value in want[0].items():
        torch.testing.assert_close(want[1][name], value, rtol=1e-4, atol=1e-7)


@KINDS
def test_a_whole_model_may_be_checkpointed(told):
    """Checkpointing restores torch's random numbers, from which it draws then."""

    def found(run):
        model = adapted(**told).train()
        torch.manual_seed(0)
        return gradients(model, run(lambda seed: loss_of(model, seed)))

    want = found(lambda loss: loss(0))
    for name, value in found(lambda loss: checkpoint(loss, 0, use_reentrant=False)).items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_adapters_may_be_trained_one_after_the_other(checkpointing):
    model = made({"posterior": "meanfield"}, checkpointing)
    model.add_adapter("other", config(posterior="inducing"))
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        assert gradients(model, loss_of(model))
        if checkpointing is None:
            assert not torch.equal(logits(model), logits(model))


def test_nothing_is_kept_of_a_pass_that_was_given_up():
    model = made({"posterior": "decoupled"})
    loss = loss_of(model)
    kept = weakref.ref(find_holder(model)._drawn["default"].factors.A[0])
    del loss
    evaluation(model)
    gc.collect()
    assert kept() is None


def test_a_fixed_adapter_writes_with_its_mean():
    model = made({"posterior": "meanfield"})
    find_holder(model).fixed.add("default")
    prompt = tokens(batch=2)
    texts = [model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False, pad_token_id=0) for _ in range(2)]
    assert torch.equal(*texts)
    assert torch.equal(
        texts[0], model.eval().generate(input_ids=prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    )


def test_points_may_be_passed_as_often_as_one_likes():
    model = made({"posterior": "point"}, checkpointing=False)
    assert gradients(model, loss_of(model) + loss_of(model, seed=1))


@KINDS
def test_a_text_is_written_by_one_network(told):
    """In training, too, as trainers that let the model write do."""
    model = made(told)
    prompt = tokens(batch=2)
    holder, draws = find_holder(model), []
    draw = holder._source.draw
    holder._source.draw = lambda *given: draws.append(given) or draw(*given)
    for count in range(1, 4):
        model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert len(draws) == count
    assert find_holder(model)._mode.kind == "automatic"


def test_a_part_of_the_model_uses_the_mean_in_evaluation_and_is_refused_in_training():
    model = adapted()
    head, x = model.get_base_model().lm_head, torch.randn(1, 32, generator=generator())
    with torch.no_grad():
        want = head(x)
        model.train()(tokens())
        model.eval()
        assert torch.equal(head(x), want)  # and not the draw of the pass before
        with model.draws(1, generator(1)):
            drawn = head(x)
        assert not torch.equal(drawn, want) and torch.equal(head(x), want)
        head = adapted().train().get_base_model().lm_head
        with pytest.raises(RuntimeError, match="call the whole model, not a part of it"):
            head(x)


def test_rows_that_are_compared_share_a_draw():
    """Chosen and rejected texts, in the two halves of a batch."""
    model = made({"posterior": "decoupled"})
    both = tokens(batch=4).repeat(2, 1)
    one, other = logits(model, both).chunk(2)
    assert not torch.allclose(one, other)
    model.automatic(draws=1)
    one, other = logits(model, both).chunk(2)
    torch.testing.assert_close(one, other)
    model.automatic()
    assert find_holder(model).most_draws is None
    with pytest.raises(ValueError, match="at least 1, got 0"):
        model.automatic(draws=0)
