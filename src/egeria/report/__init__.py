"""What became of a run: numbers, a page and a few lines for the terminal, from the journal alone."""

from egeria.report.build import Report, report
from egeria.report.freezing import DepthPoint, FreezeMark, Module
from egeria.report.metrics import Metric
from egeria.report.pace import Clock, Pace
from egeria.report.summary import Summary

__all__ = ["Clock", "DepthPoint", "FreezeMark", "Metric", "Module", "Pace", "Report", "Summary", "report"]
