"""Which option is the answer: the rules for ties, and that the order of the options does not matter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayeslora.predict.questions.tie_breaking import choose_options
from metrics.cases import quick

ABSENT = -np.inf


def choose(probabilities, totals, texts):
    return choose_options([np.log(probabilities)], [totals], [texts])[0]


def test_the_most_probable_option_is_taken_whatever_its_total_and_text():
    assert choose([0.2, 0.5, 0.3], [-1.0, -9.0, -2.0], ["a", "z", "b"]) == 1


def test_of_equally_probable_options_the_larger_total_is_taken():
    assert choose([0.4, 0.2, 0.4], [-3.0, -1.0, -2.0], ["a", "b", "c"]) == 2


def test_of_equal_totals_the_first_text_is_taken():
    assert choose([0.4, 0.4, 0.2], [-2.0, -2.0, -1.0], [" pear", " apple", " a"]) == 1
    assert choose([0.4, 0.4, 0.2], [-2.0, -2.0, -1.0], [" apple", " pear", " a"]) == 0


def test_of_equal_texts_the_first_is_taken():
    assert choose([0.5, 0.5], [-2.0, -2.0], [" yes", " yes"]) == 0


def test_round_off_is_no_difference_and_all_else_is():
    assert choose([0.5, 0.5 + 1e-7], [0.0, -9.0], ["a", "b"]) == 0
    assert choose([0.5, 0.5 + 1e-7], [-9.0, -9.0 - 1e-6], ["b", "a"]) == 1
    assert choose([0.5, 0.5 + 1e-5], [0.0, -9.0], ["a", "b"]) == 1
    assert choose([0.5, 0.5], [-9.0, -8.999], ["a", "b"]) == 1
    assert choose([0.5, 0.5], [-300.0001, -300.0], ["a", "b"]) == 0  # sums of many tokens round by more
    assert choose([0.5, 0.5], [-300.01, -300.0], ["a", "b"]) == 1


def test_options_that_a_question_lacks_are_never_taken():
    log_p = np.array([[ABSENT, ABSENT, ABSENT], [np.log(0.1), np.log(0.9), ABSENT]])
    totals = np.array([[ABSENT] * 3, [-3.0, -4.0, ABSENT]])
    assert choose_options(log_p, totals, [["b", "a"], ["x", "y"]]) == [1, 1]


def test_questions_are_chosen_for_apart():
    rng = np.random.default_rng(0)
    log_p, totals = rng.normal(size=(20, 4)), rng.normal(size=(20, 4))
    texts = [list("abcd")] * 20
    assert choose_options(log_p, totals, texts) == log_p.argmax(1).tolist()
    alone = [choose_options(log_p[k : k + 1], totals[k : k + 1], texts[:1])[0] for k in range(20)]
    assert choose_options(log_p, totals, texts) == alone


@pytest.mark.parametrize("rows", [1, 3])
def test_as_many_texts_as_questions(rows):
    with pytest.raises(ValueError, match="zip"):
        choose_options(np.zeros((2, 2)), np.zeros((2, 2)), [["a", "b"]] * rows)


@st.composite
def questions_with_ties(draw):
    """Few values, so that most options tie; texts that differ; and an order to put them into."""
    count = draw(st.integers(2, 6))
    value = st.sampled_from([-2.0, -1.0, -0.5])
    texts = draw(st.lists(st.text("abc ", max_size=3), min_size=count, max_size=count, unique=True))
    log_p, totals = (draw(st.lists(value, min_size=count, max_size=count)) for _ in range(2))
    return log_p, totals, texts, draw(st.permutations(range(count)))


@quick
@given(questions_with_ties())
def test_the_order_of_the_options_does_not_matter(case):
    log_p, totals, texts, order = case
    chosen = choose_options([log_p], [totals], [texts])[0]
    moved = [[values[k] for k in order] for values in (log_p, totals, texts)]
    assert moved[2][choose_options(*([values] for values in moved))[0]] == texts[chosen]
    assert log_p[chosen] == max(log_p)
    assert totals[chosen] == max(t for p, t in zip(log_p, totals, strict=True) if p == max(log_p))
