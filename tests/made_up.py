"""Synthetic traces of right runs, which tests of checks then change in one place."""

import copy

import numpy as np

from gradparity.conformance import Evidence, Scenario
from gradparity.conformance.comparison.doubts import doubts_of
from gradparity.conformance.comparison.law import apply_checks
from gradparity.conformance.comparison.measured import (
    ClipRow,
    Doubt,
    Lack,
    Parity,
    ParityRow,
)
from gradparity.conformance.rank.trace import (
    Collective,
    Decision,
    Misuse,
    RankTrace,
    Reduction,
    Restored,
    StepTrace,
)
from gradparity.conformance.status import Finding

SCENARIO = Scenario.parse("ddp/2/fp32/sgd/none/steps=4,scale=8,interval=2")
BAD_STEP = 1
OF_STACKS = ("random.",)
"""Groups of checks that do not depend on a scaler."""


def rank_trace(rank: int, *, bad: bool) -> RankTrace:
    """Return a trace of a right run of two replicas; ``bad`` adds an inf on rank 1."""
    trace = RankTrace(
        rank=rank,
        coordinate={"dp": rank},
        index={"w": np.arange(2)},
        shards={"w": "same"},
        reduce_dtype="float32",
    )
    scale, growth, digest, taken = 8.0, 0, "start", 0
    for step in range(SCENARIO.steps):
        skip = bad and step == BAD_STEP
        seen = StepTrace(step=step, complete=True, loss=1.0)
        seen.scale_before, seen.growth_before = scale, growth
        if skip:
            scale, growth = scale / 2, 0
        else:
            digest = f"after {step}"
            scale, growth = (scale * 2, 0) if growth == 1 else (scale, growth + 1)
        seen.scale_after, seen.growth_after = scale, growth
        decision = Decision(parameters_changed=not skip, state_changed=not skip)
        decision.non_finite = ["w"] if skip and rank == 1 else []
        seen.decisions = [decision]
        seen.digests = {"w": digest}
        seen.collectives = [Collective("allreduce[6:float64]", (0, 1, 2, 3))]
        seen.reductions = [
            Reduction(
                collective=Collective("allreduce[2:float32]", (0, 1)),
                dtype="float32",
                elements=2,
            )
        ]
        seen.reported_norm = 0.5
        seen.schedule = (f"{taken}", f"{taken + (not skip)}")
        before, after = ({"w": (2, f"{n}")} for n in (taken, taken + (not skip)))
        seen.average = (before, after)
        seen.skips = (step - taken, step - taken + skip)
        taken += not skip
        seen.checked_sum = (3.0, 3.0)
        seen.settings = {"w": {"lr": 0.1 * (step + 1), "betas": (0.9, 0.99)}}
        seen.copies = [{"lr": 0.3}, {"lr": 0.1}]
        seen.gradients = {"w": np.array([1e-7, -0.5], np.float32)}
        trace.steps.append(seen)
    trace.misuse = [Misuse(call="a second step()", error="RuntimeError", changed=())]
    trace.loaded = (1, "")
    trace.restored = Restored(saved=(16.0, 1), loaded=(16.0, 1), new=(8.0, 0))
    return trace


def evidence(
    *, bad: bool = False, size: int = 2, scenario: Scenario = SCENARIO
) -> Evidence:
    ranks = tuple(rank_trace(r, bad=bad) for r in range(size))
    parity = parity_without_rows()
    parity.clip_norm = 0.25
    parity.clipped = [
        clip_row(rank=rank, step=step)
        for step in range(SCENARIO.steps)
        for rank in range(size)
        if not (bad and step == BAD_STEP)
    ]
    for kind in ("gradient", "update", "loss"):
        add(parity, row(kind, error=0.5))
    return Evidence(
        scenario=scenario,
        ranks=ranks,
        control=copy.deepcopy(ranks),
        uninterrupted=copy.deepcopy(ranks),
        parity=parity,
    )


def add(parity: Parity, row: ParityRow) -> None:
    """Add a row of one element to the comparison."""
    if not parity.add(row.kind, [row], elements=1):
        parity.lacks(row.kind, Lack.NOISE, row.step, 1)


def row(kind: str, error: float) -> ParityRow:
    """Return a row with a true value of 0 and a bound of 1."""
    return ParityRow(
        kind=kind,
        step=2,
        parameter="w",
        rank=1,
        measure="norm",
        error=error,
        bound=1.0,
        size=0.0,
    )


def parity_without_rows() -> Parity:
    """Return parity with norms only."""
    steps = SCENARIO.steps
    return Parity(
        per_step=[0.0] * steps,
        reference_norm=[0.5] * steps,
        norm_bound=[1e-6] * steps,
    )


def clip_row(*, rank: int, step: int, factor: float = 0.5) -> ClipRow:
    return ClipRow(
        step=step,
        parameter="w",
        rank=rank,
        factor=factor,
        due=0.5,
        bound=1e-6,
        above_noise=True,
    )


def doubts_in(of: Evidence) -> list[Doubt]:
    """Return the doubts that the traces of a run raise."""
    steps = [[*zip(of.ranks, seen, strict=True)] for _, seen in of.steps()]
    return doubts_of(of.scenario, steps, "")


def finding(of: Evidence, law: str) -> Finding:
    """Return the finding of one check."""
    (verdict,) = [v for v in apply_checks(of) if v.law == law]
    return verdict
