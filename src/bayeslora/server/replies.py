"""Texts in OpenAI's formats, complete and streamed."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from bayeslora.server import openai_schemas as shapes
from bayeslora.server.engine import Piece, Text, Written
from bayeslora.server.pieces import HALF

Finish = Literal["stop", "length"]


class Reply(ABC):
    """Builds the responses to one request.

    Args:
        model: its name.
        texts: the requested texts.
        logprobs: whether to include log-probabilities.
    """

    prefix: str

    def __init__(self, model: str, texts: Sequence[Text], *, logprobs: bool) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.texts = texts
        self.logprobs = logprobs
        self.told = [""] * len(texts)

    @abstractmethod
    def whole(self, written: Sequence[Written]) -> BaseModel:
        """The response with all complete texts."""

    def opening(self) -> list[BaseModel]:
        """First pieces of the stream."""
        return []

    def piece(self, index: int, piece: Piece) -> BaseModel:
        """The next piece of a text."""
        made = self._piece(index, piece.text, [piece], _confidence([piece]), None)
        self.told[index] += piece.text
        return made

    def closing(self, index: int, written: Written) -> BaseModel:
        """The last piece of a text, with text that was held back and the confidence of the whole text."""
        rest = written.generation.text[len(self.told[index]) :]
        return self._piece(index, rest, [], self._sequence_confidence(index, written, []), _finish(written))

    @abstractmethod
    def usage_piece(self, usage: shapes.Usage) -> BaseModel:
        """The last piece of the stream, if usage was requested."""

    @abstractmethod
    def _piece(
        self, index: int, text: str, pieces: Sequence[Piece], confidence: shapes.Confidence, finish: Finish | None
    ) -> BaseModel: ...

    def _sequence_confidence(self, index: int, written: Written, pieces: Sequence[Piece]) -> shapes.Confidence:
        text, found = self.texts[index], written.generation
        whole = {"log_likelihood": found.log_likelihood, "mutual_information": found.mutual_information}
        return _confidence(pieces).model_copy(update={**whole, "samples": text.samples, "seed": text.writing.seed})


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
        return self._completion(choices, count_usage(written))

    def usage_piece(self, usage: shapes.Usage) -> shapes.Completion:
        """A piece with the usage and no text."""
        return self._completion([], usage)

    def _piece(
        self, index: int, text: str, pieces: Sequence[Piece], confidence: shapes.Confidence, finish: Finish | None
    ) -> shapes.Completion:
        choice = shapes.CompletionChoice(
            index=index,
            text=text,
            finish_reason=finish,
            logprobs=self._logprobs(index, pieces, len(self.told[index])),
            confidence=confidence,
        )
        return self._completion([choice], None)

    def _completion(self, choices: list[shapes.CompletionChoice], usage: shapes.Usage | None) -> shapes.Completion:
        return shapes.Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _logprobs(self, index: int, pieces: Sequence[Piece], offset: int) -> shapes.CompletionLogprobs | None:
        if not self.logprobs:
            return None
        offsets = [offset]
        for piece in pieces:
            offsets.append(offsets[-1] + len(piece.word))
        return shapes.CompletionLogprobs(
            tokens=[piece.word for piece in pieces],
            token_logprobs=[piece.log_probability for piece in pieces],
            top_logprobs=[_by_word(piece, self.texts[index].top) for piece in pieces],
            text_offset=offsets[:-1],
        )


class ChatReply(Reply):
    """Responses of ``/v1/chat/completions``."""

    prefix = "chatcmpl"

    def whole(self, written: Sequence[Written]) -> shapes.ChatCompletion:
        """The response with the complete message."""
        (one,) = written
        choice = shapes.ChatChoice(
            index=0,
            message=shapes.ChatMessage(content=one.generation.text),
            finish_reason=_finish(one),
            logprobs=self._logprobs(one.pieces),
            confidence=self._sequence_confidence(0, one, one.pieces),
        )
        return shapes.ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=[choice], usage=count_usage(written)
        )

    def opening(self) -> list[BaseModel]:
        """A piece with the role."""
        delta = shapes.Delta(role="assistant", content="")
        choice = shapes.ChatPieceChoice(index=0, delta=delta, finish_reason=None, logprobs=None, confidence=None)
        return [self._chunk([choice], None)]

    def usage_piece(self, usage: shapes.Usage) -> shapes.ChatPiece:
        """A piece with the usage and no text."""
        return self._chunk([], usage)

    def _piece(
        self, index: int, text: str, pieces: Sequence[Piece], confidence: shapes.Confidence, finish: Finish | None
    ) -> shapes.ChatPiece:
        choice = shapes.ChatPieceChoice(
            index=index,
            delta=shapes.Delta(content=text),
            finish_reason=finish,
            logprobs=self._logprobs(pieces) if pieces else None,
            confidence=confidence,
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
                    token=piece.word,
                    logprob=piece.log_probability,
                    bytes=_bytes(piece.word),
                    top_logprobs=[
                        shapes.TopLogprob(token=word, logprob=value, bytes=_bytes(word))
                        for word, value in piece.top[:count]
                    ],
                )
                for piece in pieces
            ]
        )


def count_usage(written: Sequence[Written]) -> shapes.Usage:
    """Count tokens read and written."""
    read, new = sum(one.prompt_tokens for one in written), sum(len(one.pieces) for one in written)
    return shapes.Usage(prompt_tokens=read, completion_tokens=new, total_tokens=read + new)


def _finish(written: Written) -> Finish:
    return "stop" if written.generation.ended else "length"


def _confidence(pieces: Sequence[Piece]) -> shapes.Confidence:
    return shapes.Confidence(
        tokens=[
            shapes.TokenConfidence(
                token=piece.word,
                probability=piece.token.probability,
                entropy=piece.token.entropy,
                aleatoric=piece.token.aleatoric,
                epistemic=piece.token.epistemic,
            )
            for piece in pieces
        ]
    )


def _by_word(piece: Piece, count: int) -> dict[str, float]:
    """Log-probabilities of the most probable tokens by text; the highest if several have the same text."""
    found: dict[str, float] = {}
    for word, value in piece.top[:count]:
        found.setdefault(word, value)
    return found


def _bytes(word: str) -> list[int] | None:
    """Bytes of a token; ``None`` if it has an incomplete character."""
    return None if HALF in word else list(word.encode())
