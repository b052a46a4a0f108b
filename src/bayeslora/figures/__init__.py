"""Figures in files and tables of what was measured; studies, searches and reports stand on them."""

from bayeslora.figures.reliability import draw_reliability, reliability_figure
from bayeslora.figures.scatter import scatter_figure

__all__ = ["draw_reliability", "reliability_figure", "scatter_figure"]
