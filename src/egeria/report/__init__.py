"""What became of a run: numbers, a page and a few lines for the terminal, from its events alone."""

from egeria.report.build import Report, report
from egeria.report.summary import Clock, DepthPoint, Metric, Pace, Summary

__all__ = ["Clock", "DepthPoint", "Metric", "Pace", "Report", "Summary", "report"]
