"""Verdicts and margins of reports of runs on a GPU, for docs/gpu-results.md.

    gradparity run --quick --device cuda --share-gpus --scaler ... --out DIR
    gradparity bench gpu --commit ID --nccl 2.32.3 DIR/report.jsonl ...

The record becomes ``results/gpu.json``. A report that was cut off counts with the cases
that it has, and the record keeps how many were planned. Commit and NCCL are not in a
report: a machine with GPUs need not have a checkout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradparity.benchmarks.tables import row, write_between
from gradparity.conformance.files import write_whole
from gradparity.conformance.report.records import CaseRecord, Report, read_report

RESULTS = Path(__file__).parents[1] / "results" / "gpu.json"
SCALER = RESULTS.with_name("gpu_scaler.json")
"""Path of the record of ``gpu_scaler.py``."""
PAGE = Path(__file__).parents[2] / "docs" / "gpu-results.md"


def largest(case: CaseRecord) -> float | None:
    """Return the largest error / bound of a case; None without a bound."""
    ratios = [worst.ratio for worst in case.worst if worst.bound]
    return round(max(ratios), 3) if ratios else None


def record_of(commit: str, nccl: str, reports: Sequence[Report]) -> dict[str, Any]:
    """Return the parts of the reports that are recorded."""
    header = reports[0].header
    return {
        "commit": commit,
        "nccl": nccl,
        "torch": header.torch,
        "python": header.python,
        "gpus": list(header.gpus),
        "backend": header.backend,
        "runs": [
            {
                "command": report.header.command,
                "started": report.header.started,
                "planned": report.header.planned,
                "checked": len(report.cases),
            }
            for report in reports
        ],
        "cases": [
            [case.scaler, case.topology, case.scenario, case.status, largest(case)]
            for report in reports
            for case in report.cases
        ],
    }


def tables(record: Mapping[str, Any], timed: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> table of the page, from its two records."""
    cells: dict[str, dict[str, list[tuple[str, float | None]]]] = defaultdict(dict)
    for scaler, topology, _, status, ratio in record["cases"]:
        cells[topology].setdefault(scaler, []).append((status, ratio))
    scalers = list(dict.fromkeys(scaler for scaler, *_ in record["cases"]))
    heads = ["topology", *(f"`{scaler}`" for scaler in scalers)]
    lines = [row(*heads), row(*["---"] * len(heads))]
    for topology, of in cells.items():
        lines.append(row(topology, *(_told(of.get(s, [])) for s in scalers)))
    checked = sum(run["checked"] for run in record["runs"])
    planned = sum(run["planned"] for run in record["runs"])
    made = (
        f"gradparity at {record['commit'][:7]}, torch {record['torch']}, NCCL "
        f"{record['nccl']}, Python {record['python']}, {', '.join(record['gpus'])}, "
        f"{record['runs'][0]['started'][:10]}; {checked} of {planned} planned cases"
    )
    verdicts = "\n".join(lines)
    return {"made": made, "verdicts": verdicts, "scaler": _of_scaler(timed)}


def _of_scaler(record: Mapping[str, Any]) -> str:
    parts = record["parts"]
    calls = [call["work"] for call in next(iter(parts.values()))]
    lines = [row("gradients", *calls), row(*["---"] * (1 + len(calls)))]
    for part, timed in parts.items():
        cells = []
        for call in timed:
            theirs, ours = call["torch"], call["ours"]
            kernels = f"{theirs['kernels']} / {ours['kernels']}"
            cells.append(f"{theirs['us'] / ours['us']:.2f}, {kernels}")
        lines.append(row(part, *cells))
    made = record["provenance"]
    lines += [
        "",
        f"{made['gpu']}, torch {made['torch']}, NCCL {made['nccl']}, {made['date']}.",
    ]
    return "\n".join(lines)


def write_page() -> None:
    """Replace the tables on the page by the tables of the records."""
    write_between(PAGE, tables(*(json.loads(p.read_text()) for p in (RESULTS, SCALER))))


def _told(cases: Sequence[tuple[str, float | None]]) -> str:
    counted = Counter(status for status, _ in cases)
    parts = [f"{number} {status}" for status, number in counted.items()]
    ratios = [ratio for status, ratio in cases if status == "pass" and ratio]
    if ratios:
        parts.append(f"largest {max(ratios):.2f}")
    return ", ".join(parts) or "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Record reports and write the tables."""
    parser = argparse.ArgumentParser(prog="gpu", description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--nccl", required=True)
    parser.add_argument("reports", nargs="+", type=Path)
    given = parser.parse_args(argv)
    reports = [read_report(path) for path in given.reports]
    record = record_of(given.commit, given.nccl, reports)
    write_whole(RESULTS, json.dumps(record, indent=1) + "\n")
    write_page()
    return 0


if __name__ == "__main__":
    sys.exit(main())
