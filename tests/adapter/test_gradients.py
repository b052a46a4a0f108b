"""Gradients that must be the same whatever the user does to save memory, and that must reach every parameter."""

import copy
import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model

from adapter.cases import MODELS, adapted, base_model, config, tokens
from bayeslora import find_holder
from bayeslora.adapter.layer import add_update
from bayeslora.errors import InputError
from bayeslora.posterior.factors import LayerFactors
from rounding import summed
from tiers import some

ALL = pytest.mark.parametrize("architecture", MODELS)
KL_WEIGHT = 1e-3


def gradients(model, **forward):
    """Gradient of loss and KL at a draw that is the same at every call."""
    model.train()
    model.zero_grad()
    model.seed_draws(0)
    inputs = forward or {"input_ids": tokens()}
    loss = model(**inputs, labels=tokens()).loss + KL_WEIGHT * model.kl().total
    loss.backward()
    return {name: p.grad.clone() for name, p in find_holder(model).named_parameters()}


def assert_same(got, want):
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, **summed(grad), msg=lambda m, name=name: f"{name}: {m}")
        assert grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    "architecture, reentrant, preserve_rng_state",
    some(
        list(itertools.product(MODELS, [False, True], [False, True])),
        lambda case: case[0] == "llama" or case[1:] == (True, False),
    ),
)
def test_checkpointing_gives_the_same_gradients(architecture, reentrant, preserve_rng_state):
    model = adapted(architecture, target_modules="all-linear")
    plain = gradients(model)
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": reentrant, "preserve_rng_state": preserve_rng_state}
    )
    assert_same(gradients(model), plain)
    assert_same(gradients(model), plain)  # a second step finds nothing left over from the first


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_inputs_embeds(reentrant):
    model = adapted()
    embeds = model.get_input_embeddings()(tokens()).detach()
    plain = gradients(model, inputs_embeds=embeds)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert_same(gradients(model, inputs_embeds=embeds.requires_grad_()), plain)


def test_several_adapters_under_reentrant_checkpointing():
    from adapter.cases import config

    model = adapted()
    model.add_adapter("other", config(seed=4, posterior="point"))
    model.base_model.set_adapter(["default", "other"])
    plain = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert_same(gradients(model), plain)


def test_a_bridge_that_nothing_crosses_is_noticed():
    model = adapted()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.train()
    base = model.get_base_model()
    base.get_input_embeddings = lambda: None
    with pytest.raises(RuntimeError, match="re-entrant gradient checkpointing needs the model's input embeddings"):
        model(input_ids=tokens(), labels=tokens())


@ALL
@pytest.mark.parametrize("posterior", ["inducing", "point", "ensemble"])
def test_no_parameter_is_left_without_gradient(architecture, posterior):
    model = adapted(architecture, posterior=posterior)
    model.train()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    for name, parameter in find_holder(model).named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert all(p.grad is None for n, p in model.named_parameters() if "weight_posterior" not in n)


@pytest.mark.parametrize("posterior", ["inducing", "point", "ensemble"])
def test_the_mean_has_gradients_too(posterior):
    """A model kept in evaluation mode to switch dropout off must still learn."""
    model = adapted(posterior=posterior).eval()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    for name, parameter in find_holder(model).named_parameters():
        if "lambda_logit" not in name:  # the mean knows nothing of the noise
            assert parameter.grad.abs().sum() > 0, name


def test_mixed_precision():
    """Under autocast the layers compute in bfloat16, the posterior does not."""
    model = adapted()
    plain = gradients(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = gradients(model)
    assert all(grad.dtype == torch.float32 and torch.isfinite(grad).all() for grad in half.values())
    mean = "bayeslora_posterior.default.mean_4x4"
    assert torch.nn.functional.cosine_similarity(half[mean].flatten(), plain[mean].flatten(), dim=0) > 0.98


def test_an_update_in_another_precision_than_the_layers_is_scaled_too():
    """As it is where a layer computes in float32 what comes in bfloat16."""
    rng = torch.Generator().manual_seed(0)
    x, result = torch.randn(2, 5, 8, generator=rng).bfloat16(), torch.randn(2, 5, 6, generator=rng)
    factors = LayerFactors(torch.randn(1, 3, 8, generator=rng), torch.randn(1, 6, 3, generator=rng))
    update = x.float() @ factors.A[0].mT @ factors.B[0].mT
    got = add_update(x, result, factors, 3.0)
    assert got.dtype == torch.float32
    # each of two products rounds its terms to 8 bits
    torch.testing.assert_close(got, result + 3.0 * update, atol=3.0 * 2**-7 * float(update.abs().max()), rtol=0)


def test_gradients_of_n_draws_are_the_mean_over_the_blocks():
    model = adapted()
    ids = tokens(batch=2)
    model.train()
    model.draw(3, torch.Generator().manual_seed(0))
    model(input_ids=ids.repeat(3, 1), labels=ids.repeat(3, 1)).loss.backward()
    folded = {n: p.grad.clone() for n, p in find_holder(model).named_parameters()}
    # the same three draws, one network at a time
    holder = find_holder(model)
    factors = holder.posterior("default").draw(3, torch.Generator().manual_seed(0))
    model.zero_grad()
    losses = []
    for k in range(3):
        holder.use({"default": factors.pick(k)})
        losses.append(model(input_ids=ids, labels=ids).loss)
    torch.stack(losses).mean().backward()
    for name, parameter in holder.named_parameters():
        torch.testing.assert_close(folded[name], parameter.grad, **summed(parameter.grad))


def train(model, steps=4, accumulate=1, checkpointing=None):
    """Steps of gradient descent on four sequences, at draws fixed by the step."""
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    model.train()
    holder = find_holder(model)
    optimiser = torch.optim.SGD(holder.parameters(), lr=0.02, momentum=0.9)
    for step in range(steps):
        optimiser.zero_grad()
        for part in tokens(seed=step).chunk(accumulate):
            model.seed_draws(step)
            likelihood = model(input_ids=part, labels=part).loss / accumulate
            (likelihood + KL_WEIGHT * model.kl().total / accumulate).backward()
        optimiser.step()
    return {name: p.detach().clone() for name, p in holder.named_parameters()}


def test_training_takes_the_same_path_whatever_saves_memory():
    model = adapted(settings={"init_d": 0.3})  # at its usual 1e-3, D hardly feels a gradient
    start = {name: p.detach().clone() for name, p in find_holder(model).named_parameters()}
    plain = train(copy.deepcopy(model))
    assert all(not torch.equal(plain[name], start[name]) for name in start)
    for settings in ({"checkpointing": False}, {"checkpointing": True}, {"accumulate": 2}, {"accumulate": 4}):
        other = train(copy.deepcopy(model), **settings)
        for name in plain:
            torch.testing.assert_close(other[name], plain[name], atol=1e-4, rtol=1e-3, msg=f"{settings} {name}")


def test_posteriors_aim_at_the_gradient_that_a_lora_would_get():
    """Of two losses, against autograd through PEFT's own LoRA with the same ``A``, and ``B`` at zero."""
    model = adapted(init_weights=True, target_modules=["q_proj"])
    holder = find_holder(model)
    stock = get_peft_model(
        base_model(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    texts = [tokens(), tokens().flip(1)]
    layers = {name: module for name, module in stock.named_modules() if name.endswith("q_proj")}
    mean = holder.posterior("default").mean()
    for name, layer in layers.items():
        layer.lora_A["default"].weight.data.copy_(mean[name.removeprefix("base_model.model.")].A[0])
    sum(stock(input_ids=ids, labels=ids).loss for ids in texts).backward()
    found = []
    holder.posterior("default").aim = found.append
    doubled = []
    holder.aim([lambda ids=ids: model(input_ids=ids, labels=ids).loss for ids in texts], doubled.append)
    assert len(doubled) == 1  # what several processes would add up
    for name, layer in layers.items():
        own = found[0][name.removeprefix("base_model.model.")]
        want = layer.lora_B["default"].weight.grad
        torch.testing.assert_close(own.B[0], want, **summed(want))
        assert not own.A.any()
    model(input_ids=texts[0], labels=texts[0]).loss.backward()  # and draws are what they were


def test_a_loss_to_aim_by_may_look_at_another_adapter():
    """As those of TRL do, at a copy from before training."""
    given = {"init_weights": True, "target_modules": ["q_proj"]}
    alone, model = adapted(**given), adapted(**given)
    model.add_adapter("ref", config(**given))

    def loss():
        own = model(input_ids=tokens(), labels=tokens()).loss
        model.set_adapter("ref")
        with torch.no_grad():
            other = model(input_ids=tokens(), labels=tokens()).loss
        model.set_adapter("default")
        return own - other

    model.aim([loss])
    alone.aim([lambda: alone(input_ids=tokens(), labels=tokens()).loss])
    want = dict(find_holder(alone).posterior("default").named_parameters())
    for name, parameter in find_holder(model).posterior("default").named_parameters():
        assert torch.equal(parameter, want[name])


def test_where_nothing_aims_nothing_is_computed():
    find_holder(adapted(posterior="point")).aim([lambda: pytest.fail("computed")])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_none_ends_in_one_line(value):
    model = adapted(init_weights=True, target_modules=["q_proj"])
    with pytest.raises(
        InputError, match=r"the gradient is NaN or infinite before training has begun: .* check its weights"
    ):
        model.aim([lambda: value * model(input_ids=tokens(), labels=tokens()).loss])


def test_a_model_can_be_told_to_aim():
    model = adapted(init_weights=True, target_modules=["q_proj"])
    start = {name: p.detach().clone() for name, p in find_holder(model).named_parameters()}
    model.aim([lambda: model(input_ids=tokens(), labels=tokens()).loss])
    moved = [name for name, p in find_holder(model).named_parameters() if not torch.equal(p, start[name])]
    assert [name.split(".")[-1].split("_32")[0] for name in moved] == ["z_row_B"]
