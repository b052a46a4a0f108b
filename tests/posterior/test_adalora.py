"""AdaLoRA against PEFT's own: the same penalty, importance and pruned triplets along a whole training run."""

import copy
import itertools
import warnings

import pytest
import torch
from peft import AdaLoraConfig, get_peft_model
from peft.tuners.adalora.layer import RankAllocator

from adapter.cases import adapted, base_model, tokens
from bayeslora import find_holder
from bayeslora.posterior import AdaloraConfig, AdaloraPosterior, LayerShape, PointPosterior

LAYERS = [
    LayerShape("block0.q", 8, 6, rank=6),
    LayerShape("block0.v", 4, 6, rank=6),
    LayerShape("block1.q", 8, 6, rank=6),
    LayerShape("block1.v", 4, 6, rank=2),
]
STEPS = 20
RATE = 0.3
TARGETS = ["q_proj", "k_proj"]  # of different sizes


def peft_adalora(ranks, target, *, start, end, every, betas):
    """PEFT's AdaLoRA with a rank for each target, which its own configuration does not offer."""
    settings = AdaLoraConfig(
        task_type="CAUSAL_LM",
        target_modules=TARGETS,
        init_r=4,
        target_r=target,
        lora_alpha=8,
        tinit=start,
        tfinal=STEPS - end,
        deltaT=every,
        beta1=betas[0],
        beta2=betas[1],
        total_step=STEPS,
    )
    torch.manual_seed(0)
    model = get_peft_model(base_model(), settings)
    for name, module in model.named_modules():
        if hasattr(module, "lora_E"):
            module.update_layer("default", ranks[name.rpartition(".")[2]], 8, settings)
            for factor in (module.lora_A, module.lora_B, module.lora_E):
                torch.nn.init.normal_(factor["default"], std=0.3)  # so that the update does something
    model.base_model.rankallocator = RankAllocator(model.base_model.model, settings, "default")
    return model.train()


def theirs(model, posterior, factor, what=lambda name, parameter: parameter):
    """Parameters of PEFT's layers, or what is known of them, stacked as ours are."""
    found = dict(model.base_model.model.named_parameters())
    stacked = {}
    for group in posterior.groups:
        names = [f"{layer}.lora_{factor}.default" for layer in group.names]
        values = torch.stack([what(name, found[name]).detach() for name in names])
        stacked[group.key] = values.squeeze(-1) if factor == "E" else values
    return stacked


def ours(posterior, prefix):
    return {group.key: getattr(posterior, f"{prefix}_{group.key}").detach() for group in posterior.groups}


def assert_same(got, want, **tolerance):
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, **tolerance)


@pytest.mark.parametrize(
    "ranks, target, share, every, betas",
    [
        ({"q_proj": 6, "k_proj": 6}, 4, 2 / 3, 1, (0.85, 0.85)),
        ({"q_proj": 6, "k_proj": 6}, 3, 0.5, 3, (0.6, 0.95)),
        ({"q_proj": 6, "k_proj": 2}, 2, 0.5, 1, (0.85, 0.85)),  # 3 of 6 and 1 of 2
    ],
)
def test_a_training_run_is_the_same_as_with_peft(ranks, target, share, every, betas):
    start, end = 4, 15
    settings = {"target_share": share, "start": start / STEPS, "end": end / STEPS, "every": every}
    settings |= {"beta1": betas[0], "beta2": betas[1]}
    their_model = peft_adalora(ranks, target, start=start, end=end, every=every, betas=betas)
    our_model = adapted(
        posterior="adalora", settings=settings, target_modules=TARGETS, init_weights=True, rank_pattern=ranks
    ).train()
    holder = find_holder(our_model)
    posterior = holder.posterior("default")
    with torch.no_grad():
        for factor in "ABE":
            for key, value in theirs(their_model, posterior, factor).items():
                posterior.get_parameter(f"{factor}_{key}").copy_(value)
    optimisers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=RATE) for m in (our_model, their_model)
    ]
    pruned = []
    for step in range(1, STEPS + 1):
        ids = tokens(seed=step % 3)
        for optimiser in optimisers:
            optimiser.zero_grad()
        our_loss = our_model(input_ids=ids, labels=ids).loss + holder.penalty()
        their_loss = their_model(input_ids=ids, labels=ids).loss  # with their penalty in it
        torch.testing.assert_close(our_loss, their_loss, atol=1e-5, rtol=1e-5)
        our_loss.backward(), their_loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        holder.after_step(step, STEPS)
        their_model.base_model.update_and_allocate(step)
        got, want = ours(posterior, "E"), theirs(their_model, posterior, "E")
        assert_same({k: v == 0 for k, v in got.items()}, {k: v == 0 for k, v in want.items()})
        assert_same(got, want, atol=1e-4, rtol=1e-3)
        pruned.append(sum(int((value == 0).sum()) for value in got.values()))
        if step < end:
            allocator = their_model.base_model.rankallocator
            for factor in "ABE":
                for mine, notes in (("sensitivity", allocator.exp_avg_ipt), ("uncertainty", allocator.exp_avg_unc)):
                    known = theirs(their_model, posterior, factor, lambda name, _, notes=notes: notes[name])
                    largest = max(value.max() for value in known.values())
                    assert_same(ours(posterior, f"{mine}_{factor}"), known, atol=1e-3 * largest, rtol=1e-2)
    total, left = 2 * sum(ranks.values()), 2 * 2 * target
    assert pruned[:start] == [0] * start
    assert pruned[end - 1 :] == [total - left] * (STEPS - end + 1)
    assert any(0 < count < total - left for count in pruned)


def random_posterior(seed=0, **settings):
    posterior = AdaloraPosterior(LAYERS, AdaloraConfig(**settings), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in posterior.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return posterior


def take_step(posterior, step, steps=STEPS):
    """Plain descent along gradients that the step alone decides."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in posterior.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            parameter -= 0.01 * parameter.grad
    posterior.after_step(step, steps)


def rank(posterior):
    return sum(int((value != 0).sum()) for value in ours(posterior, "E").values())


def naive_scores(posterior):
    """Importance of all triplets, one at a time."""
    scores = {}
    for group in posterior.groups:
        products = {
            factor: ours(posterior, f"sensitivity_{factor}")[group.key]
            * ours(posterior, f"uncertainty_{factor}")[group.key]
            for factor in "ABE"
        }
        for row, layer in enumerate(group.names):
            A, B, E = (products[factor][row] for factor in "ABE")
            for k in range(group.rank):
                scores[layer, k] = float(E[k] + A[k].mean() + B[:, k].mean())
    return scores


@pytest.mark.parametrize("share", [1 / 6, 0.5, 1.0])
def test_the_best_triplets_of_all_layers_are_kept(share):
    posterior = random_posterior(target_share=share, start=0.2, end=0.8, every=4)
    left = 3 * round(share * 6) + max(1, round(share * 2))
    for step in range(1, STEPS + 1):
        take_step(posterior, step)
        if step < 16:
            scores = naive_scores(posterior)
        if step % 4 or step <= 4:
            assert step >= 16 or rank(posterior) == 20
            continue
        budget = posterior.budget(step, STEPS)
        wanted = set(sorted(scores, key=scores.get)[20 - budget :])
        kept = {
            (layer, k)
            for group in posterior.groups
            for row, layer in enumerate(group.names)
            for k in range(group.rank)
            if posterior.get_parameter(f"E_{group.key}")[row, k] != 0
        }
        assert kept == wanted
        assert rank(posterior) == budget >= left
    assert rank(posterior) == left


def test_the_budget_falls_as_a_cubic_between_the_ends():
    posterior = AdaloraPosterior(LAYERS, AdaloraConfig(target_share=0.5, start=0.1, end=0.6))
    budgets = [posterior.budget(step, 100) for step in range(101)]
    assert budgets[:11] == [20] * 11
    assert budgets[60:] == [10] * 41
    assert budgets[35] == int(10 * 0.5**3 + 10)
    assert all(a >= b for a, b in itertools.pairwise(budgets))


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_short_runs_end_at_the_target_too(steps):
    posterior = random_posterior()
    for step in range(1, steps + 1):
        take_step(posterior, step, steps)
    assert rank(posterior) == 3 * 4 + 1


def test_a_run_goes_on_exactly_where_it_was_interrupted():
    """With nothing but parameters and buffers, at every step, the frozen phase included."""
    through = random_posterior(every=2)
    for step in range(1, STEPS + 1):
        fresh = AdaloraPosterior(LAYERS, AdaloraConfig(every=2), seed=9)
        with torch.no_grad():
            for name, tensor in (*through.named_parameters(), *through.named_buffers()):
                (dict(fresh.named_parameters()) | dict(fresh.named_buffers()))[name].copy_(tensor)
        take_step(through, step), take_step(fresh, step)
        pairs = zip(through.parameters(), fresh.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), step
        assert all(torch.equal(a, b) for a, b in zip(through.buffers(), fresh.buffers(), strict=True)), step


def test_an_adapter_that_is_not_trained_is_left_alone():
    posterior = random_posterior()
    before = copy.deepcopy(posterior.state_dict())
    for step in range(1, STEPS + 1):
        posterior.after_step(step, STEPS)
    assert all(torch.equal(before[name], value) for name, value in posterior.state_dict().items())


def test_it_starts_as_published():
    posterior = AdaloraPosterior([LayerShape("q", 200, 100, rank=8)])
    A, B, E = (parameter.detach() for parameter in posterior.parameters())
    assert A.std() == pytest.approx(0.02, rel=0.1) and B.std() == pytest.approx(0.02, rel=0.1)
    assert E.abs().max() == 0 and posterior.mean().product("q").abs().max() == 0
    assert not list(posterior.state_dict().keys() - {name for name, _ in posterior.named_parameters()})


def test_the_penalty_is_zero_for_orthonormal_vectors_and_may_be_switched_off():
    posterior = AdaloraPosterior([LayerShape("q", 9, 7, rank=4)])
    A, B, _ = posterior.parameters()
    with torch.no_grad():
        A.copy_(torch.linalg.qr(torch.randn(1, 7, 4)).Q.mT)
        B.copy_(torch.linalg.qr(torch.randn(1, 9, 4)).Q)
    assert posterior.penalty() < 1e-5
    with torch.no_grad():
        A.zero_()
    torch.testing.assert_close(posterior.penalty(), torch.tensor(0.5 * 4**0.5 / 2), atol=1e-5, rtol=1e-5)
    posterior.penalty().backward()
    assert torch.isfinite(A.grad).all()
    assert AdaloraPosterior(LAYERS, AdaloraConfig(orthogonality=0.0)).penalty() is None


def test_starting_from_a_lora_with_zeros_leaves_nothing_untrainable():
    point = PointPosterior(LAYERS)  # B is zero
    with torch.no_grad():
        A, B = (point.get_parameter(f"{factor}_8x6_r6") for factor in "AB")
        B.normal_(generator=torch.Generator().manual_seed(0))
        A[0, 1], B[1, :, 2] = 0.0, 0.0
    posterior = random_posterior()
    posterior.start_from(point.mean())
    for layer in LAYERS:
        torch.testing.assert_close(posterior.mean().product(layer.name), point.mean().product(layer.name))
    for group in posterior.groups:
        A, B, E = (posterior.get_parameter(f"{factor}_{group.key}") for factor in "ABE")
        assert (A.abs().amax(-1) > 0).all() and (B.abs().amax(-2) > 0).all()
        if group.key == "8x6_r6":
            lengths = A.norm(dim=-1)[E != 0]
            torch.testing.assert_close(lengths, torch.ones_like(lengths))
            assert (E == 0).sum() == 2


def test_a_pruned_adapter_is_merged_like_any_other():
    model = adapted(posterior="adalora", settings={"end": 1.0})
    posterior = find_holder(model).posterior("default")
    for step in range(1, 6):
        take_step(posterior, step, 5)
    ids = tokens()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = model(ids).logits
        torch.testing.assert_close(model.merge_and_unload()(ids).logits, before, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"target_share": 0.0}, "target_share"),
        ({"target_share": 1.1}, "target_share"),
        ({"orthogonality": -1.0}, "orthogonality"),
        ({"start": 0.5, "end": 0.5}, "start < end"),
        ({"end": 1.5}, "end"),
        ({"every": 0}, "every"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": 0.0}, "beta2"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AdaloraConfig(**settings)
