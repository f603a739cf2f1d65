"""One baseline over versions of torch: false alarms, and planted faults it refuses.

    gradparity bench torch-versions --venv DIR [--venv DIR ...]

The baseline is recorded in this environment. Each DIR is a virtual environment with
another torch and the packages of pyproject.toml, without gradparity. There the same
right setups and scalers run, and each of them with a fault. Then ``gate --any-torch``
must pass the right ones and fail each fault. A faulty setup or scaler gets the name of
its right version before it is gated, as if its source had been edited.

The record goes to ``benchmarks/results/torch_versions.json``, its table
to docs/gate-tests.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gradparity.benchmarks.tables import row, write_between
from gradparity.ci.baseline import Baseline, make_baseline
from gradparity.ci.decision import Decision, Terms, decide
from gradparity.ci.reasons import Outcome
from gradparity.conformance.files import write_whole
from gradparity.conformance.report.records import (
    CaseRecord,
    Footer,
    Report,
    ReportWriter,
    read_report,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parents[1] / "results" / "torch_versions.json"
SPECIMENS = Path(__file__).parents[1] / "results" / "specimens.json"
PAGE = ROOT / "docs" / "gate-tests.md"
PLAIN = "gradparity.fixtures.faulty:PlainScaler"
OWN = "gradparity.examples.workload:Stack"
TIMEOUT_S = 30.0
CLOSED = (Outcome.FAIL, Outcome.INVALID)
"""Outcomes of the gate that detect a fault; an inconclusive gate does not."""


@dataclass(frozen=True)
class Fault:
    """A planted fault, and its fixed version in the baseline."""

    name: str
    scaler: str
    scenario: str
    right_scaler: str
    right_scenario: str


def id_of(scenario: str) -> str:
    """Return a scenario id as reports write it today; older ids can still be parsed."""
    from gradparity.conformance import Scenario

    return Scenario.parse(scenario).id


def faults() -> list[Fault]:
    """Return faulty scalers, and broken specimens that are found by their record.

    One scaler for each check is enough: all of them take minutes (``gradparity
    mutants``).
    """
    from gradparity.fixtures.faulty import FAULTY
    from gradparity.fixtures.specimens import SPECIMENS as PAIRS

    seen = json.loads(SPECIMENS.read_text())["specimens"]
    found = []
    for name, pair in PAIRS.items():
        if seen[name]["caught"]:
            where = seen[name]["broken"]["scenario"]
            twin = where.replace(pair.broken, pair.fixed)
            found.append(Fault(name, "none", id_of(where), "none", id_of(twin)))
    laws = set()
    for scaler, broken in FAULTY.items():
        if broken.law not in laws:
            spec = f"gradparity.fixtures.faulty:{scaler.__name__}"
            at = id_of(broken.at)
            found.append(Fault(scaler.__name__, spec, at, PLAIN, at))
        laws.add(broken.law)
    return found


# - In each environment


def pairs(what: str) -> list[tuple[str, str]]:
    """Return (scaler, scenario id) of the ``right`` or of the ``planted`` cases."""
    from gradparity.conformance.space.catalogue import Selection, select

    if what == "planted":
        return [(fault.scaler, fault.scenario) for fault in faults()]
    right = [(fault.right_scaler, fault.right_scenario) for fault in faults()]
    for scaler, alone in (("none", True), (PLAIN, False)):
        chosen = select("layouts", Selection(workload=OWN, no_scaler=alone))
        right += [(scaler, scenario.id) for scenario in chosen]
    return list(dict.fromkeys(right))


def record(what: str, path: Path) -> None:
    """Run all cases in this environment and write the report."""
    from gradparity.conformance import Case, Runner, Scenario
    from gradparity.conformance.rank.devices import Devices
    from gradparity.conformance.run.launcher import Pool
    from gradparity.conformance.run.recorder import case_record, make_header

    chosen = [(spec, Scenario.parse(text)) for spec, text in pairs(what)]
    place = Pool(Devices(), TIMEOUT_S)
    header = make_header(
        planned=len(chosen),
        preset="ids",
        seed=0,
        arguments=["bench", "torch_versions"],
        place=place,
        data=[scenario.dataset for _, scenario in chosen],
    )
    start = time.monotonic()
    with (
        ReportWriter(path, header) as writer,
        Runner(folder=os.getcwd(), place=place) as runner,
    ):

        def end(case: Case) -> bool:
            writer.case(case_record(case))
            return False

        runner.run_all(chosen, lambda spec, scenario: None, end)
        broken = sum(case.status == "error" for case in read_report(path).cases)
        writer.close(time.monotonic() - start, f"{broken} cases broke" * (broken > 0))


# - In this one


def run_in(python: str, what: str, path: Path, scratch: Path) -> Report:
    """Run all cases in another environment with this tree as its gradparity, once."""
    if path.exists() and read_report(path).footer is not None:
        return read_report(path)  # of an earlier run that was interrupted
    shim = scratch / "package"
    shim.mkdir(exist_ok=True)
    if not (shim / "gradparity").exists():
        (shim / "gradparity").symlink_to(ROOT, target_is_directory=True)
    module = "gradparity.benchmarks.validation.torch_versions"
    subprocess.run(
        [python, "-m", module, "--record", what, "--out", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(shim), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return read_report(path)


def gated(cases: Sequence[CaseRecord], report: Report, baseline: Baseline) -> Decision:
    """Return the gate's decision on some cases; the baseline is cut to these cases."""
    keys = {case.key for case in cases}
    kept = tuple(case for case in baseline.cases if case.key in keys)
    assert len(kept) == len(keys), "the baseline lacks a case"
    broken = sum(case.status == "error" for case in cases)
    counts = {s: sum(c.status == s for c in cases) for s in {c.status for c in cases}}
    whole = Report(
        header=replace(report.header, planned=len(cases)),
        cases=tuple(cases),
        footer=Footer(
            complete=not broken,
            cases=len(cases),
            counts=dict(sorted(counts.items())),
            seconds=0.0,
            reason=f"{broken} cases broke" * (broken > 0),
        ),
    )
    only = Baseline(provenance=baseline.provenance, cases=kept)
    return decide(whole, Terms(today=date.today(), baseline=only, any_torch=True))


def false_alarms(report: Report, baseline: Baseline) -> list[str]:
    """Return the right cases for which, one by one, the gate does not pass."""
    found = []
    for case in report.cases:
        said = gated([case], report, baseline)
        if said.outcome is not Outcome.PASS:
            found.append(f"{case.scenario} {case.scaler}: {said.causes[0].line}")
    return found


def missed(report: Report, baseline: Baseline) -> list[str]:
    """Return the planted faults for which the gate does not fail."""
    by_key = {case.key: case for case in report.cases}
    # a fault changes no batch, so use the data hashes of the fixed versions
    same = replace(report.header, data=baseline.provenance.data)
    report = replace(report, header=same)
    found = []
    for fault in faults():
        case = by_key[fault.scaler, fault.scenario]
        right = replace(case, scaler=fault.right_scaler, scenario=fault.right_scenario)
        said = gated([right], report, baseline)
        if said.outcome not in CLOSED:
            found.append(f"{fault.name}: {said.outcome.word}")
    return found


def measure(venvs: Sequence[Path], reports: Path | None) -> dict[str, Any]:
    """Record the baseline here, check it everywhere; returns the record.

    Args:
        venvs: the other environments.
        reports: folder of the reports; existing ones are used again.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = reports or Path(folder)
        own = [
            run_in(sys.executable, "right", scratch / f"right-{name}.jsonl", scratch)
            for name in ("here", "here-again")
        ]
        baseline = make_baseline(own)
        rows = []
        pythons = {venv.name: str(venv.absolute() / "bin" / "python") for venv in venvs}
        for name, python in {"here": sys.executable, **pythons}.items():
            right, wrong = (
                run_in(python, what, scratch / f"{what}-{name}.jsonl", scratch)
                for what in ("right", "planted")
            )
            whole = gated(right.cases, right, baseline)
            rows.append(
                {
                    "torch": right.header.torch,
                    "cases": len(right.cases),
                    "checks": whole.checked,
                    "outcome": whole.outcome.word,
                    "false_alarms": false_alarms(right, baseline),
                    "planted": len(faults()),
                    "missed": missed(wrong, baseline),
                    "seconds": sum(
                        r.footer.seconds for r in (right, wrong) if r.footer
                    ),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    header = own[0].header
    return {
        "provenance": {
            "baseline_torch": header.torch,
            "python": header.python,
            "platform": header.platform,
            "commit": header.commit,
            "started": header.started,
            "cores": os.cpu_count(),
        },
        "versions": rows,
    }


def lines(record: dict[str, Any]) -> Iterator[str]:
    """Return the lines of the table, and its provenance."""
    made = record["provenance"]
    yield (
        f"{made['started'][:10]}, baseline of torch {made['baseline_torch']}, Python "
        f"{made['python']}, {made['cores']} cores, CPU, gloo."
    )
    if "note" in made:
        yield ""
        yield made["note"]
    yield ""
    heads = ("torch", "cases", "checks", "gate", "false alarms", "planted faults")
    yield row(*heads)
    yield "|---" * len(heads) + "|"
    for each in record["versions"]:
        caught = each["planted"] - len(each["missed"])
        yield row(
            each["torch"],
            each["cases"],
            each["checks"],
            each["outcome"],
            len(each["false_alarms"]),
            f"{caught} of {each['planted']} close it",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record and the table; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="torch_versions", description=__doc__)
    parser.add_argument("--venv", action="append", default=[], type=Path)
    parser.add_argument("--record", choices=("right", "planted"))
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--reports", type=Path, help="keep the reports, go on with them"
    )
    given = parser.parse_args(argv)
    if given.record:
        record(given.record, given.out)
        return 0
    found = measure(given.venv, given.reports)
    write_whole(RESULTS, json.dumps(found, indent=1) + "\n")
    write_between(PAGE, {"torch": "\n".join(lines(found))})
    print(*lines(found), sep="\n")
    right = all(not each["false_alarms"] for each in found["versions"])
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
