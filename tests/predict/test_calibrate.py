"""Calibration after training, against grids, scipy and what was put into the data."""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from bayeslora.errors import InputError
from bayeslora.metrics import nll
from bayeslora.predict.calibrate import (
    DEFAULT_SCALES,
    FEWEST,
    LEVELS,
    PRIOR_SD,
    TEMPERATURES,
    Calibration,
    apply_temperature,
    choose_scale,
    choose_threshold,
    conformal_thresholds,
    describe_doubts,
    fit_temperature,
    require_enough,
)
from bayeslora.predict.calibrate.doubts import ENOUGH
from metrics.cases import classifications, draw_labels, quick, random_case, softmax

COMPLETE = Calibration(
    temperature=1.75,
    posterior_scale=0.7,
    threshold=0.1 + 0.2,
    target="coverage of at least 0.8",
    samples=8,
    task="urns",
    split="validation",
    before={"nll": 1.0 / 3.0, "ece": 0.0},
    after={"nll": 0.25},
)


def scaled_nll(log_p, labels, temperature):
    """The plain formula, for checking."""
    return nll(softmax(np.asarray(log_p, dtype=np.float64) / temperature), labels)


def masked_case(seed, rows=200, options=5, temperature=2.0):
    """Rows of two to five options, absent ones -inf, with labels drawn at the temperature."""
    rng = np.random.default_rng(seed)
    logits = 3.0 * rng.normal(size=(rows, options))
    logits[np.arange(options) >= rng.integers(2, options + 1, size=(rows, 1))] = -np.inf
    return np.log(softmax(logits), where=np.isfinite(logits), out=np.full(logits.shape, -np.inf)), draw_labels(
        rng, softmax(logits / temperature)
    )


@st.composite
def scored(draw, max_rows=10, max_options=5):
    """Log-probabilities on a coarse grid, so that many are equal, some absent, and labels that are present."""
    rows, options = draw(st.integers(1, max_rows)), draw(st.integers(1, max_options))
    value = st.one_of(st.just(-np.inf), st.integers(-12, 0).map(lambda k: k / 2), st.floats(-60, 0))
    row = st.lists(value, min_size=options, max_size=options).filter(lambda r: max(r) > -np.inf)
    log_p = np.array(draw(st.lists(row, min_size=rows, max_size=rows)))
    return log_p, np.array([draw(st.sampled_from(np.flatnonzero(np.isfinite(r)).tolist())) for r in log_p])


# Temperature ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_temperature_agrees_with_scipy(seed, dtype):
    log_p, labels = masked_case(seed)
    log_p = log_p.astype(dtype)
    bounds = tuple(math.log(t) for t in TEMPERATURES)
    found = minimize_scalar(
        lambda t: scaled_nll(log_p, labels, math.exp(t)), bounds=bounds, method="bounded", options={"xatol": 1e-10}
    )
    assert fit_temperature(log_p, labels) == pytest.approx(math.exp(found.x), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_no_temperature_of_a_fine_grid_is_better(seed):
    log_p, labels = masked_case(seed, rows=60)
    best = scaled_nll(log_p, labels, fit_temperature(log_p, labels))
    assert best <= min(scaled_nll(log_p, labels, t) for t in np.geomspace(*TEMPERATURES, 2001))


@quick
@given(scored())
def test_no_temperature_is_better_whatever_the_data(case):
    log_p, labels = case
    temperature = fit_temperature(log_p, labels)
    assert TEMPERATURES[0] <= temperature <= TEMPERATURES[1]
    best = scaled_nll(log_p, labels, temperature)
    assert all(best <= scaled_nll(log_p, labels, t) + 1e-12 for t in np.geomspace(*TEMPERATURES, 101))


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5, 6.0])
def test_a_known_temperature_is_recovered(temperature):
    """Within four standard errors: the Fisher information on 1/T is the variance of the scores under the model."""
    log_p, labels = masked_case(0, rows=20_000, temperature=temperature)
    p, scores = softmax(log_p / temperature), np.where(np.isfinite(log_p), log_p, 0.0)
    information = ((p * scores**2).sum(1) - (p * scores).sum(1) ** 2).sum()
    error = temperature / math.sqrt(information)  # of log T
    assert error < 0.02
    assert math.log(fit_temperature(log_p, labels)) == pytest.approx(math.log(temperature), abs=4 * error)


@pytest.mark.parametrize("seed", range(3))
def test_slope_is_zero_at_the_optimum(seed):
    log_p, labels = masked_case(seed)
    beta = 1 / fit_temperature(log_p, labels)
    ahead, behind = (scaled_nll(log_p, labels, 1 / (beta + step)) for step in (1e-5, -1e-5))
    assert abs(ahead - behind) / 2e-5 < 1e-8


def test_fitting_again_finds_nothing_left():
    log_p, labels = masked_case(1)
    cooled = apply_temperature(log_p, fit_temperature(log_p, labels))
    assert fit_temperature(cooled, labels) == pytest.approx(1.0, rel=1e-9)


def test_temperature_ignores_absent_options_and_normalisation():
    log_p, labels = masked_case(2)
    wider = np.concatenate([log_p, np.full((len(log_p), 3), -np.inf)], axis=-1)
    shifted = log_p + np.linspace(-50, 50, len(log_p))[:, None]
    expected = fit_temperature(log_p, labels)
    assert fit_temperature(wider, labels) == pytest.approx(expected, rel=1e-12)
    assert fit_temperature(shifted, labels) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 800.0])
def test_temperature_stops_at_its_bounds(sharpness):
    log_p = np.array([[0.0, -1.0], [-2.0, 0.0]]) * sharpness
    assert fit_temperature(log_p, [0, 1]) == TEMPERATURES[0]
    assert fit_temperature(log_p, [1, 0]) == TEMPERATURES[1]


@pytest.mark.parametrize("log_p", [[[0.0], [-0.3]], [[-np.inf, 0.0], [-1.0, -1.0]], [[0.0, -np.inf], [-np.inf, -5.0]]])
def test_temperature_is_1_where_none_changes_anything(log_p):
    labels = np.argmax(log_p, axis=-1)
    assert fit_temperature(log_p, labels) == 1.0


@quick
@given(scored(), st.floats(*TEMPERATURES))
def test_applying_a_temperature(case, temperature):
    log_p, _ = case
    cooled = apply_temperature(log_p, temperature)
    assert np.array_equal(np.isneginf(cooled), np.isneginf(log_p))
    np.testing.assert_allclose(np.exp(cooled), softmax(log_p / temperature), atol=1e-14)
    answer = log_p.argmax(axis=-1, keepdims=True)
    assert np.array_equal(np.take_along_axis(cooled, answer, axis=-1), cooled.max(axis=-1, keepdims=True))


def test_temperature_1_only_normalises():
    log_p, _ = masked_case(3)
    np.testing.assert_allclose(apply_temperature(log_p, 1.0), log_p, atol=1e-14)
    np.testing.assert_allclose(apply_temperature(log_p - 7.0, 1), log_p, atol=1e-14)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf, True, "1", None])
def test_bad_temperatures_are_refused(temperature):
    with pytest.raises(InputError, match=r"temperature is .* above 0"):
        apply_temperature([[0.0, -1.0]], temperature)


def test_a_label_without_probability_is_refused():
    with pytest.raises(InputError, match=r"the right option, 1, of row 1 has probability 0 \(1 such rows\)"):
        fit_temperature([[0.0, -1.0], [0.0, -np.inf]], [0, 1])


@pytest.mark.parametrize(
    "log_p, labels, message",
    [
        ([0.0, -1.0], [0], "shape"),
        (np.zeros((0, 2)), [], "shape"),
        ([[0.0, np.nan]], [0], "finite"),
        ([[0.0, np.inf]], [0], "finite"),
        ([[-np.inf, -np.inf]], [0], "an option in every row"),
        ([["a", "b"]], [0], "real numbers"),
        ([[0.0, -1.0]], [2], "from 0 to 1"),
        ([[0.0, -1.0]], [0, 1], "one per row"),
        ([[0.0, -1.0]], [0.0], "integers"),
    ],
)
def test_bad_scores_are_refused(log_p, labels, message):
    with pytest.raises(ValueError, match=message):
        fit_temperature(log_p, labels)


# Scale of the posterior -----------------------------------------------------------------------------------------------


def test_the_default_scales_are_even_around_1():
    assert 1.0 in DEFAULT_SCALES
    ratios = np.diff(np.log(DEFAULT_SCALES))
    np.testing.assert_allclose(ratios, math.log(2) / 2, atol=0.02)


def noisier_away_from(best, log_p, noise):
    """Scores that are the worse the farther the scale is from the best, and twice as sharp as they should be."""
    rng = np.random.default_rng(0)
    added = noise * rng.normal(size=log_p.shape)
    return lambda scale: 2 * (log_p + abs(math.log(scale / best)) * added)


def test_the_scale_of_least_nll_is_kept():
    log_p, labels = masked_case(4, rows=2000, temperature=1.0)
    scores = noisier_away_from(2.0, log_p, noise=3.0)
    choice = choose_scale(scores, labels)
    assert tuple(choice.tried) == DEFAULT_SCALES
    for scale, found in choice.tried.items():  # at the temperature it would get
        grid = [scaled_nll(scores(scale), labels, temperature) for temperature in np.geomspace(0.5, 20, 100)]
        assert found == pytest.approx(min(grid), abs=1e-3) and found <= min(grid) + 1e-12
    assert choice.nll == choice.tried[choice.scale] == min(choice.tried.values())
    assert choice.scale == 2.0


def test_a_scale_that_only_softens_is_left_to_the_temperature():
    log_p, labels = masked_case(4, temperature=2.0)
    choice = choose_scale(lambda scale: log_p / scale, labels)
    assert choice.scale == 1.0 and len({round(found, 9) for found in choice.tried.values()}) == 1


def test_what_few_questions_cannot_tell_apart_goes_to_the_nearest_to_1():
    log_p, labels = masked_case(4, rows=2000, temperature=1.0)
    scores = noisier_away_from(2.0, log_p, noise=0.5)
    few = choose_scale(lambda scale: scores(scale)[:12], labels[:12])
    many = choose_scale(scores, labels)
    assert abs(math.log(few.scale)) < abs(math.log(many.scale)) and few.nll < many.nll + 1.0


@pytest.mark.parametrize(
    "scales, expected", [(DEFAULT_SCALES, 1.0), ((4.0, 2.0, 0.3), 2.0), ((2.0, 0.5), 0.5), ((0.5, 2.0), 0.5)]
)
def test_equal_scales_go_to_the_nearest_to_1(scales, expected):
    log_p, labels = masked_case(5)
    assert choose_scale(lambda _: log_p, labels, scales).scale == expected


def test_progress_is_told_after_every_scale_and_none_is_tried_twice():
    log_p, labels = masked_case(6)
    asked, told = [], []
    choose_scale(
        lambda scale: asked.append(scale) or log_p,
        labels,
        iter([1.0, 2.0, 1.0]),
        progress=lambda done, total: told.append((done, total)),
    )
    assert asked == [1.0, 2.0]
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize("scales", [[], [0.0], [1.0, -1.0], [math.nan], [math.inf]])
def test_bad_scales_are_refused_before_any_is_tried(scales):
    with pytest.raises(InputError, match="above 0"):
        choose_scale(lambda _: pytest.fail("tried"), [0], scales)


def test_bad_scores_name_their_scale():
    with pytest.raises(ValueError, match=r"scores\(2\) must be finite"):
        choose_scale(lambda scale: [[0.0, -1.0 if scale < 2 else np.nan]], [0], (1.0, 2.0))


# Threshold ------------------------------------------------------------------------------------------------------------


@quick
@given(classifications(), st.floats(0, 1))
def test_error_rate_is_kept_at_the_largest_coverage(case, wanted):
    probs, labels = case
    confidence, wrong = probs.max(-1), probs.argmax(-1) != labels
    within = [np.mean(confidence >= t) for t in confidence if wrong[confidence >= t].mean() <= wanted]
    assume(within)
    threshold = choose_threshold(probs, labels, error_rate=wanted)
    answered = confidence >= threshold.confidence
    assert threshold.error_rate == wrong[answered].mean() <= wanted
    assert threshold.coverage == answered.mean() == max(within)


@quick
@given(classifications(), st.floats(0, 1, exclude_min=True))
def test_coverage_is_reached_and_only_equals_exceed_it(case, wanted):
    probs, labels = case
    confidence, wrong = probs.max(-1), probs.argmax(-1) != labels
    threshold = choose_threshold(probs, labels, coverage=wanted)
    answered = confidence >= threshold.confidence
    assert threshold.coverage == answered.mean() >= wanted * (1 - 1e-12)
    assert np.mean(confidence > threshold.confidence) < wanted
    assert threshold.error_rate == wrong[answered].mean()


def test_targets_are_told_in_words():
    probs, labels = random_case(0)
    assert choose_threshold(probs, labels, error_rate=0.25).target == "error rate of at most 0.25"
    assert choose_threshold(probs, labels, coverage=0.8).target == "coverage of at least 0.8"


def test_an_error_rate_out_of_reach_names_the_least():
    probs = np.array([[0.9, 0.1]] * 3 + [[0.6, 0.4]])
    labels = [0, 0, 1, 1]
    with pytest.raises(InputError, match=r"at most 0.1 is not reached: the least is 0.3334, answering 75.0% of 4"):
        choose_threshold(probs, labels, error_rate=0.1)
    assert choose_threshold(probs, labels, error_rate=0.3334).coverage == 0.75
    probs = np.array([[0.9, 0.1]] * 2 + [[0.6, 0.4]] * 2)
    with pytest.raises(InputError, match=r"the least is 0.5, answering 100.0% of 4"):  # and not the surest half only
        choose_threshold(probs, [0, 1, 0, 1], error_rate=0.1)


@pytest.mark.parametrize("targets", [{}, {"error_rate": 0.1, "coverage": 0.5}])
def test_exactly_one_target_is_needed(targets):
    with pytest.raises(InputError, match="exactly one of the two"):
        choose_threshold([[0.5, 0.5]], [0], **targets)


@pytest.mark.parametrize(
    "targets",
    [{"error_rate": -0.1}, {"error_rate": 1.1}, {"error_rate": math.nan}, {"coverage": 0.0}, {"coverage": 80}],
)
def test_targets_are_shares(targets):
    (name,) = targets
    with pytest.raises(InputError, match=f"{name} is .*; give a finite number .* of at most 1"):
        choose_threshold([[0.5, 0.5]], [0], **targets)


# The calibration and its file -----------------------------------------------------------------------------------------


@quick
@given(classifications(), st.floats(0, 1, exclude_min=True))
def test_abstains_from_what_the_threshold_leaves_out(case, coverage):
    probs, labels = case
    threshold = choose_threshold(probs, labels, coverage=coverage)
    abstained = Calibration(threshold=threshold.confidence).abstains(probs)
    assert abstained.dtype == bool
    assert abstained.mean() == pytest.approx(1 - threshold.coverage)
    assert not Calibration().abstains(probs).any()


def test_log_probabilities_are_not_taken_for_probabilities():
    with pytest.raises(ValueError, match="probabilities must not be negative"):
        COMPLETE.abstains([[-0.1, -2.0]])


def test_apply_is_the_temperature():
    log_p, _ = masked_case(7)
    assert np.array_equal(COMPLETE.apply(log_p), apply_temperature(log_p, 1.75))


@pytest.mark.parametrize("calibration", [COMPLETE, Calibration(), Calibration(before={"nll": np.float32(0.5)})])
def test_saved_and_loaded_is_the_same(tmp_path, calibration):
    path = tmp_path / "new" / "calibration.json"
    calibration.save(path)
    assert Calibration.load(path) == calibration
    assert Calibration.load(str(path)) == calibration
    assert os.listdir(path.parent) == ["calibration.json"]


def test_fields_left_out_are_as_if_nothing_had_been_chosen(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text('{"temperature": 2}')
    assert Calibration.load(path) == Calibration(temperature=2)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "Expecting value"),
        ('{"temperature": 1.5', "Expecting"),
        ("\x00\x01", "Expecting value"),
        ("[" * 100_000, ""),
        ("[1.5]", "no temperature"),
        ("{}", "no temperature"),
        ('{"r": 8, "peft_type": "LORA"}', "no temperature"),
        ('{"temperature": 1.5, "tresholds": 0.5}', "unknown field 'tresholds' .did you mean 'threshold'"),
        ('{"temperature": "1.5"}', "temperature is '1.5'"),
        ('{"temperature": true}', "temperature is True"),
        ('{"temperature": null}', "temperature is None"),
        ('{"temperature": NaN}', "temperature is nan"),
        ('{"temperature": 1e999}', "temperature is inf"),
        ('{"temperature": 0}', "temperature is 0"),
        ('{"temperature": -1.0}', "temperature is -1.0"),
        (f'{{"temperature": 1{"0" * 400}}}', "temperature is 1000"),
        ('{"temperature": 1, "posterior_scale": 0.0}', "posterior_scale is 0.0"),
        ('{"temperature": 1, "threshold": 80}', "threshold is 80; .* at most 1"),
        ('{"temperature": 1, "threshold": -0.5}', "threshold is -0.5"),
        ('{"temperature": 1, "samples": 0}', "samples is 0"),
        ('{"temperature": 1, "samples": 2.5}', "samples is 2.5"),
        ('{"temperature": 1, "samples": true}', "samples is True"),
        ('{"temperature": 1, "task": 3}', "task is 3"),
        ('{"temperature": 1, "before": [0.5]}', "before is"),
        ('{"temperature": 1, "before": {"nll": null}}', "before has 'nll'"),
        ('{"temperature": 1, "after": {"nll": Infinity}}', "after has 'nll'"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "calibration.json"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"calibration.json: not a calibration: .*{message}.*calibrate again"):
        Calibration.load(path)


def test_bytes_are_refused(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_bytes(b"\xff\xfe\x93NUMPY")
    with pytest.raises(InputError, match=r"calibration.json: not a calibration"):
        Calibration.load(path)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_what_is_no_file_is_refused(tmp_path, name):
    with pytest.raises(InputError, match=r"cannot be read: .*; give a file"):
        Calibration.load(tmp_path / name)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken):
    path = tmp_path / "calibration.json"
    COMPLETE.save(path)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(InputError, match=r"calibration.json: cannot be written: No space left on device"):
        Calibration().save(path)
    assert Calibration.load(path) == COMPLETE
    assert os.listdir(tmp_path) == ["calibration.json"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        COMPLETE.save(tmp_path / "file" / "calibration.json")
    with pytest.raises(InputError, match="cannot be written"):
        COMPLETE.save(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


def test_the_file_is_for_people_too(tmp_path):
    path = tmp_path / "calibration.json"
    COMPLETE.save(path)
    content = json.loads(path.read_text())
    assert content["temperature"] == 1.75 and content["before"]["nll"] == 1.0 / 3.0
    assert path.read_text().count("\n") > 9


# Few questions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior_sd", [0.3, math.log(2), 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_with_a_prior_it_is_the_most_probable_temperature(seed, prior_sd):
    rng = np.random.default_rng(seed)
    log_p = np.log(rng.dirichlet(np.full(4, 0.3), 12))
    labels = rng.integers(4, size=12)

    def loss(log_t):
        return 12 * scaled_nll(log_p, labels, math.exp(log_t)) + 0.5 * (log_t / prior_sd) ** 2

    grid = np.linspace(math.log(0.05), math.log(20), 201)
    best = grid[np.argmin([loss(it) for it in grid])]
    fine = np.linspace(best - (grid[1] - grid[0]), best + (grid[1] - grid[0]), 41)
    best = fine[np.argmin([loss(it) for it in fine])]
    assert math.log(fit_temperature(log_p, labels, prior_sd)) == pytest.approx(best, abs=2 * (fine[1] - fine[0]))


def test_a_prior_holds_few_questions_and_gives_way_to_many():
    """Eight wrong answers, all sure: by themselves they ask for the end of the search."""
    log_p = np.log([[0.99, 0.01]] * 8)
    wrong = [1] * 8
    assert fit_temperature(log_p, wrong) == TEMPERATURES[1]
    assert 2 < fit_temperature(log_p, wrong, PRIOR_SD) < 12
    rng = np.random.default_rng(0)
    many = np.log(rng.dirichlet(np.ones(3), 4000))
    labels = [rng.choice(3, p=np.exp(row)) for row in many]
    assert fit_temperature(many, labels, PRIOR_SD) == pytest.approx(fit_temperature(many, labels), rel=0.01)
    with pytest.raises(InputError, match="prior_sd is 0"):
        fit_temperature(many, labels, 0.0)


def test_doubts_are_told():
    assert describe_doubts(Calibration(questions=500, conformal={f"{level:g}": 0.5 for level in LEVELS})) == ()
    found = describe_doubts(
        Calibration(questions=30, temperature=20.0, posterior_scale=4.0, conformal={"0.5": 0.3, "0.8": 0.5, "0.9": 0.6})
    )
    assert [line.split(" ")[1] for line in found] == ["was", "are", "temperature", "posterior"]
    assert "30 questions only" in found[0] and "0.95 and 0.99" in found[1] and "20 is at the end" in found[2]
    every = {f"{level:g}": 0.5 for level in LEVELS}
    other = describe_doubts(Calibration(questions=ENOUGH, temperature=0.05, posterior_scale=0.25, conformal=every))
    assert [line.split(" ")[1] for line in other] == ["temperature", "posterior"]
    (few,) = describe_doubts(Calibration(questions=ENOUGH - 1, temperature=0.06, posterior_scale=0.3, conformal=every))
    assert "99 questions only" in few


@pytest.mark.parametrize("count, levels", [(9, ["0.5", "0.8", "0.9"]), (19, ["0.5", "0.8", "0.9", "0.95"]), (99, None)])
def test_levels_that_the_questions_cannot_promise_are_left_out(count, levels):
    probabilities = np.full((count, 2), 0.5)
    assert list(conformal_thresholds(probabilities, [0] * count)) == (levels or [f"{level:g}" for level in LEVELS])


def test_a_handful_of_questions_is_not_enough():
    require_enough(FEWEST, "mine, validation")
    with pytest.raises(InputError, match="mine, validation: has 9 questions to calibrate on, and it takes at least 10"):
        require_enough(FEWEST - 1, "mine, validation")
    with pytest.raises(InputError, match="has 1 question to calibrate on"):
        require_enough(1, "mine, validation")
