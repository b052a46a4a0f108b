"""Tasks that predict every token: running text, or solutions of problems.

Instead of the options of a question, they predict the next token from the whole vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Prompt tokens, and the target tokens to be predicted after them, one by one."""

    id: str
    prompt_ids: list[int]
    target_ids: list[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.target_ids)


def tokens_digest(texts: Sequence[EncodedText]) -> str:
    """Hash of the tokens, to check that two runs were evaluated on the same ones."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(repr((text.prompt_ids, text.target_ids)).encode())
    return digest.hexdigest()
