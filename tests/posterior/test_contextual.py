"""C-LoRA: its KL, its forward pass token by token, the noise of training and of evaluation, and what it refuses."""

import copy
import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

from adapter.cases import adapted, generator, logits, tokens
from bayeslora import find_holder
from bayeslora.adapter.layer import BayesLoraLinear
from bayeslora.errors import InputError
from bayeslora.posterior import ContextualConfig, ContextualPosterior, LayerShape, PointPosterior
from rounding import summed

LAYERS = [LayerShape("q", 5, 4, rank=3), LayerShape("k", 5, 4, rank=3), LayerShape("v", 6, 4, rank=2)]
SETTINGS = {"hidden": 7}
KL_WEIGHT = 1e-3


def posterior(seed=0, **settings):
    made = ContextualPosterior(LAYERS, ContextualConfig(**{**SETTINGS, **settings}), seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=noise)
    return made


def network(made, name):
    """Of one layer, as torch writes it: mean and standard deviation of the core for one ``h``."""
    group, row = next((g, g.names.index(name)) for g in made.groups if name in g.names)
    W1, b1, W2, b2 = (
        made.get_parameter(f"network_{part}_{group.key}")[row] for part in ("weight1", "bias1", "weight2", "bias2")
    )

    def moments(h):
        out = F.linear(F.relu(F.linear(h, W1, b1)), W2, b2)
        mean, root = out.chunk(2)
        size = (group.rank, group.rank)
        return mean.view(size), torch.sigmoid(root).square().view(size)

    return moments


def naive(made, factors, name, x, draw):
    """``E h`` of one token under one draw, without flips."""
    A = factors[name].A[draw]
    h = A @ x
    mean, sd = network(made, name)(h)
    core = mean
    if len(factors.inner_by_layer()[name].tensors) == 5:
        core = mean + made.scale * sd * factors.inner_by_layer()[name].tensors[-1][draw]
    return core @ h


# Moments and KL -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (3, 4)])
@pytest.mark.parametrize("prior_sd", [0.2, 1.0])
def test_the_kl_is_that_of_the_cores_of_all_tokens(seed, shape, prior_sd):
    made = posterior(seed, prior_sd=prior_sd).double()
    x = torch.randn(1, *shape, 4, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    factors = made.draw(1, torch.Generator().manual_seed(0))
    expected = 0.0
    for layer in LAYERS:
        A = factors[layer.name].A
        factors.inner_by_layer()[layer.name](x, A)
        for token in x.flatten(0, 2):
            mean, sd = network(made, layer.name)(A[0] @ token)
            expected = expected + kl_divergence(Normal(mean, sd), Normal(0.0, prior_sd)).sum()
    kl = made.kl(factors)
    torch.testing.assert_close(kl.total, expected)
    assert list(kl.terms) == ["factors"] and kl.total.requires_grad


def test_the_kl_adds_up_over_tokens_and_is_the_mean_over_draws():
    made = posterior()
    x = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))

    def kl(inputs, n=1):
        factors = made.draw(n)
        factors.inner_by_layer()["q"](inputs, factors["q"].A)
        return made.kl(factors).total

    one = kl(x)
    torch.testing.assert_close(kl(torch.cat([x, x], 1)), 2 * one)
    torch.testing.assert_close(kl(torch.cat([x, x], 2)), 2 * one)
    torch.testing.assert_close(kl(x.repeat(5, 1, 1, 1), 5), one)
    assert one > 0


def test_every_pass_has_its_own_kl_and_reading_it_changes_nothing():
    made = posterior()
    factors = made.draw(1)
    few, many = (torch.ones(1, 1, length, 4) for length in (1, 3))
    assert made.kl(factors).total == made.kl().total == 0  # nothing has passed yet
    call = factors.inner_by_layer()["q"]
    call(few, factors["q"].A)
    first = made.kl(factors).total
    assert made.kl(factors).total == first > 0
    call(many, factors["q"].A)
    torch.testing.assert_close(made.kl(factors).total, 3 * first)
    call(few, factors["q"].A), call(many, factors["q"].A)  # two passes before the next reading
    torch.testing.assert_close(made.kl(factors).total, 4 * first)
    made.eval()
    still = made.draw(1)
    still.inner_by_layer()["q"](few, still["q"].A)
    assert still.latents is None and made.kl(still).total == 0


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_training_noise_has_the_moments_of_evaluation_noise(scale):
    made = posterior()
    made.scale = scale
    x = torch.randn(1, 2, 2, 4, generator=torch.Generator().manual_seed(1)).expand(20_000, -1, -1, -1)
    torch.manual_seed(0)
    with torch.no_grad():
        mean_factors = made.mean()
        mean = mean_factors.inner_by_layer()["q"](x[:1], mean_factors["q"].A)[0]
        variance = torch.zeros_like(mean)
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
            h = mean_factors["q"].A[0] @ x[0, row, column]
            variance[row, column] = (scale * network(made, "q")(h)[1]).square() @ h.square()
        for training in (True, False):
            factors = made.train(training).draw(20_000, torch.Generator().manual_seed(0))
            hidden = factors.inner_by_layer()["q"](x, factors["q"].A)
            torch.testing.assert_close(hidden.mean(0), mean, atol=0.03, rtol=0)
            torch.testing.assert_close(hidden.var(0), variance, atol=1e-4, rtol=0.06)
            noise = hidden - mean
            together = (noise[:, 0, 0] * noise[:, 1, 1]).mean(0).abs().max() > 0.05 * variance.max()
            assert together != training  # tokens flip apart in training, share one draw in evaluation


def test_flips_are_signs_on_both_sides_of_the_noise():
    made = posterior().double()
    x = torch.randn(1, 1, 1, 4, dtype=torch.double, generator=torch.Generator().manual_seed(2))
    factors = made.draw(1, torch.Generator().manual_seed(0))
    A = factors["q"].A
    torch.manual_seed(0)
    seen = torch.stack([factors.inner_by_layer()["q"](x, A).flatten() for _ in range(300)]).detach()
    h = A[0] @ x.flatten()
    mean, sd = network(made, "q")(h)
    noise = sd * factors.inner_by_layer()["q"].tensors[-1][0]
    sides = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.double)] * 6)
    possible = torch.stack([mean @ h + s[:3] * (noise @ (s[3:] * h)) for s in sides]).detach()
    apart = (seen.unsqueeze(1) - possible).abs().amax(-1)
    assert apart.amin(1).max() < 1e-10
    assert len(apart.argmin(1).unique()) == 32  # all there are: a change of all signs changes nothing


# In a model ---------------------------------------------------------------------------------------------------------


def contextual(**settings):
    return adapted(posterior="contextual", settings=SETTINGS, **settings)


@pytest.mark.parametrize("draws", [0, 1, 3])
def test_the_forward_pass_is_that_of_every_token_alone(draws):
    model = contextual().eval()
    model.posterior_scale = 0.7
    made = find_holder(model).posterior("default")
    if draws:
        model.draw(draws, generator())
    factors = made.draw(draws, generator()) if draws else made.mean()
    seen = {}
    layers = [module for module in model.modules() if isinstance(module, BayesLoraLinear)]
    for layer in layers:
        layer.register_forward_hook(lambda layer, args, out: seen.update({layer: (args[0], out)}))
    logits(model, tokens(batch=2).repeat(max(1, draws), 1))
    assert len(seen) == len(layers) == 5
    for layer, (x, out) in seen.items():
        expected = layer.base_layer(x)
        for row in range(x.shape[0]):
            for position in range(x.shape[1]):
                draw = row // 2
                core = naive(made, factors, layer.name, x[row, position], draw)
                expected[row, position] += layer.scaling["default"] * factors[layer.name].B[draw] @ core
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


def test_predictions_do_not_depend_on_the_batch():
    model = contextual().eval()
    ids = tokens(batch=3)
    with model.draws(2, generator()):
        together = logits(model, ids.repeat(2, 1)).unflatten(0, (2, 3))
        apart = torch.stack([logits(model, row.repeat(2, 1)) for row in ids], dim=1)
        short = logits(model, ids[:, :4].repeat(2, 1)).unflatten(0, (2, 3))
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(together[:, :, :4], short, atol=1e-5, rtol=1e-4)
    assert (together[0] - together[1]).abs().max() > 1e-3


def gradients(model, kl_first=False):
    """Gradients of loss and KL at the same draw and signs at every call."""
    model.train()
    model.zero_grad()
    model.seed_draws(0)
    torch.manual_seed(3)
    ids = tokens()
    loss = model(input_ids=ids, labels=ids).loss
    kl = model.kl().total
    parameters = dict(find_holder(model).posterior("default").named_parameters())
    if kl_first:
        found = torch.autograd.grad(KL_WEIGHT * kl, parameters.values(), retain_graph=True, materialize_grads=True)
        loss.backward()
        return kl.item(), {n: p.grad + g for (n, p), g in zip(parameters.items(), found, strict=True)}
    (loss + KL_WEIGHT * kl).backward()
    assert model.kl().total == kl, "repetitions in the backward pass must not count"
    return kl.item(), {name: parameter.grad.clone() for name, parameter in parameters.items()}


@pytest.mark.parametrize("kl_first", [False, True])
def test_gradient_checkpointing_gives_the_same_kl_and_gradients(kl_first):
    model = contextual()
    kl, plain = gradients(copy.deepcopy(model), kl_first)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for _ in range(2):  # a second step finds nothing left over from the first
        other_kl, other = gradients(model, kl_first)
        assert other_kl == pytest.approx(kl)
        for name, gradient in plain.items():
            assert gradient.abs().max() > 0, name
            torch.testing.assert_close(other[name], gradient, **summed(gradient))


def test_reentrant_checkpointing_has_no_graph_for_the_kl_and_says_so():
    model = contextual()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(RuntimeError, match="'use_reentrant': False"):
        gradients(model)
    with torch.no_grad():
        assert model.kl().total > 0  # the number can be had


def test_without_gradients_the_kl_is_a_number():
    model = contextual().train()
    with torch.no_grad():
        model(tokens())
        kl = model.kl().total
    assert kl > 0 and not kl.requires_grad
    find_holder(model).posterior("default").requires_grad_(False)
    model(tokens())
    assert model.kl().total > 0  # nothing to train: nothing to refuse


def test_no_graph_is_kept_longer_than_its_draw():
    model = contextual().train()
    kept = []
    for _ in range(3):
        loss = model(input_ids=tokens(), labels=tokens()).loss + KL_WEIGHT * model.kl().total
        kept += [weakref.ref(term) for term in find_holder(model)._drawn["default"].factors.latents.outputs]
        loss.backward()
    gc.collect()
    assert [term() is None for term in kept] == [True] * 10 + [False] * 5  # five layers, and the last draw is in use


def test_everything_is_trained_from_the_second_step_on():
    """At the start ``B`` is zero and hides the rest from the likelihood."""
    model = contextual(init_weights=True).train()
    parameters = dict(find_holder(model).posterior("default").named_parameters())
    optimiser = torch.optim.SGD(parameters.values(), lr=0.1)
    touched = []
    for _ in range(2):
        optimiser.zero_grad()
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        touched.append({name for name, parameter in parameters.items() if parameter.grad.abs().sum() > 0})
        optimiser.step()
    assert touched[0] == {name for name in parameters if name.startswith("B_")}
    assert touched[1] == set(parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_models_of_other_precision(dtype):
    model = contextual().to(dtype).train()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    kl = model.kl().total
    assert kl.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (loss + KL_WEIGHT * kl).backward()
    assert all(torch.isfinite(p.grad).all() for p in find_holder(model).parameters())


def test_merging_and_exporting_are_refused(tmp_path):
    model = contextual().eval()
    with pytest.raises(ValueError, match="depends on the input: there is no mean to merge"):
        model.merge_adapter()
    with pytest.raises(InputError, match="depend on the input"):
        model.export_samples(2, tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_saving_and_loading(tmp_path):
    from peft import PeftModel

    from adapter.cases import base_model

    model = contextual().eval()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base_model(), str(tmp_path)).eval()
    for draws in (0, 2):
        for each in (model, loaded):
            each.draw(draws, generator()) if draws else each.automatic()
        ids = tokens().repeat(max(1, draws), 1)
        torch.testing.assert_close(logits(loaded, ids), logits(model, ids))


# Start --------------------------------------------------------------------------------------------------------------


def test_it_starts_as_published():
    shapes = [LayerShape("q", 64, 32, rank=8), LayerShape("v", 16, 32, rank=8)]
    made = ContextualPosterior(shapes)
    extra = sum(p.numel() for name, p in made.named_parameters() if name.startswith("network_"))
    assert extra == 2 * 8896
    assert made.parameter_count() - extra == PointPosterior(shapes).parameter_count()
    factors = made.draw(2)
    assert factors["q"].B.abs().max() == 0  # so neither mean nor noise has an effect at first
    for part, inputs in (("weight1", 8), ("bias1", 8), ("weight2", 64), ("bias2", 64)):
        value = made.get_parameter(f"network_{part}_64x32_r8").detach()
        assert 0.8 / math.sqrt(inputs) < value.abs().max() <= 1 / math.sqrt(inputs)
    assert {made.kind(name) for name, _ in made.named_parameters()} == {"weights_a", "weights_b", "network"}


def test_a_start_from_lora_can_be_trained_away_from():
    point = PointPosterior(LAYERS, seed=3)
    with torch.no_grad():
        for parameter in point.parameters():
            parameter += 0.3
    made = posterior()
    made.start_from(point.mean())
    x = torch.randn(1, 2, 3, 4)
    factors = made.mean()
    torch.testing.assert_close(
        factors.inner_by_layer()["q"](x, factors["q"].A), x @ point.mean()["q"].A.mT.unsqueeze(1)
    )
    (factors.inner_by_layer()["q"](x, factors["q"].A).square().sum()).backward()
    group = made.groups[0]
    assert made.get_parameter(f"network_weight2_{group.key}").grad[:, :9].abs().sum() > 0


@pytest.mark.parametrize("settings", [{"hidden": 0}, {"prior_sd": 0.0}, {"prior_sd": float("nan")}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        ContextualConfig(**settings)
