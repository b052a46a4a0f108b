"""Texts in a mapped file: what comes out is what was put in, and memory does not grow with it."""

import random
import tracemalloc

import pytest

from bayeslora.tasks.token_store import TokenStore
from bayeslora.tasks.tokens import EncodedText


def text(number, rng):
    prompt = [rng.randrange(200_000) for _ in range(rng.randrange(4))]
    target = [rng.randrange(200_000) for _ in range(rng.randrange(1, 9))]
    counted = tuple(rng.random() < 0.5 for _ in target) if number % 3 else None
    return EncodedText(f"text-{number}", prompt, target, counted)


@pytest.mark.parametrize("count", [0, 1, 50])
def test_texts_come_back_as_they_were(count):
    rng = random.Random(0)
    texts = [text(number, rng) for number in range(count)]
    store = TokenStore(iter(texts))
    assert len(store) == count and list(store) == texts and store == texts
    assert [store[k] for k in range(-count, 0)] == texts
    assert store[3:40:7] == texts[3:40:7] and store[::-1] == texts[::-1]
    with pytest.raises(IndexError):
        store[count]


def test_stores_that_differ_are_not_equal():
    store = TokenStore([EncodedText("a", [1], [2])])
    assert store != [EncodedText("a", [1], [3])] and store != [] and store != 5
    assert store != [EncodedText("a", [1], [2], (True,))]


def test_large_token_numbers_and_what_counts_do_not_mix():
    one = EncodedText("a", [2**31 - 1], [2**31 - 1, 0, 2**31 - 1], (True, False, False))
    assert TokenStore([one])[0] == one


def test_memory_does_not_grow_with_the_tokens():
    """A million tokens, of which a list would take eight megabytes for the references alone."""
    tracemalloc.start()
    store = TokenStore(EncodedText(str(k), [], [k] * 1000) for k in range(1000))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert store[999].target_ids == [999] * 1000
    assert kept < 300_000
