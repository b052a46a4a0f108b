"""What is drawn, read back from the figure, against the metrics."""

import os
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from matplotlib.text import Text

from bayeslora.errors import InputError
from bayeslora.figures import draw_reliability, reliability_figure
from bayeslora.figures.reliability import FEW
from bayeslora.metrics import accuracy, ece, nll, reliability_bins
from metrics.cases import random_case
from tiers import some

TOO_LONG = "A title that is too long for a line. " * 6
LONG = "Bayesian-LoRA with 8 draws, temperature and scale chosen on $validation"


def methods(count, rows=300):
    return {f"{LONG} {k}" if k == 1 else f"method {k}": random_case(k, rows) for k in range(count)}


def bars(axes, label):
    """Left edge, bottom, width and height of the bars of one kind."""
    (container,) = [c for c in axes.containers if c.get_label() == label]
    return np.array([(bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()) for bar in container])


def png_size(content):
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(content[16:20]), int.from_bytes(content[20:24])


# What is drawn --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [20, 400])
def test_bars_are_the_reliability_bins(rows):
    predictions = methods(2, rows)
    axes = draw_reliability(predictions).axes
    for case, diagram, histogram in zip(predictions.values(), axes[::2], axes[1::2], strict=True):
        bins = reliability_bins(*case, 15)
        full = bins.count > 0
        assert full.sum() < 15  # an empty bin is not drawn
        left, width = bins.edges[:-1], np.diff(bins.edges)
        drawn = np.stack([left, np.zeros(15), width, bins.accuracy], axis=-1)[full]
        np.testing.assert_allclose(bars(diagram, "accuracy"), drawn)
        gaps = np.stack([left, bins.accuracy, width, bins.confidence - bins.accuracy], axis=-1)[full]
        np.testing.assert_allclose(bars(diagram, "gap"), gaps, atol=1e-15)
        shares = np.stack([left, np.zeros(15), width, bins.count / rows], axis=-1)[full]
        np.testing.assert_allclose(bars(histogram, "answers"), shares)


def test_the_annotation_is_the_metrics():
    predictions = methods(3)
    for case, diagram in zip(predictions.values(), draw_reliability(predictions).axes[::2], strict=True):
        expected = f"ACC {accuracy(*case):.3f}\nNLL {nll(*case):.3f}\nECE {ece(*case):.3f}"
        assert [text.get_text() for text in diagram.texts] == [expected]


def test_bins_with_few_answers_are_lighter():
    probs = np.array([[0.6, 0.4]] * (FEW - 1) + [[0.9, 0.1]] * FEW)
    diagram = draw_reliability({"one": (probs, np.zeros(len(probs), dtype=int))}).axes[0]
    for container in diagram.containers:
        few, enough = (bar.get_edgecolor()[3] * bar.get_facecolor()[3] for bar in container)
        assert few < 0.5 * enough


def test_the_diagonal_is_dashed():
    (line,) = draw_reliability(methods(1)).axes[0].lines
    assert line.get_linestyle() == "--"
    assert line.get_xydata().tolist() == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    "case", [([[1.0]], [0]), ([[1.0, 0.0]] * 3, [1, 1, 1]), (np.full((4, 4), np.float32(0.25)), [0] * 4)]
)
def test_extreme_predictions_are_drawn(tmp_path, case):
    assert reliability_figure({"extreme": case}, tmp_path / "figure.png").stat().st_size > 0


# How it is laid out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count, rows", some([(4, [4]), (5, [5]), (6, [3, 3]), (7, [4, 3]), (14, [5, 5, 4])], [(7, [4, 3])])
)
def test_many_panels_are_in_rows_of_at_most_five(count, rows):
    figure = draw_reliability(methods(count), "A title")
    figure.canvas.draw()
    boxes = [axes.get_window_extent() for axes in figure.axes[::2]]
    levels = [round(box.y0) for box in boxes]
    assert levels == sorted(levels, reverse=True)  # from the upper left on
    assert [levels.count(level) for level in dict.fromkeys(levels)] == rows
    assert {(round(box.width, 6), round(box.height, 6)) for box in boxes} == {(round(boxes[0].width, 6),) * 2}
    assert [round(box.x0) for box in boxes] == [round(boxes[k % rows[0]].x0) for k in range(count)]
    labelled = [k for k, axes in enumerate(figure.axes[::2]) if axes.get_ylabel() == "accuracy"]
    assert labelled == list(range(0, count, rows[0]))


@pytest.mark.parametrize("count", some([1, 4, 7], [1, 4]))
def test_panels_are_square_and_share_their_confidence_axis(count):
    figure = draw_reliability(methods(count), "A title")
    figure.canvas.draw()
    assert len(figure.axes) == 2 * count
    for diagram, histogram in zip(figure.axes[::2], figure.axes[1::2], strict=True):
        box, below = diagram.get_window_extent(), histogram.get_window_extent()
        assert box.width == pytest.approx(box.height)
        assert (box.x0, box.x1) == pytest.approx((below.x0, below.x1))
        assert diagram.get_xlim() == diagram.get_ylim() == histogram.get_xlim() == (0, 1)
        assert diagram.get_shared_x_axes().joined(diagram, histogram)
    assert len({histogram.get_ylim() for histogram in figure.axes[1::2]}) == 1


@pytest.mark.parametrize(
    "count, title",
    some(
        [(1, TOO_LONG), (2, "A title"), (3, ""), (4, TOO_LONG), (6, "A title"), (14, TOO_LONG)],
        [(1, TOO_LONG), (6, "A title")],
    ),
)
def test_no_text_is_cut_off_or_overlaps(count, title):
    figure = draw_reliability(methods(count), title)
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    boxes = {text: text.get_window_extent(renderer) for text in texts}
    for text, box in boxes.items():
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert inside, text
    for (one, a), (other, b) in combinations(boxes.items(), 2):
        assert not a.overlaps(b), (one, other)


# The file -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, width", some([(1, 643), (2, 1200), (4, 1200)], [(1, 643), (2, 1200)]))
def test_a_png_of_the_expected_size(tmp_path, count, width):
    path = reliability_figure(methods(count), tmp_path / "new" / "figure.png", title="A title")
    assert path == tmp_path / "new" / "figure.png"
    wide, high = png_size(path.read_bytes())
    assert abs(wide - width) <= 1
    assert 0.3 * wide < high < 1.5 * wide


@pytest.mark.parametrize("name, start", [("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("a.PNG", b"\x89PNG")])
def test_the_suffix_says_the_format(tmp_path, name, start):
    path = reliability_figure(methods(1), str(tmp_path / name))
    assert path.read_bytes().startswith(start)
    assert os.listdir(tmp_path) == [name]


def test_an_older_figure_is_replaced(tmp_path):
    path = tmp_path / "figure.png"
    path.write_text("old")
    assert png_size(reliability_figure(methods(1), path).read_bytes())[0] > 0


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken):
    path = tmp_path / "figure.png"
    path.write_text("old")

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(InputError, match=r"figure.png: cannot be written: No space left on device"):
        reliability_figure(methods(1), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["figure.png"]


@pytest.mark.parametrize("name", ["figure.jpeg", "figure", "figure.png.gz"])
def test_unknown_suffixes_are_refused(tmp_path, name):
    with pytest.raises(InputError, match=r"unknown suffix .*; choose one of .png, .svg, .pdf"):
        reliability_figure(methods(1), tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_no_methods_are_refused(tmp_path):
    with pytest.raises(InputError, match="no predictions to draw; give"):
        reliability_figure({}, tmp_path / "figure.png")


def test_bad_probabilities_name_their_method(tmp_path):
    with pytest.raises(ValueError, match="rows of probabilities of 'flawed' must sum to 1"):
        reliability_figure({"flawed": ([[0.9, 0.3]], [0])}, tmp_path / "figure.png")


@pytest.mark.system
def test_nothing_global_is_touched():
    code = (
        "import sys, matplotlib; before = matplotlib.rcParams.copy()\n"
        "from bayeslora.figures import draw_reliability\n"
        "draw_reliability({'one': ([[0.9, 0.1]], [0])}).canvas.draw()\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert matplotlib.rcParams.copy() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
