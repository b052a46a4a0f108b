"""From questions to predictions, with everything between: tokens, draws, averaging, calibration, the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bayeslora.adapter.sampling import Sampling
from bayeslora.errors import InputError
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.mc import average_draws
from bayeslora.predict.predictions import Predictions
from bayeslora.predict.questions import score_questions
from bayeslora.predict.scorer import DrawScores, Scorer
from bayeslora.predict.tie_breaking import choose_options
from bayeslora.tasks import EncodedItem, Item, Scoring, continuations, encode_items

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Predictor:
    """Predicts the answers of questions.

    Attributes:
        scorer: scores options with the adapted model.
        tokenizer: of the model.
        scoring: what answers a question, the option's text or its letter.
        max_tokens: of a prompt with an option, to which passages are cut.
        sampling: draws of the weights that are averaged.
        batch_tokens: computed at once.
        calibration: temperature and threshold, as fitted on held-out data.
    """

    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    scoring: Scoring = "text"
    max_tokens: int = 1024
    sampling: Sampling = field(default_factory=Sampling)
    batch_tokens: int = 16384
    calibration: Calibration = field(default_factory=Calibration)

    def __call__(
        self,
        items: Sequence[Item],
        encoded: Sequence[EncodedItem] | None = None,
        advance: Callable[[int, int], None] | None = None,
    ) -> Predictions:
        """Predictions of the questions, in their order. ``encoded`` saves encoding them again."""
        if not items:
            raise InputError("there are no questions to predict; give at least one")
        encoded = self.encode(items) if encoded is None else encoded
        return self.predictions(items, self.score(encoded, advance))

    def predictions(self, items: Sequence[Item], scores: DrawScores) -> Predictions:
        """What scores of these questions say, calibrated."""
        predictive = self.calibration.apply(scores.predictive)
        totals = average_draws(scores.totals).numpy()
        texts = [continuations(item, self.scoring) for item in items]
        choices = np.array(choose_options(predictive, totals, texts))
        draws = scores.log_probabilities.exp().numpy()
        return Predictions(tuple(items), np.exp(predictive), choices, draws)

    def score(self, encoded: Sequence[EncodedItem], advance: Callable[[int, int], None] | None = None) -> DrawScores:
        """Scores of the questions under every draw, before calibration."""
        return score_questions(self.scorer, encoded, self.sampling, batch_tokens=self.batch_tokens, advance=advance)

    def with_draws(self, **changes: Any) -> Predictor:
        """The same with other draws, by the fields of :class:`Sampling` that change."""
        return replace(self, sampling=replace(self.sampling, **changes))

    def encode(self, items: Sequence[Item]) -> list[EncodedItem]:
        """The questions as token ids.

        Passages are cut to ``max_tokens``. A question that is longer by itself stays whole, as long as the model can read
        it: those of a benchmark are all to be answered.
        """
        return encode_items(items, self.tokenizer, self.scoring, self.max_tokens, self.scorer.context or 0)
