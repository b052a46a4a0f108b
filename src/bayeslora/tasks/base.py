"""Tasks: three splits that are read on demand, and the most common kind, questions with options.

An :class:`Item` is one question as text: a prompt, and a continuation for each option. Items are independent of
tokenizers, and their numbers of options may differ; nothing is padded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar, get_args

from bayeslora.errors import InputError, did_you_mean

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = get_args(SplitName)

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in three pieces, of which only the passage may be truncated, from the left, if the whole is too long.

    A passage includes its leading space, as options do, so that a truncated one begins with its own.
    """

    head: str
    passage: str = ""
    tail: str = ""

    @property
    def text(self) -> str:
        """The whole prompt."""
        return self.head + self.passage + self.tail


@dataclass(frozen=True, slots=True)
class FromRow:
    """What one row of data says.

    Attributes:
        id: its name in predictions.
        origin: where the row lies, for error messages: file and line. Empty for what was made otherwise.
    """

    id: str
    origin: str = field(default="", compare=False, repr=False, kw_only=True)

    def named(self, noun: str) -> str:
        """How errors name it: by its place in the data, if it has one, and its id."""
        return f"{self.origin}: {noun} {self.id!r}" if self.origin else f"{noun} {self.id!r}"


@dataclass(frozen=True, slots=True)
class Item(FromRow):
    """One question.

    Attributes:
        prompt: input of the model.
        options: continuation of the prompt for each option, with its leading space: ``" Paris"``.
        labels: the options' labels as annotated: ``A``-``E``, ``1``-``4``.
        gold: index of the right option, if known.
        probabilities: the true answer probabilities, if known.
        letter_prompt: input of the model for scoring by label, if the prompt itself shows no labels.
    """

    prompt: Prompt
    options: tuple[str, ...]
    labels: tuple[str, ...]
    gold: int | None
    probabilities: tuple[float, ...] | None = None
    letter_prompt: Prompt | None = None

    def __post_init__(self) -> None:
        n = len(self.options)
        if n == 0 or len(self.labels) != n:
            raise InputError(
                f"{self.named('item')}: {n} options and {len(self.labels)} labels; give one label per option"
            )
        if self.gold is not None and not 0 <= self.gold < n:
            raise InputError(f"{self.named('item')}: gold is {self.gold}; give an index from 0 to {n - 1}, or none")
        if self.probabilities is not None and len(self.probabilities) != n:
            raise InputError(
                f"{self.named('item')}: {n} options and {len(self.probabilities)} probabilities; give one each"
            )


@dataclass(frozen=True)
class Split:
    """The items of one split, and how many rows were left out of its source, by reason.

    If two splits are parts of one source, both have the counts of that source.
    """

    items: tuple[Item, ...]
    counts: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)


@dataclass(frozen=True)
class Splits(Generic[Content]):
    """Three named splits. ``read`` reads a split; :meth:`load` does so once and caches it."""

    name: str
    description: str
    read: Callable[[SplitName], Content] = field(repr=False)
    _loaded: dict[SplitName, Content] = field(default_factory=dict, init=False, repr=False, compare=False)

    def load(self, split: str) -> Content:
        """A split by name: ``train``, ``validation`` (for selection) or ``test`` (for reporting)."""
        for name in SPLITS:
            if split == name:
                if name not in self._loaded:
                    self._loaded[name] = self.read(name)
                return self._loaded[name]
        raise InputError(f"unknown split {split!r}; choose {', '.join(SPLITS)}{did_you_mean(split, SPLITS)}")


@dataclass(frozen=True)
class Task(Splits[Split]):
    """A named set of questions with options.

    Attributes:
        kind: ``questions``, or ``labels`` where all have the same options: texts to classify.
    """

    kind: str = "questions"

    @property
    def train(self) -> tuple[Item, ...]:
        """Training items."""
        return self.load("train").items

    @property
    def validation(self) -> tuple[Item, ...]:
        """Items for the selection of settings and checkpoints."""
        return self.load("validation").items

    @property
    def test(self) -> tuple[Item, ...]:
        """Items for reported results."""
        return self.load("test").items


def require_gold(items: Iterable[Item]) -> list[int]:
    """The right answers; refuses items without one, which can be predicted but not used in training or evaluation."""
    gold = []
    for item in items:
        if item.gold is None:
            asked = (item.prompt.passage or item.prompt.head).strip()
            text = asked if len(asked) <= 60 else f"{asked[:60]}..."
            raise InputError(
                f"{item.named('item')} has no answer; training and evaluation need one, so add its 'answer' or 'label': "
                f"{text!r}"
            )
        gold.append(item.gold)
    return gold
