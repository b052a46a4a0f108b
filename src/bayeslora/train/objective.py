"""The objective of a step: the mean cross-entropy of answers or of tokens, and the KL with its weight (section 13.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from bayeslora.posterior import kl_weight
from bayeslora.posterior.kl import KLScaling
from bayeslora.predict.questions.options import ATTENTION, Encoded
from bayeslora.predict.questions.scorer import Scorer
from bayeslora.tasks.tokens import EncodedText
from bayeslora.train.graphed_pass import GraphedPass, graphed_pass
from bayeslora.train.head_loss import head_input, is_frozen_linear, sliced_cross_entropy

ALIKE = 32
"""Rows are filled to multiples of so many tokens where graphs are captured for each shape of batch."""


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

    def guess(self, example: Learnt) -> float:
        """Cross-entropy of a uniform guess; infinite where nobody would guess."""

    def length(self, example: Learnt) -> int:
        """Tokens that an example takes in a batch, if it is worth having examples of similar length in one; else 0."""


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

    def guess(self, example: Example) -> float:
        """All options are equally probable."""
        return math.log(len(example.encoded.option_ids))

    def length(self, example: Example) -> int:
        """Not used: questions are short, and each batch is a random one."""
        return 0


@dataclass(frozen=True)
class TokenObjective:
    """Cross-entropy of all target tokens of each text.

    Attributes:
        model: the model being trained.
        pad_id: fills rows at their ends, where a causal model does not look.
        label_smoothing: share of the target that is spread over the vocabulary.
        head: the model's output head if it can be applied to slices of tokens, see
            :func:`~bayeslora.train.head_loss.find_sliceable_head`; without it the logits of a batch are in memory.
    """

    model: nn.Module
    pad_id: int = 0
    label_smoothing: float = 0.0
    head: nn.Module | None = None

    def losses(self, examples: Sequence[EncodedText], draws: int) -> Tensor:
        """Cross-entropy ``[B]`` of every text."""
        size = math.ceil(len(examples) / draws)
        rows = [k % draws * size + k // draws for k in range(len(examples))]
        given = [examples[0]] * (draws * size)  # empty rows are filled with any text, and do not count
        for row, example in zip(rows, examples, strict=True):
            given[row] = example
        graphs, device = self._graphs, next(self.model.parameters()).device
        lessons = batch_lessons(given, self.pad_id, 1 if graphs is None else ALIKE)
        tensors = [it.to(device, non_blocking=True) for it in lessons]
        by_text = self._losses_of_rows(*tensors) if graphs is None else graphs(self._losses_of_rows, *tensors)
        return by_text[torch.tensor(rows).to(device, non_blocking=True)]

    @cached_property
    def _graphs(self) -> GraphedPass | None:
        return graphed_pass(self.model) if is_frozen_linear(self.head) else None

    def _losses_of_rows(self, input_ids: Tensor, targets: Tensor, counted: Tensor, weights: Tensor) -> Tensor:
        """Cross-entropy ``[B]`` of every row, from the tensors of :class:`Lessons`."""
        losses = self._token_losses(input_ids, targets, counted) * weights
        return losses.new_zeros(targets.numel()).index_add(0, counted, losses).view(targets.shape).sum(1)

    def _token_losses(self, input_ids: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
        with sdpa_kernel(ATTENTION):
            if self.head is not None:
                states = head_input(self.model, input_ids, self.head)
                return sliced_cross_entropy(states, self.head, targets, counted, self.label_smoothing)
            logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        part, wanted = logits.flatten(0, 1).index_select(0, counted), targets.flatten().index_select(0, counted)
        return F.cross_entropy(part.float(), wanted, reduction="none", label_smoothing=self.label_smoothing)

    def terms(self, example: EncodedText) -> int:
        """One for each token."""
        return example.terms

    def guess(self, example: EncodedText) -> float:
        """Infinite: a base model is far better than a uniform guess."""
        return math.inf

    def length(self, example: EncodedText) -> int:
        """All tokens: rows are padded to the longest of a batch."""
        return len(example)


class Lessons(NamedTuple):
    """Texts to learn from, one a row, padded at the end.

    Attributes:
        input_ids: ``[B, T]``.
        targets: ``[B, T]``, the next tokens.
        counted: ``[K]``, positions of the targets that count, through all rows.
        weights: ``[K]``, 1, or 0 where one of them only fills the list.
    """

    input_ids: Tensor
    targets: Tensor
    counted: Tensor
    weights: Tensor


def batch_lessons(texts: Sequence[EncodedText], pad_id: int, alike: int = 1) -> Lessons:
    """Texts as one batch. The last target predicts nothing and is left out of the input.

    With ``alike`` above 1 many batches have one shape: rows are filled to a multiple of so many tokens, and the list of
    targets that count to a quarter, half, three quarters or all of the batch.
    """
    width = -(-(max(map(len, texts)) - 1) // alike) * alike
    ids = np.full((len(texts), 1 + width), pad_id, dtype=np.int64)
    counts = np.zeros(ids.shape, dtype=bool)
    for row, text in enumerate(texts):
        start, end = len(text.prompt_ids), len(text)
        ids[row, :end] = [*text.prompt_ids, *text.target_ids]
        counts[row, start:end] = True if text.counted is None else text.counted
    counted = counts[:, 1:].ravel().nonzero()[0]
    step = max(1.0, len(texts) * width / 4) if alike > 1 else 1.0
    listed = np.zeros(math.ceil(step * math.ceil(len(counted) / step)), dtype=np.int64)
    listed[: len(counted)] = counted
    weights = (np.arange(len(listed)) < len(counted)).astype(np.float32)
    whole = torch.from_numpy(ids)
    return Lessons(whole[:, :-1], whole[:, 1:], torch.from_numpy(listed), torch.from_numpy(weights))


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
