"""Generate a record for every item of a split, in batches. Interrupted work can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from bayeslora.progress import Advance
from bayeslora.runs.answer_file import AnswerFile, read_answers


class Named(Protocol):
    """Something to generate for, with an identifier."""

    @property
    def id(self) -> str:
        """Its identifier."""


T = TypeVar("T", bound=Named)
Record = dict[str, Any]


@dataclass(frozen=True)
class BatchedGeneration(Generic[T]):
    """Generates records in batches of about ``batch_tokens``, the longest prompts first.

    Attributes:
        write: generates the records of a batch.
        length: number of tokens of an item's prompt.
        draws: sequences for each item.
        max_new_tokens: longest text to generate.
        batch_tokens: tokens of a batch, including draws and all that may be generated.
    """

    write: Callable[[Sequence[T]], list[Record]]
    length: Callable[[T], int]
    draws: int
    max_new_tokens: int
    batch_tokens: int

    def __call__(self, items: Sequence[T], skip: int = 0, advance: Advance | None = None) -> Iterator[Record]:
        """Yield a record for every item after the first ``skip``. Batches do not depend on ``skip``."""
        done = 0
        for batch in self._batches(items):
            start, done = done, done + len(batch)
            if done <= skip:
                continue
            yield from self.write(batch)[max(0, skip - start) :]
            if advance is not None:
                advance(done, len(items))

    def records(
        self, items: Sequence[T], path: Path | None, settings: Mapping[str, Any], advance: Advance | None
    ) -> list[Record]:
        """All records. With a ``path`` they are written there one by one, and the same settings resume it."""
        if path is None or not items:
            return list(self(items, advance=advance))
        with AnswerFile(path, dict(settings), force=path.exists()) as out:  # a complete file without a result is redone
            for record in self(items, out.done, advance):
                out.write(record)
        return read_answers(path)

    def _batches(self, items: Sequence[T]) -> Iterator[list[T]]:
        lengths = {item.id: self.length(item) for item in items}
        order = sorted(items, key=lambda item: (-lengths[item.id], item.id))
        start = 0
        while start < len(order):
            row = self.draws * (lengths[order[start].id] + self.max_new_tokens)
            size = max(1, self.batch_tokens // row)
            yield order[start : start + size]
            start += size
