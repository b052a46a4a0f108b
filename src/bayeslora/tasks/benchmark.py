"""Definition of a public benchmark: its sources, how its rows become items, and the use of its splits.

Settings are chosen on ``validation`` and results reported on ``test``. Where train, validation and test are all
labelled, they are the official ones. Where the labels of test are hidden, ``test`` is the official validation split and
``validation`` a fixed 20 % of train, never seen in training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path

from bayeslora.errors import InputError
from bayeslora.tasks.base import Item, Split, SplitName, Task
from bayeslora.tasks.rows import Reader, clean, divide
from bayeslora.tasks.sources import HubRow, Source, check_data_dir, read_source

HELD_OUT = 0.2
"""Share of train used as the validation split if there is no official one."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark. Without ``train`` it is for evaluation only; without ``validation`` a part of train is held out.

    Rows with equal ``key`` are never split between the two.
    """

    name: str
    description: str
    read: Reader[Item]
    hub_row: HubRow
    train: Source | None
    validation: Source | None
    test: Source
    key: Callable[[Item], str] = attrgetter("id")

    def task(self, data_dir: Path | None) -> Task:
        """The task, read from the data directory or else from the hub."""
        checked = None if data_dir is None else check_data_dir(data_dir)
        official = cache(lambda split: self._read_official(split, checked))  # two splits may need train
        return Task(self.name, self.description, lambda split: self._split(split, official))

    def _split(self, split: SplitName, official: Callable[[SplitName], Split]) -> Split:
        """One of our splits, from the official ones."""
        if split == "test" or self.validation is not None:
            return official(split)
        whole = official("train")
        held_out, rest = divide(whole.items, (HELD_OUT, 1 - HELD_OUT), self.key)
        return Split(rest if split == "train" else held_out, whole.counts)

    def _read_official(self, split: SplitName, data_dir: Path | None) -> Split:
        source = {"train": self.train, "validation": self.validation, "test": self.test}[split]
        if source is None:
            raise InputError(f"{self.name} is for evaluation only and has no {split} split; train on another task")
        rows = read_source(source, data_dir, self.hub_row)
        result = clean(rows, self.read, f"{self.name} {split}", drop=split == "train")
        if not result.items:
            raise InputError(f"{self.name} {split}: none of its {len(rows)} rows can be used; get the data again")
        return result
