"""JUnit XML: one suite for each case, one test for each check.

Ranks and numbers are properties. A case in which the harness broke has a single test,
``harness``, with one error. Inconclusive is an ``error`` of type ``inconclusive``, so
that no reader takes it for a pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from xml.etree import ElementTree as ET

from ..conformance.output import harmless
from ..conformance.report.records import CaseRecord, Report
from ..conformance.status import Verdict
from .reasons import BEGINS, place

__all__ = ["render", "xml_text"]

# ElementTree writes such characters unescaped; then no parser reads the file.
_INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ELEMENTS = {
    "fail": "failure",
    "error": "error",
    "inconclusive": "error",
    "skipped": "skipped",
}
"""Status -> child element; a pass has none."""
_COUNTS = {"failures": ("fail",), "errors": ("error", "inconclusive")}


def xml_text(text: str) -> str:
    """Replace each character that XML 1.0 does not allow."""
    # Messages hold what a user's code printed: one such character would lose the file.
    return _INVALID.sub("\ufffd", text)


def render(report: Report) -> str:
    """Return the report as JUnit XML."""
    root = ET.Element("testsuites", name="gradparity")
    for case in report.cases:
        root.append(_suite(case, report.header.started))
    if report.incomplete:
        root.append(_incomplete(report))
    verdicts = [v for c in report.cases for v in c.findings]
    _set_counts(root, verdicts, extra_errors=bool(report.incomplete))
    ET.indent(root)
    # An XML reader gets the same characters.
    text = harmless(ET.tostring(root, encoding="unicode"), lambda c: f"&#{ord(c)};")
    text = text.replace("\r", "&#13;")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _suite(case: CaseRecord, started: str) -> ET.Element:
    suite = _element("testsuite", name=f"{case.scenario} {case.scaler}")
    _set_counts(suite, case.findings)
    suite.set("time", f"{case.seconds:.3f}")
    suite.set("timestamp", xml_text(started.partition("+")[0]))
    facts = {
        "scaler": case.scaler,
        "topology": case.topology,
        "world_size": str(case.world_size),
        "precision": case.precision,
        "model": case.model,
        "replay": case.replay,
    }
    _add_properties(suite, facts.items())
    for verdict in case.findings:
        suite.append(_test(case, verdict))
    return suite


def _set_counts(
    element: ET.Element,
    verdicts: Sequence[Verdict],
    *,
    extra_errors: bool = False,
) -> None:
    counts = {
        name: sum(v.status in statuses for v in verdicts)
        for name, statuses in _COUNTS.items()
    }
    counts["tests"] = len(verdicts) + extra_errors
    counts["errors"] += extra_errors
    if element.tag == "testsuite":  # the schema allows it on suites alone
        counts["skipped"] = sum(v.status == "skipped" for v in verdicts)
    for name, count in counts.items():
        element.set(name, str(count))


def _test(case: CaseRecord, verdict: Verdict) -> ET.Element:
    # The time of a run is measured as a whole: checks read its trace afterwards.
    test = _element("testcase", classname=case.scenario, name=verdict.law, time="0")
    _add_properties(test, _facts(verdict))
    tag = _ELEMENTS.get(verdict.status)
    if tag is not None:
        child = _element(tag, message=verdict.message, type=verdict.status)
        where = place(case) if verdict.status == "fail" else ""
        lines = [verdict.message, *([f"{BEGINS}: {where}"] if where else [])]
        child.text = xml_text("\n".join([*lines, case.replay]))
        test.append(child)
    return test


def _facts(verdict: Verdict) -> Iterator[tuple[str, str]]:
    if verdict.step is not None:
        yield "step", str(verdict.step)
    if verdict.ranks:  # one property: readers keep the last of several with one name
        yield "rank", ", ".join(map(str, verdict.ranks))
    if verdict.parameter is not None:
        yield "parameter", verdict.parameter
    for name, value in verdict.numbers.items():
        yield name, str(value)


def _add_properties(parent: ET.Element, facts: Iterable[tuple[str, str]]) -> None:
    pairs = list(facts)
    if pairs:
        box = ET.SubElement(parent, "properties")
        for name, value in pairs:
            box.append(_element("property", name=name, value=value))


def _incomplete(report: Report) -> ET.Element:
    suite = _element("testsuite", name="gradparity")
    _set_counts(suite, (), extra_errors=True)
    test = _element("testcase", classname="gradparity", name="report.complete")
    test.append(_element("error", message=report.incomplete, type="incomplete"))
    suite.append(test)
    return suite


def _element(tag: str, **attributes: str) -> ET.Element:
    return ET.Element(tag, {k: xml_text(v) for k, v in attributes.items()})
