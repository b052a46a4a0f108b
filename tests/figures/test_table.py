"""Tables of methods: what is in bold, and how far seeds are apart."""

import math
import statistics

import pytest

from bayeslora.figures.table import Cell, Column, has_dagger, is_best, latex, markdown

ACC = Column("acc", "ACC", factor=100, digits=1, largest=True)
NLL = Column("nll", "NLL", digits=2)


def rows(**values):
    return {name: {"acc": Cell((acc,)), "nll": Cell((nll,))} for name, (acc, nll) in values.items()}


@pytest.mark.parametrize(
    ("table", "bold"),
    [
        (rows(a=(0.5, 1.0), b=(0.6, 2.0)), {"acc": "b", "nll": "a"}),
        (rows(a=(0.5, 1.0), b=(0.5, 1.5), c=(0.4, 1.0)), {"acc": "ab", "nll": "ac"}),
        (rows(a=(0.0, 1.0), b=(0.0, 1.5)), {"acc": "", "nll": "a"}),
        (rows(a=(0.5, 1.0)), {"acc": "a", "nll": "a"}),
        (rows(a=(0.5, 1.0)) | {"b": {"acc": Cell((0.7,))}, "c": {}}, {"acc": "b", "nll": "a"}),
    ],
    ids=["one", "two alike", "all alike", "alone", "gaps"],
)
def test_the_best_are_bold(table, bold):
    for column in (ACC, NLL):
        assert "".join(name for name in table if is_best(table, column, name)) == bold[column.metric]
    count = sum(map(len, bold.values()))
    assert markdown(table, [ACC, NLL]).count("**") == 2 * count
    assert latex(table, [ACC, NLL]).count("textbf") == count


def test_rounding_does_not_decide_which_is_best():
    seeds = {"a": (0.1, 0.2, 0.3), "b": (0.3, 0.2, 0.1), "c": (0.2, 0.2, 0.2), "d": (0.1, 0.1, 0.1)}
    table = {name: {"acc": Cell(values)} for name, values in seeds.items()}
    assert [is_best(table, ACC, name) for name in table] == [True, True, True, False]


def test_a_column_without_a_best_has_none():
    epistemic = Column("nll", "epistemic", ranked=False)
    assert "**" not in markdown(rows(a=(0.5, 1.0), b=(0.6, 2.0)), [epistemic])


def test_the_spread_is_that_of_a_sample():
    assert Cell((1.0, 2.0, 4.0)).sd == pytest.approx(statistics.stdev([1, 2, 4]))
    assert math.isnan(Cell((1.0,)).sd)
    assert "0.50 ± 0.14" in markdown({"a": {"nll": Cell((0.4, 0.6))}}, [NLL])


def test_a_dagger_marks_others_that_the_best_cannot_be_told_from():
    """The best have none, not even where all are alike and none is in bold."""
    told = {name: {"acc": Cell((acc,), ties_best=True)} for name, acc in (("a", 0.5), ("b", 0.6), ("c", 0.5))}
    assert [has_dagger(told, ACC, name) for name in told] == [True, False, True]
    alike = {name: {"acc": Cell((0.5,), ties_best=True)} for name in "abc"}
    assert "†" not in markdown(alike, [ACC]) and "dagger" not in latex(alike, [ACC])
    assert not has_dagger({"a": {}}, ACC, "a")
