"""Predictions of a Laplace approximation by the model linearised in its weights (methods entry 9).

Scores that are linear in Gaussian weights are Gaussian: ``f ~ N(f̂, J Λ⁻¹ Jᵀ)``, with ``f`` the log-probabilities of the
options. ``J`` is computed without a loop over questions: every question is a block of the batch with its own factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bayeslora.adapter.holder import PosteriorHolder
from bayeslora.posterior.base import Posterior
from bayeslora.posterior.decompose import eigh
from bayeslora.posterior.laplace import LaplacePosterior
from bayeslora.predict.linearised.gradients import differentiating, graph_batches, option_gradients, with_graphs
from bayeslora.predict.questions.options import Encoded, OptionScores
from bayeslora.predict.questions.scorer import DrawScores, Scorer, require_numbers

LEAST_DRAWS = 256
"""Least number of draws of Gaussian scores, which are cheap, unlike draws of weights."""

JACOBIAN_ENTRIES = 2**27
"""Entries of the Jacobians in memory at once, half a GiB in float32."""

Jacobian = list[tuple[Tensor, Tensor]]


def score_linearised(
    scorer: Scorer,
    items: Sequence[Encoded],
    posterior: Posterior,
    *,
    samples: int,
    seed: int,
    batch_tokens: int,
    advance: Callable[[int, int], None] | None = None,
) -> DrawScores:
    """Score questions with the linearised model; the totals are those of the mean.

    With ``predictive="probit"`` there is one row, already averaged. Otherwise the rows are at least ``LEAST_DRAWS`` draws,
    with the same noise for all questions, so that a prediction depends neither on the other questions nor on how they are
    batched. Draws are antithetic, so their logits average to those of the mean: probabilities must be averaged
    instead.
    """
    assert isinstance(posterior, LaplacePosterior), "no other posterior has curvature"
    precisions = [posterior.prior_precision]
    (scores,) = score_at_precisions(
        scorer, items, posterior, precisions, samples=samples, seed=seed, batch_tokens=batch_tokens, advance=advance
    )
    return scores


@torch.no_grad()
def score_at_precisions(
    scorer: Scorer,
    items: Sequence[Encoded],
    posterior: LaplacePosterior,
    precisions: Sequence[float],
    *,
    samples: int,
    seed: int,
    batch_tokens: int,
    advance: Callable[[int, int], None] | None = None,
) -> list[DrawScores]:
    """:func:`score_linearised` at each of several prior precisions; the derivatives, which are slow, are computed once."""
    mean, totals, covariances = with_graphs(
        lambda tokens: _moments(scorer, items, posterior, precisions, tokens, advance), items, batch_tokens, posterior
    )
    if posterior.config.predictive == "probit":
        found = [probit(mean, covariance).unsqueeze(0) for covariance in covariances]
    else:
        found = [sampled(mean, covariance, max(samples, LEAST_DRAWS), seed) for covariance in covariances]
    return [DrawScores(rows, totals.expand(len(rows), -1, -1)) for rows in found]


def _moments(
    scorer: Scorer,
    items: Sequence[Encoded],
    posterior: LaplacePosterior,
    precisions: Sequence[float],
    tokens: int,
    advance: Callable[[int, int], None] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and totals at the mean, ``[N, O]``, and covariances of the former by precision, ``[k, N, O, O]``."""
    options = max(len(item.option_ids) for item in items)
    mean = torch.full((len(items), options), -torch.inf, dtype=torch.float64)
    totals = mean.clone()
    covariances = torch.zeros(len(precisions), len(items), options, options, dtype=torch.float64)
    size = options * sum(point.numel() for points in posterior.random_points() for point in points)
    done = 0
    with differentiating(scorer) as holder:
        for rows in graph_batches(items, tokens, most=JACOBIAN_ENTRIES // size):
            scores, jacobian = option_jacobian(scorer, holder, posterior, [items[row] for row in rows])
            width = scores.total.shape[1]
            mean[rows, :width] = scores.log_probabilities.double().cpu()
            totals[rows, :width] = scores.total.double().cpu()
            found = posterior.functional_variance(jacobian, precisions)
            covariances[:, rows, :width, :width] = found.double().cpu()
            done += len(rows)
            if advance is not None:
                advance(done, len(items))
    return mean, totals, covariances


def option_jacobian(
    scorer: Scorer, holder: PosteriorHolder, posterior: LaplacePosterior, items: Sequence[Encoded]
) -> tuple[OptionScores, Jacobian]:
    """Scores at the mean, and the derivatives ``[L, N, O, R, i]`` and ``[L, N, O, o, R]`` of the log-probabilities.

    They are zero for options that a question does not have. Call it inside :func:`differentiating`.
    """
    A, B = (
        [point.detach().unsqueeze(1).repeat(1, len(items), 1, 1).requires_grad_() for point in points]
        for points in posterior.random_points()
    )
    factors = {name: holder.posterior(name).mean().detach() for name in holder.active}
    for name, points in factors.items():
        if holder.posterior(name) is posterior:
            factors[name] = posterior.place(points, A, B)
    holder.use(factors)
    scores = scorer(items, blocks=len(items))
    require_numbers(scores.log_probabilities)
    rows = list(option_gradients(scores.log_probabilities, scores.present, [*A, *B]))
    stacked = [torch.stack(by_option, dim=2) for by_option in zip(*rows, strict=True)]
    detached = OptionScores(scores.total.detach(), scores.mean.detach())
    return detached, list(zip(stacked[: len(A)], stacked[len(A) :], strict=True))


def probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """Log-probabilities of scores ``[N, O]`` with covariance ``[N, O, O]``, in closed form.

    ``p_k ∝ 1 / Σ_j exp((f_j - f_k) / √(1 + π/8 · var(f_j - f_k)))``: MacKay's approximation for every pair of options, and his
    formula itself for two. Only differences of scores matter, as in a softmax. An option that a question does not have
    scores ``-inf``.
    """
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    spread = variance.unsqueeze(-1) + variance.unsqueeze(-2) - 2.0 * covariance
    gap = (mean.unsqueeze(-2) - mean.unsqueeze(-1)) / (1.0 + math.pi / 8.0 * spread.clamp(min=0.0)).sqrt()
    present = torch.isfinite(mean)
    both = present.unsqueeze(-1) & present.unsqueeze(-2)
    against = gap.masked_fill(~both, -torch.inf).logsumexp(-1)
    return (-against).masked_fill(~present, -torch.inf).log_softmax(-1)


def sampled(mean: Tensor, covariance: Tensor, draws: int, seed: int) -> Tensor:
    """``draws`` (one more if odd) draws ``[n, N, O]`` of ``log softmax(f)`` with ``f ~ N(mean, covariance)``.

    All questions share the noise, so its errors would not average out: its mean and covariance are made exact.
    """
    noise = _noise(max((draws + 1) // 2, mean.shape[1]), mean.shape[1], seed)
    values, vectors = eigh(covariance)
    # symmetric root, which is stable under rounding; the covariance is singular, so eigenvalues may be slightly negative
    root = (vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2)) @ vectors.mT
    change = torch.einsum("do,nqo->dnq", noise, root)
    return (mean + torch.cat([change, -change])).log_softmax(-1)


def _noise(draws: int, options: int, seed: int) -> Tensor:
    """``[draws, options]`` with ``noiseᵀ noise / draws = I``; more options do not change the first columns."""
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randn(draws, generator=generator, dtype=torch.float64) for _ in range(options)]
    Q, R = torch.linalg.qr(torch.stack(columns, dim=1))
    return draws**0.5 * Q * R.diagonal().sign()
