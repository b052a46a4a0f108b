"""Metrics over the tokens of generated or scored text.

A token is a classification over the vocabulary, but probabilities of all tokens at once do not fit into
memory. :func:`token_scores` reduces a chunk to a few numbers per token; chunks are joined with
:meth:`TokenScores.concatenate`, and every metric is computed from those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bayeslora.metrics.calibration import ece_from_confidence
from bayeslora.metrics.scores import label_probability, mean_nll, squared_error, top_class
from bayeslora.metrics.uncertainty import row_entropy
from bayeslora.metrics.validation import (
    BoolArray,
    FloatArray,
    check_label_values,
    check_mask,
    check_rows,
    check_scores,
    read_array,
    real_array,
    share_to_count,
)


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Statistics of ``N`` tokens that metrics need, as flat arrays ``[N]``.

    It may be empty (a chunk of padding only); then no metric is defined.

    Attributes:
        label_probability: probability of the observed token.
        confidence: largest probability.
        correct: whether the most probable token is the observed one.
        entropy: entropy of the prediction, in nats.
        brier: ``Σ_v (p_v − 1[y = v])²``.
    """

    label_probability: FloatArray
    confidence: FloatArray
    correct: BoolArray
    entropy: NDArray[np.float64]
    brier: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"TokenScores({len(self)} tokens{f', NLL {self.nll:.3f}, ECE {self.ece():.3f}' if len(self) else ''})"

    def __len__(self) -> int:
        return len(self.correct)

    @classmethod
    def concatenate(cls, chunks: Sequence[TokenScores]) -> TokenScores:
        """The tokens of all chunks, in order."""
        if not chunks:
            raise ValueError("no chunks given; expected at least one TokenScores")
        return cls(*(np.concatenate([getattr(c, f.name) for c in chunks]) for f in fields(cls)))

    def subset(self, index: ArrayLike) -> TokenScores:
        """The tokens chosen by a boolean mask ``[N]`` or by integer positions."""
        chosen = np.atleast_1d(np.asarray(index))
        if chosen.size == 0 and chosen.dtype.kind == "f":
            chosen = chosen.astype(np.intp)  # an empty list
        if chosen.dtype.kind == "b":
            check_mask(chosen, (len(self),))
        return TokenScores(*(getattr(self, f.name)[chosen] for f in fields(self)))

    @property
    def nll(self) -> float:
        """``−mean log p_y`` in nats per token; ``exp`` of it is the perplexity."""
        return mean_nll(_not_empty(self.label_probability))

    @property
    def accuracy(self) -> float:
        """Share of tokens predicted correctly."""
        return float(_not_empty(self.correct).mean())

    @property
    def brier_score(self) -> float:
        """Mean of ``brier``."""
        return float(_not_empty(self.brier).mean())

    def ece(self, bins: int = 15) -> float:
        """Expected calibration error, as :func:`bayeslora.metrics.ece`."""
        return ece_from_confidence(_not_empty(self.confidence), self.correct, bins)


def token_scores(probs: ArrayLike, labels: ArrayLike, mask: ArrayLike | None = None) -> TokenScores:
    """Scores of every token of a chunk, in order of position.

    Takes working memory of a few times ``probs``, in float64; that bounds the size of a chunk.

    Args:
        probs: ``[..., T, V]``.
        labels: ``[..., T]``, the observed tokens.
        mask: boolean ``[..., T]``, which positions count; all of them if not given. Other positions are
            ignored: labels there may be -100 and probabilities anything.
    """
    p, y = real_array(probs, "probs"), read_array(labels, "labels")
    if p.ndim < 2:
        raise ValueError(f"probs must have shape [..., T, V], got shape {p.shape}")
    if y.shape != p.shape[:-1]:
        raise ValueError(f"labels must have shape {p.shape[:-1]}, one per token, got shape {y.shape}")
    keep = check_mask(mask, y.shape)
    p, y = p[keep], check_label_values(y[keep], p.shape[-1])
    check_rows(p, "unmasked probs")
    confidence, correct = top_class(p, y)
    return TokenScores(
        label_probability=label_probability(p, y),
        confidence=confidence,
        correct=correct,
        entropy=row_entropy(p),
        brier=squared_error(p, y),
    )


def top_entropy(entropy: ArrayLike, fraction: float = 0.05) -> BoolArray:
    """Mask of the ``⌈fraction · N⌉`` tokens of highest entropy; of equal ones the earlier are taken.

    Most tokens of a text are all but certain, so metrics over all tokens say little about the forks where
    the model had to decide; this picks the forks.
    """
    h = check_scores(entropy, "entropy")
    chosen = np.argsort(-h, kind="stable")[: share_to_count(fraction, len(h), "fraction")]
    mask = np.zeros(len(h), dtype=bool)
    mask[chosen] = True
    return mask


def _not_empty(values: NDArray[Any]) -> NDArray[Any]:
    if len(values) == 0:
        raise ValueError("there are no tokens, so there is nothing to take a mean of; is everything masked?")
    return values
