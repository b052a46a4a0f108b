"""Adapters of PEFT's own: when they sample, from which seed, and what stays as PEFT has it."""

import copy

import pytest
import torch
from peft import PeftModel

from adapter.cases import base_model, foreign_model, generator, logits, tokens
from bayeslora import find_holder
from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.foreign import FOREIGN, MontecloraSettings, PveraSettings
from bayeslora.adapter.foreign.monteclora import noise
from bayeslora.train.optimise import parameter_groups

SETTINGS = {"monteclora": {"sample_scaler": 0.1, "use_entropy": True}, "pvera": {"r": 16, "dropout": 0.3}}
ALL = pytest.mark.parametrize("name", FOREIGN)


def made(name, settings=None, **changes):
    """A model in evaluation mode whose adapter does something."""
    model = foreign_model(FOREIGN[name], SETTINGS[name] | (settings or {}), **changes)
    noise = generator(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key or "lambda_b" in key:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=noise))
    return model.eval()


def drawn(model, n, seed=0, ids=None):
    """Logits ``[n, B, T, V]`` of ``n`` draws."""
    ids = tokens() if ids is None else ids
    holder = find_any_holder(model)
    with holder.restoring():
        holder.draw(n, generator(seed))
        return logits(model, ids.repeat(n, 1)).unflatten(0, (n, -1))


# Draws ----------------------------------------------------------------------------------------------------------------


@ALL
def test_draws_differ_and_can_be_repeated(name):
    model = made(name)
    first, second = drawn(model, 2)
    assert not torch.allclose(first, second, atol=1e-4)
    assert torch.equal(drawn(model, 2), torch.stack([first, second]))
    assert not torch.allclose(drawn(model, 1, seed=1)[0], first, atol=1e-4)
    assert torch.equal(drawn(model, 4)[:2], torch.stack([first, second]))  # however many there are


@ALL
def test_draws_are_kept_until_told_otherwise(name):
    model = made(name, {"dropout": 0.0} if name == "pvera" else {})
    holder, mean = find_any_holder(model), logits(model)
    holder.draw(1, generator())
    first = logits(model)
    assert torch.equal(logits(model), first) and not torch.allclose(first, mean, atol=1e-4)
    with holder.restoring():
        holder.deterministic()
        assert torch.equal(logits(model), mean)
        assert torch.equal(logits(model.train()), mean)
    model.eval()
    assert torch.equal(logits(model), first)


@ALL
def test_the_layers_of_a_draw_have_noise_of_their_own(name):
    """Layers of equal shape would else share it."""
    model = made(name, targets=["q_proj"])
    layers = [model.get_submodule(path) for path in find_any_holder(model).layer_names]
    x = torch.randn(1, 3, 32, generator=generator())
    state = copy.deepcopy(layers[0].state_dict())
    for layer in layers:
        layer.load_state_dict(state)
    find_any_holder(model).draw(1, generator())
    one, other = (layer(x) for layer in layers)
    assert not torch.allclose(one, other, atol=1e-4)


def test_a_draw_of_monteclora_is_one_network_for_all_questions():
    model = made("monteclora")
    whole = drawn(model, 2)
    parts = [drawn(model, 2, ids=part) for part in tokens().split(1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_noise_of_pvera_belongs_to_tokens():
    model = made("pvera")
    same = tokens(batch=1).repeat(2, 1)
    one, other = drawn(model, 1, ids=same)[0]
    assert not torch.allclose(one, other, atol=1e-4)


@ALL
def test_the_global_random_numbers_are_left_alone(name):
    state = torch.get_rng_state()
    model = made(name)
    drawn(model, 3)
    assert torch.equal(torch.get_rng_state(), state)


@ALL
def test_the_seed_decides_where_an_adapter_starts(name):
    def start(seed):
        return foreign_model(FOREIGN[name], SETTINGS[name], seed=seed).state_dict()

    one, same, other = start(0), start(0), start(1)
    assert all(torch.equal(value, same[key]) for key, value in one.items())
    assert any(not torch.equal(value, other[key]) for key, value in one.items())


@ALL
def test_blocks_that_do_not_fit_and_impossible_numbers_are_refused(name):
    model = made(name)
    holder = find_any_holder(model)
    holder.draw(3)
    with pytest.raises(ValueError, match="with 3 draws in use the batch must consist of 3 blocks of equal size"):
        logits(model)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        holder.draw(0)


# What stays as PEFT has it ----------------------------------------------------------------------------------------------


@ALL
def test_stock_peft_loads_the_adapter_and_gives_the_same_mean(name, tmp_path):
    model = made(name)
    drawn(model, 2)
    with torch.no_grad():
        model.train()(tokens())
    model.eval().save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(base_model(), tmp_path).eval()
    assert torch.equal(logits(stock), logits(model))
    FOREIGN[name].attach(stock)
    assert torch.equal(drawn(stock, 2), drawn(model, 2))


@ALL
def test_without_draws_training_samples_from_the_global_random_numbers(name):
    model = made(name).train()
    assert not torch.equal(logits(model), logits(model))


@ALL
def test_the_base_model_is_given_back_as_it_was(name):
    base = base_model()
    before = [key for key, _ in base.named_modules()]
    model = FOREIGN[name].adapt(
        base, FOREIGN[name].peft_config({}, rank=2, alpha=4, targets=["q_proj"], layers=None, seed=0), 0
    )
    drawn(model, 2)
    assert model.unload() is base
    assert [key for key, _ in base.named_modules()] == before
    assert torch.equal(logits(base), logits(base_model()))


def test_layers_that_cannot_sample_are_refused_and_undone(monkeypatch):
    kind = FOREIGN["monteclora"]
    monkeypatch.setattr(kind, "_adapts", lambda self, module: False)
    base = base_model()
    with pytest.raises(ValueError, match="PEFT made no layer that samples"):
        kind.adapt(base, kind.peft_config({}, rank=2, alpha=4, targets=["q_proj"], layers=None, seed=0), 0)
    assert [key for key, _ in base.named_modules()] == [key for key, _ in base_model().named_modules()]


def test_only_the_named_layers_are_adapted():
    for name in FOREIGN:
        model = made(name, layers=[1])
        assert all(".layers.1." in path for path in find_any_holder(model).layer_names)


def test_our_own_interface_says_that_it_is_not_for_these():
    with pytest.raises(ValueError, match="found one of PEFT's own"):
        find_holder(made("pvera"))


@pytest.mark.parametrize("copies", [1, 3, 8])
@pytest.mark.parametrize("rank", [1, 4])
def test_the_noise_of_monteclora_is_pefts(copies, rank):
    """With the same random numbers, in values, in gradients and in what PEFT's loss is made of."""
    model = made("monteclora", {"num_samples": copies}, rank=rank).train()
    layer = model.get_submodule(find_any_holder(model).layer_names[0])
    sampler = layer.lora_monteclora_sampler["default"]
    sample = sampler.sampler.get()

    def outcome(noisy):
        model.zero_grad()
        value = noisy()
        loss, entropy = sampler.get_variational_loss()
        (value.square().sum() + 100 * loss + entropy).backward()
        return value, loss, entropy, sampler.std_prior.grad.clone(), sampler.expert_weights_prior.grad.clone()

    def pefts():
        sampler.sampler.index = 0
        noisy, weights = sampler()
        return torch.einsum("n,nij->ij", weights, noisy)

    def ours():
        return noise(sampler, sample["z_mvn"], sample["z_wishart"].diag(), sample["z_dirichlet"])

    torch.testing.assert_close(outcome(ours), outcome(pefts), rtol=1e-4, atol=1e-6)


def test_wishart_diagonals_follow_the_distribution_of_pefts():
    """Sums of squared normals instead of the diagonal of a Wishart matrix: same quantiles."""
    rank, count = 3, 20_000
    torch.manual_seed(0)
    wishart = torch.distributions.Wishart(df=rank, scale_tril=torch.eye(rank))._bartlett_sampling(torch.Size([count]))
    pefts = wishart.diagonal(dim1=-2, dim2=-1)
    ours = torch.randn(count, rank, rank).square().sum(1)
    levels = torch.tensor([0.1, 0.5, 0.9])
    density = torch.distributions.Chi2(rank).log_prob(ours.quantile(levels, 0)).exp()
    deviation = (2 * levels * (1 - levels) / count).sqrt()[:, None] / density  # of the difference of two quantiles
    assert ((pefts.quantile(levels, 0) - ours.quantile(levels, 0)).abs() < 5 * deviation).all()
    torch.testing.assert_close(ours.T.corrcoef(), torch.eye(rank), atol=5 / count**0.5, rtol=0)


# What training asks for -------------------------------------------------------------------------------------------------


def gradients(model):
    model.zero_grad()
    holder = find_any_holder(model.train())
    holder.draw(2, generator())
    torch.manual_seed(1)  # of dropout
    loss = model(tokens().repeat(2, 1)).logits.square().mean()
    penalty = holder.penalty()
    (loss if penalty is None else loss + penalty).backward()
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@ALL
def test_gradients_are_right_under_gradient_checkpointing(name):
    model = made(name)
    expected = gradients(model)
    assert expected.keys() == {key for key, p in model.named_parameters() if p.requires_grad}
    assert all(g.abs().sum() > 0 for g in expected.values())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = gradients(model)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


@pytest.mark.parametrize("settings", [{}, {"use_entropy": False, "kl_loss_weight": 1.0, "num_samples": 3}])
def test_the_penalty_of_monteclora_is_pefts_loss_in_values_and_gradients(settings):
    model = made("monteclora", settings).train()
    holder = find_any_holder(model)
    holder.draw(1, generator())

    def outcome(loss):
        model.zero_grad()
        loss.backward(retain_graph=True)
        return loss, {name: p.grad.clone() for name, p in model.named_parameters() if "prior" in name}

    model(tokens())
    ours, pefts = outcome(holder.penalty()), outcome(model.base_model._get_monteclora_loss())
    torch.testing.assert_close(ours, pefts, rtol=1e-4, atol=1e-7)
    assert ours[0] > 0 and find_any_holder(model.eval()).penalty() is None


def test_the_penalty_is_that_of_the_active_adapter():
    """Another one may have another number of copies."""
    model = made("monteclora")
    other = FOREIGN["monteclora"].peft_config(
        {"num_samples": 3}, rank=2, alpha=4, targets=["q_proj"], layers=None, seed=0
    )
    model.add_adapter("other", other)
    model.train()
    find_any_holder(model).draw(1, generator())
    with torch.no_grad():
        model(tokens())
    torch.testing.assert_close(find_any_holder(model).penalty(), model.base_model._get_monteclora_loss())


def test_a_copy_of_a_model_predicts_and_draws_the_same():
    """And has layers of its own, whose forward pass is ours."""
    model = made("monteclora")
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), logits(model)) and torch.equal(drawn(twin, 2), drawn(model, 2))


def test_pvera_has_no_penalty_and_neither_has_a_kl():
    assert find_any_holder(made("pvera").train()).penalty() is None
    for name in FOREIGN:
        assert find_any_holder(made(name)).kl().total == 0


def test_what_samplers_note_does_not_outlive_the_draws():
    model = made("monteclora")
    before = copy.deepcopy(model.state_dict())
    holder = find_any_holder(model.train())
    with holder.restoring():
        holder.draw(1, generator())
        model(tokens())
        assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_samplers_are_scales_to_the_optimiser_and_not_decayed():
    groups = {group["kind"]: group for group in parameter_groups(made("monteclora"), 1e-3, 0.1, {})}
    assert groups.keys() == {"weights", "scale"}
    assert all("monteclora_sampler" in name for name in groups["scale"]["names"])
    assert (groups["scale"]["weight_decay"], groups["weights"]["weight_decay"]) == (0.0, 0.1)


# Settings ---------------------------------------------------------------------------------------------------------------


def test_settings_reach_peft():
    config = made("monteclora").peft_config["default"]
    assert (config.r, config.lora_alpha, config.monteclora_config.sample_scaler) == (4, 8.0, 0.1)
    assert config.monteclora_config.use_entropy and config.monteclora_config.buffer_size == 1
    config = made("pvera", seed=3).peft_config["default"]
    assert (config.r, config.pvera_dropout, config.projection_prng_key, config.save_projection) == (16, 0.3, 3, True)


@pytest.mark.parametrize(
    "kind, wrong",
    [
        (PveraSettings, {"r": 0}),
        (PveraSettings, {"dropout": 1.0}),
        (MontecloraSettings, {"num_samples": 0}),
        (MontecloraSettings, {"sample_scaler": -1.0}),
        (MontecloraSettings, {"kl_loss_weight": float("nan")}),
    ],
)
def test_impossible_settings_are_refused(kind, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(**wrong)


def test_a_large_mixture_has_a_finite_penalty():
    """PEFT's own overflows from about 20 copies on."""
    model = foreign_model(FOREIGN["monteclora"], {"num_samples": 64}).train()
    with torch.no_grad():
        model(tokens())
    assert torch.isfinite(find_any_holder(model).penalty())
