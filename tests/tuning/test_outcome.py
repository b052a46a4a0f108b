"""What a search has found: which trials are feasible, which of them are best, and which is chosen."""

from __future__ import annotations

import pytest

pytest.importorskip("botorch")

from bayeslora.tuning.log import Trial
from bayeslora.tuning.outcome import Outcome, metric_bounds, verdict
from tuning.cases import tuning


def outcome(*rows: tuple[float, float, float], constraints: tuple[str, ...] = ()) -> Outcome:
    """Of trials with these ECE, NLL and accuracy; a trial without a number failed."""
    trials = [
        Trial(
            k,
            "sobol",
            {"learning_rate": 0.1, "weight_decay": 0.1},
            "done",
            dict(zip(("ece", "nll", "acc"), row, strict=True)),
        )
        if row
        else Trial(k, "sobol", {"learning_rate": 0.1, "weight_decay": 0.1}, "failed", {}, "why")
        for k, row in enumerate(rows)
    ]
    return Outcome(tuning(constraints=constraints), trials, {})


def test_the_front_is_of_feasible_trials_and_nll_decides():
    found = outcome((0.1, 1.0, 0.7), (0.2, 0.8, 0.7), (0.2, 0.9, 0.6), (), (0.01, 0.5, 0.4), constraints=("acc>=0.5",))
    assert found.feasible.tolist() == [True, True, True, False, False]
    assert found.front == [0, 1] and found.chosen == 1
    assert (found.reference > found.objectives[found.feasible].max(0)).all()
    everything = outcome((0.1, 1.0, 0.7), (0.2, 0.8, 0.7), (0.2, 0.9, 0.6), (), (0.01, 0.5, 0.4))
    assert everything.front == [0, 1, 4] and everything.chosen == 4


def test_a_constraint_that_is_only_just_kept_is_kept():
    found = outcome((0.1, 1.0, 0.5), (0.1, 1.5, 0.8), (0.1, 1.0, 0.4), constraints=("acc>=0.5", "nll<=1.0"))
    assert found.feasible.tolist() == [True, False, False] and found.chosen == 0


def test_all_bounds_of_an_outcome_are_drawn():
    found = outcome((0.1, 1.0, 0.5), constraints=("acc>=0.4", "nll<=1.0", "acc<=0.9"))
    assert metric_bounds(found) == {"acc": [0.4, 0.9], "nll": [1.0]}


def test_of_equal_trials_the_earliest_is_chosen():
    found = outcome((0.1, 1.0, 0.7), (0.2, 0.8, 0.7), (0.2, 0.8, 0.7))
    assert found.front == [0, 1, 2] and found.chosen == 1


def test_outcomes_without_any_trial_to_choose():
    found = outcome((), constraints=("acc>=0.5",))
    assert found.front == [] and found.chosen is None and found.reference is None and found.hypervolumes == []


def test_that_all_trials_failed_is_no_matter_of_constraints():
    for constraints in ((), ("acc>=0.5",)):
        assert verdict(outcome((), (), constraints=constraints)).startswith("All trials failed; correct what")
    assert verdict(outcome((), (0.1, 1.0, 0.4), constraints=("acc>=0.5",))).startswith("No trial keeps acc>=0.5;")
