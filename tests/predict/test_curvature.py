"""Curvature against per-token gradients taken one question at a time, and against the dense Fisher where it is exact."""

import pytest
import torch
from torch import nn

from adapter.cases import adapted, generator
from bayeslora import find_holder
from bayeslora.adapter.lora import adapted_layers
from bayeslora.errors import InputError
from bayeslora.predict import pack, score_options
from bayeslora.predict.linearised.curvature import fit_curvature
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.predict.trunk import TrunkScorer
from predict.test_options import Question, questions

FULL = 64  # directions: more than any side has


def laplace(architecture="llama", *, adapter=None, **settings):
    """A tiny model and its posterior."""
    settings = {"curvature_rank": FULL, **settings}
    model = adapted(architecture, posterior="laplace", settings=settings, **(adapter or {}))
    return model, find_holder(model).posterior("default")


def fitted(model, items, pad_id=0, **settings):
    posterior = find_holder(model).posterior("default")
    fit_curvature(Scorer(model, pad_id), items, posterior, **settings)
    return blocks(posterior)


def blocks(posterior):
    """``H`` of every factor of every random layer as its two sides, the one of the rank first."""
    found = {}
    for group in posterior.random_groups:
        for factor in ("A", "B"):
            s = posterior._spectrum(factor, group)
            small = s.small_vectors * s.small_values.unsqueeze(-2) @ s.small_vectors.mT
            long = s.long_vectors * s.long_values.unsqueeze(-2) @ s.long_vectors.mT
            for row, name in enumerate(group.names):
                found[name, factor] = (small[row], long[row])
    return found


def assert_same(got, want, tolerance=1e-4):
    assert got.keys() == want.keys()
    for key, sides in want.items():
        for side, (one, other) in enumerate(zip(got[key], sides, strict=True)):
            size = float(other.abs().max())
            assert size > 0, key
            torch.testing.assert_close(
                one, other, atol=tolerance * size, rtol=0, msg=lambda m, k=(key, side): f"{k}: {m}"
            )


def counted(item):
    """Columns of a packed question that any score depends on: an option's last token predicts nothing."""
    columns, end = list(range(len(item.prompt_ids))), len(item.prompt_ids)
    for option in item.option_ids:
        columns += range(end, end + len(option) - 1)
        end += len(option)
    return columns


def observed(model, item):
    """Log-probabilities of a question's options, and input and output of every adapted layer."""
    seen = {}

    def see(layer, args, output):
        seen[layer.name] = args[0], output

    handles = [layer.register_forward_hook(see) for layer in adapted_layers(model, "default").values()]
    log_p = score_options(model, pack([item])).log_probabilities[0]
    for handle in handles:
        handle.remove()
    return log_p, seen


def naive(model, items):
    """Sums over questions, options and tokens, one at a time."""
    posterior, layers = find_holder(model).posterior("default"), adapted_layers(model, "default")
    mean = posterior.mean().detach()
    outer, inner, pairs = {}, {}, dict.fromkeys(layers, 0)
    for item in items:
        log_p, seen = observed(model, item)
        outputs = [seen[name][1] for name in layers]
        width = pack([item]).input_ids.shape[1]
        for option in range(len(item.option_ids)):
            gradients = torch.autograd.grad(log_p[option], outputs, retain_graph=True)
            for (name, layer), gradient in zip(layers.items(), gradients, strict=True):
                A, B = (factor[0] for factor in mean[name])
                x, g = seen[name][0][0].detach(), layer.scaling["default"] * gradient[0]
                for column in (
                    counted(item) if len(x) == width else range(len(x))
                ):  # a head sees nothing but what counts
                    a, b = x[column], g[column]
                    if option == 0:
                        pairs[name] += 1
                        for factor, value in (("A", a), ("B", A @ a)):
                            inner[name, factor] = inner.get((name, factor), 0) + torch.outer(value, value)
                    for factor, value in (("A", B.T @ b), ("B", b)):
                        weighted = log_p[option].detach().exp() * torch.outer(value, value)
                        outer[name, factor] = outer.get((name, factor), 0) + weighted
    mean_inner = {(name, factor): value / pairs[name] for (name, factor), value in inner.items()}
    return {key: (outer[key], mean_inner[key]) if key[1] == "A" else (mean_inner[key], outer[key]) for key in outer}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_it_is_the_sum_over_tokens_taken_one_at_a_time(architecture):
    model, _ = laplace(architecture)
    items = questions(count=4)
    assert_same(fitted(model, items), naive(model, items))


def test_products_of_inputs_and_gradients_add_up_to_the_gradient_of_the_factors():
    """So both carry the right scale, and tokens that do not count have no gradient."""
    model, posterior = laplace()
    item = questions(count=1)[0]
    layers = adapted_layers(model, "default")
    log_p, seen = observed(model, item)
    score = log_p[0]
    parameters = dict(posterior.named_parameters())
    by_output = dict(
        zip(layers, torch.autograd.grad(score, [seen[name][1] for name in layers], retain_graph=True), strict=True)
    )
    by_factor = dict(zip(parameters, torch.autograd.grad(score, list(parameters.values())), strict=True))
    mean, used = posterior.mean().detach(), pack([item]).used[0]
    for group in posterior.groups:
        for row, name in enumerate(group.names):
            A, B = (factor[0] for factor in mean[name])
            x, g = seen[name][0][0], layers[name].scaling["default"] * by_output[name][0]
            if len(x) == len(used):
                assert not g[~used].any()
                x, g = x[used], g[used]
            torch.testing.assert_close(by_factor[f"A_{group.key}"][row], (g @ B).T @ x, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(by_factor[f"B_{group.key}"][row], g.T @ (x @ A.T), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("copies", [1, 3])
def test_with_one_input_it_is_the_dense_fisher_information(copies):
    """A head that scores letters has one token per question, and the same question has the same input."""
    model, posterior = laplace(adapter={"target_modules": ["lm_head"]})
    item = Question([5, 9, 2], [[1], [2], [3], [4]])
    (group,) = posterior.groups
    found = fitted(model, [item] * copies)
    log_p = score_options(model, pack([item])).log_probabilities[0]
    for factor in ("A", "B"):
        parameter = posterior.get_parameter(f"{factor}_{group.key}")
        J = torch.stack([torch.autograd.grad(score, parameter, retain_graph=True)[0].flatten() for score in log_p])
        dense = copies * J.T @ log_p.detach().exp().diag() @ J
        small, long = found["lm_head", factor]
        got = torch.kron(small, long) if factor == "A" else torch.kron(long, small)
        torch.testing.assert_close(got, dense, atol=1e-5 * float(dense.max()), rtol=0)


def test_the_fisher_information_is_the_curvature_of_the_loss_of_a_linear_model():
    """The Gauss-Newton matrix with the Hessian of softmax in the middle, for the factor that scores are linear in."""
    model, posterior = laplace(adapter={"target_modules": ["lm_head"]})
    item = Question([5, 9, 2], [[1], [2], [3]])
    small, long = fitted(model, [item])["lm_head", "B"]
    parameter = posterior.get_parameter(f"B_{posterior.groups[0].key}")

    def loss(value):
        hidden = model.get_base_model().model(torch.tensor([[5, 9, 2]])).last_hidden_state[0, -1].detach()
        A = posterior.mean()["lm_head"].A[0].detach()
        base = model.get_base_model().lm_head.base_layer.weight.detach() @ hidden
        logits = base + 2.0 * value.view_as(parameter[0]) @ (A @ hidden)
        return -logits[[1, 2, 3]].log_softmax(0)[0]

    dense = torch.autograd.functional.hessian(loss, parameter[0].detach().flatten())
    torch.testing.assert_close(torch.kron(long, small), dense, atol=1e-4 * float(dense.max()), rtol=0)


@pytest.mark.parametrize("batch_tokens", [8, 8 * 40, 8 * 90])
def test_it_does_not_depend_on_the_batches(batch_tokens):
    model, _ = laplace()
    items = questions(count=7)
    assert_same(fitted(model, items, batch_tokens=batch_tokens), fitted(model, items, batch_tokens=10**6))


def test_it_depends_neither_on_padding_nor_on_the_order():
    model, _ = laplace()
    items = questions(count=6)
    want = fitted(model, items)
    assert_same(fitted(model, items, pad_id=11), want)
    assert_same(fitted(model, items[::-1]), want)


def test_it_is_a_sum_over_questions_on_one_side_and_a_mean_on_the_other():
    model, _ = laplace()
    items = questions(count=3)
    once, twice = fitted(model, items), fitted(model, items * 2)
    for (name, factor), (small, long) in once.items():
        gradients, inputs = (2.0, 1.0) if factor == "A" else (1.0, 2.0)
        small_twice, long_twice = twice[name, factor]
        torch.testing.assert_close(small_twice, gradients * small, atol=1e-4 * float(small.max()), rtol=0)
        torch.testing.assert_close(long_twice, inputs * long, atol=1e-4 * float(long.max()), rtol=0)


def test_the_last_layer_alone_has_the_curvature_it_has_among_all():
    items = questions(count=4)
    every, (last, posterior) = fitted(laplace()[0], items), laplace(scope="last")
    found = fitted(last, items)
    assert [layer.name for layer in posterior.layers][-1] == "lm_head"
    assert found.keys() == {("lm_head", "A"), ("lm_head", "B")}
    assert_same(found, {key: every[key] for key in found})


def test_few_directions_hold_the_largest_eigenvalues():
    items = questions(count=8)
    every = fitted(laplace()[0], items)
    few = fitted(laplace(curvature_rank=3)[0], items, batch_tokens=8 * 40)
    for key, (small, long) in every.items():
        torch.testing.assert_close(few[key][0], small, atol=1e-4 * float(small.max()), rtol=0)
        got, want = (torch.linalg.eigvalsh(side).flip(0)[:4] for side in (few[key][1], long))
        torch.testing.assert_close(got[:3], want[:3], rtol=0.05, atol=0)
        assert got[3] < 1e-4 * want[0]


def test_a_frozen_adapter_has_the_same_curvature():
    items = questions(count=3)
    model, posterior = laplace()
    want = fitted(model, items)
    posterior.requires_grad_(False)
    assert_same(fitted(model, items), want)


def test_a_kept_trunk_gives_the_same_curvature():
    items = questions(count=4)
    model, posterior = laplace(adapter={"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]})
    want = fitted(model, items)
    fit_curvature(TrunkScorer(model), items, posterior)
    assert_same(blocks(posterior), want)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model, posterior = laplace()
    model.train(training)
    model.draw(2, generator())
    mode, told = find_holder(model)._mode, []
    fit_curvature(
        Scorer(model), questions(count=5), posterior, advance=lambda *done: told.append(done), batch_tokens=8 * 60
    )
    assert model.training == training and posterior.training == training
    assert find_holder(model)._mode is mode
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer._forward_hooks for layer in adapted_layers(model, "default").values())
    assert told[-1] == (5, 5) and len(told) > 1


def test_it_widens_nothing_that_the_data_determine():
    """Draws after fitting change the scores less than draws from the prior."""
    model, posterior = laplace(prior_precision=1.0)
    items = questions(count=6)
    scorer = Scorer(model)

    def spread():
        with torch.no_grad(), model.draws(64, generator(), variates="independent"):
            scores = scorer(items, 64).log_probabilities.unflatten(0, (64, -1))
        return scores.exp().std(0).mean()

    before = spread()
    fit_curvature(scorer, items * 20, posterior)
    assert spread() < 0.95 * before
    assert 1e-3 < posterior.best_precision() < 1e3


def test_used_tokens_are_those_that_a_score_depends_on():
    items = questions(count=5)
    batch = pack(items)
    for number, ((row, start), item) in enumerate(zip(batch.places, items, strict=True)):
        used = batch.used[row] & (batch.question[row] == number)
        assert used.nonzero().flatten().tolist() == [start + column for column in counted(item)]


class Flattening(nn.Module):
    """A layer whose model hands it all tokens in one row after the other."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def test_what_cannot_be_computed_is_refused():
    model, posterior = laplace()
    items = questions(count=2)
    with pytest.raises(InputError, match="no questions to take the curvature from"):
        fit_curvature(Scorer(model), [], posterior)
    with pytest.raises(InputError, match="belongs to no active adapter"):
        fit_curvature(Scorer(model), items, laplace()[1])
    attention = model.get_base_model().model.layers[0].self_attn
    attention.q_proj = Flattening(attention.q_proj)
    with pytest.raises(InputError, match=r"layers\.0\.self_attn\.q_proj is given \[\d+, 32\] for \[\d, \d+\] tokens"):
        fit_curvature(Scorer(model), items, posterior)
    attention.q_proj = attention.q_proj.layer
    with torch.no_grad():
        for parameter in posterior.parameters():
            parameter.fill_(torch.nan)
    with pytest.raises(ArithmeticError, match="not numbers"):
        fit_curvature(Scorer(model), items, posterior)
    assert not any(layer._forward_hooks for layer in adapted_layers(model, "default").values())
