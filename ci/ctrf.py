"""CTRF: the Common Test Report Format, one test a verdict.

The rules of its schema that matter here: objects take no field of their own choosing
except under ``extra``; times are whole milliseconds since 1970; the statuses are
passed, failed, skipped, pending and other; names are never empty; ids are UUIDs.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from .. import __version__
from ..conformance.report.records import CaseRecord, Header, Report
from ..conformance.status import Verdict

__all__ = ["SPEC_VERSION", "render"]

SPEC_VERSION = "1.0.0"
_STATUSES = {
    "pass": "passed",
    "fail": "failed",
    "error": "failed",
    "skipped": "skipped",
}
_OTHER = "other"  # inconclusive: neither passed nor failed
_ALL = ("passed", "failed", "skipped", "pending", _OTHER)


def render(report: Report) -> str:
    """The report as one CTRF document."""
    document = {
        "reportFormat": "CTRF",
        "specVersion": SPEC_VERSION,
        "reportId": _uuid(report.header.started, report.header.command),
        "timestamp": _moment(report.header).isoformat(),
        "generatedBy": f"gradparity {__version__}",
        "results": _results(report),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def _results(report: Report) -> dict[str, Any]:
    tests = [_test(c, v) for c in report.cases for v in c.findings]
    tests += _incomplete(report)
    return {
        "tool": {"name": "gradparity", "version": report.header.gradparity},
        "summary": _summary(report, tests),
        "tests": tests,
        "environment": _environment(report.header),
    }


def _summary(report: Report, tests: list[dict[str, Any]]) -> dict[str, int]:
    counts = Counter(test["status"] for test in tests)
    seconds = report.footer.seconds if report.footer else 0.0
    start, duration = _ms(_moment(report.header).timestamp()), _ms(seconds)
    return {
        "tests": len(tests),
        **{status: counts[status] for status in _ALL},
        "suites": len(report.cases),
        "start": start,
        "stop": start + duration,
        "duration": duration,
    }


def _test(case: CaseRecord, verdict: Verdict) -> dict[str, Any]:
    return {
        "id": _uuid(case.scaler, case.scenario, verdict.law),
        "name": f"{verdict.law} in {case.scenario}",
        "status": _STATUSES.get(verdict.status, _OTHER),
        "rawStatus": verdict.status,
        "duration": 0,  # the run is timed as a whole, see extra
        "suite": [case.scaler, case.scenario],
        "message": verdict.message,
        "parameters": {
            "topology": case.topology,
            "world_size": case.world_size,
            "precision": case.precision,
            "model": case.model,
        },
        "extra": {
            "step": verdict.step,
            "ranks": verdict.ranks,
            "parameter": verdict.parameter,
            "numbers": verdict.numbers,
            "case_ms": _ms(case.seconds),
            "replay": case.replay,
        },
    }


def _incomplete(report: Report) -> Iterator[dict[str, Any]]:
    """What a reader of test results must not miss: the run did not finish."""
    if report.incomplete:
        yield {
            "name": "the report is complete",
            "status": "failed",
            "duration": 0,
            "message": report.incomplete,
        }


def _environment(header: Header) -> dict[str, Any]:
    return {
        "appName": "gradparity",
        "appVersion": header.gradparity,
        "commit": header.commit,
        "osPlatform": header.platform.partition("-")[0],
        "extra": {
            "torch": header.torch,
            "python": header.python,
            "platform": header.platform,
            "backend": header.backend,
            "device": header.device,
            "seed": header.seed,
            "command": header.command,
        },
    }


def _moment(header: Header) -> datetime:
    """When the run was started; 1970 where the header says no date."""
    try:
        moment = datetime.fromisoformat(header.started)
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _uuid(*parts: str) -> str:
    """The same id for the same parts, in every run."""
    # uuid5: readers follow a test over runs by its id
    return str(uuid.uuid5(uuid.NAMESPACE_URL, "gradparity:" + "\n".join(parts)))
