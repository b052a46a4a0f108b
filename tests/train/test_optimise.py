"""What the optimiser is told, against the schedulers of torch and transformers, and against single norms."""

import math

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from adapter.cases import adapted, config
from bayeslora import find_holder
from bayeslora.posterior import InducingConfig, InducingPosterior, LayerShape, PointPosterior
from bayeslora.posterior.registry import POSTERIORS
from bayeslora.train.optimise import clip_apart, parameter_groups, parameter_kinds, rate_factor

# Learning rates over time ---------------------------------------------------------------------------------------------


def of_scheduler(make, steps, rate=1.0):
    """Learning rates at every step as a scheduler sets them."""
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = make(optimiser)
    rates = []
    for _ in range(steps):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return rates


def ours(schedule, steps, *, warmup=0.0, steps_per_epoch=5, milestones=(4, 6)):
    return [
        rate_factor(schedule, k, steps=steps, steps_per_epoch=steps_per_epoch, warmup=warmup, milestones=milestones)
        for k in range(steps)
    ]


@pytest.mark.parametrize("steps", [2, 7, 40])
@pytest.mark.parametrize("warmup", [0.0, 0.06, 0.5])
@pytest.mark.parametrize(
    "schedule, make", [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_linear_and_cosine_agree_with_transformers(schedule, make, steps, warmup):
    """But for the rise, which is one step ahead here: theirs begins with a step at rate zero."""
    rising = math.ceil(warmup * steps)
    theirs = of_scheduler(lambda optimiser: make(optimiser, rising, steps), steps + 1)
    got = ours(schedule, steps, warmup=warmup)
    assert got[rising:] == pytest.approx(theirs[rising:steps])
    assert got[:rising] == pytest.approx(theirs[1 : rising + 1])


@pytest.mark.parametrize("steps_per_epoch", [1, 3, 8])
@pytest.mark.parametrize("milestones", [(4, 6), (1,), ()])
def test_multistep_agrees_with_torch(steps_per_epoch, milestones):
    steps = 10 * steps_per_epoch
    at = [epoch * steps_per_epoch for epoch in milestones]
    theirs = of_scheduler(lambda optimiser: torch.optim.lr_scheduler.MultiStepLR(optimiser, at), steps)
    assert ours("multistep", steps, steps_per_epoch=steps_per_epoch, milestones=milestones) == pytest.approx(theirs)


def test_multistep_counts_epochs_from_the_start_though_the_rate_rises_first():
    got = ours("multistep", 50, warmup=0.1)
    assert got[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert got[5:20] == [1.0] * 15 and got[20:30] == pytest.approx([0.1] * 10) and got[30] == pytest.approx(0.01)


def test_constant_rises_and_stays():
    assert ours("constant", 8, warmup=0.5) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("schedule", ["linear", "cosine", "multistep", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 0.06, 0.99])
def test_no_step_is_without_a_rate(schedule, warmup):
    for steps in (1, 2, 17, 50):
        factors = ours(schedule, steps, warmup=warmup)
        assert all(0 < factor <= 1 for factor in factors) and max(factors) == 1.0


# Groups of parameters -------------------------------------------------------------------------------------------------

KINDS = {
    "z_row_": "points",
    "z_col_": "points",
    "log_d_row_": "diagonals",
    "log_d_col_": "diagonals",
    "lambda_logit_": "scale",
    "sd_logit_": "scale",
    "mean_": "mean",
    "flow_": "flow",
}
LAYERS = [LayerShape("a", 12, 8, rank=4), LayerShape("b", 8, 8, rank=4), LayerShape("c", 8, 8, rank=2)]
SETTINGS = [{}, {"flow_depth": 2}, {"flow_depth": 0, "learn_lambda": False}, {"share_inducing": True}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_parameter_of_the_inducing_posterior_has_its_kind(settings):
    posterior = InducingPosterior(LAYERS, InducingConfig(**settings))
    for name, _ in posterior.named_parameters():
        wanted = [kind for prefix, kind in KINDS.items() if name.startswith(prefix)]
        assert [posterior.kind(name)] == wanted, name


def test_scales_are_exactly_what_the_conditional_kl_and_the_width_depend_on():
    """Found by what the parameters do: those that move the spread of draws and not the mean of a Gaussian."""
    posterior = InducingPosterior(LAYERS, InducingConfig(flow_depth=0))
    mean = posterior.mean()
    sum(f.square().sum() for f in (*mean.A, *mean.B)).backward()
    touched = {name for name, p in posterior.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    scales = {name for name, _ in posterior.named_parameters() if posterior.kind(name) == "scale"}
    assert not touched & scales
    posterior.zero_grad()
    posterior.kl()["conditional"].backward()
    pulled = {name for name, p in posterior.named_parameters() if p.grad is not None}
    assert pulled and pulled <= scales


def test_multipliers_name_kinds_that_exist():
    for name, posterior in POSTERIORS.items():
        assert set(posterior.hints.rate_multipliers) <= posterior.hints.all_kinds, name


def test_only_points_do_not_differ_between_draws():
    assert [name for name, it in POSTERIORS.items() if it.spread == "nothing"] == ["point", "adalora"]
    assert PointPosterior(LAYERS).kind("A_12x8r4") == "weights_a"


@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_every_trainable_parameter_is_in_exactly_one_group(posterior, architecture):
    model = adapted(architecture, posterior=posterior)
    groups = parameter_groups(model, 1e-3, 0.1, {})
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == len(list(find_holder(model).parameters()))
    members = [(name, id(p)) for group in groups for name, p in zip(group["names"], group["params"], strict=True)]
    assert sorted(members) == sorted((name, id(p)) for name, p in trainable.items())
    assert len({group["kind"] for group in groups}) == len(groups)
    torch.optim.AdamW(groups)  # takes them as they are


@pytest.mark.parametrize("posterior, decayed", [("inducing", False), ("point", True), ("ensemble", True)])
def test_nothing_is_decayed_but_point_estimates(posterior, decayed):
    groups = parameter_groups(adapted(posterior=posterior), 1e-3, 0.1, {})
    assert {group["weight_decay"] for group in groups} == {0.1 if decayed else 0.0}


def test_learning_rates_are_multiplied_by_kind():
    groups = parameter_groups(adapted(), 0.5, 0.0, {"points": 20.0, "flow": 0.1, "mean": 0.0, "weights": 7.0})
    assert {group["kind"]: group["lr"] for group in groups} == {
        "points": 10.0,
        "flow": 0.05,
        "mean": 0.0,
        "scale": 0.5,
        "diagonals": 0.5,
    }


def test_each_adapter_has_the_kinds_of_its_own_posterior():
    model = adapted()
    model.add_adapter("other", config(posterior="point", target_modules=["q_proj"]))
    for active, kinds in (
        ("default", {"points", "diagonals", "scale", "mean", "flow"}),
        ("other", {"weights_a", "weights_b"}),
    ):
        model.set_adapter(active)
        found = parameter_kinds(model)
        assert set(found.values()) == kinds
        assert all(f".{active}." in name for name in found)
    find_holder(model).requires_grad_(True)  # both at once
    for name, kind in parameter_kinds(model).items():
        assert kind.startswith("weights") == (".other." in name), name


def test_what_is_trained_beside_the_posterior_is_a_weight():
    model = adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])
    kinds = parameter_kinds(model)
    assert [kind for name, kind in kinds.items() if "lm_head" in name] == ["weights"]
    assert sum(kind == "weights" for kind in kinds.values()) == 1
    decay = {group["kind"]: group["weight_decay"] for group in parameter_groups(model, 1e-3, 0.1, {})}
    assert decay.pop("weights") == 0.1 and set(decay.values()) == {0.0}


# Clipping -------------------------------------------------------------------------------------------------------------


def groups_with_gradients(**gradients):
    def parameter(value):
        p = torch.nn.Parameter(torch.zeros(len(value)))
        p.grad = torch.tensor(value)
        return p

    return [{"kind": kind, "params": [parameter(value)]} for kind, value in gradients.items()]


def test_a_huge_gradient_of_the_scales_leaves_that_of_the_data_alone():
    groups = groups_with_gradients(mean=[0.3, 0.0], scale=[3e6, 4e6], flow=[0.0, 0.4])
    norm, scale_norm = clip_apart(groups, 1.0)
    assert (float(norm), float(scale_norm)) == pytest.approx((0.5, 5e6))
    gradients = {group["kind"]: group["params"][0].grad for group in groups}
    assert torch.equal(gradients["mean"], torch.tensor([0.3, 0.0]))
    assert torch.equal(gradients["flow"], torch.tensor([0.0, 0.4]))
    torch.testing.assert_close(gradients["scale"], torch.tensor([0.6, 0.8]))


def test_all_but_scales_share_one_norm():
    groups = groups_with_gradients(mean=[3.0], points=[0.0, 4.0], scale=[0.25])
    clip_apart(groups, 1.0)
    got = torch.cat([group["params"][0].grad for group in groups])
    torch.testing.assert_close(got, torch.tensor([0.6, 0.0, 0.8, 0.25]))


def test_points_have_no_scales_to_clip():
    groups = groups_with_gradients(weights=[30.0, 40.0])
    norm, scale_norm = clip_apart(groups, 0.5)
    assert (float(norm), float(scale_norm)) == (50.0, 0.0)
    torch.testing.assert_close(groups[0]["params"][0].grad, torch.tensor([0.3, 0.4]))


@pytest.mark.parametrize("kind", ["mean", "scale"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_norms_tell_of_gradients_that_are_not_finite(kind, value):
    gradients = {"mean": [1.0], "scale": [1.0], kind: [value]}
    assert not torch.isfinite(sum(clip_apart(groups_with_gradients(**gradients), 1.0)))


@pytest.mark.parametrize(
    "given, want",
    [({}, (1.0, 1.0)), ({"weights": 0.35}, (0.35, 0.35)), ({"weights": 0.5, "weights_b": 16.0}, (0.5, 16.0))],
)
def test_point_estimates_below_a_cut_have_a_rate_of_their_own(given, want):
    model = adapted(stochastic_layers="last:1", target_modules=["q_proj"])
    rates = {group["kind"]: group["lr"] for group in parameter_groups(model, 1.0, 0.0, given)}
    assert (rates["weights_a"], rates["weights_b"]) == want and rates["mean"] == 1.0
