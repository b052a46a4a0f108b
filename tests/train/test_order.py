"""The order of an epoch: random, with examples of similar length in a batch."""

import itertools
import random

import pytest

from bayeslora.train.order import WINDOW, order_of_epoch


def padding(lengths, order, size):
    """Tokens that the batches take, over the tokens there are."""
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return sum(len(rows) * max(lengths[row] for row in rows) for rows in batches) / sum(lengths)


@pytest.mark.parametrize("count", [1, 7, 64, 500, 2001])
@pytest.mark.parametrize("size", [1, 4, 32])
def test_every_example_is_seen_once(count, size):
    lengths = [random.Random(k).randint(1, 50) for k in range(count)]
    assert sorted(order_of_epoch(lengths, size, random.Random(0))) == list(range(count))


@pytest.mark.parametrize(("count", "size"), [(2000, 8), (2003, 8), (512, 16)])
def test_little_is_padded(count, size):
    """Lengths uniform in 64 to 512: at random a batch of 8 has 1.6 times its tokens. The texts left over are a random batch."""
    source = random.Random(0)
    lengths = [source.randint(64, 512) for _ in range(count)]
    full = count // size * size
    at_random = padding(lengths, list(range(full)), size)
    order = order_of_epoch(lengths, size, random.Random(0))[:full]
    kept = [lengths[row] for row in order]
    # a window's texts by length are spaced evenly: a batch of a window of w batches spans a w-th of the range of lengths
    window = min(WINDOW, count // size // 4)
    bound = 1 + 2 * (512 - 64) / window / (sum(kept) / len(kept))
    assert padding(kept, list(range(full)), size) < bound < at_random


def test_batches_of_all_lengths_are_spread_over_an_epoch_and_differ_between_epochs():
    lengths = [random.Random(k).randint(1, 500) for k in range(1000)]
    orders = [order_of_epoch(lengths, 10, random.Random(f"0 {epoch}")) for epoch in range(2)]
    batches = [[frozenset(order[k : k + 10]) for k in range(0, 1000, 10)] for order in orders]
    assert not set(batches[0]) & set(batches[1])
    halves = [sum(lengths[row] for row in orders[0][start : start + 500]) / 500 for start in (0, 500)]
    # the mean of 50 batches, each nearly of one length, that is uniform: standard error 144 / sqrt(50)
    assert abs(halves[0] - halves[1]) < 4 * 144 * (2 / 50) ** 0.5
    means = [sum(lengths[row] for row in orders[0][k : k + 10]) / 10 for k in range(0, 1000, 10)]
    steps = [abs(a - b) for a, b in itertools.pairwise(means)]
    # two lengths at random differ by a third of the range, 167; in the order of their lengths, batches would by 20
    assert sum(steps) / len(steps) > 100
    assert order_of_epoch(lengths, 10, random.Random("0 0")) == orders[0]


@pytest.mark.parametrize("lengths", [[0] * 100, [7] * 100, list(range(31))])
def test_equal_lengths_and_few_batches_are_shuffled_alone(lengths):
    """Examples of 31 lengths make seven batches of four, of which a window would have one."""
    plain = list(range(len(lengths)))
    random.Random(3).shuffle(plain)
    assert order_of_epoch(lengths, 4, random.Random(3)) == plain
