"""Reports of runs and studies: one HTML page, with figures and tables as separate files."""

from bayeslora.report.make import make_report

__all__ = ["make_report"]
