"""WinoGrande: choose which of two words fills the blank. The labels of its test split are hidden.

An option is the rest of the sentence with its word inserted, so the sentences are compared from where they begin to
differ. For scoring by letter, the prompt contains the whole sentence and lists both words.

Sentences come in twins with the same two words and opposite answers. Holding out one twin of a pair would leak the
other's answer, so rows are held out by their pair of words; the hub's copy has no ids, and this way both copies are
divided alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from bayeslora.tasks.base import Item, Prompt
from bayeslora.tasks.benchmark import Benchmark
from bayeslora.tasks.choices import choice_prompt
from bayeslora.tasks.rows import Candidate, Malformed, row_id, text_field
from bayeslora.tasks.sources import HubPlace, Source

BLANK = "_"
ANSWERS = ("1", "2")
LABELS = ("A", "B")


def read_winogrande(values: Mapping[str, Any]) -> Candidate[Item]:
    """A row ``{"id", "sentence", "option1", "option2", "answer": "1" or "2"}``."""
    sentence = text_field(values, "sentence")
    before, blank, after = sentence.partition(BLANK)
    if not blank:
        raise Malformed("no blank '_' in the sentence", before[:60])
    words = (text_field(values, "option1"), text_field(values, "option2"))
    answer = text_field(values, "answer")
    if answer not in ANSWERS:
        raise Malformed("answer is neither 1 nor 2", repr(answer)[:60])
    options = tuple(f" {word}{after}" for word in words)
    asked = choice_prompt(f"Which option fills the blank? {sentence}", words, LABELS)
    prompt, gold = Prompt(before.rstrip()), ANSWERS.index(answer)
    item = Item(row_id(values), prompt, options, LABELS, gold, letter_prompt=asked)
    return Candidate(item, _flaw(before, after, words))


def hub_row(row: Mapping[str, Any], place: HubPlace) -> dict[str, Any]:
    """A row of ``allenai/winogrande``, which has no ids."""
    return {name: row[name] for name in ("sentence", "option1", "option2", "answer")}


def word_pair(item: Item) -> str:
    """Key from the two words of an item in any order, without their common ending: the same for both twins."""
    backwards = zip(*(reversed(option) for option in item.options), strict=False)
    rest = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], backwards))
    return repr(sorted(option[: len(option) - rest].lower() for option in item.options))


def _flaw(before: str, after: str, words: tuple[str, str]) -> str | None:
    if not before.strip():
        return "nothing before the blank"
    if BLANK in after:
        return "more than one blank"
    return None if all(words) else "empty choice"


def _benchmark(size: str, rows: str) -> Benchmark:
    hub, configs = "allenai/winogrande", (f"winogrande_{size}",)
    return Benchmark(
        f"winogrande-{size}",
        f"WinoGrande {size.upper()}: fill in the blank, {rows} training sentences of which 20 % are held out",
        read_winogrande,
        hub_row,
        train=Source(f"winogrande/train_{size}", hub, configs, "train"),
        validation=None,
        test=Source("winogrande/validation", hub, configs, "validation"),
        key=word_pair,
    )


BENCHMARKS = (_benchmark("s", "640"), _benchmark("m", "2,558"))
