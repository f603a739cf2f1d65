"""Small reports for the tests of ``ci``, and a test that they are sound."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from gradparity.ci.integrity import contradictions
from gradparity.conformance.report.records import (
    SCHEMA_VERSION,
    CaseRecord,
    Curves,
    Footer,
    Header,
    LawText,
    Report,
    read_report,
)
from gradparity.conformance.status import Verdict

MESSAGES = {
    "liveness.completes": "6 rank-steps completed",
    "agreement.scale": "6 rank-steps compared by their scale",
    "agreement.skip": "6 rank-steps compared by their decision",
    "scale.rule": "6 updates equal to the rule",
    "parity.gradient": "worst gradient at 0.6 of its bound (w, step 1, rank 0, norm)",
}
SKIPPED = "skip.all-ranks-skip"
LAWS = [*MESSAGES, SKIPPED]
SCALER = "mine.amp:Scaler"


def verdict(
    law: str,
    status: str = "pass",
    message: str | None = None,
    *,
    compared: int | None = None,
    not_compared: int = 0,
) -> Verdict:
    """Make a verdict; by default a pass has 6 comparisons, any other status none."""
    if compared is None:
        compared = 6 if status == "pass" else 0
    if message is None:
        message = (
            MESSAGES.get(law, "no gradient was bad") if status == "pass" else "why"
        )
    return Verdict(
        law=law,
        status=status,
        message=message,
        compared=compared,
        not_compared=not_compared,
    )


def curves() -> Curves:
    return Curves(
        loss=[2.0, 1.5, 1.0],
        reference_loss=[2.0, 1.5, 1.0],
        scale=[[8.0, 4.0, 4.0]] * 2,
        growth=[[1, 0, 1]] * 2,
        stepped=[[True, False, True]] * 2,
        bad=[["", "w", ""]] * 2,
        parity=[0.1, 0.6, 0.15],
        parameters={"w": 0.6, "b": 0.05},
    )


def case(scenario: str = "fsdp/2/fp32/sgd/none", scaler: str = SCALER) -> CaseRecord:
    topology, world, precision = scenario.split("/")[:3]
    verdicts = [verdict(law) for law in MESSAGES] + [verdict(SKIPPED, "skipped")]
    return CaseRecord(
        scaler=scaler,
        scenario=scenario,
        topology=topology,
        world_size=int(world),
        precision=precision,
        model="digits",
        status="pass",
        verdicts=tuple(verdicts),
        seconds=0.5,
        replay=f"gradparity replay {scenario} --scaler {scaler}",
        curves=curves(),
    )


def with_verdict(record: CaseRecord, new: Verdict) -> CaseRecord:
    """Return ``record`` with one verdict replaced, and its status updated."""
    verdicts = [new if v.law == new.law else v for v in record.verdicts]
    found = {v.status for v in verdicts}
    order = ("error", "fail", "inconclusive", "pass")
    status = next((s for s in order if s in found), "inconclusive")
    return msgspec.structs.replace(record, verdicts=tuple(verdicts), status=status)


def with_curves(record: CaseRecord, **changes: object) -> CaseRecord:
    assert record.curves is not None
    new = msgspec.structs.replace(record.curves, **changes)
    return msgspec.structs.replace(record, curves=new)


def report_of(cases: Iterable[CaseRecord], **header: object) -> Report:
    """Return a complete report; keyword arguments change its header."""
    records = tuple(cases)
    counts = Counter(c.status for c in records)
    head = Header(
        schema=SCHEMA_VERSION,
        laws={law: LawText(text="It holds.", reason="Why.") for law in LAWS},
        gradparity="0.1.0",
        torch="2.13.0+cpu",
        python="3.11.7",
        platform="linux-x86_64",
        backend="gloo",
        device="cpu",
        threads=1,
        commit="abc",
        command="gradparity run",
        preset="parity",
        seed=0,
        started="2026-11-21T06:46:50+00:00",
        planned=len(records),
        data={"digits": "22994f7bbf85cded"},
        environment={},
    )
    return Report(
        header=msgspec.structs.replace(head, **header),
        cases=records,
        footer=Footer(
            complete=True, cases=len(records), counts=dict(counts), seconds=1.5
        ),
    )


def sample() -> Report:
    """Return a report of three sound cases of one scaler."""
    ids = ("fsdp/2/fp32/sgd/none", "tp/2/fp32/adamw/none", "tp/2/bf16/sgd/none")
    return report_of(case(each) for each in ids)


def write(report: Report, path: Path) -> Path:
    lines = [report.header, *report.cases, *([report.footer] if report.footer else [])]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def test_the_sample_is_sound_and_readable(tmp_path: Path) -> None:
    assert contradictions(sample()) == []
    assert read_report(write(sample(), tmp_path / "r.jsonl")) == sample()
