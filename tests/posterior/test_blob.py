"""BLoB: its KL, the equality with the KL of whole updates, and the moments of flipout."""

import itertools

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal, kl_divergence

from adapter.cases import adapted, tokens
from bayeslora import find_holder
from bayeslora.posterior import BlobConfig, BlobPosterior, LayerShape, inner
from rounding import summed

LAYERS = [LayerShape("q", 5, 3, rank=2), LayerShape("k", 5, 3, rank=2)]


def posterior(seed=0, **settings):
    made = BlobPosterior(LAYERS, BlobConfig(**settings), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return made


def moments(made):
    group = made.groups[0]
    return made.get_parameter(f"mean_A_{group.key}"), made.get_parameter(f"root_A_{group.key}") ** 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prior_sd", [0.2, 1.0])
def test_the_kl_is_that_of_the_entries_of_A(seed, prior_sd):
    made = posterior(seed, prior_sd=prior_sd)
    mean, sd = moments(made)
    torch.testing.assert_close(made.kl().total, kl_divergence(Normal(mean, sd), Normal(0.0, prior_sd)).sum())


@pytest.mark.parametrize("seed", range(3))
def test_the_kl_of_A_is_the_kl_of_the_whole_update(seed):
    """``KL(q(B A) ‖ p(B A))`` for the prior ``σ_p² (B Bᵀ) ⊗ I`` that ``B`` induces, on the space that ``B`` spans."""
    made = posterior(seed, prior_sd=0.7).double()
    mean, sd = (moment[0] for moment in moments(made))
    B = made.get_parameter(f"B_{made.groups[0].key}")[0]
    basis = torch.linalg.qr(B).Q  # coordinates of the column space, in which both Gaussians have a density
    lift = torch.kron(basis.T @ B, torch.eye(3, dtype=torch.double))  # row-major vec(A) to vec(basisᵀ B A)
    q = MultivariateNormal(lift @ mean.flatten(), lift @ sd.square().flatten().diag() @ lift.T)
    p = MultivariateNormal(torch.zeros(6, dtype=torch.double), 0.7**2 * lift @ lift.T)
    own = kl_divergence(Normal(mean, sd), Normal(0.0, 0.7)).sum()
    torch.testing.assert_close(kl_divergence(q, p), own)


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_flipout_has_the_mean_and_the_variance_of_separate_draws(per):
    made = posterior(flipout=per)
    mean, sd = (moment[0] for moment in moments(made))
    x = torch.randn(1, 2, 4, 3, generator=torch.Generator().manual_seed(1)).expand(20_000, -1, -1, -1)
    torch.manual_seed(0)
    with torch.no_grad():
        factors = made.draw(20_000, torch.Generator().manual_seed(0))
        hidden = factors.inner_by_layer()["q"](x, factors["q"].A)
        torch.testing.assert_close(hidden.mean(0), x[0] @ mean.T, atol=0.03, rtol=0)
        variance = x[0].square() @ sd.square().T
        torch.testing.assert_close(hidden.var(0), variance, atol=1e-4, rtol=0.06)
        noise = hidden - x @ mean.T
        between = (
            (noise[:, 0, 0] * noise[:, 1, 0]).mean(0).abs()
        )  # rows are independent, tokens only if they flip alone
        assert (between < 0.05 * variance.max()).all()
        tokens_together = (noise[:, 0, 0] * noise[:, 0, 1]).mean(0).abs().max() > 0.05 * variance.max()
        assert tokens_together == (per == "sequence")


def test_it_starts_as_published():
    made = BlobPosterior(LAYERS)
    _, sd = moments(made)
    assert 1.25e-3 * (1 - 1e-6) <= sd.min() < sd.max() <= 2.5e-3 * (1 + 1e-6)
    assert made.mean().product("q").abs().max() == 0
    assert made.draw(2)["q"].B.abs().max() == 0  # so noise has no effect at first


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_every_parameter_gets_the_same_gradient_whatever_saves_memory(reentrant):
    gradients = []
    for mode in (None, reentrant):
        model = adapted(posterior="blob", settings={"init_root": 0.5})
        if mode is not None:
            model.gradient_checkpointing_enable({"use_reentrant": mode})
        model.train()
        model.seed_draws(0)
        torch.manual_seed(3)
        ids = tokens()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in find_holder(model).posterior("default").named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradients[1][name], gradient, **summed(gradient))


@pytest.mark.parametrize("settings", [{"prior_sd": 0.0}, {"init_root": -1.0}, {"flipout": "rows"}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        BlobConfig(**settings)


@pytest.mark.parametrize("per", ["token", "sequence"])
def test_flipout_signs_inputs_and_outputs(per, monkeypatch):
    """Position by position, with signs that are known: ``A x + v ⊙ (N (u ⊙ x))``."""
    generator = torch.Generator().manual_seed(0)
    n, rows, positions, features, rank = 2, 3, 4, 5, 2
    x = torch.randn(n, rows, positions, features, generator=generator)
    A, noise = (torch.randn(n, rank, features, generator=generator) for _ in range(2))
    own = positions if per == "token" else 1
    signs = torch.randint(0, 2, (n, rows, own, features + rank), generator=generator) * 2.0 - 1.0
    monkeypatch.setattr(inner, "random_signs", lambda shape, like: signs if tuple(shape) == signs.shape else None)
    found = inner.Flipout(tensors=(noise,), per=per)(x, A)
    for draw, row, place in itertools.product(range(n), range(rows), range(positions)):
        u, v = signs[draw, row, place if per == "token" else 0].split((features, rank))
        vector = x[draw, row, place]
        want = A[draw] @ vector + v * (noise[draw] @ (u * vector))
        torch.testing.assert_close(found[draw, row, place], want)
