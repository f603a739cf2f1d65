"""Scenarios, traces, laws, reference training, parity, report and command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# The pytest plugin lives in this package and is loaded in every session of its
# environment: what it does not use must not be imported.
_HOMES = {
    "LAWS": "law",
    "Case": "runner",
    "Evidence": "law",
    "Finding": "law",
    "Law": "law",
    "Report": "report",
    "ReportError": "report",
    "Runner": "runner",
    "Scenario": "scenario",
    "Status": "law",
    "Verdict": "law",
    "judge": "law",
    "read_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(".laws", __name__)  # they enter themselves into LAWS
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
