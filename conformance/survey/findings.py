"""Findings: failures of a survey with one cause, each with a report for upstream.

Failures are one family where the same rule of a plan (or, without a rule, the same
class of module) leaves a gradient wrong in the same kind of run: in any, or only where
micro-batches are accumulated. Plans share rules, so one cause may show under several
plans. Of each family one script is kept, that of its smallest model, and every failure
of it must be confirmed by its own script.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from ..files import write_whole
from ..status import plain
from .catalogue import PLANS, model_types
from .records import (
    ODD_HEADS,
    Header,
    ModelRecord,
    Rule,
    Run,
    ScriptRecord,
    Survey,
    append,
    wildcards,
)
from .script import MICRO_BATCHES, script_of

__all__ = [
    "Family",
    "FindingRecord",
    "confirm_all",
    "families",
    "write_finding",
]

SCRIPT_S = 600.0
"""Time limit of a script, with room for a busy machine."""
THREADS: Mapping[str, str] = {
    "transformers-tp-checkpoint-conversion": (
        "no thread found for `Chunk` and `Concatenate`; "
        "huggingface/transformers#48519 (open) is the same of `Transpose` and "
        "`PermuteForRope`"
    )
}
"""Id of a finding -> a public thread on it, found by hand."""
NO_THREAD = "no thread found"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One parameter of one model that is wrong for the family's cause."""

    model: ModelRecord
    run: Run
    """The first run in which it departs."""
    parameter: str
    error: float

    @property
    def plan(self) -> str:
        """Under which it departs."""
        return self.model.plan


@dataclass(frozen=True, kw_only=True)
class Family:
    """Failures that have one cause."""

    accumulates: bool
    """Whether only runs that accumulate micro-batches show it."""
    rule: Rule
    failures: tuple[Failure, ...]
    """The worst parameter of each model and plan: by plan, the smallest model first."""

    @property
    def id(self) -> str:
        """Name of its files."""
        cause = self.rule.style or self.rule.module
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cause).lower()
        parts = ["transformers", self.first.plan, words]
        text = "-".join([*parts, *["accumulation"] * self.accumulates])
        return re.sub(r"[^a-z0-9]+", "-", text)

    @property
    def first(self) -> Failure:
        """The failure that the page shows."""
        return self.failures[0]

    @property
    def misloads(self) -> bool:
        """Whether the loaded weights are wrong, not the gradients."""
        return self.first.run.misloaded

    @property
    def names(self) -> list[str]:
        """Model types, those under other plans than the first with the plan."""
        return [self.name_of(failure) for failure in self.failures]

    def name_of(self, failure: Failure) -> str:
        """The name of a failure's model."""
        name = failure.model.model
        return name if failure.plan == self.first.plan else f"{name} ({failure.plan})"


class FindingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the table of all findings is made of."""

    id: str
    package: str
    version: str
    what: str
    parameter: str
    relative_error: str
    reference: str
    verdict: str
    """``bug``: its script shows it."""
    where: str
    judge: str
    """The judge's description."""
    thread: str
    script: str
    date: str
    command: str
    found_by: str
    versions: dict[str, str]
    machine: str
    output: tuple[str, ...]
    """Output of the script."""
    models: tuple[str, ...] = ()
    confirmed: tuple[str, ...] = ()
    """Those models whose own script shows it."""


def families(survey: Survey) -> list[Family]:
    """The failures of a survey by cause, the largest family first."""
    found: dict[tuple[bool, str], dict[tuple[str, str], Failure]] = {}
    rules: dict[tuple[bool, str], Rule] = {}
    for model in survey.models:
        for failure, rule in _failures(model):
            accumulates = MICRO_BATCHES[failure.run.name] > 1
            key = (accumulates, rule.style or rule.module)
            rules.setdefault(key, rule)
            known = found.setdefault(key, {}).get(model.key)
            if known is None or known.error < failure.error:
                found[key][model.key] = failure
    plans = [*PLANS]
    # within a plan the fastest first: it stands for the smallest model
    made = [
        Family(
            accumulates=key[0],
            rule=rules[key],
            failures=tuple(
                sorted(
                    by_model.values(),
                    key=lambda f: (plans.index(f.plan), f.model.seconds),
                )
            ),
        )
        for key, by_model in found.items()
    ]
    return sorted(made, key=lambda family: -len(family.failures))


def _failures(model: ModelRecord) -> Iterable[tuple[Failure, Rule]]:
    """Each parameter in the first run in which it departs."""
    known = set[str]()  # what departs in an earlier run departs in the later ones, too
    failed = [run for run in model.runs if run.departed]
    # one wrong gradient changes the norm and with it every clipped gradient
    plain_runs = [run for run in failed if not run.name.endswith("clipped")]
    for run in plain_runs or failed:
        if run.misloaded:
            worst = run.parameter
            found = Failure(model=model, run=run, parameter=worst, error=run.error)
            yield found, model.rules[wildcards(worst)]
            return
        inside = [n for n in run.departed if n.startswith(f"{run.forward}.")]
        if run.forward and inside:  # departures after that module are its consequences
            first = inside[0]
            error = run.departed[first]
            found = Failure(model=model, run=run, parameter=first, error=error)
            yield found, model.rules[wildcards(first)]
            return
        for name, error in run.departed.items():
            general = wildcards(name)
            if general not in known and general in model.rules:
                failure = Failure(model=model, run=run, parameter=name, error=error)
                yield failure, model.rules[general]
        known |= {wildcards(name) for name in run.departed}


def what(family: Family, plan: str = "") -> str:
    """The finding in one sentence, under a plan, by default its first."""
    if family.misloads:
        return f"weights loaded wrong under the {plan or family.first.plan} plan"
    leaves = sorted({_leaf(f.parameter) for f in family.failures})
    when = ", with several micro-batches" if family.accumulates else ""
    plan = plan or family.first.plan
    return f"gradient of {leaves[0]} wrong under the {plan} plan{when}"


def _leaf(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def script(failure: Failure, title: str, header: Header) -> str:
    """The text of a model's script; imports transformers."""
    from .zoo import WRITTEN_INPUTS, Stack, config_class, model_class

    kind = model_types()[failure.model.model]
    odd = failure.run.name == ODD_HEADS
    stack = Stack(kind, odd_heads=odd)
    inputs = {"input_ids": "tokens[:, :-1]"}
    inputs = dict(WRITTEN_INPUTS.get(kind.name, inputs))
    if "decoder_input_ids" in stack.batch(0, 0)[0]:
        inputs["decoder_input_ids"] = "tokens[:, 1:]"
    return script_of(
        title=title,
        date=header.started[:10],
        versions=f"transformers {header.version}, torch {header.torch}",
        plan=failure.plan,
        replaced=failure.model.replaced,
        run=failure.run.name,
        parameter=failure.parameter,
        config=config_class(kind),
        model=model_class(kind),
        settings=stack.settings(),
        inputs=inputs,
        output=stack.output_name(),
        misloads=failure.run.misloaded,
    )


def confirm_all(
    survey: Survey,
    found: Sequence[Family],
    path: Path,
    console: Console,
    jobs: int = 1,
) -> Survey:
    """Run the script of every failure that was not run yet.

    Args:
        survey: with the scripts that ran already.
        found: the families of its failures.
        path: file of the records; scripts are kept beside it.
        console: prints each.
        jobs: scripts that run at a time.
    """
    folder = path.parent / "scripts"
    folder.mkdir(exist_ok=True)
    known = {record.key: record for record in survey.scripts}
    left = [
        (family, failure)
        for family in found
        for failure in family.failures
        if (family.id, *failure.model.key) not in known
    ]
    pool = ThreadPoolExecutor(jobs)  # of threads: each only waits for a process
    try:
        running = {}
        for family, failure in left:
            plan, name = failure.model.key
            file = folder / f"{family.id}-{plan}-{name}.py"
            text = script(failure, what(family, plan), survey.headers[-1])
            file.write_text(text, encoding="utf-8")
            running[pool.submit(run_script, file)] = (family.id, plan, name)
        for done in as_completed(running):
            (finding, plan, name), (shows, printed) = running[done], done.result()
            record = ScriptRecord(
                finding=finding, plan=plan, model=name, shows=shows, text=printed
            )
            append(path, record)
            known[record.key] = record
            said = "shows it" if shows else f"does not show it: {printed}"
            line = plain(f"script of {finding}, {plan} {name}: {said}")
            console.print(line[:160], markup=False, highlight=False)
    finally:
        # after Ctrl-C no further script is started
        pool.shutdown(cancel_futures=True)
    return msgspec.structs.replace(survey, scripts=tuple(known.values()))


def run_script(file: Path) -> tuple[bool, str]:
    """Run a script alone; whether it shows its finding, and what it printed."""
    # as a maintainer would run it: nothing of this project on the path
    away = ("PYTHONPATH", "PYTHONWARNINGS")
    environment = {k: v for k, v in os.environ.items() if k not in away}
    environment |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(
            [sys.executable, str(file)],
            capture_output=True,
            text=True,
            timeout=SCRIPT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return False, f"not done within {SCRIPT_S:g} s"
    # a script that raises also exits with 1, but prints no finding; one that shows it
    # prints a line in fp32 and one in fp64, or one of the weight and one of the output
    shows = done.returncode == 1 and done.stdout.count("relative error") == 2
    if done.returncode and not shows:
        return False, done.stderr[-300:].strip()
    lines = done.stdout.splitlines()  # packages print, too
    return shows, "\n".join(line for line in lines if "relative error" in line)


_ISSUE = """\
# {what}

Package: transformers {version} (torch {torch}), {date}. Found by
`{command}`,
confirmed by [{script}]({script}), which needs torch and transformers alone.

## Text for an issue

{text}

## What the script prints

{printed}

## Models

{models}

## Where it departs first

{where}

Public thread: {thread}.
"""
_WHY = {
    ("colwise", False): (
        "The forward of the experts cuts the product with `gate_up_proj` in two, gate "
        "and up; a contiguous shard of its rows has rows of one of them alone. Other "
        "models have the rule `packed_colwise` for it. "
    ),
    ("replicated_with_grad_allreduce", True): (
        "The hook is a post-accumulate-grad hook and all-reduces `param.grad`, which "
        "already holds the sum over the ranks of earlier micro-batches: with n ranks "
        "these are multiplied by n once more in each further backward. What is to be "
        "reduced is what a backward adds, for example by a hook on the gradient "
        "(`param.register_hook`) in place of one on the accumulated sum. "
    ),
}
"""Style of a plan, and whether micro-batches are accumulated -> what goes wrong."""
_LOADER = (
    "Under `DistributedConfig({sizes})` `from_pretrained` gives `{parameter}` of "
    "`{model}` other values than on one process, and raises or warns of nothing: the "
    "relative error is {error:.2g}; {count} parameters are wrong. Its checkpoints hold "
    "it in another form, which a `WeightConverter` of `conversion_mapping.py` brings "
    "into the model's. Where the parameter is a DTensor, each rank takes its slice of "
    "the tensor of the checkpoint, by the placement of the converted one ({where}), "
    "and converts the slice. `Chunk` and `Concatenate` along the sharded dimension "
    "then give a rank rows of another part, or in another order; all shapes fit. FSDP2 "
    "shards parameters that the tensor-parallel plan leaves whole, too. The "
    'docstring of `Split` warns of this ("not TP-safe, a sharded fused tensor needs '
    "each target's local slice\"); those two have no such warning, and the model "
    "ships the plan. What helps is to convert before the shard is taken. Seen with "
    "transformers {version}; the attached script exits 1 while it shows.{more}"
)
"""Text for an issue, where weights are loaded wrong."""


def write_finding(family: Family, survey: Survey, folder: Path) -> FindingRecord | None:
    """Write script, text and record of a finding; None if no script shows it.

    Args:
        family: of failures.
        survey: with the scripts that ran.
        folder: for the three files.
    """
    ran = (r for r in survey.scripts if r.finding == family.id and r.shows)
    said = {(r.plan, r.model): r for r in ran}
    shown = [f for f in family.failures if f.model.key in said]
    if not shown:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    first, header = shown[0], survey.headers[-1]
    name = f"{family.id}.py"
    record = FindingRecord(
        id=family.id,
        package=header.package,
        version=header.version,
        what=what(family),
        parameter=first.parameter,
        relative_error=f"{first.error:.2e}",
        reference="the same model on one process in fp64",
        verdict="bug",
        judge=f"{first.run.law}: {first.run.message}".replace("net.", ""),
        where=family.rule.where,
        thread=THREADS.get(family.id, NO_THREAD),
        script=f"docs/wild/{name}",
        date=header.started[:10],
        command=f"python docs/wild/{name}",
        found_by=f"gradparity survey transformers --plan {first.plan} --model "
        f"{first.model.model}",
        versions={"torch": header.torch, "python": header.python},
        machine=header.machine,
        output=tuple(said[first.model.key].text.splitlines()),
        models=tuple(family.names),
        confirmed=tuple(map(family.name_of, shown)),
    )
    write_whole(folder / name, script(first, record.what, header))
    rows = [
        f"| `{f.model.model}` | {f.plan} | `{f.parameter}` | {f.run.name} | "
        f"{f.error:.2g} | {'yes' if f.model.key in said else 'not confirmed'} |"
        for f in family.failures
    ]
    table = [
        "| model type | plan | parameter | run | relative error | script |",
        "|---" * 6 + "|",
    ]
    text = _ISSUE.format(
        what=record.what,
        version=header.version,
        torch=header.torch,
        date=record.date,
        command=record.found_by,
        script=name,
        text=_issue_text(family, first, record),
        printed="\n".join(
            f"    {line}" for line in said[first.model.key].text.splitlines()
        ),
        models="\n".join([*table, *rows]),
        where=first.run.where.replace("net.", "") or "not looked for",
        thread=record.thread,
    )
    write_whole(folder / f"{family.id}.md", text)
    write_whole(
        folder / f"{family.id}.json",
        msgspec.json.format(msgspec.json.encode(record)).decode() + "\n",
    )
    return record


def _issue_text(family: Family, first: Failure, record: FindingRecord) -> str:
    others = [n for n in record.confirmed if n != family.name_of(first)]
    more = f" The same shows in {', '.join(others)}." if others else ""
    if family.misloads:
        return _LOADER.format(
            sizes=_sizes(first.plan),
            parameter=first.parameter,
            model=first.model.model,
            error=first.error,
            count=len(first.run.departed),
            where=family.rule.where,
            version=record.version,
            more=more,
        )
    whole = ", ".join(f"`{name}`" for name in first.model.replaced)
    kept = f" {whole} are kept whole, as the plan raises otherwise." if whole else ""
    rule = f"rule `{family.rule.style}`" if family.rule.style else "no rule"
    count = MICRO_BATCHES[first.run.name]
    how = (
        f"in {count} backward passes before a step, while one backward is right"
        if family.accumulates
        else "in a single backward"
    )
    count_all = len(first.run.departed)
    rest = f"{count_all} gradients depart; the others agree to rounding. "
    if first.run.forward:
        rest = f"The output of `{first.run.forward}` departs before. "
    why = _WHY.get((family.rule.style, family.accumulates), "")
    return (
        f"Under `DistributedConfig({_sizes(first.plan)})` the gradient of "
        f"`{first.parameter}` of `{first.model.model}` is not that of the model on one "
        f"process: the relative error is {first.error:.2g} {how}. {rest}The plan has "
        f"{rule} for it; the code is {family.rule.where}. {why}Seen with transformers "
        f"{record.version}; the attached script exits 1 while it shows.{kept}{more}"
    )


def _sizes(plan: str) -> str:
    return ", ".join(f"{name}={size}" for name, size in PLANS[plan].sizes.items())
