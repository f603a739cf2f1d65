"""Tools for work on gradparity itself: ``gradparity bench [NAME ...]``.

Without a name the tools are listed. They are in a checkout, and not in the wheel.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from gradparity.conformance.output import say
from gradparity.conformance.status import UsageError, unknown

__all__ = ["SPEED", "VALIDATION", "main"]

SPEED = {
    "scaler": "the scaler beside torch's in the same run: docs/scaler-speed.md",
    "gpu_scaler": "the scaler on a GPU: docs/gpu-results.md",
    "scale": "a step of the scaler as the world grows: docs/scale.md",
    "harness": "the harness beside torch's test classes: docs/harness-inside.md",
    "loops": "a step of other people's trainers: docs/integrations/cost.md",
    "record": "record and compare: docs/recordings.md",
    "report": "the page of a report with 500 scenarios",
    "memory": "memory of a long run",
}
"""Tools that measure time and memory, by module name."""

VALIDATION = {
    "specimens": "known faults beside their fixed versions: docs/specimens.md",
    "right_stacks": "right setups, of which none may fail: docs/first-verdicts.md",
    "mutants": "faulty scalers against the checks: docs/mutants.md",
    "code_mutants": "mutated code against its tests: docs/mutants.md",
    "histories": "call histories of the scaler for MINUTES: docs/mutants.md",
    "survey": "the parallel plans of transformers: docs/wild/transformers.md",
    "survey_scalers": "scalers that people use: docs/known-scalers.md",
    "wild": "the scripts of docs/wild",
    "integrations": "the fp16 steps of trainers: docs/integrations/README.md",
    "rl": "fp16 in reinforcement learning: docs/rl.md",
    "foreign": "recordings of jobs in other people's loops: docs/recordings.md",
    "recorded": "right variants of a recorded job, and faults: docs/recordings.md",
    "parity": "margin of the bounds: docs/parity.md",
    "repeats": "one verdict N times",
    "torch_versions": "one baseline over versions of torch: docs/gate-tests.md",
    "torchrun_faults": "faults of a rank under torchrun: docs/decisions/harness.md",
    "adopted": "torch's own distributed tests on our ranks: docs/adopted.md",
    "gpu": "reports of runs on a GPU: docs/gpu-results.md",
    "baseline": "the baseline of make gate: two runs, the second for the noise",
    "planted": "the gate on five copies of this tree with a regression each",
    "under_load": "make test beside four busy loops, RUNS times",
}
"""Tools that test the comparison, the scaler or the suite itself, by module name."""

PAGES = {
    "laws_page": "write docs/laws.md from the checks",
    "recordings_page": "write docs/recordings.md from the records",
    "site": "build the documentation as a site: make site",
}
"""Tools that write pages, by module name."""

_SESSIONS = ("baseline", "histories", "planted", "under_load")


def main(arguments: Sequence[str]) -> int:
    """Run a tool, or list all of them.

    Args:
        arguments: name of the tool, with - or _, and the tool's own arguments.

    Returns:
        The tool's exit code.

    Raises:
        UsageError: if there is no such tool.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        _list()
        return 0
    name = arguments[0].replace("-", "_")
    if name not in {**SPEED, **VALIDATION, **PAGES}:
        names = [_shown(each) for each in (*SPEED, *VALIDATION, *PAGES)]
        raise UsageError(unknown("tool", arguments[0], names))
    if name in _SESSIONS:
        module = importlib.import_module("gradparity.benchmarks.validation.sessions")
        return int(getattr(module, name)(list(arguments[1:])))
    folder = "gradparity.benchmarks" + ".validation" * (name in VALIDATION)
    module = importlib.import_module(f"{folder}.{name}")
    return int(module.main(list(arguments[1:])) or 0)


def _shown(name: str) -> str:
    return name.replace("_", "-")


def _list() -> None:
    tables = {"Speed": SPEED, "Validation": VALIDATION, "Pages": PAGES}
    for title, table in tables.items():
        say(f"{title}:")
        for name, text in table.items():
            say(f"  {_shown(name):<16} {text}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        sys.exit(f"gradparity.benchmarks: {error}")
