"""What was measured, for people to look at: figures in files."""

from bayeslora.report.figures import draw_reliability, reliability_figure

__all__ = ["draw_reliability", "reliability_figure"]
