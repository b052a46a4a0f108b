"""What is drawn of an ablation, read back from the figure."""

import pytest
from matplotlib.lines import Line2D

from bayeslora.errors import InputError
from bayeslora.figures.curves import curves_figure, draw_curves
from bayeslora.figures.table import Cell

TICKS = ["0", "1", "4"]


def row(*nll):
    return {"acc": Cell(tuple(0.5 + v / 10 for v in nll)), "nll": Cell(nll), "ece": Cell(tuple(v / 20 for v in nll))}


CURVES = {"lora": {"0": row(1.0, 1.2), "1": row(0.9, 0.7), "4": row(0.5, 0.5)}, "bayesian-lora": {"1": row(0.3, 0.4)}}


def lines(axes):
    """Curves and dots of a panel: places, heights, style and marker."""
    drawn = [line for line in axes.get_lines() if isinstance(line, Line2D)]
    return [(list(it.get_xdata()), list(it.get_ydata()), it.get_linestyle(), it.get_marker()) for it in drawn]


def test_means_and_seeds_are_where_they_should_be():
    acc, nll, ece = draw_curves({"task": CURVES}, axis="flow layers", ticks=TICKS, joined=True).axes
    *seeds, mean, other_seeds, other = lines(nll)
    assert [(x, y) for x, y, _, _ in seeds] == [([0, 0], [1.0, 1.2]), ([1, 1], [0.9, 0.7]), ([2, 2], [0.5, 0.5])]
    assert mean[0] == [0, 1, 2] and mean[1] == pytest.approx([1.1, 0.8, 0.5])
    assert other[0] == [1] and other[1] == pytest.approx([0.35]) and other_seeds[0] == [1, 1]
    assert lines(acc)[3][1] == pytest.approx([61.0, 58.0, 55.0]) and "in %" in acc.get_ylabel()
    assert lines(ece)[3][1] == pytest.approx([5.5, 4.0, 2.5])
    assert [tick.get_text() for tick in nll.get_xticklabels()] == TICKS and nll.get_xlabel() == "flow layers"


def test_curves_can_be_told_apart_without_colour():
    panel = draw_curves({"task": CURVES}, axis="x", ticks=TICKS, joined=True).axes[0]
    first, second = lines(panel)[3], lines(panel)[5]
    assert first[2] != second[2] and first[3] != second[3]


def test_values_without_an_order_are_not_joined():
    panel = draw_curves({"task": CURVES}, axis="x", ticks=TICKS, joined=False).axes[0]
    assert {style for _, _, style, _ in lines(panel)} == {"None"}


def test_the_legend_names_curves_if_there_are_several_and_seeds_if_there_are_several():
    def legend(curves):
        figure = draw_curves({"task": curves}, axis="x", ticks=TICKS, joined=True)
        return [text.get_text() for it in figure.legends for text in it.get_texts()]

    assert legend(CURVES) == ["lora", "bayesian-lora", "single seeds"]
    assert legend({"lora": {"0": row(1.0, 2.0)}}) == ["single seeds"]
    assert legend({"lora": {"0": row(1.0)}}) == []


def test_every_split_has_its_row_of_panels(tmp_path):
    figure = draw_curves({"a": CURVES, "a → b": CURVES}, axis="x", ticks=TICKS, joined=True)
    assert len(figure.axes) == 6 and [ax.get_title() for ax in figure.axes if ax.get_title()] == ["a", "a → b"]
    path = curves_figure({"a": CURVES}, tmp_path / "figure.png", axis="x", ticks=TICKS, joined=True)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(InputError, match="nothing to draw"):
        curves_figure({}, tmp_path / "figure.png", axis="x", ticks=[], joined=True)
