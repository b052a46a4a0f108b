"""The embedded task ``urns``: draws from described urns, whose answer probabilities are known.

    Beads in the jar: red blue blue green red blue. Picked at random:

Beads are listed one by one, because small models count badly and compare well. The options are the colours, the
probabilities their shares, and the gold answer is drawn from them. So the answer is random, and a good model is exactly as
uncertain as the truth. That makes calibration measurable against the truth: by the distance to it
(:func:`distance_to_truth`), and by the NLL, which in expectation over the drawn answers cannot be below the entropy of the
truth (:func:`truth_entropy`). On a finite split the drawn answers move the NLL of the truth itself somewhat around that
entropy.

No files are read: everything is generated from a seed. Which urn (colours with counts) belongs to which split is
decided by a hash of the urn, so no two splits share one, whatever the wording, seeds and sizes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence

from bayeslora.errors import InputError
from bayeslora.tasks.base import SPLITS, Item, Prompt, Split, SplitName, Task
from bayeslora.tasks.rows import digest

NAME = "urns"
DESCRIPTION = "draws from described urns: made from a seed, with known answer probabilities"
SIZES: Mapping[SplitName, int] = {"train": 128, "validation": 64, "test": 200}
EDITION = 2
"""Increased when urns or their wording change, so that no test urn was used in earlier choices."""

MAX_SIZE = 5_000
"""Largest size of a split, below its number of distinct urns, about 7,000."""

COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "pink")
"""Colours, one token each in common tokenizers."""

CONTAINERS = ("urn", "bag", "box", "jar", "bowl", "basket")
OBJECTS = ("Balls", "Marbles", "Beads", "Stones", "Buttons")
DRAWS = ("One is drawn blindly:", "Picked at random:", "One taken without looking:", "One is drawn at random:")
COUNTS = (1, 1, 1, 2, 6, 8)
"""Possible counts of a colour: few or many, so that urns are uneven and predictions informative."""


def urns_task(seed: int = 0, sizes: Mapping[SplitName, int] = SIZES) -> Task:
    """The task, with its splits of these sizes."""
    for split in SPLITS:
        if not 1 <= sizes.get(split, 0) <= MAX_SIZE:
            raise InputError(f"urns: size of {split} is {sizes.get(split, 0)}; give a number from 1 to {MAX_SIZE}")
    return Task(NAME, DESCRIPTION, lambda split: Split(make_urns(split, sizes[split], seed)))


def make_urns(split: SplitName, size: int, seed: int = 0) -> tuple[Item, ...]:
    """Generate ``size`` different urns of a split. A larger size only adds items at the end."""
    rng = random.Random(f"{NAME} {EDITION} {seed} {split}")
    items: list[Item] = []
    seen: set[str] = set()
    while len(items) < size:
        urn = _draw_urn(rng)
        key = _urn_key(urn)
        if key in seen or _split_of(key) != split:
            continue
        seen.add(key)
        items.append(_ask(f"{split}-{len(items)}", urn, rng))
    return tuple(items)


def distance_to_truth(probabilities: Sequence[Sequence[float]], items: Sequence[Item]) -> float:
    """Mean total variation ``½ Σ |p − truth|`` between predictions and the items' true probabilities, from 0 to 1.

    A row of predictions may be longer than the item's options if the rest is 0, as padded arrays are.
    """
    if len(probabilities) != len(items) or not items:
        raise InputError(f"{len(probabilities)} rows of probabilities for {len(items)} items; give one row per item")
    return math.fsum(map(_distance, probabilities, items)) / len(items)


def truth_entropy(items: Iterable[Item]) -> float:
    """Mean entropy of the items' true probabilities in nats: the least expected NLL of any predictor."""
    entropies = [-math.fsum(p * math.log(p) for p in _truth(item) if p > 0) for item in items]
    if not entropies:
        raise InputError("no items were given; give at least one with known probabilities")
    return math.fsum(entropies) / len(entropies)


def _draw_urn(rng: random.Random) -> dict[str, int]:
    colours = rng.sample(COLOURS, rng.randint(2, 4))
    return {colour: rng.choice(COUNTS) for colour in colours}


def _urn_key(urn: Mapping[str, int]) -> str:
    return repr(sorted(urn.items()))


def _split_of(key: str) -> SplitName:
    return SPLITS[int(digest(key), 16) % len(SPLITS)]


def _ask(name: str, urn: Mapping[str, int], rng: random.Random) -> Item:
    """Make an item: the urn in words, its options in random order, and an answer drawn from it."""
    content = [colour for colour, count in urn.items() for _ in range(count)]
    rng.shuffle(content)
    text = f"{rng.choice(OBJECTS)} in the {rng.choice(CONTAINERS)}: {' '.join(content)}. {rng.choice(DRAWS)}"
    colours = tuple(rng.sample(list(urn), len(urn)))
    total = sum(urn.values())
    gold = rng.choices(range(len(colours)), weights=[urn[colour] for colour in colours])[0]
    options = tuple(f" {colour}" for colour in colours)
    return Item(name, Prompt(text), options, colours, gold, tuple(urn[colour] / total for colour in colours))


def _truth(item: Item) -> tuple[float, ...]:
    if item.probabilities is None:
        raise InputError(f"item {item.id!r} has no true probabilities; only items of the task 'urns' have them")
    return item.probabilities


def _distance(row: Sequence[float], item: Item) -> float:
    truth = _truth(item)
    given = [float(p) for p in row]
    if len(given) < len(truth) or any(given[len(truth) :]):
        raise InputError(
            f"item {item.id!r}: probabilities {given} do not belong to its {len(truth)} options; give one each"
        )
    return math.fsum(abs(p - q) for p, q in zip(given, truth, strict=False)) / 2
