"""Predictive uncertainty, and its split into aleatoric and epistemic parts.

With ``n`` draws of the weights and their predictions ``p_k``:

    H[mean_k p_k]  =  mean_k H[p_k]  +  I(y; weights)
      total            aleatoric        epistemic

The epistemic part is the disagreement between draws; it is zero if they all predict the same, be it right or wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.metrics.validation import FloatArray, check_probabilities


@dataclass(frozen=True, eq=False)
class EntropySplit:
    """Entropy of the mean prediction and its two parts, in nats, each ``[N]``."""

    total: NDArray[np.float64]
    aleatoric: NDArray[np.float64]
    epistemic: NDArray[np.float64]


def entropy(probs: ArrayLike) -> NDArray[np.float64]:
    """``−Σ_c p_c log p_c`` in nats with ``0 log 0 = 0``: ``[..., C]`` to ``[...]``."""
    return row_entropy(check_probabilities(probs, "...C"))


def entropy_split(draws: ArrayLike) -> EntropySplit:
    """Split the predictive entropy of ``draws [n, N, C]``.

    Entropy is concave, so the epistemic part cannot be negative. It is clipped at 0 for round-off alone:
    the work is done in float64 whatever the input's dtype, which leaves about 1e-15 · C to clip.
    """
    p = check_probabilities(draws, "nNC", "draws").astype(np.float64, copy=False)
    total = row_entropy(p.mean(axis=0))
    aleatoric = row_entropy(p).mean(axis=0)
    return EntropySplit(total, aleatoric, np.maximum(total - aleatoric, 0.0))


def row_entropy(probs: FloatArray) -> NDArray[np.float64]:
    """:func:`entropy` of checked input."""
    p = probs.astype(np.float64, copy=False)
    log_p = np.zeros_like(p)
    np.log(p, out=log_p, where=p > 0)
    return np.asarray(0.0 - np.einsum("...c,...c->...", p, log_p))
