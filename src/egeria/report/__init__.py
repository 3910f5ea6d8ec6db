"""What became of a run: numbers, a page and a few lines for the terminal, from
the journal alone.
"""

from egeria.report.build import Report, report
from egeria.report.freezing import DepthPoint, FreezeMark, Module
from egeria.report.summary import Clock, DepthPace, Metric, Summary

__all__ = [
    "Clock",
    "DepthPace",
    "DepthPoint",
    "FreezeMark",
    "Metric",
    "Module",
    "Report",
    "Summary",
    "report",
]
