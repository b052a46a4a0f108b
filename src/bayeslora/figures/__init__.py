"""Figures and tables of results, used by studies, searches and reports."""

from bayeslora.figures.reliability import draw_reliability, reliability_figure
from bayeslora.figures.scatter import scatter_figure

__all__ = ["draw_reliability", "reliability_figure", "scatter_figure"]
