"""Scenarios, traces, laws, reference training, parity, report and command line."""

from .law import LAWS as LAWS
from .law import Evidence as Evidence
from .law import Finding as Finding
from .law import Law as Law
from .law import Status as Status
from .law import Verdict as Verdict
from .law import judge as judge
from .report import Report as Report
from .report import ReportError as ReportError
from .report import read_report as read_report
from .runner import Case as Case
from .runner import Runner as Runner
from .scenario import Scenario as Scenario

__all__ = [
    "LAWS",
    "Case",
    "Evidence",
    "Finding",
    "Law",
    "Report",
    "ReportError",
    "Runner",
    "Scenario",
    "Status",
    "Verdict",
    "judge",
    "read_report",
]
