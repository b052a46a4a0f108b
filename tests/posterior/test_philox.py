"""Philox 4×32-10 against its published vectors, and the noise made of it against exact functions and another device."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from bayeslora.posterior.philox import (
    MULTIPLIERS,
    Philox,
    _cos_sin,
    _log,
    key_schedule,
    normals,
    philox,
    uniforms,
)

CPU = torch.device("cpu")
ONES = 0xFFFFFFFF
PUBLISHED = [  # counter, key, words: the known-answer tests of the authors' library, Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
ULP = 2.0**-23
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def array(values, kind):
    return np.array(values, np.uint64) if kind == "numpy" else torch.tensor(values)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_published_vectors(counter, key, words, kind):
    even, odd = array([[counter[0]], [counter[2]]], kind), array([[counter[1]], [counter[3]]], kind)
    keys = [array(pair, kind)[:, None] for pair in key_schedule(key[0] | key[1] << 32)]
    even, odd = philox(even, odd, array(MULTIPLIERS, kind)[:, None], keys)
    assert tuple(int(word) for word in (even[0, 0], odd[0, 0], even[1, 0], odd[1, 0])) == words


def plain_philox(counter, seed):
    """The method written down word by word, in Python's integers."""
    c, k = list(counter), [seed & ONES, seed >> 32]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & ONES, first >> 32 ^ c[3] ^ k[1], first & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return c


@pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
@pytest.mark.parametrize(("layers", "n", "size"), [(1, 1, 1), (3, 2, 7), (2, 5, 16)])
def test_numbers_are_keyed_by_seed_request_draw_and_place(seed, layers, n, size):
    source = Philox(seed, CPU, stream=1)
    source.next(1, 1, 1)
    found = source.next(layers, n, size, uniforms)
    blocks = -(-size // 4)
    for layer in range(layers):
        for draw in range(n):
            words = [plain_philox((layer * blocks + block, draw, 1, 1), seed) for block in range(blocks)]
            # the first words of all blocks, then the third, the second and the fourth
            want = [words[block][lane] >> 8 for lane in (0, 2, 1, 3) for block in range(blocks)][:size]
            assert found[layer, draw].tolist() == [word * 2.0**-24 for word in want]


@pytest.mark.parametrize("size", [1, 4, 4 * 2**13, 4 * 2**13 + 5, 3 * 4 * 2**13])
def test_chunks_do_not_show(size):
    """A draw of one layer more, whose chunks are others, begins with the same numbers."""
    seeds = Philox(7, CPU), Philox(7, CPU)
    one, two = seeds[0].next(1, 2, size), seeds[1].next(3, 4, size)
    assert torch.equal(one, two[:1, :2])
    assert len(two.flatten().unique()) > 0.99 * two.numel()


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_standard_normal(seed):
    drawn = Philox(seed, CPU).next(10, 4, 5000).double()
    assert kstest(drawn.flatten().numpy(), "norm").pvalue > 1e-4
    rows = drawn.view(40, 5000)
    correlation = (rows @ rows.T / 5000 - torch.eye(40)).abs()
    assert correlation.max() < 5.5 * (2 / 5000) ** 0.5  # the variance's own error is the largest, √2 of the rest
    assert abs(drawn.pow(4).mean() - 3) < 5 * (96 / drawn.numel()) ** 0.5


def test_pairs_of_normals_fill_the_circle():
    words = np.random.default_rng(0).integers(0, 2**32, (2, 100_000), dtype=np.uint64)
    x, y = normals(words[0], words[1], np)
    radius = np.hypot(x.astype(float), y.astype(float))
    exact = np.sqrt(-2 * np.log((words[0].astype(float) + 1) / 2**32))
    # the rounding of the uniform number moves its logarithm by 2⁻²⁴, which matters most where the radius is small
    assert np.all(np.abs(radius**2 - exact**2) < 4 * ULP * (1 + exact**2))
    angle = np.arctan2(y, x)
    assert kstest(angle / (2 * np.pi) + 0.5, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("word", [0, 1, 2**31, ONES - 1, ONES])
@pytest.mark.parametrize("other", [0, 1, 2**29, 2**30, 2**31, ONES])
def test_extreme_words_give_finite_noise(word, other):
    pair = normals(np.array([word], np.uint64), np.array([other], np.uint64), np)
    assert all(
        np.isfinite(numbers).all() and abs(numbers[0]) <= math.sqrt(2 * 32 * math.log(2)) * (1 + ULP)
        for numbers in pair
    )


def test_logarithm_cosine_and_sine_are_exact_to_their_rounding():
    x = np.concatenate([np.linspace(1e-9, 1, 10_001), 2.0 ** -np.arange(32)]).astype(np.float32)
    exact = np.log(x.astype(float))
    assert np.all(np.abs(_log(x, np) - exact) <= 2 * ULP * np.abs(exact))
    angle = np.linspace(-math.pi / 4, math.pi / 4, 10_001).astype(np.float32)
    for found, function in zip(_cos_sin(angle), (np.cos, np.sin), strict=True):
        assert np.abs(found - function(angle.astype(float))).max() < ULP


def test_tensors_give_the_same_noise_as_arrays():
    """To the root, which torch's own on CPUs does not always round to the nearest; on a GPU to the bit."""
    words = np.random.default_rng(1).integers(0, 2**32, (2, 50_000), dtype=np.uint64)
    tensors = torch.from_numpy(words.astype(np.int64))
    for found, want in zip(normals(*tensors, torch), normals(*words, np), strict=True):
        np.testing.assert_allclose(found.numpy(), want, rtol=2 * ULP, atol=0)
    for found, want in zip(uniforms(*tensors, torch), uniforms(*words, np), strict=True):
        assert np.array_equal(found.numpy(), want)


@needs_gpu
@pytest.mark.parametrize("make", [normals, uniforms])
def test_a_gpu_makes_the_same_bits(make):
    for seed in range(5):
        here, there = Philox(seed, CPU), Philox(seed, torch.device("cuda"))
        for shape in ((1, 1, 3), (28, 4, 8 * 1536), (3, 5, 1001)):
            assert torch.equal(there.next(*shape, make).cpu(), here.next(*shape, make))
