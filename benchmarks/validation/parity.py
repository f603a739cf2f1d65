"""Measure the margin of the parity bounds, and how often chance alone exceeds them.

Two figures for ``docs/parity.md``: (1) by simulation, how often one more correct run
exceeds ``SAFETY_FACTOR`` times the largest error of the reference runs, for error
vectors of 1 to 64 independent elements; (2) measured, the largest error / bound of a
correct scaler over several seeds. Results go to ``benchmarks/results/parity.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gradparity.conformance import Runner, Scenario
from gradparity.conformance.comparison.compare import SAFETY_FACTOR
from gradparity.conformance.comparison.variants import NOISY
from gradparity.conformance.files import write_whole
from gradparity.conformance.rank.devices import Devices
from gradparity.conformance.run.launcher import Pool
from gradparity.conformance.run.recorder import make_header

SCALER = "gradparity.fixtures.faulty:PlainScaler"
SCENARIOS = (
    "fsdp/2/fp32/sgd/none/steps=8",
    "tp/2/fp32/sgd/none/steps=8",
    "fsdp+tp/4/fp32/adamw/none/steps=8",
    "fsdp/2/fp16-params/sgd/none/steps=8",
    "ddp/2/fp32/adamw/none/model=text,steps=8",
    "tp/2/fp32/sgd/none/model=text,steps=8",
    "fsdp+tp/4/fp32/sgd/none/model=text,steps=8",
    "tp/2/fp16-autocast/sgd/none/model=text,steps=8",
    "fsdp+tp/4/fp16-autocast/adam/none/steps=8",
)
DRAWS = 4_000_000


def chance(elements: int, generator: np.random.Generator) -> float:
    """Return the fraction of draws in which one more run exceeds the bound."""
    crossed = 0
    for _ in range(16):
        # The squared norm of an error of independent normal elements is chi-squared.
        # The first column is the checked run, the others are the references. 16 parts
        # keep the memory small.
        runs = generator.chisquare(elements, (DRAWS // 16, 1 + len(NOISY)))
        norms = np.sqrt(runs)
        crossed += int((norms[:, 0] > SAFETY_FACTOR * norms[:, 1:].max(axis=1)).sum())
    return crossed / DRAWS


def measured(seeds: int) -> dict[str, list[float]]:
    """Return scenario -> largest error / bound of each seed."""
    found: dict[str, list[float]] = {}
    with Runner(folder=".") as runner:
        for text in SCENARIOS:
            for seed in range(seeds):
                case = runner.run(SCALER, Scenario.parse(f"{text},seed={seed}"))
                assert case.evidence is not None and case.evidence.parity is not None
                worst = max(case.evidence.parity.per_step)
                found.setdefault(text, []).append(round(worst, 4))
    return found


def main(argv: Sequence[str]) -> int:
    """Measure, print and record.

    Args:
        argv: optionally the number of seeds (default 10).
    """
    seeds = int(argv[0]) if argv else 10
    generator = np.random.default_rng(0)
    header = make_header(
        planned=0,
        preset="",
        seed=0,
        arguments=["bench", "parity"],
        place=Pool(Devices(), timeout_s=60.0),
    )
    result = {
        "torch": header.torch,
        "python": header.python,
        "platform": header.platform,
        "commit": header.commit,
        "started": header.started,
        "safety_factor": SAFETY_FACTOR,
        "references": len(NOISY),
        "chance": {str(n): chance(n, generator) for n in (1, 2, 4, 16, 64)},
        "measured": measured(seeds),
    }
    path = Path(__file__).parents[1] / "results" / "parity.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n")
    print(path.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
