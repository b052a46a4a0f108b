"""Predict questions: encoding, scoring under draws, averaging, calibration, choice of the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bayeslora.adapter.sampling import Sampling
from bayeslora.errors import InputError
from bayeslora.models.context import within_context
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.questions.familiarity import Familiarity
from bayeslora.predict.questions.features import prompt_features
from bayeslora.predict.questions.predictions import Predictions
from bayeslora.predict.questions.scorer import DrawScores, Scorer
from bayeslora.predict.questions.scores import score_questions
from bayeslora.tasks import EncodedItem, Item, Scoring, encode_items

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Predictor:
    """Predicts the answers of questions.

    Attributes:
        scorer: scores options with the adapted model.
        tokenizer: of the model.
        scoring: what is scored, the option's text or its letter.
        max_tokens: longest prompt with an option; passages are truncated to fit.
        sampling: draws of the weights to average.
        batch_tokens: tokens per batch.
        calibration: temperature and threshold, as fitted on held-out data.
        familiarity: measures the distance of questions from those of training.
    """

    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    scoring: Scoring = "text"
    max_tokens: int = 1024
    sampling: Sampling = field(default_factory=Sampling)
    batch_tokens: int = 16384
    calibration: Calibration = field(default_factory=Calibration)
    familiarity: Familiarity | None = None

    def __call__(
        self,
        items: Sequence[Item],
        encoded: Sequence[EncodedItem] | None = None,
        advance: Callable[[int, int], None] | None = None,
    ) -> Predictions:
        """Predictions of the questions, in their order. ``encoded`` avoids encoding them again."""
        if not items:
            raise InputError("there are no questions to predict; give at least one")
        encoded = self.encode(items) if encoded is None else encoded
        return self.with_distances(encoded, self.predictions(items, self.score(encoded, advance)))[0]

    def predictions(self, items: Sequence[Item], scores: DrawScores) -> Predictions:
        """Calibrated predictions from the scores of these questions."""
        return Predictions.from_scores(items, scores, self.calibration, self.scoring)

    def score(self, encoded: Sequence[EncodedItem], advance: Callable[[int, int], None] | None = None) -> DrawScores:
        """Scores of the questions under every draw, before calibration."""
        return score_questions(self.scorer, encoded, self.sampling, batch_tokens=self.batch_tokens, advance=advance)

    def with_distances(self, encoded: Sequence[EncodedItem], *predictions: Predictions) -> list[Predictions]:
        """Several predictions of the same questions, with the distances of these from the training questions, if known."""
        if self.familiarity is None:
            return list(predictions)
        distances = self.familiarity.gaussian.distances(self.features(encoded))
        return [replace(one, distances=distances) for one in predictions]

    def features(
        self, encoded: Sequence[EncodedItem], advance: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float64]:
        """Features ``[N, d]`` of the questions, by the posterior mean."""
        return prompt_features(
            self.scorer.model, encoded, pad_id=self.scorer.pad_id, batch_tokens=self.batch_tokens, advance=advance
        )

    def with_draws(self, **changes: Any) -> Predictor:
        """Return a copy with changed fields of :class:`Sampling`."""
        return replace(self, sampling=replace(self.sampling, **changes))

    def encode(self, items: Sequence[Item]) -> list[EncodedItem]:
        """The questions as token ids.

        Passages are truncated to ``max_tokens``, or to the model's context if that is shorter. A question that is longer without
        a passage is kept whole if it fits the context, so that all questions of a benchmark are answered.
        """
        limit = within_context(self.scorer.model, self.max_tokens)
        return encode_items(items, self.tokenizer, self.scoring, limit, self.scorer.context or 0)
