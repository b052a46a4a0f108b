"""Answers in free text with a confidence: what the model writes, how probable it is, and whether the draws agree.

An answer is decoded greedily from the average over the draws. Its probability is that of the whole text,
``p(y|x) = 1/N Σ_n Π_t p(y_t | y_<t, x, w_n)``: a draw is one network from the first token to the last. Then every draw writes
its own answer (:mod:`bayeslora.predict.generation.agreement`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.sampling import Sampling
from bayeslora.data_frames import Results, quoted
from bayeslora.errors import InputError
from bayeslora.predict.calibrate import Calibration
from bayeslora.predict.calibrate.confidence import ConfidenceModel
from bayeslora.predict.generation.agreement import Agreement, Same, find_agreement
from bayeslora.predict.generation.results import Generation
from bayeslora.predict.generation.writing import Prompt, Writing, generate, generate_by_draw
from bayeslora.tasks.answers import same_free_answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FEATURES = (
    "log_probability",
    "mean_log_probability",
    "least_log_probability",
    "epistemic",
    "agreement",
    "semantic_entropy",
)
"""What the calibrated confidence is computed from."""


@dataclass(frozen=True)
class WrittenAnswer:
    """A generated answer with its confidence. Entropies are in nats.

    Attributes:
        text: the answer.
        confidence: probability that it is right: calibrated, or else that of the text itself.
        abstains: whether the confidence is below the threshold that calibration chose.
        agreement: what the draws wrote each by itself.
        generation: the text token by token.
    """

    text: str
    confidence: float
    abstains: bool
    agreement: Agreement
    generation: Generation = field(repr=False)

    def __repr__(self) -> str:
        figures = f"confidence {self.confidence:.3f}, agreement {self.agreement.share:.2f}"
        return f"WrittenAnswer({quoted(self.text)}, {figures}{', abstains' if self.abstains else ''})"

    @property
    def log_probability(self) -> float:
        """Of the whole text, under the average of the draws."""
        return self.generation.log_probability

    @property
    def entropy(self) -> float:
        """Uncertainty of all tokens together."""
        return math.fsum(self.generation.entropy)

    @property
    def aleatoric(self) -> float:
        """The part of it that every draw has on average."""
        return math.fsum(self.generation.aleatoric)

    @property
    def epistemic(self) -> float:
        """The rest: mutual information between the text and the draw that writes it."""
        return self.generation.mutual_information

    @property
    def alternatives(self) -> tuple[tuple[str, float], ...]:
        """Answers of the draws that say something else, with their shares."""
        return self.agreement.others

    @property
    def features(self) -> dict[str, float]:
        """What the calibrated confidence is computed from."""
        tokens = [math.log(max(p, 1e-300)) for p in self.generation.probabilities] or [0.0]
        values = (
            self.log_probability,
            self.log_probability / len(tokens),
            min(tokens),
            self.epistemic,
            self.agreement.share,
            self.agreement.semantic_entropy,
        )
        return dict(zip(FEATURES, values, strict=True))

    def to_row(self) -> dict[str, Any]:
        """Its cells in a table of answers."""
        return {**self.to_dict(), "alternatives": dict(self.alternatives)}

    def to_dict(self) -> dict[str, Any]:
        """The answer as JSON, without its tokens."""
        return {
            "answer": self.text,
            "confidence": self.confidence,
            "abstains": self.abstains,
            "entropy": self.entropy,
            "aleatoric": self.aleatoric,
            **self.features,
            "alternatives": [{"answer": text, "share": share} for text, share in self.alternatives],
        }


@dataclass(frozen=True)
class AnswerWriter:
    """Writes answers with a confidence.

    Attributes:
        model: with an adapter.
        tokenizer: of the model.
        sampling: draws of the weights.
        writing: settings of generation; the answer itself is always decoded greedily.
        calibration: calibration whose confidence and threshold are applied.
        same: whether two answers say the same.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    writing: Writing
    calibration: Calibration = field(default_factory=Calibration)
    same: Same = same_free_answer

    def __call__(self, prompts: Sequence[Prompt]) -> Results[WrittenAnswer]:
        """Answers to a batch of prompts."""
        samples, layers = self.sampling.samples, self.sampling.layers
        generations = generate(self.model, self.tokenizer, prompts, self._greedy, samples=samples, layers=layers)
        # one network has written already what it writes greedily
        if self.sampling.count(find_any_holder(self.model)) <= 1:
            return self._compared(generations, [[generation.text] for generation in generations])
        return self.assess(prompts, generations)

    @property
    def _greedy(self) -> Writing:
        return replace(self.writing, temperature=0.0, seed=self.sampling.seed)

    def assess(
        self, prompts: Sequence[Prompt], generations: Sequence[Generation], between: Callable[[], None] | None = None
    ) -> Results[WrittenAnswer]:
        """Texts that were generated from the prompts as answers: every draw writes one of its own, greedily, to compare, with a
        callback after every step."""
        apart = generate_by_draw(self.model, self.tokenizer, prompts, self._greedy, self.sampling, between)
        return self._compared(generations, apart)

    def _compared(self, generations: Sequence[Generation], apart: Sequence[Sequence[str]]) -> Results[WrittenAnswer]:
        agreements = [
            find_agreement(generation.text, answers, self.same)
            for generation, answers in zip(generations, apart, strict=True)
        ]
        return Results(
            self.judge(WrittenAnswer(generation.text.strip(), 0.0, False, agreement, generation))
            for generation, agreement in zip(generations, agreements, strict=True)
        )

    def judge(self, answer: WrittenAnswer) -> WrittenAnswer:
        """The answer with its confidence, and whether that is enough."""
        fitted, threshold = self.calibration.confidence, self.calibration.threshold
        if fitted is None:  # a threshold was chosen for the confidence in choices
            return replace(answer, confidence=math.exp(min(0.0, answer.log_probability)), abstains=False)
        [confidence] = calibrated_confidence(fitted, [answer.features])
        return replace(answer, confidence=confidence, abstains=threshold is not None and confidence < threshold)


def calibrated_confidence(model: ConfidenceModel, features: Sequence[Mapping[str, float]]) -> list[float]:
    """Confidence of some answers by a model that was fitted on the same features."""
    if model.features != FEATURES:
        raise InputError(
            f"the calibration's confidence is computed from {', '.join(model.features)}, and answers have {', '.join(FEATURES)}; "
            "calibrate again"
        )
    found: list[float] = model.apply(feature_rows(features)).tolist()
    return found


def feature_rows(features: Sequence[Mapping[str, float]]) -> NDArray[np.float64]:
    """Features ``[N, F]`` of some answers, in the order of :data:`FEATURES`."""
    return np.array([[row[name] for name in FEATURES] for row in features], dtype=np.float64).reshape(-1, len(FEATURES))
