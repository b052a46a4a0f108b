"""The weight of the KL beside a mean log-likelihood."""

from fractions import Fraction

import pytest

from bayeslora.posterior import kl_weight
from bayeslora.posterior.kl import blob_cycle


@pytest.mark.parametrize(
    "scaling, beta, want",
    [("elbo", 1.0, 1 / 1000), ("elbo", 0.5, 0.5 / 1000), ("paper", 1.0, 0.2 / 63)],
)
def test_weights(scaling, beta, want):
    assert kl_weight(scaling, examples=1000, batch_size=16, beta=beta) == pytest.approx(want)


def test_paper_weight_is_the_bound_with_beta_a_fifth_of_the_batch():
    """0.2 / S = 0.2 b / N: an effective β of 3.2 at batch size 16."""
    paper = kl_weight("paper", examples=1600, batch_size=16)
    assert paper == pytest.approx(kl_weight("elbo", examples=1600, batch_size=16, beta=3.2))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="unknown KL scaling 'ebo'; choose one of elbo, paper, blob"):
        kl_weight("ebo", examples=10, batch_size=2)
    with pytest.raises(ValueError, match="got 0 and 2"):
        kl_weight("elbo", examples=0, batch_size=2)
    with pytest.raises(ValueError, match="beta must be finite and not negative, got -1"):
        kl_weight("elbo", examples=5, batch_size=2, beta=-1)


def test_the_cycle_of_blob_is_the_published_one():
    """518 steps for the 2,251 training questions of ARC-Easy in batches of four; never less than one."""
    assert blob_cycle(2251, 4) == 518
    assert blob_cycle(1, 1) == 100 and blob_cycle(2, 1000) == 1


@pytest.mark.parametrize("examples, batch_size", [(1, 1), (10, 3), (64, 8), (5000, 4)])
def test_blob_doubles_from_step_to_step_and_spends_its_budget_in_every_cycle(examples, batch_size):
    """Card 7: ``π_j = 2^j / (2^(M+1) − 1)``, which sum to ``1 − 1 / (2^(M+1) − 1)``."""
    cycle = blob_cycle(examples, batch_size)
    for epoch in (0, 3):
        weights = [
            kl_weight("blob", examples=examples, batch_size=batch_size, beta=2.0, step=epoch * cycle + j)
            for j in range(cycle)
        ]
        exact = [Fraction(2 * 2**j, 2 ** (cycle + 1) - 1) for j in range(1, cycle + 1)]
        assert weights == pytest.approx([float(weight) for weight in exact])
        assert sum(weights) == pytest.approx(2.0 * float(1 - Fraction(1, 2 ** (cycle + 1) - 1)))
