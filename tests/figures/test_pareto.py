"""What the figure of a search shows, read back from it."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from bayeslora.errors import InputError
from bayeslora.figures.pareto import FrontPoint, pareto_figure

BASELINE = {"ece": 0.2, "nll": 1.0, "acc": 0.6}


def points() -> list[FrontPoint]:
    rng = np.random.default_rng(0)
    kinds = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
    return [
        FrontPoint(dict(zip(("ece", "nll", "acc"), rng.random(3), strict=True)), *kind)
        for kind in kinds
        for _ in range(3)
    ]


@pytest.fixture
def drawn(monkeypatch) -> list[Figure]:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or save(self, *a, **k))
    return figures


def draw(path, **changes):
    given = {
        "baseline": BASELINE,
        "bounds": {"acc": [0.55, 0.9], "train_seconds": [9.0]},
        "title": "a search",
    } | changes
    return pareto_figure(points(), [0.0, 0.1, 0.3], path, **given)


def test_every_trial_is_where_its_metrics_are(tmp_path, drawn):
    assert draw(tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    for ax, (first, second) in zip(drawn[0].axes, (("ece", "nll"), ("ece", "acc"), ("nll", "acc")), strict=False):
        for kind in ("breaks a constraint", "beaten by another", "on the front", "chosen", "LoRA"):
            (line,) = [it for it in ax.lines if it.get_label() == kind]
            expected = [point.metrics for point in points() if point.kind == kind] or [BASELINE]
            factor = np.array([100 if name != "nll" else 1 for name in (first, second)])
            np.testing.assert_allclose(line.get_xydata(), [[it[first], it[second]] * factor for it in expected])
    accuracy, nll = drawn[0].axes[1], drawn[0].axes[0]
    assert [line.get_ydata()[0] for line in accuracy.lines if line.get_linestyle() == "--"] == pytest.approx([55, 90])
    assert not any(line.get_linestyle() == "--" for line in nll.lines)
    np.testing.assert_allclose(drawn[0].axes[3].lines[0].get_ydata(), [0.0, 100 / 3, 100.0])


def test_the_legend_names_what_is_there(tmp_path, drawn):
    draw(tmp_path / "pareto.svg", baseline={})
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [
        "breaks a constraint", "beaten by another", "on the front", "chosen",
    ]  # fmt: skip


def test_a_search_without_a_front_has_no_panel_of_its_volume(tmp_path, drawn):
    only = [point for point in points() if not point.feasible]
    assert pareto_figure(only, [], tmp_path / "pareto.png", baseline={}, bounds={}, title="$1").exists()
    assert [ax.get_visible() for ax in drawn[0].axes] == [True, True, True, False]


def test_nothing_is_nothing_to_draw(tmp_path):
    with pytest.raises(InputError, match="nothing to draw"):
        pareto_figure([], [], tmp_path / "pareto.png", baseline={}, bounds={}, title="")
