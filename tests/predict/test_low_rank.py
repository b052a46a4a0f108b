"""Streamed sums of outer products against the whole sum."""

import pytest
import torch

from bayeslora.predict.linearised import low_rank
from bayeslora.predict.linearised.low_rank import SPARE, LowRankSum


def vectors(count, size, rank=None, seed=0):
    """Vectors in a random subspace of this rank."""
    generator = torch.Generator().manual_seed(seed)
    rank = size if rank is None else rank
    return torch.randn(count, rank, generator=generator) @ torch.randn(rank, size, generator=generator)


def summed(rows, rank, batch):
    total = LowRankSum(rank)
    for part in rows.split(batch):
        total.add(part)
    root = total.root()
    assert root.shape == (rows.shape[1], rank)
    return root @ root.mT


@pytest.fixture(params=["whole", "in parts"], autouse=True)
def kept(request, monkeypatch):
    """Sums that are kept whole, and those of vectors that are too long for that."""
    monkeypatch.setattr(low_rank, "WHOLE", 10**9 if request.param == "whole" else 0)


@pytest.mark.parametrize("exact", [1024, 4])
@pytest.mark.parametrize("batch", [1, 7, 60])
@pytest.mark.parametrize("count, size", [(60, 20), (20, 60), (3, 20)])
def test_it_is_the_sum_where_the_vectors_span_no_more_than_is_kept(monkeypatch, exact, batch, count, size):
    monkeypatch.setattr(low_rank, "EXACT", exact)
    rows = vectors(count, size, rank=4)
    want = rows.mT @ rows
    torch.testing.assert_close(summed(rows, 5, batch), want, atol=1e-5 * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize("exact", [1024, 4])
@pytest.mark.parametrize("count, size", [(400, 50), (50, 400)])
def test_otherwise_its_largest_directions_are_kept(monkeypatch, exact, count, size):
    monkeypatch.setattr(low_rank, "EXACT", exact)
    lengths = 0.8 ** torch.arange(size)
    rows = vectors(count, size) * lengths
    whole = rows.double().mT @ rows.double()
    want = torch.linalg.eigvalsh(whole).flip(0)[:5]
    streamed = summed(rows, 5, 20).double()
    torch.testing.assert_close(torch.linalg.eigvalsh(streamed).flip(0)[:5], want, rtol=0.02, atol=0)
    rest = torch.linalg.eigvalsh(whole - streamed)
    assert rest.min() > -1e-4 * want[0]  # never more than the sum
    torch.testing.assert_close(
        torch.linalg.eigvalsh(summed(rows, 5, count).double()).flip(0)[:5], want, rtol=1e-3, atol=0
    )


def test_what_is_spare_is_kept_until_the_end():
    """Of directions that come one at a time the last are the largest: all were seen before any was cut."""
    rows = torch.arange(1.0, 1 + 2 * SPARE).diag()
    want = rows[-2:].square().sum(0).diag()
    torch.testing.assert_close(summed(rows, 2, SPARE), want)


def test_the_global_random_state_is_left_alone(monkeypatch):
    monkeypatch.setattr(low_rank, "EXACT", 4)
    before = torch.get_rng_state()
    summed(vectors(60, 50), 2, 60)
    assert torch.equal(before, torch.get_rng_state())
