"""Tokens as clients see them: the text of each, and its bytes, as a token may hold a part of a character only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers.convert_slow_tokenizer import bytes_to_unicode

from bayeslora.predict.generation.results import HALF
from bayeslora.tasks.encode import ANCHOR, plain_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
"""How byte-level tokenizers write bytes."""

FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""How SentencePiece writes a byte of a character that it does not know."""


@dataclass(frozen=True)
class Word:
    """The text of a token, with a replacement character for a part of a character, and its bytes if they are known."""

    text: str
    bytes: bytes | None

    @property
    def name(self) -> str:
        """The text, or the bytes if they are no text, as in OpenAI's completions."""
        if self.bytes in (None, self.text.encode()):
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes or b"")


class Words:
    """Looks up the words of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._anchor = plain_ids(ANCHOR, tokenizer)
        self._anchored = len(str(tokenizer.decode(self._anchor)))

    def __call__(self, token: int) -> Word:
        """The word of a token, behind another one, since many tokenizers strip the space from the beginning of a text."""
        text = str(self._tokenizer.decode([*self._anchor, token]))[self._anchored :]
        return Word(text, self._raw_bytes(token) if HALF in text else text.encode())

    def _raw_bytes(self, token: int) -> bytes | None:
        """Bytes of a token as the tokenizer stores it; ``None`` if it does not store bytes."""
        stored = str(self._tokenizer.convert_ids_to_tokens(token))
        if found := FALLBACK.fullmatch(stored):
            return bytes.fromhex(found[1])
        return bytes(BYTES[it] for it in stored) if all(it in BYTES for it in stored) else None
