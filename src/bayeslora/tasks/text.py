"""Running text for language modelling: WikiText-2, or your own plain-text file.

A text is split into blocks. Every token is predicted once, from the tokens before it in its block: the first token of a
block from the last one of the previous block, with which the block begins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bayeslora.errors import InputError
from bayeslora.tasks.base import FromRow, SplitName
from bayeslora.tasks.encode import beginning_ids
from bayeslora.tasks.file import SHARES
from bayeslora.tasks.rows import Candidate, Malformed, row_id, whole_characters
from bayeslora.tasks.sources import HubPlace, Source, all_lines, check_data_dir, find_file, read_source
from bayeslora.tasks.token_store import TokenStore
from bayeslora.tasks.tokens import EncodedText, Lessons, TokenTask
from bayeslora.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUFFIXES = (".txt.gz", ".txt")
"""Suffixes of text files; the first that exists is used."""

NAME = "wikitext2"
DESCRIPTION = "WikiText-2: articles of Wikipedia, 2.1 million words, for language modelling"
SOURCES: Mapping[SplitName, Source] = {
    split: Source(f"wikitext2/{split}", "Salesforce/wikitext", ("wikitext-2-v1",), split)
    for split in ("train", "validation", "test")
}

AT_ONCE = 1000
"""Documents that are tokenised together."""


@dataclass(frozen=True)
class TextTask(TokenTask[str]):
    """A named text."""

    kind: ClassVar[str] = "text"

    def encode(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[EncodedText]:
        """Blocks of ``max_tokens``; the last one may be shorter."""
        ids = list(tokenizer(self.load(split), add_special_tokens=False, verbose=False).input_ids)
        return list(encode_blocks(f"{self.name} {split}", split, ids, tokenizer, max_tokens))

    def encode_lessons(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Lessons:
        """Encode for training: the same blocks."""
        return Lessons(self.encode(split, tokenizer, max_tokens))


@dataclass(frozen=True, slots=True)
class Document(FromRow):
    """One of many texts."""

    text: str


@dataclass(frozen=True)
class DocumentTask(TokenTask[Collection[Document]]):
    """Many texts, packed into blocks one after the other, with the end token between them."""

    kind: ClassVar[str] = "text"

    def encode(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[EncodedText]:
        """Blocks of ``max_tokens``; the last one may be shorter."""
        return list(self._blocks(split, tokenizer, max_tokens))

    def encode_lessons(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Lessons:
        """Encode for training: the same blocks."""
        return Lessons(TokenStore(self._blocks(split, tokenizer, max_tokens)))

    def _blocks(self, split: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> Iterator[EncodedText]:
        """The blocks one by one; only a few documents are in memory."""
        ending = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]

        def ids() -> Iterator[int]:
            documents = iter(self.load(split))
            while some := [document.text for document in islice(documents, AT_ONCE)]:
                for row in tokenizer(some, add_special_tokens=False, verbose=False).input_ids:
                    yield from (*row, *ending)

        return encode_blocks(f"{self.name} {split}", split, ids(), tokenizer, max_tokens)


def read_document(values: Mapping[str, Any]) -> Candidate[Document]:
    """A row of ``text``, which keeps its line breaks."""
    if not isinstance(values.get("text"), str):
        raise Malformed("text is no text" if values.get("text") is not None else "no text")
    text = whole_characters(values["text"], "text")
    return Candidate(Document(row_id(values), text), None if text.strip() else "empty text")


def document_key(document: Document) -> str:
    """What a document says."""
    return document.text


def encode_blocks(
    where: str, split: str, ids: Iterable[int], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> Iterator[EncodedText]:
    """Tokens in blocks of ``max_tokens``."""
    ids = iter(ids)
    first = list(islice(ids, 2))
    number = -1
    for number, (prompt, target) in enumerate(cut_blocks(chain(first, ids), beginning_ids(tokenizer), max_tokens)):
        yield EncodedText(f"{split}-{number}", prompt, target)
    if number < 0:
        raise InputError(f"{where}: has {len(first)} tokens, which is too short; give a longer text")


def cut_blocks(ids: Iterable[int], beginning: Sequence[int], max_tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompt and target of each block, of at most ``max_tokens`` together.

    ``beginning`` are special tokens at the start of every block. Without them the first token of the text cannot be
    predicted.
    """
    step = max_tokens - len(beginning) - 1
    if step < 1:
        raise InputError(f"max_tokens is {max_tokens}; blocks of text need at least {len(beginning) + 2}")
    ids = iter(ids)
    last = [] if beginning else list(islice(ids, 1))
    while target := list(islice(ids, step)):
        yield [*beginning, *last], target
        last = target[-1:]


def wikitext2_task(data_dir: Path | None) -> TextTask:
    """WikiText-2, from ``wikitext2/train.txt.gz`` and so on below the data directory, or from the hub."""
    checked = None if data_dir is None else check_data_dir(data_dir)
    return TextTask(NAME, DESCRIPTION, lambda split: _read(SOURCES[split], checked))


def is_text(path: Path) -> bool:
    """Whether a path has the name of a text file, or is a directory with text splits."""
    return path.name.endswith(SUFFIXES) or any(find_file(path / split, SUFFIXES) for split in SHARES)


def text_task(path: Path) -> TextTask:
    """A file of text, or a directory with ``train.txt``, ``validation.txt`` and ``test.txt`` (or ``.txt.gz``).

    A single file is divided into 60 % train, 20 % validation and 20 % test, in this order, at ends of lines.
    """
    if path.is_dir():
        return TextTask(str(path), f"running text in {path}", lambda split: _read_part(path, split))
    if not path.is_file():
        raise InputError(f"{path}: no such file or directory; pass a file of text or a directory with splits")
    return TextTask(str(path), f"running text in {path}", lambda split: _divide(path, split))


def _read(source: Source, data_dir: Path | None) -> str:
    if data_dir is None:
        return "".join(row.values["text"] for row in read_source(source, None, _hub_line))
    path = find_file(data_dir / source.file, SUFFIXES)
    if path is None:
        names = " or ".join(source.file + suffix for suffix in SUFFIXES)
        raise InputError(f"{data_dir}: has no {names}; pass the directory that holds it as --data-dir")
    return _whole(path)


def _hub_line(row: Mapping[str, Any], place: HubPlace) -> dict[str, Any]:
    """A line of ``Salesforce/wikitext``, where empty lines lack their space and line feed."""
    return {"text": row["text"] or " \n"}


def _read_part(directory: Path, split: SplitName) -> str:
    path = find_file(directory / split, SUFFIXES)
    if path is None:
        raise InputError(f"{directory}: has no {split}.txt (or .txt.gz); add it, or use another split")
    return _whole(path)


def _whole(path: Path) -> str:
    return "".join(_lines(path))


def _lines(path: Path) -> list[str]:
    lines = list(all_lines(path))
    if not any(line.strip() for line in lines):
        raise InputError(f"{path}: holds no text; give a file with some")
    return lines


def _divide(path: Path, split: SplitName) -> str:
    """One split of a file. A line belongs to the split that contains its middle."""
    lines = _lines(path)
    ends = list(accumulate(map(len, lines)))
    edges = [share * ends[-1] for share in accumulate(SHARES.values())][:-1]
    wanted = list(SHARES).index(split)
    part = [line for line, end in zip(lines, ends, strict=True) if bisect_right(edges, end - len(line) / 2) == wanted]
    if not part:
        raise InputError(
            f"{path}: has {counted(len(lines), 'line')}, too few to divide: {split} would be empty; give a text of more lines, "
            "or a directory with one file per split"
        )
    return "".join(part)
