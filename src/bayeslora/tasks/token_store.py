"""Encoded texts in a file that is mapped into memory, so that training data may be larger than memory.

A token takes four bytes there, and a text that is asked for is read when it is asked for. As lists of Python's integers the same
tokens would take about nine times as much, all of it in memory.
"""

from __future__ import annotations

import mmap
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from bayeslora.tasks.tokens import EncodedText

_COUNTED = 1 << 31
_PIECE = 1 << 20
"""Tokens written at a time."""


class TokenStore(Sequence[EncodedText]):
    """A sequence of texts.

    Its file is temporary (in ``TMPDIR``), has no name, and is gone with the process.

    Args:
        texts: what to keep; each is let go before the next one is taken.
    """

    def __init__(self, texts: Iterable[EncodedText]) -> None:
        self._ids: list[str] = []
        self._ends, self._prompts, self._all_count = array("q"), array("q"), bytearray()
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the map below needs it as long as the store exists
        piece, written = array("I"), 0
        for text in texts:
            counted = text.counted or (True,) * len(text.target_ids)
            piece.extend(text.prompt_ids)
            piece.extend(
                token | _COUNTED if learnt else token for token, learnt in zip(text.target_ids, counted, strict=True)
            )
            written += len(text)
            self._ids.append(text.id)
            self._ends.append(written)
            self._prompts.append(len(text.prompt_ids))
            self._all_count.append(text.counted is None)
            if len(piece) >= _PIECE:
                file.write(piece.tobytes())
                piece = array("I")
        file.write(piece.tobytes())
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if written else b""
        self._tokens = memoryview(mapped).cast("I")

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> EncodedText: ...
    @overload
    def __getitem__(self, place: slice) -> list[EncodedText]: ...
    def __getitem__(self, place: int | slice) -> EncodedText | list[EncodedText]:
        if isinstance(place, slice):
            return [self[k] for k in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        start, end = (self._ends[place - 1] if place else 0), self._ends[place]
        middle = start + self._prompts[place]
        prompt, target = self._tokens[start:middle].tolist(), self._tokens[middle:end].tolist()
        counted = None if self._all_count[place] else tuple(token >= _COUNTED for token in target)
        return EncodedText(self._ids[place], prompt, [token & (_COUNTED - 1) for token in target], counted)

    def __iter__(self) -> Iterator[EncodedText]:
        return (self[k] for k in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(EncodedText.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]
