"""The embedded task: what it says is what it counts, and answers come as often as they should."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from bayeslora.errors import InputError
from bayeslora.tasks import SPLITS, Item, Prompt, distance_to_truth, load_task, make_urns, truth_entropy, urns_task
from bayeslora.tasks.rows import content_key


def urn_of(item: Item) -> dict[str, int]:
    """Reads the urn back from the words."""
    match = re.fullmatch(r"\w+ in the \w+: (.+?)\. .+:", item.prompt.text)
    assert match, item.prompt.text
    return dict(Counter(match[1].split()))


@pytest.mark.parametrize("split", SPLITS)
def test_the_words_give_the_probabilities(split: Any) -> None:
    for item in make_urns(split, 300):
        urn = urn_of(item)
        total = sum(urn.values())
        assert item.labels == tuple(option.removeprefix(" ") for option in item.options)
        assert set(item.labels) == set(urn) and 2 <= len(urn) <= 4
        assert all(1 <= count <= 8 for count in urn.values())
        assert item.probabilities == tuple(urn[colour] / total for colour in item.labels)
        assert item.prompt.passage == "" and item.gold in range(len(urn))


def test_sizes_and_variety() -> None:
    task = load_task("urns")
    assert [len(task.load(split)) for split in SPLITS] == [128, 64, 200]
    items = task.train + task.validation + task.test
    assert {len(item.options) for item in items} == {2, 3, 4}
    words = {" ".join(re.findall(r"[A-Za-z]+", re.sub(r": .+?\.", "", item.prompt.text))) for item in items}
    assert len(words) > 60
    assert len({item.id for item in task.test}) == 200
    assert sum(tuple(urn_of(item)) != item.labels for item in items) > len(items) / 3


def test_the_first_items_are_pinned() -> None:
    assert load_task("urns").test[3] == Item(
        "test-3",
        Prompt("Beads in the basket: pink pink yellow pink pink pink pink. One is drawn blindly:"),
        (" pink", " yellow"),
        ("pink", "yellow"),
        0,
        (6 / 7, 1 / 7),
    )
    first = load_task("urns").test[0].prompt.text
    assert first == (
        "Beads in the jar: yellow red red red red yellow yellow red red red yellow red yellow yellow yellow yellow. "
        "One is drawn blindly:"
    )


def test_same_seed_same_items_and_more_items_only_add() -> None:
    assert urns_task(3).test == urns_task(3).test != urns_task(4).test
    assert make_urns("train", 50, 3)[:20] == make_urns("train", 20, 3)


def test_no_two_splits_share_an_urn() -> None:
    urns = [{frozenset(urn_of(item).items()) for item in make_urns(split, 600)} for split in SPLITS]
    urns.append({frozenset(urn_of(item).items()) for item in make_urns("test", 600, seed=1)})
    train, validation, test, other_test = urns
    assert all(len(split) == 600 for split in urns)
    assert not train & validation and not train & (test | other_test) and not validation & (test | other_test)
    assert len({content_key(item) for split in SPLITS for item in make_urns(split, 300)}) == 900


def test_answers_come_as_often_as_their_probabilities_say() -> None:
    """Chi-square over bins of probability: each option is a trial that comes true with its probability."""
    items = make_urns("test", 4000)
    truth = np.array([p for item in items for p in item.probabilities or ()])
    hit = np.array([k == item.gold for item in items for k in range(len(item.options))])
    bins = np.minimum((truth * 8).astype(int), 7)
    expected = np.bincount(bins, truth)
    variance = np.bincount(bins, truth * (1 - truth))
    chi_square = ((np.bincount(bins, hit) - expected) ** 2 / variance).sum()
    assert chi_square < 22  # the 99.5 % point for 8 degrees of freedom


def test_gold_does_not_depend_on_position() -> None:
    items = [item for item in make_urns("train", 4000) if len(item.options) == 3]
    share = np.bincount([item.gold or 0 for item in items]) / len(items)
    assert np.abs(share - 1 / 3).max() < 4 * math.sqrt(2 / 9 / len(items))


def test_the_entropy_of_the_truth_is_the_nll_of_the_truth() -> None:
    items = make_urns("test", 4000)
    nll = -np.mean([math.log((item.probabilities or ())[item.gold or 0]) for item in items])
    assert truth_entropy(items) == pytest.approx(nll, abs=0.03)
    assert 0.8 < truth_entropy(items) < 1.1


def item(probabilities: tuple[float, ...] | None) -> Item:
    count = len(probabilities or "ab")
    return Item("x", Prompt("?"), (" a",) * count, tuple("abcd"[:count]), 0, probabilities)


def test_distance_to_truth() -> None:
    items = [item((0.25, 0.75)), item((0.5, 0.25, 0.25))]
    assert distance_to_truth([[0.25, 0.75], [0.5, 0.25, 0.25]], items) == 0
    assert distance_to_truth([[1.0, 0.0], [0.5, 0.25, 0.25]], items) == 0.375
    assert distance_to_truth(np.array([[1, 0, 0], [0, 0.5, 0.5]]), items) == pytest.approx((0.75 + 0.5) / 2)
    assert truth_entropy([item((0.5, 0.5)), item((1.0, 0.0))]) == pytest.approx(math.log(2) / 2)


@pytest.mark.parametrize(
    "rows, items, message",
    [
        ([], [], "0 rows of probabilities for 0 items; give one row per item"),
        ([[1.0, 0.0]], [], "1 rows of probabilities for 0 items; give one row per item"),
        ([[1.0, 0.0]], [item(None)], "item 'x' has no true probabilities; only items of the task 'urns' have them"),
        ([[1.0]], [item((0.5, 0.5))], "item 'x': probabilities [1.0] do not belong to its 2 options; give one each"),
        ([[0.5, 0.25, 0.25]], [item((0.5, 0.5))], "item 'x': probabilities [0.5, 0.25, 0.25] do not belong to its 2"),
    ],
)
def test_distances_that_make_no_sense(rows: Any, items: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        distance_to_truth(rows, items)
    assert str(error.value).startswith(message)


def test_no_items_have_no_entropy() -> None:
    with pytest.raises(InputError, match=r"^no items were given; give at least one with known probabilities$"):
        truth_entropy([])


@pytest.mark.parametrize("size", [0, -1, 10_001])
def test_sizes_that_cannot_be(size: int) -> None:
    with pytest.raises(InputError, match=f"^urns: size of train is {size}; give a number from 1 to 5000$"):
        urns_task(sizes={"train": size, "validation": 1, "test": 1})
