"""The linearised predictive against Jacobians of single questions, dense Gaussians and sampled linear models."""

import math

import pytest
import torch
from peft import PeftModel

from adapter.cases import adapted, base_model, generator
from bayeslora import find_holder
from bayeslora.adapter.sampling import Sampling
from bayeslora.predict import pack, score_options
from bayeslora.predict.linearised import scores as linearised
from bayeslora.predict.linearised.curvature import fit_curvature
from bayeslora.predict.linearised.gradients import differentiating
from bayeslora.predict.linearised.scores import (
    LEAST_DRAWS,
    option_jacobian,
    probit,
    sampled,
    score_at_precisions,
    score_linearised,
)
from bayeslora.predict.questions.scorer import DrawScores, Scorer
from bayeslora.predict.questions.scores import score_questions
from bayeslora.predict.trunk import TrunkScorer
from predict.test_options import questions
from predict.test_scorer import assert_same
from tiers import some

SEED = 5
SCOPES = pytest.mark.parametrize("scope", ["all", "last"])


def laplace(scope="all", architecture="llama", *, adapter=None, **settings):
    """A tiny model with curvature, and its posterior."""
    settings = {"scope": scope, "curvature_rank": 64, "prior_precision": 20.0, **settings}
    model = adapted(architecture, posterior="laplace", settings=settings, **(adapter or {}))
    posterior = find_holder(model).posterior("default")
    fit_curvature(Scorer(model), questions(seed=9, count=6), posterior)
    return model, posterior


def scored(model, items, *, samples=4, seed=SEED, batch_tokens=10_000, make=Scorer, advance=None, **settings):
    sampling = Sampling(samples, seed, **settings)
    return score_questions(make(model), items, sampling, batch_tokens=batch_tokens, advance=advance)


def jacobians(model, posterior, items):
    with differentiating(Scorer(model)) as holder:
        return option_jacobian(Scorer(model), holder, posterior, items)


def dense_jacobian(model, posterior, item):
    """Log-probabilities of one question and their derivatives by all parameters, by name."""
    with torch.enable_grad():
        log_p = score_options(model, pack([item])).log_probabilities[0]
        parameters = dict(posterior.named_parameters())
        rows = [torch.autograd.grad(score, list(parameters.values()), retain_graph=True) for score in log_p]
    return log_p.detach(), {name: torch.stack(by) for name, by in zip(parameters, zip(*rows, strict=True), strict=True)}


def dense_moments(model, posterior, item):
    """Mean and covariance of one question's log-probabilities, from dense precisions."""
    log_p, J = dense_jacobian(model, posterior, item)
    covariance = torch.zeros(len(log_p), len(log_p), dtype=torch.float64)
    positions = {name: (group, row) for group in posterior.groups for row, name in enumerate(group.names)}
    for group in posterior.random_groups:
        for row, name in enumerate(group.names):
            for factor in ("A", "B"):
                s = posterior._spectrum(factor, group)
                small = (s.small_vectors[row] * s.small_values[row] @ s.small_vectors[row].T).double()
                long = (s.long_vectors[row] * s.long_values[row] @ s.long_vectors[row].T).double()
                H = torch.kron(small, long) if factor == "A" else torch.kron(long, small)
                precision = H + posterior.prior_precision * torch.eye(len(H), dtype=torch.float64)
                whole, index = positions[name]
                by = J[f"{factor}_{whole.key}"][:, index].flatten(1).double()
                covariance += by @ torch.linalg.solve(precision, by.T)
    return log_p.double(), covariance


# Jacobians ------------------------------------------------------------------------------------------------------------


@SCOPES
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_jacobians_are_those_of_single_questions(scope, architecture):
    model, posterior = laplace(scope, architecture)
    items = questions(count=4)
    scores, found = jacobians(model, posterior, items)
    assert not scores.total.requires_grad
    for row, item in enumerate(items):
        log_p, J = dense_jacobian(model, posterior, item)
        own = len(item.option_ids)
        torch.testing.assert_close(scores.log_probabilities[row, :own], log_p, atol=1e-5, rtol=1e-5)
        for group, (by_A, by_B) in zip(posterior.random_groups, found, strict=True):
            for factor, got in (("A", by_A), ("B", by_B)):
                want = J[f"{factor}_{group.key}"].movedim(1, 0)[-len(group) :]  # the last is the last of its shape
                torch.testing.assert_close(got[:, row, :own], want, atol=1e-4 * float(want.abs().max()), rtol=0)
                assert not got[:, row, own:].any()  # options that the question does not have


@SCOPES
def test_the_covariance_is_that_of_the_dense_precisions(scope):
    model, posterior = laplace(scope)
    items = questions(count=3)
    posterior.scale = 1.5
    _, found = jacobians(model, posterior, items)
    (got,) = posterior.functional_variance(found)
    for row, item in enumerate(items):
        _, want = dense_moments(model, posterior, item)
        own = len(want)
        torch.testing.assert_close(
            got[row, :own, :own], 1.5**2 * want, atol=1e-4 * float(want.max()), rtol=1e-4, check_dtype=False
        )


def test_layers_out_of_scope_record_no_gradients():
    """Their activations need not be kept: the graph starts at the last layer."""
    model, posterior = laplace("last")
    seen = []
    model.get_base_model().model.register_forward_hook(lambda *args: seen.append(args[2].last_hidden_state))
    jacobians(model, posterior, questions(count=2))
    assert not seen[0].requires_grad


def test_layers_of_the_last_ones_shape_record_no_gradients_either():
    model, posterior = laplace("last", adapter={"target_modules": ["o_proj"]})
    seen = []
    for layer in model.get_base_model().model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda *args: seen.append(args[2].requires_grad))
    jacobians(model, posterior, questions(count=2))
    assert len(seen) > 1 and seen == [False] * (len(seen) - 1) + [True]


# Predictions ----------------------------------------------------------------------------------------------------------


@SCOPES
def test_probabilities_are_those_of_the_sampled_linear_model(scope):
    """Weights drawn from the posterior, put into ``f̂ + J (θ − θ̂)``, softmax, average."""
    model, posterior = laplace(scope)
    items, n = questions(count=3), 8_000
    scores = scored(model, items, samples=n)
    with torch.no_grad():
        draws, mean = posterior.draw(n, generator()), posterior.mean()
    for row, item in enumerate(items):
        log_p, J = dense_jacobian(model, posterior, item)
        f = log_p.expand(n, -1).clone()
        for k, group in enumerate(posterior.groups):
            for factor in ("A", "B"):
                moved = getattr(draws, factor)[k] - getattr(mean, factor)[k]
                f += torch.einsum("olab,lsab->so", J[f"{factor}_{group.key}"], moved)
        want, error = f.softmax(-1).mean(0), float(f.softmax(-1).std(0).max()) / n**0.5
        got = torch.from_numpy(scores.predictive[row, : len(want)]).exp()
        torch.testing.assert_close(got, want, atol=4 * 2**0.5 * error, rtol=0, check_dtype=False)
        assert (want - log_p.exp()).abs().max() > 0.02  # the test would not notice otherwise


@pytest.mark.parametrize("draws", [8, 256])
def test_draws_have_exactly_the_moments_asked_for(draws):
    mean = torch.tensor([[0.0, -1.0, -2.0], [0.3, 0.1, -torch.inf]], dtype=torch.float64)
    root = torch.randn(2, 3, 3, generator=generator(), dtype=torch.float64)
    root[1, 2] = 0.0  # an option that the second question does not have
    covariance = root @ root.mT
    log_p = sampled(mean, covariance, draws, seed=0)
    for row, own in ((0, 3), (1, 2)):
        contrast = log_p[:, row, 1:own] - log_p[:, row, :1]  # what softmax leaves of the scores
        lift = torch.eye(own, dtype=torch.float64)[1:] - torch.eye(own, dtype=torch.float64)[:1]
        want = lift @ covariance[row, :own, :own] @ lift.T
        torch.testing.assert_close(contrast.mean(0), lift @ mean[row, :own])
        torch.testing.assert_close(torch.atleast_2d(torch.cov(contrast.T, correction=0)), want)
    assert (log_p[:, 1, 2] == -torch.inf).all()


def test_draws_are_gaussian():
    """Their fourth moment and the mean of a softmax, which two moments alone do not tell."""
    covariance = torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64))[None]
    log_p = sampled(torch.zeros(1, 2, dtype=torch.float64), covariance, 100_000, seed=0)[:, 0]
    f = log_p[:, 0] - log_p[:, 1]
    assert float(f.pow(4).mean()) == pytest.approx(3 * 16, rel=0.05)
    shifted = (
        sampled(torch.tensor([[1.0, 0.0]], dtype=torch.float64), covariance, 100_000, seed=0)[:, 0, 0].exp().mean()
    )
    grid = torch.linspace(-14, 14, 20_001, dtype=torch.float64)
    density = torch.distributions.Normal(0.0, 2.0).log_prob(grid).exp()
    assert float(shifted) == pytest.approx(float(torch.trapezoid(density * torch.sigmoid(1 + grid), grid)), abs=2e-3)


def test_averaged_logits_are_those_of_the_mean_and_averaged_probabilities_are_softer():
    """Logits must not be averaged: they would give the point estimate back."""
    model, _ = laplace(prior_precision=1.0)
    items = questions(count=5)
    scores, point = scored(model, items), scored(model, items, samples=0)
    for row, item in enumerate(items):
        own = len(item.option_ids)
        log_p = scores.log_probabilities[:, row, :own]
        contrast = (log_p - log_p[:, :1]).mean(0)
        want = point.log_probabilities[0, row, :own]
        torch.testing.assert_close(contrast, want - want[0], atol=1e-5, rtol=1e-5)
    predictive = torch.from_numpy(scores.predictive)
    assert (predictive.max(-1).values < point.log_probabilities[0].max(-1).values - 1e-3).all()


@pytest.mark.parametrize("precision, apart", [(1e5, 2e-4), (1e3, 0.02)])
def test_probit_and_draws_agree_where_variances_are_small(precision, apart):
    items, answers = questions(count=6), {}
    for predictive in ("probit", "mc"):
        model, posterior = laplace(predictive=predictive)
        posterior.prior_precision = precision
        answers[predictive] = torch.from_numpy(scored(model, items).predictive).exp()
    point = scored(model, items, samples=0).log_probabilities[0].exp()
    torch.testing.assert_close(answers["probit"], answers["mc"], atol=apart, rtol=0)
    torch.testing.assert_close(answers["mc"], point, atol=10 * apart, rtol=0)


def test_probit_is_its_formula_and_one_row():
    model, posterior = laplace(predictive="probit")
    items = questions(count=3)
    scores = scored(model, items, samples=7)
    assert len(scores.log_probabilities) == len(scores.totals) == 1
    for row, item in enumerate(items):
        log_p, covariance = dense_moments(model, posterior, item)
        options = range(len(log_p))
        spread = [[covariance[k, k] + covariance[j, j] - 2 * covariance[k, j] for j in options] for k in options]
        sums = [
            sum(math.exp((log_p[j] - log_p[k]) / math.sqrt(1 + math.pi / 8 * spread[k][j])) for j in options)
            for k in options
        ]
        want = torch.tensor([1 / it for it in sums], dtype=torch.float64)
        want /= want.sum()
        torch.testing.assert_close(scores.log_probabilities[0, row, : len(want)].exp(), want, atol=1e-5, rtol=1e-5)
    mean, zero = torch.tensor([[-1.0, -torch.inf]]), torch.zeros(1, 2, 2)
    assert probit(mean, zero).tolist() == [[0.0, -torch.inf]]


@pytest.mark.parametrize("options", [2, 3, 5])
def test_probit_sees_differences_of_scores_alone(options):
    """A constant added to all scores changes no probability, nor does noise that all scores share."""
    generator = torch.Generator().manual_seed(options)
    mean = torch.randn(4, options, generator=generator, dtype=torch.float64)
    root = torch.randn(4, options, options, generator=generator, dtype=torch.float64)
    covariance = root @ root.mT
    found = probit(mean, covariance)
    torch.testing.assert_close(probit(mean - 7.5, covariance), found)
    torch.testing.assert_close(probit(mean, covariance + 3.0), found)
    torch.testing.assert_close(probit(mean, torch.full_like(covariance, 2.0)), mean.log_softmax(-1))
    assert (found.max(-1).values < mean.log_softmax(-1).max(-1).values).all()


def test_probit_of_two_options_is_mackays_formula():
    mean, covariance = torch.tensor([[0.3, -0.9]]), torch.tensor([[[2.0, 0.5], [0.5, 1.0]]])
    want = torch.sigmoid(torch.tensor(1.2) / math.sqrt(1 + math.pi / 8 * (2.0 + 1.0 - 2 * 0.5)))
    torch.testing.assert_close(probit(mean, covariance)[0].exp(), torch.stack([want, 1 - want]))


def test_shapes_totals_and_numbers_of_draws():
    model, _ = laplace()
    items = questions(count=4)
    options = max(len(item.option_ids) for item in items)
    point = scored(model, items, samples=0)
    for samples, rows in ((1, LEAST_DRAWS), (LEAST_DRAWS, LEAST_DRAWS), (301, 302)):
        scores = scored(model, items, samples=samples)
        assert scores.log_probabilities.shape == scores.totals.shape == (rows, 4, options)
        assert scores.log_probabilities.dtype == scores.totals.dtype == torch.float64
    torch.testing.assert_close(scores.totals, point.totals.expand_as(scores.totals), atol=1e-4, rtol=1e-5)
    assert torch.equal(torch.isfinite(scores.log_probabilities[0]), torch.isfinite(point.totals[0]))


@pytest.mark.parametrize("predictive", ["mc", "probit"])
@pytest.mark.parametrize("batch_tokens", some([8, 8 * 40, 8 * 90], [8, 8 * 40]))
def test_scores_depend_neither_on_batches_nor_on_padding(predictive, batch_tokens):
    model, _ = laplace(predictive=predictive)
    items = questions(count=7)
    want = scored(model, items)
    assert_same(scored(model, items, batch_tokens=batch_tokens), want, tolerance=1e-4)
    assert_same(scored(model, items, make=lambda model: Scorer(model, pad_id=13)), want, tolerance=1e-4)


def test_few_jacobians_at_once_change_nothing(monkeypatch):
    model, posterior = laplace()
    items = questions(count=5)
    want, passes = scored(model, items), []
    size = max(len(item.option_ids) for item in items) * sum(p.numel() for p in posterior.parameters())
    monkeypatch.setattr(linearised, "JACOBIAN_ENTRIES", 2 * size)
    model.get_base_model().register_forward_hook(lambda *_: passes.append(1))
    assert_same(scored(model, items), want, tolerance=1e-4)
    assert len(passes) == 3
    monkeypatch.setattr(linearised, "JACOBIAN_ENTRIES", 1)
    assert_same(scored(model, items), want, tolerance=1e-4)


def test_scores_do_not_depend_on_the_other_questions():
    model, _ = laplace()
    items = questions(count=5)
    together = scored(model, items)
    assert_same(
        scored(model, items[::-1]),
        DrawScores(together.log_probabilities.flip(1), together.totals.flip(1)),
        tolerance=1e-4,
    )
    for row, item in enumerate(items):
        own = len(item.option_ids)
        alone = DrawScores(together.log_probabilities[:, [row], :own], together.totals[:, [row], :own])
        assert_same(scored(model, [item]), alone, tolerance=1e-4)


def test_draws_follow_from_the_seed_and_nothing_else():
    model, _ = laplace()
    items = questions(count=3)
    before, first = torch.get_rng_state(), scored(model, items)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert torch.equal(scored(model, items).log_probabilities, first.log_probabilities)
    other = scored(model, items, seed=SEED + 1).log_probabilities
    assert not torch.equal(other, first.log_probabilities)


def test_the_scale_widens_and_zero_is_the_point():
    model, _ = laplace()
    items = questions(count=5)
    spread = []
    for scale in (0.0, 0.5, 2.0):
        model.posterior_scale = scale
        spread.append(float(scored(model, items).log_probabilities.exp().std(0).mean()))
        if scale == 0.0:
            point = scored(model, items, samples=0)
            got = scored(model, items)
            want = DrawScores(
                point.log_probabilities.expand_as(got.log_probabilities), point.totals.expand_as(got.totals)
            )
            assert_same(got, want, tolerance=1e-4)
    assert spread[0] < 1e-6 < spread[1] < spread[2]


@pytest.mark.parametrize("predictive", ["mc", "probit"])
def test_several_precisions_are_scored_as_each_would_be_alone(predictive, monkeypatch):
    model, posterior = laplace(predictive=predictive)
    items, precisions, passes = questions(count=5), [0.5, 20.0, 3000.0], []
    jacobian = linearised.option_jacobian
    monkeypatch.setattr(linearised, "option_jacobian", lambda *given: passes.append(1) or jacobian(*given))
    settings = {"samples": 4, "seed": SEED, "batch_tokens": 10_000}
    together = score_at_precisions(Scorer(model), items, posterior, precisions, **settings)
    assert len(passes) == 1 and posterior.prior_precision == pytest.approx(20.0)
    for precision, got in zip(precisions, together, strict=True):
        posterior.prior_precision = precision
        assert_same(got, score_linearised(Scorer(model), items, posterior, **settings), tolerance=1e-6)


def test_a_full_gpu_means_smaller_graphs(monkeypatch):
    """For the curvature and for predictions."""
    whole, tried = Scorer.__call__, []

    def limited(self, part, *args, **kwargs):
        tried.append(len(part))
        if len(part) > 2:
            raise torch.cuda.OutOfMemoryError("full")
        return whole(self, part, *args, **kwargs)

    def predicted():
        model, posterior = laplace()
        return scored(model, questions(count=5)), posterior.log_evidence()

    want, evidence = predicted()
    monkeypatch.setattr(Scorer, "__call__", limited)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    got, same = predicted()
    assert max(tried) == 6 and tried[-1] <= 2
    assert_same(got, want, tolerance=1e-5)
    assert same == pytest.approx(evidence, rel=1e-4)


# Which path is taken --------------------------------------------------------------------------------------------------


def test_weight_draws_are_used_where_they_are_asked_for():
    model, posterior = laplace(predictive="draws")
    items = questions(count=3)
    scores = scored(model, items, samples=3)
    assert len(scores.log_probabilities) == 3
    with torch.no_grad(), model.draws(3, generator(SEED)):
        want = score_options(model, pack(items), copies=3).log_probabilities.unflatten(0, (3, -1))
    torch.testing.assert_close(scores.log_probabilities, want.double(), atol=1e-5, rtol=1e-5)
    lines = score_linearised(Scorer(model), items, posterior, samples=3, seed=SEED, batch_tokens=10_000)
    assert len(lines.log_probabilities) == LEAST_DRAWS


def test_no_samples_mean_the_point():
    model, posterior = laplace()
    items = questions(count=3)
    with torch.no_grad():
        want = score_options(model, pack(items)).log_probabilities
    got = scored(model, items, samples=0).log_probabilities
    torch.testing.assert_close(got, want[None].double(), atol=1e-5, rtol=1e-5)
    assert posterior.stochastic


def test_a_small_posterior_predicts_alike_by_weights_and_linearised():
    """What is left out by linearising vanishes with the variance."""
    items, answers, n = questions(count=4), {}, 1500
    for predictive in ("mc", "draws"):
        model, posterior = laplace(predictive=predictive)
        posterior.prior_precision = 1e5
        scores = scored(model, items, samples=n)
        answers[predictive] = scores.log_probabilities.exp()
    error = float(answers["draws"].std(0).max()) / n**0.5  # of the mean; that of a standard deviation is 1/√2n of it
    torch.testing.assert_close(answers["mc"].mean(0), answers["draws"].mean(0), atol=4 * error, rtol=0)
    torch.testing.assert_close(answers["mc"].std(0), answers["draws"].std(0), atol=1e-6, rtol=4 / (2 * n) ** 0.5)


@pytest.mark.parametrize("low_memory", [False, True])
def test_a_saved_adapter_predicts_the_same(tmp_path, low_memory):
    model, posterior = laplace()
    posterior.prior_precision = posterior.best_precision()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base_model(), tmp_path, low_cpu_mem_usage=low_memory).eval()
    items = questions(count=3)
    assert find_holder(loaded).posterior("default").prior_precision == pytest.approx(posterior.prior_precision)
    assert_same(scored(loaded, items), scored(model, items), tolerance=1e-6)


def test_a_kept_trunk_gives_the_same_predictions():
    model, _ = laplace(adapter={"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]})
    items = questions(count=4)
    assert_same(scored(model, items, make=TrunkScorer), scored(model, items), tolerance=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model, posterior = laplace()
    model.train(training)
    model.draw(2, generator(1))
    mode, told = find_holder(model)._mode, []
    scored(model, questions(count=5), batch_tokens=8 * 60, advance=lambda *done: told.append(done))
    assert model.training == training and posterior.training == training
    assert find_holder(model)._mode is mode
    assert all(parameter.grad is None for parameter in model.parameters())
    assert told[-1] == (5, 5) and len(told) > 1


def test_scores_that_are_not_numbers_are_an_error():
    model, posterior = laplace()
    with torch.no_grad():
        for parameter in posterior.parameters():
            parameter.fill_(torch.nan)
    with pytest.raises(ArithmeticError, match="not numbers"):
        scored(model, questions())


def test_a_posterior_without_curvature_predicts_by_its_prior():
    model = adapted(posterior="laplace", settings={"prior_precision": 50.0})
    scores = scored(model, questions(count=2))
    assert torch.isfinite(scores.log_probabilities[:, :, :2]).all()
    assert float(scores.log_probabilities.exp().std(0).max()) > 1e-2


def test_factors_given_to_the_holder_are_used_until_told_otherwise():
    model, posterior = laplace()
    holder, items = find_holder(model), questions(count=2)
    with torch.no_grad():
        draw = posterior.draw(1, generator(3))
        with model.draws(1, generator(3)):
            want = score_options(model, pack(items)).total
        with holder.restoring():
            holder.use({"default": draw})
            assert torch.equal(score_options(model, pack(items)).total, want)
            posterior.scale = 2.0
            with pytest.raises(RuntimeError, match="stale"):
                score_options(model, pack(items))
        assert holder._mode.kind == "automatic"
        model.merge_adapter()
    with pytest.raises(ValueError, match="merged into the base weights"):
        holder.use({"default": draw})
