"""Tasks that predict every token: running text, solutions of problems, conversations.

Instead of the options of a question, they predict the next token from the whole vocabulary.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from bayeslora.tasks.base import Content, SplitName, Splits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Prompt tokens, and the target tokens to be predicted after them, one by one.

    Attributes:
        id: of the text.
        prompt_ids: tokens that are only read.
        target_ids: tokens that follow.
        counted: which targets are learnt and evaluated; all if not given. The others are read like the prompt, such as what
            a user says between two answers.
    """

    id: str
    prompt_ids: list[int]
    target_ids: list[int]
    counted: tuple[bool, ...] | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.target_ids)

    @property
    def terms(self) -> int:
        """Number of targets that count."""
        return len(self.target_ids) if self.counted is None else sum(self.counted)


@dataclass(frozen=True)
class Lessons:
    """Texts to learn from.

    Attributes:
        texts: the texts.
        left_out: number of examples that were left out, by reason.
        truncated: number of examples whose end was cut off.
    """

    texts: Sequence[EncodedText]
    left_out: Mapping[str, int] = field(default_factory=dict)
    truncated: int = 0


@dataclass(frozen=True)
class TokenTask(Splits[Content]):
    """A task whose every token is predicted.

    Attributes:
        kind: what it consists of, in a word.
        rows_left_out: number of rows of a split that cannot be used, by reason.
    """

    kind: ClassVar[str]
    rows_left_out: Callable[[SplitName], Mapping[str, int]] = field(default=lambda split: {}, repr=False, compare=False)

    @abstractmethod
    def encode(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[EncodedText]:
        """Encode a split for evaluation; ``max_tokens`` is the size of blocks where text is divided into blocks."""

    @abstractmethod
    def encode_lessons(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Lessons:
        """Encode a split for training, with at most ``max_tokens`` per text."""


def tokens_digest(texts: Sequence[EncodedText]) -> str:
    """Hash of the tokens, to check that two runs were evaluated on the same ones."""
    digest = hashlib.sha256()
    for text in texts:
        counted = () if text.counted is None else (text.counted,)
        digest.update(repr((text.prompt_ids, text.target_ids, *counted)).encode())
    return digest.hexdigest()


def marked(text: EncodedText, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Pieces of a text in order, with whether they are learnt."""
    counted = (True,) * len(text.target_ids) if text.counted is None else text.counted
    ids = [*text.prompt_ids, *text.target_ids]
    learnt = [*(False for _ in text.prompt_ids), *counted]
    start = 0
    for k in range(1, len(ids) + 1):
        if k == len(ids) or learnt[k] != learnt[start]:
            yield str(tokenizer.decode(ids[start:k])), learnt[start]
            start = k
