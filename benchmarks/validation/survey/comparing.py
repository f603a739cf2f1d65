"""Run one model type under one plan through the checks of every workload."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace

from msgspec import structs

from gradparity.benchmarks.validation.survey.catalogue import (
    PLANS,
    ModelType,
    model_types,
)
from gradparity.benchmarks.validation.survey.records import (
    LOADED,
    ODD_HEADS,
    WEIGHTS,
    ModelRecord,
    Rule,
    Run,
    wildcards,
)
from gradparity.benchmarks.validation.survey.zoo import (
    Stack,
    misloaded,
    replaced_rules,
    rule_of,
    rule_of_loader,
)
from gradparity.conformance.rank.devices import Devices
from gradparity.conformance.rank.scaler_spec import NO_SCALER
from gradparity.conformance.run.launcher import Place, Pool
from gradparity.conformance.run.runner import Case, Runner
from gradparity.conformance.space.scenario import Scenario
from gradparity.conformance.status import plain
from gradparity.multiprocess import Cluster, RankState, WorldError
from gradparity.multiprocess.cluster import BaseCluster

__all__ = ["check_model", "ranks"]

STEPS = 2
"""Number of steps; the second one shows errors of the first update, and leftover
gradients."""
ZOO = "gradparity.benchmarks.validation.survey.zoo"
_RUNS = {
    "tp": ("plain", "accumulate", "accumulate-uneven", "clip-norm"),
    "ep": ("plain", "accumulate", "clip-norm"),
    "fsdp+tp": ("plain", "accumulate", "accumulate-no-sync", "clip-norm"),
}
"""Plan -> recipes. Hooks on sums are wrong only with accumulation, deferred
synchronisation needs FSDP2; clipping is last, as one wrong gradient changes all."""
WORDS = {
    "plain": "1 micro-batch",
    "accumulate": "2 equal micro-batches",
    "accumulate-no-sync": "2 micro-batches, synchronised in the last",
    "accumulate-uneven": "3 unequal micro-batches",
    "clip-norm": "1 micro-batch, clipped",
}
_PARITY = {"parity.gradient", "parity.update", "parity.loss"}
_LOST = {
    RankState.HUNG.value: "too slow",
    RankState.KILLED.value: "crashed",
    RankState.EXITED.value: "crashed",
}
"""State of a rank that was lost -> verdict on its model; in other states it raised."""


def scenarios(plan: str, model: str) -> Iterator[tuple[str, str]]:
    """Return the runs of a model: description -> id of the scenario."""
    mesh = PLANS[plan].mesh
    topology = "-".join(f"{axis}{size}" for axis, size in mesh.items())
    world = math.prod(mesh.values())
    for recipe in _RUNS[plan]:
        # a wrong norm shows in the first step, and each step costs references
        steps = 1 if recipe == "clip-norm" else STEPS
        settings = f"model={ZOO}:types.{model},steps={steps}"
        if recipe != "plain":
            settings += f",recipe={recipe}"
        yield WORDS[recipe], f"{topology}/{world}/fp32/own/none/{settings}"


def ranks(limit_s: float) -> Place:
    """Return the place that starts the ranks of a survey.

    Args:
        limit_s: time limit of one scenario.
    """
    return _WarmPool(Devices(), limit_s)


class _WarmPool(Pool):
    """Ranks that are forked with transformers imported."""

    def _make(self, world: int) -> BaseCluster:
        spec = self.devices.spec(world, self.timeout_s)
        cluster = Cluster.of(replace(spec, preload=(*spec.preload, *_preloaded())))
        return self._stack.enter_context(cluster)


def _preloaded() -> tuple[str, ...]:
    """Return installed modules that every model, or its saving and loading, imports."""
    found = (
        *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "numpy.ma"),
        *("transformers.distributed", "transformers.modeling_utils"),
        *("transformers.modeling_layers", "transformers.masking_utils"),
        *("transformers.generation.utils", "transformers.processing_utils"),
        "transformers.models.auto.modeling_auto",
        *("accelerate", "deepspeed"),  # where they are there, saving asks for them
    )
    return tuple(n for n in found if importlib.util.find_spec(n) is not None)


def check_model(plan: str, model: str, place: Place) -> ModelRecord:
    """Run a model type under a plan, in every scenario.

    Args:
        plan: a key of ``PLANS``.
        model: a model type.
        place: starts the ranks.
    """
    start = time.monotonic()
    runs: list[Run] = []
    verdict, reason, rules = "", "", dict[str, Rule]()
    replaced = dict[str, str]()
    # one: it costs a second run, and the first failure names the module to look at
    runner = Runner(folder=os.getcwd(), place=place, localises=1)
    kind = model_types()[model]
    try:
        Stack(kind).output_name()  # it trains on one process
        runs += _misloaded(plan, model, place)
        loads = not runs or runs[0].status == "error"
        for name, scenario in scenarios(plan, model) if loads else ():
            runs.append(_run_of(name, runner.run(NO_SCALER, Scenario.parse(scenario))))
            if runs[-1].status == "error":
                break  # the other recipes would most likely end in the same way
        verdict = _verdict(runs)
        checked = verdict in ("right", "wrong") and not runs[0].misloaded
        # once: the other plans split heads by the same rules
        if plan == "tp" and checked:
            runs += _with_odd_heads(kind, runner)
            verdict = _verdict(runs)
        open_ = (r.message for r in runs if r.status not in ("pass", "skipped"))
        reason = next(open_, "")
        rules = _rules(plan, kind, runs)
        replaced = dict(replaced_rules(kind))
    except Exception as error:  # the package's code may raise any exception
        verdict, reason = "not built", f"{type(error).__name__}: {error}"
    return ModelRecord(
        plan=plan,
        model=model,
        folder=kind.folder,
        verdict=verdict,
        reason=plain(reason)[:400],
        runs=tuple(runs),
        rules=rules,
        replaced=replaced,
        seconds=round(time.monotonic() - start, 2),
    )


def _misloaded(plan: str, model: str, place: Place) -> list[Run]:
    """Return a run that shows why loading is wrong, or raised an error; else []."""
    world = math.prod(PLANS[plan].mesh.values())
    start = time.monotonic()
    try:
        errors = place.ranks(world).run(misloaded, plan, model)[0]
    except WorldError as error:
        run = Run(name=LOADED, scenario="", status="error", message=plain(str(error)))
        return [structs.replace(run, ended=error.root.state.value)]
    if not errors:
        return []
    worst = max(errors, key=lambda name: errors[name])
    return [
        Run(
            name=LOADED,
            scenario="",
            status="fail",
            message=f"{len(errors)} parameters are not loaded as they were saved",
            law=WEIGHTS,
            parameter=worst,
            error=errors[worst],
            departed=errors,
            seconds=round(time.monotonic() - start, 2),
        )
    ]


def _rules(plan: str, kind: ModelType, runs: list[Run]) -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for name in dict.fromkeys(name for run in runs for name in run.departed):
        if wildcards(name) not in found:
            found[wildcards(name)] = (
                rule_of_loader()
                if runs[0].misloaded
                else rule_of(kind, PLANS[plan], name)
            )
    return found


def _with_odd_heads(kind: ModelType, runner: Runner) -> list[Run]:
    """Return the run of a model with 3 heads over 2 ranks, if that can be set.

    A plan may raise for 3 heads; if it does not, its result must be right.
    """
    odd = Stack(kind, odd_heads=True)
    try:
        odd.output_name()
    except Exception:  # no such model on one process either
        return []
    scenario = f"tp2/2/fp32/own/none/model={ZOO}:odd.{kind.name},steps=1"
    run = _run_of(ODD_HEADS, runner.run(NO_SCALER, Scenario.parse(scenario)))
    refused = run.status == "error" and run.ended != RankState.HUNG.value
    return [structs.replace(run, status="skipped") if refused else run]


def _verdict(runs: list[Run]) -> str:
    statuses = {r.status for r in runs}
    if "fail" in statuses:
        return "wrong"
    if "error" in statuses:
        ended = next(r.ended for r in runs if r.status == "error")
        return _LOST.get(ended, "raises")
    # a run that was skipped shows nothing
    right = "pass" in statuses and statuses <= {"pass", "skipped"}
    return "right" if right else "undecided"


def _run_of(name: str, case: Case) -> Run:
    bad = [v for v in case.verdicts if v.status == case.status != "pass"]
    first = next(
        (v for v in bad if v.law == "parity.gradient"), bad[0] if bad else None
    )
    location = case.location
    held = {v.law for v in case.verdicts if v.status == "pass"}
    # the factor by which a gradient was clipped is not always known; it is right anyway
    enough = case.status == "inconclusive" and held >= _PARITY
    failure = case.error if isinstance(case.error, WorldError) else None
    return Run(
        name=name,
        scenario=case.scenario.id,
        status="pass" if enough else str(case.status),
        message=plain(case.problem or (first.message if first else "")),
        ended=failure.root.state.value if failure else "",
        law=first.law if first else "",
        laws=tuple(v.law for v in bad),
        step=first.step if first else None,
        parameter=(first.parameter or "").removeprefix("net.") if first else "",
        error=float(first.numbers.get("error", 0.0)) if first else 0.0,
        bound=float(first.numbers.get("bound", 0.0)) if first else 0.0,
        departed=_departed(case),
        where=location.text if location else "",
        forward=location.module.removeprefix("net.")
        if location and location.where == "forward"
        else "",
        seconds=round(case.seconds, 2),
    )


def _departed(case: Case) -> dict[str, float]:
    """Return parameter -> largest error of its gradient, in the first bad step."""
    parity = case.evidence.parity if case.evidence else None
    found: dict[str, float] = {}
    for row in parity.departed.get("gradient", ()) if parity else ():
        name = row.parameter.removeprefix("net.")
        found[name] = max(found.get(name, 0.0), float(f"{row.error:.3g}"))
    return found
