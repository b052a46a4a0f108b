"""The objective of a step: the mean cross-entropy of answers or of tokens, and the KL with its weight (section 13.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayeslora.posterior import kl_weight
from bayeslora.posterior.kl import KLScaling
from bayeslora.predict.questions.options import Encoded
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.predict.tokens.predictions import batch_texts
from bayeslora.tasks.tokens import EncodedText


class Named(Protocol):
    """A training example with an identifier."""

    @property
    def id(self) -> str:
        """Its identifier."""


Lesson = TypeVar("Lesson", bound=Named)
Learnt = TypeVar("Learnt", bound=Named, contravariant=True)


class Objective(Protocol[Learnt]):
    """Training objective for one kind of examples."""

    @property
    def model(self) -> nn.Module:
        """The model being trained."""

    def losses(self, examples: Sequence[Learnt], draws: int) -> Tensor:
        """Cross-entropy ``[B]`` of every example, summed over its terms. Examples are divided among the draws in use."""

    def terms(self, example: Learnt) -> int:
        """Number of answers or tokens in an example."""


@dataclass(frozen=True)
class Example:
    """A training question."""

    id: str
    encoded: Encoded
    gold: int


@dataclass(frozen=True)
class QuestionObjective:
    """Cross-entropy of the right option of each question."""

    scorer: Scorer
    label_smoothing: float = 0.0

    @property
    def model(self) -> nn.Module:
        """The model being trained."""
        return self.scorer.model

    def losses(self, examples: Sequence[Example], draws: int) -> Tensor:
        """Cross-entropy ``[B]`` of every question."""
        scores = self.scorer([example.encoded for example in examples], blocks=draws)
        gold = torch.tensor([example.gold for example in examples]).to(scores.total.device, non_blocking=True)
        return cross_entropy(scores.log_probabilities, gold, scores.present, self.label_smoothing)

    def terms(self, example: Example) -> int:
        """One answer."""
        return 1


@dataclass(frozen=True)
class TokenObjective:
    """Cross-entropy of all target tokens of each text."""

    model: nn.Module
    pad_id: int = 0
    label_smoothing: float = 0.0

    def losses(self, examples: Sequence[EncodedText], draws: int) -> Tensor:
        """Cross-entropy ``[B]`` of every text. Label smoothing spreads over the vocabulary."""
        size = math.ceil(len(examples) / draws)
        rows = [k % draws * size + k // draws for k in range(len(examples))]
        given = [examples[0]] * (draws * size)  # empty rows are filled with any text, and do not count
        for row, example in zip(rows, examples, strict=True):
            given[row] = example
        batch = batch_texts(given, self.pad_id, next(self.model.parameters()).device)
        counted = batch.places()
        logits, targets = batch.logits(self.model)[counted].float(), batch.targets[counted]
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)
        by_text = losses.new_zeros(batch.targets.shape).index_put(counted, losses).sum(1)
        return by_text[torch.tensor(rows).to(losses.device, non_blocking=True)]

    def terms(self, example: EncodedText) -> int:
        """One for each token."""
        return example.terms


def cross_entropy(log_probabilities: Tensor, gold: Tensor, present: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of every question, ``[B]``, over the options it has.

    Args:
        log_probabilities: ``[B, O]``, ``-inf`` where a question has no such option.
        gold: ``[B]``, the right options.
        present: ``[B, O]``, which options exist.
        smoothing: share of the target that is spread evenly over the options present, the right one included.
    """
    right = -log_probabilities.gather(1, gold.unsqueeze(1)).squeeze(1)
    if smoothing == 0.0:
        return right
    spread = -log_probabilities.masked_fill(~present, 0.0).sum(1) / present.sum(1)
    return (1.0 - smoothing) * right + smoothing * spread


@dataclass(frozen=True)
class KLWeight:
    """Weight of the KL beside a mean loss, at every step of a run.

    Attributes:
        scaling: ``elbo``, ``paper`` or ``blob``, see :func:`bayeslora.posterior.kl_weight`.
        beta: multiplier.
        warmup: share of the steps in which the weight rises linearly to its full value.
    """

    scaling: KLScaling = "elbo"
    beta: float = 1.0
    warmup: float = 0.0

    def at(self, step: int, steps: int, *, examples: int, batch_size: int, terms: float = 1.0) -> float:
        """The weight at ``step`` of ``steps``, counted from 0; the loss beside it is a mean over ``terms`` per example.

        Only ``elbo`` uses ``terms``: the evidence counts every one of them. The others depend on steps alone.
        """
        full = kl_weight(self.scaling, examples=examples, batch_size=batch_size, beta=self.beta, step=step)
        if self.scaling == "elbo":
            full /= terms
        rising = self.warmup * steps
        return full * min(1.0, (step + 1) / rising) if rising > 0 else full
