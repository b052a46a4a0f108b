"""Texts in OpenAI's formats, complete and streamed."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from bayeslora.predict.calibrate import Calibration
from bayeslora.server import openai_schemas as shapes
from bayeslora.server.engine import Piece, Text, Written
from bayeslora.server.words import Word

Finish = Literal["stop", "length"]


class _Part(NamedTuple):
    """What a chunk of a stream adds to a text; ``doubt`` is said of a text that the model abstains from."""

    text: str
    pieces: Sequence[Piece]
    confidence: shapes.Confidence
    finish: Finish | None = None
    doubt: str | None = None


class Reply(ABC):
    """Builds the responses to one request.

    Args:
        model: its name.
        texts: the requested texts, those of one prompt after each other.
        copies: how many of them continue the same prompt.
        logprobs: whether to include log-probabilities.
        calibration: of the run.
    """

    prefix: str

    def __init__(
        self, model: str, texts: Sequence[Text], calibration: Calibration, *, copies: int, logprobs: bool
    ) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.texts = texts
        self.copies = copies
        self.logprobs = logprobs
        self.calibration = calibration
        self.told = [""] * len(texts)

    @abstractmethod
    def whole(self, written: Sequence[Written]) -> BaseModel:
        """The response with all complete texts."""

    def opening(self) -> list[BaseModel]:
        """First pieces of the stream."""
        return []

    def piece(self, index: int, piece: Piece) -> BaseModel:
        """The next piece of a text."""
        made = self._piece(index, _Part(piece.text, [piece], _confidence([piece])))
        self.told[index] += piece.text
        return made

    def closing(self, index: int, written: Written) -> BaseModel:
        """The last piece of a text, with text that was held back and the confidence of the whole text."""
        rest = written.generation.text[len(self.told[index]) :]
        confidence = self._sequence_confidence(index, written, [])
        return self._piece(index, _Part(rest, [], confidence, _finish(written), self._doubt(written)))

    @abstractmethod
    def usage_piece(self, usage: shapes.Usage) -> BaseModel:
        """The last piece of the stream, if usage was requested."""

    def usage(self, written: Sequence[Written]) -> shapes.Usage:
        """Count tokens read and written. A prompt is read once, however many texts continue it."""
        read, new = sum(one.prompt_tokens for one in written[:: self.copies]), sum(len(one.pieces) for one in written)
        return shapes.Usage(prompt_tokens=read, completion_tokens=new, total_tokens=read + new)

    @abstractmethod
    def _piece(self, index: int, part: _Part) -> BaseModel: ...

    def _doubt(self, written: Written) -> str | None:
        """What is said of a text that the model abstains from."""
        if written.answer is None or not written.answer.abstains:
            return None
        return f"I am not sure: confidence {written.answer.confidence:.2f}, below {self.calibration.threshold:.2f}."

    def _sequence_confidence(self, index: int, written: Written, pieces: Sequence[Piece]) -> shapes.Confidence:
        text, found = self.texts[index], written.generation
        whole = {"log_likelihood": found.log_likelihood, "mutual_information": found.mutual_information}
        draws = {"samples": text.samples, "seed": text.writing.seed}
        return _confidence(pieces).model_copy(update=whole | draws | _answer_confidence(written))


class CompletionReply(Reply):
    """Responses of ``/v1/completions``."""

    prefix = "cmpl"

    def whole(self, written: Sequence[Written]) -> shapes.Completion:
        """The response with all complete texts."""
        choices = [
            shapes.CompletionChoice(
                index=index,
                text=one.generation.text,
                finish_reason=_finish(one),
                logprobs=self._logprobs(index, one.pieces, 0),
                confidence=self._sequence_confidence(index, one, one.pieces),
            )
            for index, one in enumerate(written)
        ]
        return self._completion(choices, self.usage(written))

    def usage_piece(self, usage: shapes.Usage) -> shapes.Completion:
        """A piece with the usage and no text."""
        return self._completion([], usage)

    def _piece(self, index: int, part: _Part) -> shapes.Completion:
        choice = shapes.CompletionChoice(
            index=index,
            text=part.text,
            finish_reason=part.finish,
            logprobs=self._logprobs(index, part.pieces, len(self.told[index])),
            confidence=part.confidence,
        )
        return self._completion([choice], None)

    def _completion(self, choices: list[shapes.CompletionChoice], usage: shapes.Usage | None) -> shapes.Completion:
        return shapes.Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _logprobs(self, index: int, pieces: Sequence[Piece], offset: int) -> shapes.CompletionLogprobs | None:
        if not self.logprobs:
            return None
        offsets = [offset]
        for piece in pieces:
            offsets.append(offsets[-1] + len(piece.word.text))
        return shapes.CompletionLogprobs(
            tokens=[piece.word.name for piece in pieces],
            token_logprobs=[piece.log_probability for piece in pieces],
            top_logprobs=[_by_name(piece, self.texts[index].top) for piece in pieces],
            text_offset=offsets[:-1],
        )


class ChatReply(Reply):
    """Responses of ``/v1/chat/completions``."""

    prefix = "chatcmpl"

    def whole(self, written: Sequence[Written]) -> shapes.ChatCompletion:
        """The response with the complete messages."""
        choices = [
            shapes.ChatChoice(
                index=index,
                message=shapes.ChatMessage(content=one.generation.text, refusal=self._doubt(one)),
                finish_reason=_finish(one),
                logprobs=self._logprobs(one.pieces),
                confidence=self._sequence_confidence(index, one, one.pieces),
            )
            for index, one in enumerate(written)
        ]
        return shapes.ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=self.usage(written)
        )

    def opening(self) -> list[BaseModel]:
        """A piece with the role, for every message."""
        delta = shapes.Delta(role="assistant", content="")
        return [
            self._chunk(
                [shapes.ChatPieceChoice(index=k, delta=delta, finish_reason=None, logprobs=None, confidence=None)], None
            )
            for k in range(len(self.texts))
        ]

    def usage_piece(self, usage: shapes.Usage) -> shapes.ChatPiece:
        """A piece with the usage and no text."""
        return self._chunk([], usage)

    def _piece(self, index: int, part: _Part) -> shapes.ChatPiece:
        choice = shapes.ChatPieceChoice(
            index=index,
            delta=shapes.Delta(content=part.text, refusal=part.doubt),
            finish_reason=part.finish,
            logprobs=self._logprobs(part.pieces) if part.pieces else None,
            confidence=part.confidence,
        )
        return self._chunk([choice], None)

    def _chunk(self, choices: list[shapes.ChatPieceChoice], usage: shapes.Usage | None) -> shapes.ChatPiece:
        return shapes.ChatPiece(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _logprobs(self, pieces: Sequence[Piece]) -> shapes.ChatLogprobs | None:
        if not self.logprobs:
            return None
        count = self.texts[0].top
        return shapes.ChatLogprobs(
            content=[
                shapes.TokenLogprob(
                    token=piece.word.text,
                    logprob=piece.log_probability,
                    bytes=_bytes(piece.word),
                    top_logprobs=[
                        shapes.TopLogprob(token=word.text, logprob=value, bytes=_bytes(word))
                        for word, value in piece.top[:count]
                    ],
                )
                for piece in pieces
            ]
        )


def _finish(written: Written) -> Finish:
    return "stop" if written.generation.ended else "length"


def _confidence(pieces: Sequence[Piece]) -> shapes.Confidence:
    return shapes.Confidence(
        tokens=[
            shapes.TokenConfidence(
                token=piece.word.text,
                probability=piece.token.probability,
                entropy=piece.token.entropy,
                aleatoric=piece.token.aleatoric,
                epistemic=piece.token.epistemic,
            )
            for piece in pieces
        ]
    )


def _answer_confidence(written: Written) -> dict[str, Any]:
    """Confidence of a text as an answer, if it was compared with those of the draws."""
    answer = written.answer
    if answer is None:
        return {}
    return {
        "value": answer.confidence,
        "calibrated": written.calibrated,
        "abstains": answer.abstains,
        "agreement": answer.agreement.share,
        "semantic_entropy": answer.agreement.semantic_entropy,
        "alternatives": [shapes.Alternative(text=text, share=share) for text, share in answer.alternatives],
    }


def _by_name(piece: Piece, count: int) -> dict[str, float]:
    """Log-probabilities of the most probable tokens by name; the highest if several have the same name."""
    found: dict[str, float] = {}
    for word, value in piece.top[:count]:
        found.setdefault(word.name, value)
    return found


def _bytes(word: Word) -> list[int] | None:
    return None if word.bytes is None else list(word.bytes)
