"""Settings and constraints from words: what they mean, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bayeslora.errors import InputError
from bayeslora.train import RunConfig, TrainingConfig
from bayeslora.tuning.config import Tuning
from bayeslora.tuning.constraints import Constraint, parse_constraint
from bayeslora.tuning.space import Axis, Space, parse_axis

RUN = RunConfig(model="smollm2", task="urns")


def space(*texts: str, method: str = "bayesian-lora", **more: Any) -> Space:
    return Space([parse_axis(text) for text in texts], RunConfig(model="smollm2", task="urns", method=method, **more))


def test_axes_from_words():
    assert parse_axis("learning-rate=1e-4:1e-2:log") == Axis("learning_rate", 1e-4, 1e-2, log=True)
    assert parse_axis("kl_beta=0:2") == parse_axis("kl_beta=0:2:linear") == Axis("kl_beta", 0.0, 2.0)


@pytest.mark.parametrize("axis", [Axis("a", 1e-4, 1e-2, log=True), Axis("a", -3.0, 5.0)])
def test_an_axis_goes_from_low_to_high_and_back(axis):
    shares = np.linspace(0, 1, 9)
    values = [axis.at(share) for share in shares]
    assert values[0] == axis.low and values[-1] == axis.high
    np.testing.assert_allclose([axis.share(value) for value in values], shares, atol=1e-12)
    steps = np.diff(np.log(values)) if axis.log else np.diff(values)
    np.testing.assert_allclose(steps, steps[0])


def test_any_number_of_a_run_can_be_searched():
    wanted = space(
        "learning_rate=1e-4:1e-2:log",
        "rank=2:16",
        "settings.init_sd_u=0.01:0.1:log",
        "rate_multipliers.flow=0:1",
        preset="inducing",
    )
    values = wanted.values([0.5, 0.5, 1.0, 0.0])
    assert values == {
        "learning_rate": pytest.approx(1e-3),
        "rank": 9,
        "settings.init_sd_u": 0.1,
        "rate_multipliers.flow": 0.0,
    }
    config = wanted.config(values)
    assert config.training.learning_rate == pytest.approx(1e-3) and config.adapter.rank == 9
    assert config.adapter.settings["init_sd_u"] == 0.1 and config.training.rate_multipliers["flow"] == 0.0
    assert config.training.rate_multipliers["points"] == 20.0  # the method's others stay
    np.testing.assert_allclose(wanted.point(values), [0.5, 0.5, 1.0, 0.0], atol=1e-12)
    assert isinstance(space("settings.flow_depth=0:3").values([0.5])["settings.flow_depth"], int)


def test_whether_a_setting_is_whole_is_not_a_matter_of_its_present_value():
    """One that nothing is said of until the rank is known is a whole number, and a multiplier of 1 is none."""
    assert space("settings.inducing_points=4:32").values([0.33])["settings.inducing_points"] == 13
    given = TrainingConfig(rate_multipliers={"flow": 1})
    assert space("rate_multipliers.flow=0.1:2", training=given).values([0.25])[
        "rate_multipliers.flow"
    ] == pytest.approx(0.575)


@pytest.mark.parametrize(
    "text, advice",
    [
        ("learning_rate", "give NAME=LOW:HIGH"),
        ("learning_rate=1e-4", "give NAME=LOW:HIGH"),
        ("learning_rate=a:b", "give NAME=LOW:HIGH"),
        ("learning_rate=1e-4:1e-2:exp", "give NAME=LOW:HIGH"),
        ("=1:2", "give NAME=LOW:HIGH"),
        ("learning_rate=1e-2:1e-4", "lower bound that is below"),
        ("learning_rate=1e-4:inf", "lower bound that is below"),
        ("weight_decay=0:0.1:log", "bounds above 0"),
        ("lerning_rate=1e-4:1e-2", r"'lerning_rate' \(did you mean 'learning_rate'\?\); choose among"),
        ("seed=0:5", "choose among"),
        ("scoring=0:5", "choose among"),
        (
            "settings.widht=0.1:0.2",
            r"did you mean 'width'.*numbers among the settings of method 'bayesian-lora'",
        ),
        ("settings.whitened=0:1", "numbers among the settings"),
        ("data.max_train=1:2", "before the point there may be settings or rate_multipliers"),
        ("rate_multipliers.flou=0:1", "rate_multipliers has 'flou'"),
        ("label_smoothing=0:1.5", "label_smoothing is 1.5; give a finite number of at least 0 and below 1"),
        ("rank=0:4", "rank is 0; give a whole number of at least 1"),
        ("rank=1.4:4", "bounds 1.4:4 for rank, which is a whole number; give whole bounds"),
    ],
)
def test_what_cannot_be_searched_is_refused(text, advice):
    with pytest.raises(InputError, match=advice):
        space(text)


# Constraints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, constraint, bound",
    [
        ("acc>=0.7", Constraint("acc", False, 0.7), 0.7),
        ("train_seconds <= 600", Constraint("train_seconds", True, 600.0), 600.0),
        ("acc>=lora-0.005", Constraint("acc", False, -0.005, "+"), 0.595),
        ("acc >= lora + 0.01", Constraint("acc", False, 0.01, "+"), 0.61),
        ("acc>=lora", Constraint("acc", False, 0.0, "+"), 0.6),
        ("train_seconds<=lora*2", Constraint("train_seconds", True, 2.0, "*"), 20.0),
        ("nll<=-1e-1", Constraint("nll", True, -0.1), -0.1),
    ],
)
def test_constraints_from_words(text, constraint, bound):
    assert parse_constraint(text) == constraint
    baseline = {"acc": 0.6, "train_seconds": 10.0, "nll": 1.0}
    assert constraint.bound(baseline) == pytest.approx(bound)


def test_a_constraint_is_kept_where_it_is_at_most_zero():
    baseline = {"acc": 0.6}
    at_least = parse_constraint("acc>=lora-0.005")
    assert at_least.violation({"acc": 0.595}, baseline) == pytest.approx(0.0)
    assert at_least.violation({"acc": 0.7}, baseline) < 0 < at_least.violation({"acc": 0.5}, baseline)
    at_most = parse_constraint("nll<=1.2")
    assert at_most.violation({"nll": 1.5}, {}) == pytest.approx(0.3)
    for right in range(2, 201):  # of 200 questions, one less than LoRA, which is just allowed
        assert at_least.violation({"acc": (right - 1) / 200}, {"acc": right / 200}) <= 0
    assert at_most.violation({"nll": 1.0}, {}) == pytest.approx(-0.2)


@pytest.mark.parametrize(
    "text, advice",
    [
        ("acc", "in quotes, such as 'acc>=lora-0.005'"),
        ("acc=0.7", "in quotes"),
        ("acc>0.7", "in quotes"),
        ("acc>=high", "the bound is no number"),
        ("acc>=nan", "the bound is no number"),
        ("acc>=lora/2", "the bound is no number"),
        ("acc>=lora-x", "the bound is no number"),
        ("accc>=0.7", r"unknown outcome 'accc' \(did you mean 'acc'\?\); choose acc, nll"),
    ],
)
def test_constraints_that_make_no_sense_are_refused(text, advice):
    with pytest.raises(InputError, match=advice):
        parse_constraint(text)


@pytest.mark.parametrize(
    "changes, advice",
    [
        ({"search": ()}, "search is empty"),
        ({"search": ("rank=1:2", "rank=1:4")}, "names one twice"),
        ({"trials": 3}, "trials is 3, but 6 are needed to start with"),
        ({"start": 1}, "start is 1; give a whole number of at least 2"),
        ({"q": 0}, "q is 0; give a whole number of at least 1"),
        ({"feasibility": "ei"}, "choose mc, pof"),
        ({"constraints": ("acc",)}, "in quotes"),
        ({"run": RunConfig(model="m", task="urns", report_split="validation")}, "report_split is not for tune"),
    ],
)
def test_searches_that_make_no_sense_are_refused(changes, advice):
    with pytest.raises(InputError, match=advice):
        Tuning(**({"run": RUN} | changes))


def test_a_search_starts_with_as_many_points_as_it_has_settings_to_learn_about():
    assert (
        Tuning(run=RUN).first == 6
        and Tuning(run=RUN, search=("rank=1:4",)).first == 4
        and Tuning(run=RUN, start=3).first == 3
    )
