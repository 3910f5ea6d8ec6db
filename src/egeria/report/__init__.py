"""The report on a run: numbers, a page and lines for the terminal, made from its events alone."""

from egeria.report.build import Report, report
from egeria.report.summary import Clock, DepthPoint, Metric, Pace, Summary

__all__ = ["Clock", "DepthPoint", "Metric", "Pace", "Report", "Summary", "report"]
