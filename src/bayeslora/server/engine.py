"""The model's work in the worker's thread: answers questions in batches, and generates texts.

The tokenizer is only used here, too, since it is not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bayeslora.adapter.base import find_any_holder
from bayeslora.adapter.holder import PosteriorHolder
from bayeslora.errors import InputError
from bayeslora.models.context import context_length
from bayeslora.predict.calibrate import LEVELS, Calibration
from bayeslora.predict.generation import Prompt, Writing, encode_prompts
from bayeslora.predict.generation.confidence import WrittenAnswer
from bayeslora.predict.generation.results import Generation, Token
from bayeslora.predict.questions.answers import Answer
from bayeslora.predict.questions.options import packed_length
from bayeslora.predict.questions.predictions import Predictions
from bayeslora.runs.trained import TrainedModel
from bayeslora.server.limits import Limits
from bayeslora.server.pieces import Pieces
from bayeslora.server.words import Word, Words
from bayeslora.tasks import EncodedItem, Item


@dataclass(frozen=True)
class Question:
    """A question to answer, with fields of :class:`bayeslora.server.schemas.AnswerRequest`."""

    item: Item
    samples: int
    level: float = 0.9
    deterministic: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Answered:
    """An answer, with the probabilities of every draw and, if requested, of the posterior mean."""

    answer: Answer
    draws: list[list[float]]
    deterministic: list[float] | None


@dataclass(frozen=True)
class Text:
    """A text to continue.

    Attributes:
        prompt: the text or chat.
        writing: settings of generation.
        samples: draws of the weights.
        top: how many of the most probable tokens to report at every step.
        agreement: whether to compare it with what every draw writes by itself.
        question: whether the prompt is a question alone, asked as those of the calibration were.
    """

    prompt: Prompt
    writing: Writing
    samples: int
    top: int = 0
    agreement: bool = False
    question: bool = False


@dataclass(frozen=True)
class Piece:
    """A token with its word, the text it adds to the stream (may be empty), and the most probable tokens."""

    token: Token
    word: Word
    text: str
    top: tuple[tuple[Word, float], ...]

    @property
    def log_probability(self) -> float:
        """Log-probability under the average of the draws."""
        return math.log(self.token.probability)


@dataclass(frozen=True)
class Written:
    """A complete text, and whether the calibrated confidence applies to it."""

    generation: Generation
    pieces: list[Piece]
    prompt_tokens: int
    answer: WrittenAnswer | None = None
    calibrated: bool = False


class Engine:
    """Answers requests with a trained run.

    Args:
        trained: the run.
        limits: maximum lengths of prompts.
    """

    def __init__(self, trained: TrainedModel, limits: Limits) -> None:
        # every question is scored once, so caching the outputs of frozen layers gains nothing
        training = replace(trained.config.training, cache_trunk=False)
        self.trained = replace(trained, config=replace(trained.config, training=training))
        self.limits = limits
        self._tokenizer = trained.loaded.tokenizer
        self._words = Words(self._tokenizer)
        self._context = context_length(trained.loaded.model)
        # the noise of PEFT's own adapters may depend on the batch
        self.batches = isinstance(find_any_holder(trained.model), PosteriorHolder)

    # Questions ----------------------------------------------------------------------------------------------------

    def encode(self, question: Question) -> EncodedItem:
        """Encode a question; refuses one that cannot be answered."""
        _require_level(self.trained.calibration, question.level)
        (encoded,) = self.trained.predictor().encode([question.item])
        if (length := packed_length(encoded)) > self.limits.max_prompt_tokens:
            raise InputError(
                f"question and choices have {length} tokens; at most {self.limits.max_prompt_tokens} are allowed"
            )
        return encoded

    def answer(self, questions: Sequence[Question], encoded: Sequence[EncodedItem]) -> list[Answered]:
        """Answer a batch of questions with the same number of draws; each answer is the same as if computed alone."""
        items = [question.item for question in questions]
        model = replace(self.trained, samples=questions[0].samples)
        predictions = model.predictor()(items, encoded)
        means = self._means(questions, encoded)
        return [
            Answered(model.answers(one, question.level)[0], _draws(one), means.get(row))
            for row, question in enumerate(questions)
            for one in [_row(predictions, row)]
        ]

    def _means(self, questions: Sequence[Question], encoded: Sequence[EncodedItem]) -> dict[int, list[float]]:
        """Probabilities of the posterior mean by number of the question, where requested."""
        rows = [row for row, question in enumerate(questions) if question.deterministic]
        if not rows:
            return {}
        mean = replace(self.trained, samples=0).predictor()
        found = mean([questions[row].item for row in rows], [encoded[row] for row in rows])
        return {row: _row(found, k).probabilities[0].tolist() for k, row in enumerate(rows)}

    @property
    def chat_tokens(self) -> int:
        """Most tokens of a chat's answer where a request does not say: half of the context is left for the chat."""
        most = self.limits.max_tokens
        return most if self._context is None else max(1, min(most, self._context // 2))

    # Texts --------------------------------------------------------------------------------------------------------

    def measure(self, text: Text) -> int:
        """Number of tokens of the prompt; refuses one that cannot be continued."""
        (ids,) = encode_prompts(self._tokenizer, [text.prompt])
        if len(ids) > self.limits.max_prompt_tokens:
            raise InputError(f"the prompt has {len(ids)} tokens; at most {self.limits.max_prompt_tokens} are allowed")
        wanted = len(ids) + text.writing.max_new_tokens
        if self._context is not None and wanted > self._context:
            raise InputError(
                f"the prompt has {len(ids)} tokens and max_tokens is {text.writing.max_new_tokens}, but the context "
                f"length is {self._context}; shorten the prompt or lower max_tokens"
            )
        return len(ids)

    def rows_at_once(self, text: Text, longest: int) -> int:
        """How many texts with these settings and prompts of at most ``longest`` tokens fit in a batch."""
        tokens = max(1, text.samples) * (longest + text.writing.max_new_tokens)
        return max(1, self.trained.config.prediction.batch_tokens // tokens)

    def write(
        self, texts: Sequence[Text], lengths: Sequence[int], tell: Callable[[Mapping[int, Piece]], None]
    ) -> list[Written]:
        """Continue texts with equal settings. ``tell`` receives the new pieces after every step (none where every draw writes
        by itself), and may use the model.

        ``lengths`` are the results of :meth:`measure`.
        """
        first = texts[0]
        top = max(text.top for text in texts)
        growing = [Pieces(self._tokenizer, first.writing.stop) for _ in texts]

        def watch(tokens: Mapping[int, Token]) -> None:
            tell({row: self._piece(t, growing[row].add(t.id)) for row, t in tokens.items() if not growing[row].stopped})

        model, prompts = replace(self.trained, samples=first.samples), [text.prompt for text in texts]
        found = model.generate(prompts, first.writing, top=top, watch=watch)
        between = partial(tell, {})
        answers = self._assess(model, texts, found, between) if first.agreement else [None] * len(found)
        return [
            Written(one, [self._piece(t, "") for t in one.tokens], length, answer, self._calibrates(text, one))
            for text, one, length, answer in zip(texts, found, lengths, answers, strict=True)
        ]

    def _assess(
        self,
        model: TrainedModel,
        texts: Sequence[Text],
        found: Sequence[Generation],
        between: Callable[[], None],
    ) -> list[WrittenAnswer]:
        """Texts with their confidence, by the same draws."""
        writer = model.answer_writer(texts[0].writing)
        bare = replace(writer, calibration=Calibration())
        answers = writer.assess([text.prompt for text in texts], found, between)
        return [
            answer if self._calibrates(text, answer.generation) else bare.judge(answer)
            for text, answer in zip(texts, answers, strict=True)
        ]

    def _calibrates(self, text: Text, found: Generation) -> bool:
        """Whether the calibrated confidence applies: to whole answers to a question alone, decoded greedily."""
        fitted, writing = self.trained.calibration.confidence is not None, text.writing
        changed = bool(writing.stop or writing.logit_bias)
        return fitted and text.question and writing.greedy and not changed and found.ended

    def _piece(self, token: Token, text: str) -> Piece:
        return Piece(token, self._words(token.id), text, tuple((self._words(id), value) for id, value in token.top))


def _require_level(calibration: Calibration, level: float) -> None:
    """Refuse a level of prediction sets that a run does not have or, before it is calibrated, that none has."""
    if calibration.conformal:
        calibration.require_level(level)
        return
    known = [f"{it:g}" for it in LEVELS]
    if f"{level:g}" not in known:
        raise InputError(f"level is {level:g}; give one that prediction sets have: {', '.join(known)}")


def _row(predictions: Predictions, row: int) -> Predictions:
    """Predictions of one question of a batch."""
    options = len(predictions.items[row].options)
    draws = predictions.draws
    return Predictions(
        (predictions.items[row],),
        predictions.probabilities[row : row + 1, :options],
        predictions.choices[row : row + 1],
        None if draws is None else draws[:, row : row + 1, :options],
        None if predictions.distances is None else predictions.distances[row : row + 1],
    )


def _draws(one: Predictions) -> list[list[float]]:
    return np.asarray(one.probabilities if one.draws is None else one.draws[:, 0]).tolist()
