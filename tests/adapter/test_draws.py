"""What a forward pass uses: mean, draws, blocks; and that nothing stale is ever used."""

import copy
from contextlib import nullcontext

import pytest
import torch

from adapter.cases import MODELS, adapted, base_model, generator, logits, tokens
from bayeslora import find_holder
from bayeslora.adapter.holder import KEPT
from bayeslora.posterior import InducingConfig

ALL = pytest.mark.parametrize("architecture", MODELS)


@ALL
def test_a_new_adapter_changes_nothing(architecture):
    model = adapted(architecture, init_weights=True)
    torch.testing.assert_close(logits(model), logits(base_model(architecture)), atol=0, rtol=0)


@pytest.mark.parametrize("rows, draws", [(1, 1), (2, 2), (6, 6), (7, 7), (8, 8), (12, 6), (11, 1), (16, 8)])
@pytest.mark.parametrize("posterior, most", [("decoupled", 8), ("inducing", 1)])
def test_draws_of_training_share_a_batch_where_the_posterior_recommends_several(posterior, most, rows, draws):
    """As many as divide its rows; each row's logits are those of its own draw."""
    model = adapted(posterior=posterior).train()
    ids = tokens(batch=rows)
    with torch.no_grad():
        found = model(input_ids=ids).logits
        factors = find_holder(model)._drawn["default"].factors
        assert factors.n == (draws if most > 1 else 1)
        model.eval()
        with find_holder(model).restoring():
            find_holder(model).use({"default": factors.pick(0)})
            first = model(input_ids=ids[: rows // factors.n]).logits
    torch.testing.assert_close(found[: rows // factors.n], first, atol=2e-5, rtol=1e-4)


@ALL
@pytest.mark.parametrize("posterior", ["inducing", "ensemble", "point"])
def test_blocks_of_a_batch_use_their_own_draw(architecture, posterior):
    """n draws folded into the batch equal n passes, each with the factors of one draw in a merged copy."""
    model = adapted(architecture, posterior=posterior)
    holder = find_holder(model)
    ids = tokens(batch=2)
    with model.draws(3, generator()):
        folded = logits(model, ids.repeat(3, 1))
        factors = holder._mode.held["default"].factors
        assert factors.n == 3
    for k in range(3):
        single = merged_by_hand(architecture, model, factors.pick(k))
        torch.testing.assert_close(folded[2 * k : 2 * k + 2], logits(single, ids), atol=2e-5, rtol=1e-4)
    if posterior != "point":
        assert (folded[:2] - folded[2:4]).abs().max() > 1e-3


def merged_by_hand(architecture, model, factors):
    """A base model with ``s B A`` added to its weights, computed apart from the adapter's code."""
    plain = base_model(architecture)
    modules = dict(plain.named_modules())
    embedding = plain.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(embedding.weight.detach().clone())  # never through a tied head
    for name in factors:
        A, B = factors[name]
        delta = (8 / 4) * B[0] @ A[0]
        weight = modules[name].weight
        modules[name].weight = torch.nn.Parameter(
            weight.detach() + (delta.T if weight.shape != delta.shape or "c_attn" in name else delta).detach()
        )
    return plain


@ALL
def test_evaluation_uses_the_mean_and_training_draws(architecture):
    model = adapted(architecture)
    mean = find_holder(model).posterior("default").mean()
    torch.testing.assert_close(logits(model), logits(merged_by_hand(architecture, model, mean)), atol=2e-5, rtol=1e-4)
    assert torch.equal(logits(model), logits(model))
    model.train()
    assert not torch.equal(logits(model), logits(model))
    with model.deterministic():
        assert torch.equal(logits(model), logits(model))
    assert not torch.equal(logits(model), logits(model))


def test_a_draw_is_held_until_the_next():
    model = adapted()
    model.draw(1, generator(0))
    first = logits(model)
    assert torch.equal(first, logits(model))
    model.draw(1, generator(1))
    assert not torch.equal(first, logits(model))
    model.draw(1, generator(0))
    assert torch.equal(first, logits(model))
    model.automatic()
    mean = logits(model)
    assert not torch.equal(first, mean)
    model.draw(1, generator(0))
    model.deterministic()
    assert torch.equal(mean, logits(model))


def test_contexts_nest_and_restore():
    model = adapted()
    mean = logits(model)
    with model.draws(1, generator(0)):
        outer = logits(model)
        with model.draws(1, generator(1)):
            assert not torch.equal(outer, logits(model))
        assert torch.equal(outer, logits(model))
        with model.deterministic():
            assert torch.equal(mean, logits(model))
        assert torch.equal(outer, logits(model))
    assert torch.equal(mean, logits(model))
    with pytest.raises(RuntimeError, match="boom"), model.draws(1):
        raise RuntimeError("boom")
    assert torch.equal(mean, logits(model))


def test_seeded_draws_can_be_repeated_and_leave_the_global_state_alone():
    model = adapted().train()
    model.seed_draws(3)
    state = torch.get_rng_state()
    first = [logits(model) for _ in range(2)]
    assert torch.equal(state, torch.get_rng_state())
    model.seed_draws(3)
    assert torch.equal(first[0], logits(model))
    assert torch.equal(first[1], logits(model))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("change", ["train", "load", "dtype", "scale"])
def test_no_stale_mean_or_draw(change):
    model = adapted()
    posterior = find_holder(model).posterior("default")
    before = logits(model)
    model.draw(1)
    if change == "train":
        with torch.no_grad():
            for parameter in posterior.parameters():
                parameter.add_(0.1)
    elif change == "load":
        other = adapted(seed=7)
        posterior.load_state_dict(find_holder(other).posterior("default").state_dict())
    elif change == "dtype":
        model.double()
    else:
        model.posterior_scale = 5.0
    with pytest.raises(RuntimeError, match=r"draws of adapter 'default' are stale.*call draw\(\) again"):
        logits(model)
    model.automatic()
    after = logits(model)
    if change == "load":
        torch.testing.assert_close(after, logits(other))
    if change != "scale":
        assert not torch.equal(before, after)


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("optimiser", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_every_optimiser_step_is_noticed(optimiser, how):
    """Fused ones raise no version by themselves, and a mean from before the step would be used after it."""
    notices_steps(lambda parameters: optimiser(parameters, lr=0.1, **how))


class Quiet(torch.optim.Optimizer):
    """Writes to ``data``, as many optimisers of other packages do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(0.1 * parameter.grad)


def test_steps_of_optimisers_of_other_packages_are_noticed():
    notices_steps(Quiet)
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the extra 'quant'")
    notices_steps(lambda parameters: bitsandbytes.optim.AdamW8bit(parameters, lr=0.1))


def test_other_parameters_are_left_alone():
    model, other = adapted(), torch.nn.Linear(3, 3)
    frozen = next(p for p in model.parameters() if not p.requires_grad)
    before = other.weight._version, frozen._version
    for tensors in ([other.weight], [frozen]):
        Quiet(tensors).step()
    assert (other.weight._version, frozen._version) == before


def test_steps_on_a_copy_are_noticed():
    notices_steps(Quiet, copy.deepcopy(adapted()))


def notices_steps(make, model=None):
    model = (model or adapted()).eval()
    steps = make([p for p in model.parameters() if p.requires_grad])
    with torch.no_grad():
        before = logits(model)
        find_holder(model).draw_from_seed(2, 0)
        drawn = held(find_holder(model))
        model.automatic()
    model(tokens()).logits.square().mean().backward()
    steps.step()
    after = logits(model)
    assert not torch.equal(before, after)
    assert torch.equal(after, logits(copy.deepcopy(model)))  # a copy keeps nothing
    with torch.no_grad():
        find_holder(model).draw_from_seed(2, 0)
    assert not torch.equal(drawn, held(find_holder(model)))


def test_draws_kept_in_training_are_not_those_of_evaluation():
    """A Laplace approximation has no noise in training."""
    model = adapted(posterior="laplace", settings={"prior_precision": 1.0})
    holder = find_holder(model)
    with torch.no_grad():
        for training in (True, False):
            model.train(training)
            holder.draw_from_seed(2, 0)
            assert torch.equal(held(holder)[:, 0], held(holder)[:, 1]) == training


def test_draws_are_not_kept_through_training():
    """Also where training says itself when to draw."""
    model = adapted().eval()
    holder = find_holder(model)
    with torch.no_grad():
        holder.draw_from_seed(2, 0)
        assert holder._kept
        holder.draw(1)
        assert holder._kept
    holder.draw(1)
    assert not holder._kept


def test_a_mean_from_inference_mode_serves_gradients_too():
    model = adapted().eval().requires_grad_(False)
    with torch.inference_mode():
        logits(model)
    given = model.get_input_embeddings()(tokens()).detach().requires_grad_()
    model(inputs_embeds=given).logits.sum().backward()
    assert given.grad.abs().sum() > 0


def held(holder):
    return holder._mode.held["default"].factors.B[0]


def test_draws_from_a_seed_are_kept_while_nothing_changes():
    """One prediction after another uses the very same tensors; whatever could make them differ makes them anew."""
    model = adapted("llama").eval()
    holder = find_holder(model)
    with torch.no_grad(), holder.restoring():
        logits(model)  # so that the precision is known
        holder.draw_from_seed(2, 7)
        first = held(holder)
        with model.draws(2, torch.Generator().manual_seed(7)):
            torch.testing.assert_close(held(holder), first, atol=0, rtol=0)
        for seed in (7, 8, 7):
            holder.automatic()
            holder.draw_from_seed(2, seed)
            assert (held(holder) is first) == (seed == 7)
        for seed in range(10, 10 + KEPT):
            holder.draw_from_seed(2, seed)
        holder.draw_from_seed(2, 7)
        assert held(holder) is not first and torch.equal(held(holder), first) and len(holder._kept) == KEPT
        holder.draw_from_seed(2, 7)
        first = held(holder)
        model.posterior_scale = 2.0
        holder.draw_from_seed(2, 7)
        assert held(holder) is not first
        first = held(holder)
    holder.draw_from_seed(2, 7)
    assert held(holder) is not first and held(holder).requires_grad  # a graph is not kept
    with torch.no_grad():
        holder.draw_from_seed(2, 7)
    holder.automatic()
    assert holder._kept
    logits(model.train())
    assert not holder._kept  # training has no use for them


def test_a_batch_that_is_not_made_of_blocks_is_refused():
    model = adapted()
    with (
        model.draws(3),
        pytest.raises(ValueError, match="must consist of 3 blocks of equal size, got a batch of 4"),
    ):
        logits(model)


def test_a_copy_draws_by_itself():
    model = adapted().train()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    twin = copy.deepcopy(model).eval()
    model.eval()
    torch.testing.assert_close(logits(model), logits(twin))
    with torch.no_grad():
        for parameter in find_holder(twin).parameters():
            parameter.add_(0.2)
    assert not torch.equal(logits(model), logits(twin))


def test_a_copy_draws_from_its_seed_anew():
    model = adapted().train()
    model.seed_draws(0)
    with torch.no_grad():
        first, second = model(tokens()).logits, model(tokens()).logits
        again = copy.deepcopy(model)(tokens()).logits
    assert torch.equal(again, first) and not torch.equal(second, first)


def test_generation_keeps_the_draw_for_the_whole_sequence():
    model = adapted()
    ids = tokens(batch=1)
    with model.draws(1, generator()):
        generated = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, use_cache=True)
        recomputed = ids
        for _ in range(5):
            recomputed = torch.cat([recomputed, logits(model, recomputed)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, recomputed)


def test_kl_uses_the_draw_of_the_last_pass():
    model = adapted().train()
    model(input_ids=tokens())
    first, again = model.kl(), model.kl()
    assert torch.equal(first["inducing"], again["inducing"])
    model(input_ids=tokens())
    assert not torch.equal(first["inducing"], model.kl()["inducing"])
    model.kl().total.backward()
    posterior = find_holder(model).posterior("default")
    assert posterior.get_parameter("mean_4x4").grad.abs().sum() > 0


def test_posterior_scale_widens_the_draws():
    model = adapted()
    assert model.posterior_scale == 1.0
    mean = logits(model)

    def spread():
        with model.draws(1, generator()):
            return (logits(model) - mean).abs().mean()

    narrow = spread()
    model.posterior_scale = 3.0
    assert model.peft_config["default"].posterior_scale == 3.0
    assert spread() > 2 * narrow
    with pytest.raises(ValueError, match="posterior scale must be finite"):
        model.posterior_scale = -1.0


def test_scale_belongs_to_our_models_only():
    from peft import LoraConfig, get_peft_model

    lora = get_peft_model(base_model(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(AttributeError, match="posterior_scale belongs to models with a bayeslora adapter"):
        lora.posterior_scale = 2.0


@ALL
def test_map_recovery(architecture):
    """λ → 0, s → 0, no flow: every draw is the deterministic model, which equals the merged one."""
    settings = InducingConfig(
        flow_depth=0, zero_start=False, init_sd_u=1e-9, max_sd_u=1e-8, init_lambda=1e-9, max_lambda=1e-8
    )
    model = adapted(architecture, settings=settings, init_weights=True)
    deterministic = logits(model)
    assert (deterministic - logits(base_model(architecture))).abs().max() > 1e-3
    with model.draws(2):
        drawn = logits(model)
    torch.testing.assert_close(drawn, deterministic, atol=1e-5, rtol=0)
    with (
        pytest.warns(UserWarning, match="merging unties lm_head")
        if architecture in ("qwen3", "gpt2")
        else nullcontext()
    ):
        merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), deterministic, atol=2e-5, rtol=1e-4)
