"""What was measured, for people to look at: figures in files, and tables."""

from bayeslora.report.figures import draw_reliability, reliability_figure
from bayeslora.report.scatter import scatter_figure

__all__ = ["draw_reliability", "reliability_figure", "scatter_figure"]
