"""What changes on a GPU: a step's time beside torch's scaler, and the bounds' margins.

    python -m gradparity.benchmarks.gpu [SEEDS]

1. One process with plain tensors on the device: a whole step and update, with ours,
   with torch's and with the bare kernels, alternating in one run; the host waits for
   the device at the end of each.
2. The largest error / bound of a right scaler, over SEEDS seeds (3): ranks share the
   GPU, references and their noise are the CPU's.

The record becomes ``results/gpu.json``; the tables of docs/gpu.md are written from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradparity.benchmarks.parity import measured
from gradparity.benchmarks.scaler import ALONE, alone
from gradparity.benchmarks.tables import row, write_between
from gradparity.conformance.files import write_whole
from gradparity.conformance.rank.devices import Devices, nccl_version
from gradparity.conformance.run.launcher import Pool
from gradparity.conformance.run.recorder import make_header

RESULTS = Path(__file__).parent / "results" / "gpu.json"
PAGE = Path(__file__).parent.parent / "docs" / "gpu.md"
REPEATS = 31
STEPS = {name: max(1, 500 // count) for name, (count, _, _) in ALONE.items()}
"""How many steps are timed as one."""


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the page, by name."""
    heads = "gradients", "bare kernels", "torch", "ours", "ours / torch"
    steps = [row(*heads), row(*["---"] * len(heads))]
    for name, seconds in record["steps"].items():
        each = [
            seconds[f"{who} step"] / STEPS[name] for who in ("bare", "torch", "our")
        ]
        cells = [f"{seconds * 1e6:.0f} µs" for seconds in each]
        steps.append(
            row(name.removeprefix("alone, "), *cells, f"{each[2] / each[1]:.2f}")
        )
    margins = [row("scenario", "largest error / bound"), row("---", "---")]
    for scenario, seeds in record["margins"].items():
        margins.append(row(f"`{scenario}`", f"{max(seeds):.2f}"))
    made = (
        f"gradparity at {record['commit'][:7]}, torch {record['torch']}, NCCL "
        f"{record['nccl']}, Python {record['python']}, {record['gpu']}, "
        f"{record['started'][:10]}"
    )
    return {"made": made, "steps": "\n".join(steps), "margins": "\n".join(margins)}


def main(argv: Sequence[str]) -> int:
    """Measure and record.

    Args:
        argv: optionally the number of seeds.
    """
    place = Pool(Devices(device="cuda", share=True), timeout_s=60.0)
    header = make_header(
        planned=0, preset="", seed=0, arguments=["bench", "gpu"], place=place
    )
    record = {
        "gpu": ", ".join(header.gpus),
        "torch": header.torch,
        "nccl": ".".join(map(str, nccl_version())),
        "python": header.python,
        "commit": header.commit,
        "started": header.started,
        "steps": {n: alone(*how, REPEATS, "cuda") for n, how in ALONE.items()},
        "margins": measured(int(argv[0]) if argv else 3, place),
    }
    write_whole(RESULTS, json.dumps(record, indent=1) + "\n")
    write_between(PAGE, tables(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
