"""Time and size of ``gradparity report --html`` for 500 scenarios.

    python benchmarks/report.py parity-report/report.jsonl

The scenarios of a real report are repeated under other seeds until they are 500.
"""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path

from msgspec.structs import replace

from gradparity.conformance.report.records import (
    CaseRecord,
    Report,
    ReportWriter,
    read_report,
)
from gradparity.conformance.space.scenario import Scenario

SCENARIOS = 500


def main(arguments: Sequence[str]) -> int:
    """Print the seconds, the bytes and the number of scenarios."""
    report = read_report(Path(arguments[0]))
    cases = _repeated(report)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.jsonl"
        with ReportWriter(file, replace(report.header, planned=len(cases))) as writer:
            for case in cases:
                writer.case(case)
            writer.close(0.0)
        command = [sys.executable, "-m", "gradparity.conformance", "report", str(file)]
        start = time.perf_counter()
        subprocess.run([*command, "--html", folder], check=True, capture_output=True)
        seconds = time.perf_counter() - start
        size = (Path(folder) / "index.html").stat().st_size
    failing = sum(case.status != "pass" for case in cases)
    print(f"{SCENARIOS} scenarios, {len(cases)} cases, {failing} with violations:")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"{seconds:.1f} s ({cpu:.1f} s of CPU time), {size / 1e6:.2f} MB")
    return 0


def _repeated(report: Report) -> list[CaseRecord]:
    ids = dict.fromkeys(case.scenario for case in report.cases)
    # other seeds, because a report refuses two cases with one id
    chosen = list(islice(product(range(SCENARIOS), ids), SCENARIOS))
    by_id = {each: [c for c in report.cases if c.scenario == each] for each in ids}
    return [
        replace(case, scenario=_seeded(case.scenario, seed))
        for seed, each in chosen
        for case in by_id[each]
    ]


def _seeded(scenario: str, seed: int) -> str:
    return dataclasses.replace(Scenario.parse(scenario), seed=seed).id


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
