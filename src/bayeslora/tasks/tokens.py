"""Tasks whose every token is predicted: running text, or solutions of problems.

Where questions have options to choose from, these have the next token: the options are the whole vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Tokens that are given, and tokens that are to be predicted behind them, one by one."""

    id: str
    prompt_ids: list[int]
    target_ids: list[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.target_ids)


def tokens_digest(texts: Sequence[EncodedText]) -> str:
    """Tells whether two runs were judged on the same tokens."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(repr((text.prompt_ids, text.target_ids)).encode())
    return digest.hexdigest()
