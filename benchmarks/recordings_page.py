"""Write the tables of ``docs/recordings.md`` from the records.

    gradparity bench recordings-page

The tools ``recorded``, ``foreign`` and ``record`` measure the figures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradparity.benchmarks.tables import row, write_between

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "recordings.md"
PRODUCTS = {"fp32": "fp32", "bf16": "bf16 products"}
MODELS = {"cpu": "fp32, one core", "cuda": "bf16 autocast"}
"""Kind of device -> description of what the benchmark ``record`` trains there."""


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def told() -> Iterator[str]:
    """Yield table lines on right variants and faults of a small Llama."""
    record = _read("recorded.json")
    yield row("", *PRODUCTS.values())
    yield row("---", "---", "---")
    right, faults = [], []
    for precision in PRODUCTS:
        of = [each for each in record["rows"] if each["precision"] == precision]
        fits = [each for each in of if each["is_right"]]
        differ = sum(each["code"] != 0 for each in fits)
        share = max(each["share"] for each in fits)
        right.append(f"{differ} of {len(fits)}, at most {share:.2f} of a bound")
        kinds = {each["kind"] for each in of if not each["is_right"]}
        faults.append(f"{len(record['told'][precision])} of {len(kinds)}")
    yield row("right variants that differ", *right)
    yield row("faults told at every seed, by numbers or by what must be equal", *faults)


def jobs() -> Iterator[str]:
    """Yield table lines on training loops of other packages, one for each package."""
    yield row(
        "loop",
        "jobs",
        "runs that are right",
        "largest",
        "faults told",
        "RUN on 2 ranks",
    )
    yield row(*["---"] * 6)
    by_version: dict[str, list[dict[str, Any]]] = {}
    for each in _read("foreign.json"):
        by_version.setdefault(each["version"], []).append(each)
    for version, rows in by_version.items():
        right = [each for each in rows if not each["fault"]]
        wrong = [each for each in rows if each["fault"]]
        shares = [
            float(found[1])
            for each in right
            if (found := re.search(r"difference ([\d.]+) of its bound", each["said"]))
        ]
        sizes = sorted(each["run_kb"] / 1000 for each in right if each["ranks"] == 2)
        yield row(
            version,
            ", ".join(dict.fromkeys(each["job"] for each in rows)),
            f"{sum(each['code'] == 0 for each in right)} of {len(right)}",
            f"{max(shares, default=float('nan')):.2f}",
            f"{sum(each['code'] == 1 for each in wrong)} of {len(wrong)}",
            " to ".join(dict.fromkeys(f"{s:.1f}" for s in (sizes[0], sizes[-1])))
            + " MB",
        )


def cost() -> Iterator[str]:
    """Yield table lines on the times of a plain step and of a recorded one."""
    yield row("model", "rows of a batch", "step", "recorded", "ratio")
    yield row(*["---"] * 5)
    for device, file in (("cpu", "record.json"), ("cuda", "record-cuda.json")):
        record = _read(file)
        where = "" if device == "cpu" else f", {record['device']}"
        for number in record["size"]["rows"]:
            each = record[f"rows_{number}"]
            millions = each["parameters"] / 1e6
            yield row(
                f"{millions:.0f} million parameters, {MODELS[device]}{where}",
                number,
                f"{each['step_ms']:.0f} ms",
                f"{each['recorded_ms']:.0f} ms",
                each["ratio"],
            )


TABLES = {"told": told, "jobs": jobs, "cost": cost}


def main(_: Sequence[str] = ()) -> None:
    """Write all tables of the page."""
    write_between(PAGE, {name: "\n".join(make()) for name, make in TABLES.items()})
