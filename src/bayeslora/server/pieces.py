"""A text that grows token by token, told in pieces that never have to be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HALF = "\ufffd"
"""What the bytes of half a character are decoded to."""


class Pieces:
    """Tokens in, text out.

    What may still change is held back: half a character at the end, and what may be the beginning of a text that stops it.

    Args:
        tokenizer: of the model.
        stop: texts that end it, and are no part of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._told = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """The next token; what can be told of the text that has not been told yet."""
        self._ids.append(token)
        text = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
        found = [text.index(word) for word in self._stop if word in text]
        self.stopped = bool(found)
        sure = text[: min(found)] if found else text[: _sure_length(text, self._stop)]
        piece = sure[self._told :]
        self._told = max(self._told, len(sure))
        return piece


def _sure_length(text: str, stop: Sequence[str]) -> int:
    """How much of a text stays as it is whatever follows."""
    sure = len(text.rstrip(HALF))
    for word in stop:
        begun = next((k for k in range(min(len(word), len(text)), 0, -1) if text.endswith(word[:k])), 0)
        sure = min(sure, len(text) - begun)
    return sure
