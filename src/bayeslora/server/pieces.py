"""Incremental decoding of a text, in pieces that later tokens do not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bayeslora.predict.generation.results import HALF

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Pieces:
    """Decodes tokens incrementally.

    Text that may still change is held back: an incomplete character at the end, and the possible beginning of a stop text.

    Args:
        tokenizer: of the model.
        stop: texts that end generation, and are not part of the result.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._told = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """Add a token; returns the new text that is final."""
        self._ids.append(token)
        text = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
        found = [text.index(word) for word in self._stop if word in text]
        self.stopped = bool(found)
        sure = text[: min(found)] if found else text[: _sure_length(text, self._stop)]
        piece = sure[self._told :]
        self._told = max(self._told, len(sure))
        return piece


def _sure_length(text: str, stop: Sequence[str]) -> int:
    """Length of the text that later tokens cannot change."""
    sure = len(text.rstrip(HALF))
    for word in stop:
        begun = next((k for k in range(min(len(word), len(text)), 0, -1) if text.endswith(word[:k])), 0)
        sure = min(sure, len(text) - begun)
    return sure
