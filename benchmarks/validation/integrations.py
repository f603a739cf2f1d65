"""Check the fp16 steps of trainers, with their own scaler and with ours.

gradparity bench integrations, in the folder of the repository; packages
that are not installed are left out and named. Writes results/integrations.json and the
tables of docs/integrations/README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from gradparity.benchmarks.tables import row, write_between
from gradparity.conformance import Runner, Scenario

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "integrations.json"
PAGE = ROOT / "docs" / "integrations" / "README.md"
OURS = "gradparity.scaler:GradScaler"
TORCH = "torch.amp:GradScaler"
SHARDED = "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler"
HERE = "examples.integrations"
CASES = {
    "planted": ("inf@r1s1:first", "steps=5,scale=1024,interval=2"),
    "natural": ("none", "steps=8,scale=67108864,interval=2"),
    "nan, last": ("nan@r0s2:last", "steps=5,scale=1024,interval=2"),
}
"""Name -> (faults, settings). A planted overflow is on one rank and its replicas."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A package's own step, and the same step with our scaler."""

    package: str
    """Name of the package's distribution."""
    module: str
    """Modules without which the workload cannot be imported."""
    name: str
    layouts: Sequence[str]
    theirs: tuple[str, str]
    """(Workload, scaler) of the package's own step."""
    ours: tuple[str, str]


def _step(
    package: str, name: str, layouts: str, theirs: str, scaler: str, ours: str = "",
    own: str = OURS, module: str = "",
) -> Step:  # fmt: skip
    return Step(
        package=package, module=module or package, name=name, layouts=layouts.split(),
        theirs=(theirs, scaler), ours=(ours or theirs, own),
    )  # fmt: skip


STEPS = [
    _step("accelerate", "DDP", "ddp2/2", "accelerate_step:Ddp", TORCH),
    _step("accelerate", "DDP, fused", "ddp2/2", "accelerate_step:DdpFused", TORCH),
    _step("accelerate", "FSDP2", "fsdp2/2", "accelerate_step:Fsdp2", TORCH,
          "accelerate_step:Fsdp2Ours"),
    _step("accelerate", "FSDP2, fused", "fsdp2/2", "accelerate_step:Fsdp2Fused", TORCH,
          "accelerate_step:Fsdp2FusedOurs"),
    _step("transformers", "DDP", "ddp2/2", "trainer_step:Ddp", TORCH),
    _step("transformers", "FSDP2", "fsdp2/2", "trainer_step:Fsdp2", TORCH),
    _step("pytorch-lightning", "DDP", "ddp2/2", "lightning_step:Ddp", TORCH,
          "lightning_step:DdpOurs", module="pytorch_lightning"),
    _step("pytorch-lightning", "ModelParallelStrategy", "fsdp2/2 tp2/2 fsdp2-tp2/4",
          "lightning_step:ModelParallel", TORCH, "lightning_step:ModelParallelOurs",
          module="pytorch_lightning"),
    _step("pytorch-lightning", "ModelParallelStrategy, plain and DTensor", "tp2/2",
          "lightning_step:Mixed", TORCH, "lightning_step:MixedOurs",
          module="pytorch_lightning"),
    _step("torchtitan", "its order of calls",
          "dp_shard2/2 dp_shard2-tp2/4 pp2-dp_shard2/4 pp2-dp_shard2-tp2/8",
          "torchtitan_step:Theirs", TORCH, "torchtitan_step:Ours"),
    _step("torchtitan", "the same, fused", "dp_shard2/2 dp_shard2-tp2/4",
          "torchtitan_step:TheirsFused", TORCH, "torchtitan_step:OursFused"),
    _step("megatron-core", "ChainedOptimizer", "dp2/2", "megatron_chained:Chain",
          f"{HERE}.megatron_chained:Own", own=f"{HERE}.megatron_chained:Shared",
          module="megatron"),
    _step("fairseq2", "FSDP2, HSDP", "fsdp2/2 replicate2-fsdp2/4",
          "fairseq2_step:Fsdp2", SHARDED),
    _step("fairseq2", "FSDP2, fused", "fsdp2/2", "fairseq2_step:Fsdp2Fused", SHARDED),
    _step("fairseq2", "DDP", "ddp2/2", "fairseq2_step:Fsdp2",
          "fairseq2.optim.fp16_loss_scaler:_InternalGradScaler"),
    _step("verl", "FSDP2, HSDP", "fsdp2/2 replicate2-fsdp2/4", "verl_fsdp:Fsdp2",
          SHARDED, "verl_fsdp:Fsdp2Ours"),
    _step("verl", "FSDP2, fused", "fsdp2/2", "verl_fsdp:Fsdp2Fused", SHARDED,
          "verl_fsdp:Fsdp2FusedOurs"),
    _step("rlinf", "FSDP2, HSDP", "fsdp2/2 replicate2-fsdp2/4", "rlinf_fsdp:Fsdp2",
          SHARDED, "rlinf_fsdp:Fsdp2Ours"),
    _step("rlinf", "FSDP2, fused", "fsdp2/2", "rlinf_fsdp:Fsdp2Fused", SHARDED,
          "rlinf_fsdp:Fsdp2FusedOurs"),
    _step("lerobot", "update_policy, DDP", "ddp2/2", "lerobot_step:LeRobot", TORCH,
          "lerobot_step:LeRobotOurs"),
]  # fmt: skip


def scenario(workload: str, layout: str, case: str) -> str:
    """Return the scenario id of one case."""
    faults, settings = CASES[case]
    return f"{layout}/fp16-autocast/own/{faults}/model={HERE}.{workload},{settings}"


def check(runner: Runner, step: Step, layout: str, case: str) -> dict[str, Any]:
    """Run one case with the package's scaler and with ours."""
    found: dict[str, Any] = {"package": step.package, "step": step.name}
    found |= {"layout": layout, "case": case}
    for side, (workload, scaler) in (("theirs", step.theirs), ("ours", step.ours)):
        at = scenario(workload, layout, case)
        done = runner.run(scaler, Scenario.parse(at))
        broken = {v.law: v.message for v in done.verdicts if v.status == "fail"}
        found[side] = {
            "status": str(done.status), "problem": done.problem, "broken": broken,
            "scaler": scaler, "scenario": at,
        }  # fmt: skip
    return found


def _versions() -> Iterator[tuple[str, str]]:
    for package in dict.fromkeys(["torch", *(s.package for s in STEPS)]):
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, ""


def run(only: Sequence[str]) -> dict[str, Any]:
    """Run the steps of all installed trainers."""
    cases, absent, start = [], [], time.monotonic()
    with Runner(folder=str(ROOT), timeout_s=200) as runner:
        for step in STEPS:
            if only and step.package not in only:
                continue
            if importlib.util.find_spec(step.module) is None:
                absent.append(step.package)
                continue
            for layout in step.layouts:
                for case in CASES:
                    found = check(runner, step, layout, case)
                    cases.append(found)
                    told = [f"{s}: {_shown(found[s])}" for s in ("theirs", "ours")]
                    print(step.package, step.name, layout, case, *told, flush=True)
    made = {
        "command": "gradparity bench integrations",
        "versions": dict(_versions()),
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, CPU, gloo",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(time.monotonic() - start),
        "absent": sorted(set(absent)),
    }
    return {"provenance": made, "cases": cases}


def _shown(side: Mapping[str, Any]) -> str:
    if side["broken"]:
        return ", ".join(f"`{law}`" for law in side["broken"])
    said = {"pass": "right", "error": "raises without any scaler"}
    status: str = side["status"]
    return said.get(status, status)


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> table of the page."""
    lines = [row("package", "step", "layout", "case", "theirs breaks", "ours"),
             row(*["---"] * 6)]  # fmt: skip
    versions = record["provenance"]["versions"]
    by = ("package", "step", "layout")
    for key, cases in groupby(record["cases"], lambda c: tuple(c[k] for k in by)):
        package, step, layout = key
        merged: dict[tuple[str, str], list[str]] = {}
        for case in cases:
            told = (_shown(case["theirs"]), _shown(case["ours"]))
            merged.setdefault(told, []).append(case["case"])
        for (theirs, ours), names in merged.items():
            whose, what = f"{package} {versions[package]}", "; ".join(names)
            lines.append(row(whose, step, f"`{layout}`", what, theirs, ours))
    made = record["provenance"]
    where = (
        f"`{made['command']}`, {made['machine']}, torch {made['versions']['torch']}, "
        f"Python {made['python']}, {made['date']}, {made['seconds']} s."
    )
    for again in made.get("renewed", []):
        packages = " ".join(again["packages"])
        seconds = f"{again['date']}, {again['seconds']} s"
        where += f" Made again with `--only {packages}`: {seconds}."
    return {"steps": "\n".join(lines), "made": where}


def main(argv: Sequence[str] | None = None) -> None:
    """Run all steps, write the record and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="packages")
    parser.add_argument("--tables", action="store_true", help="from the record alone")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not options.tables:
        record = run(options.only)
        if options.only and RESULT.exists():  # the others stay as they were recorded
            before = json.loads(RESULT.read_text())
            kept = [c for c in before["cases"] if c["package"] not in options.only]
            order = [s.package for s in STEPS]
            both = [*kept, *record["cases"]]
            record["cases"] = sorted(both, key=lambda c: order.index(c["package"]))
            made, again = before["provenance"], record["provenance"]
            renewed = {"packages": options.only} | {
                key: again[key] for key in ("versions", "date", "seconds")
            }
            record["provenance"] = {
                **made, "renewed": [*made.get("renewed", []), renewed],
            }  # fmt: skip
        draft = RESULT.with_suffix(".new")
        draft.write_text(json.dumps(record, indent=1) + "\n")
        draft.replace(RESULT)
    write_between(PAGE, tables(json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
