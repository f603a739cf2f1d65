"""Compare parallel training with one process: scenarios, traces, checks, report.

``space`` chooses a scenario, ``rank`` trains it and records traces, and ``comparison``
compares these with a reference. ``run`` does so for all cases and writes a report,
which ``report`` reads and shows. docs/architecture.md describes all of this in order.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparison.law import LAWS as LAWS
    from .comparison.law import Evidence as Evidence
    from .comparison.law import Law as Law
    from .report.records import Report as Report
    from .report.records import ReportError as ReportError
    from .report.records import read_report as read_report
    from .run.runner import Case as Case
    from .run.runner import Runner as Runner
    from .space.scenario import Scenario as Scenario
    from .status import Finding as Finding
    from .status import Status as Status
    from .status import Verdict as Verdict

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
    "read_report",
]

# The pytest plugin lives in this package and is loaded in every session of its
# environment: what it does not use must not be imported.
_HOMES = {
    "LAWS": "comparison.law",
    "Case": "run.runner",
    "Evidence": "comparison.law",
    "Finding": "status",
    "Law": "comparison.law",
    "Report": "report.records",
    "ReportError": "report.records",
    "Runner": "run.runner",
    "Scenario": "space.scenario",
    "Status": "status",
    "Verdict": "status",
    "read_report": "report.records",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(
        ".comparison.laws", __name__
    )  # they enter themselves into LAWS
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
