"""A run or a study as one page of HTML, with its figures and tables as files of their own."""

from bayeslora.report.make import make_report

__all__ = ["make_report"]
