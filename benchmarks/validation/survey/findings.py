"""Findings: failures of a survey with one cause, each with a report for upstream.

Failures are one family where the same rule of a plan (or, without a rule, the same
class of module) leaves a gradient wrong in the same kind of run: in any, or only where
micro-batches are accumulated. Plans share rules, so one cause may show under several
plans. The script of a family's smallest model is kept. Every failure of a family must
be confirmed by a script of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from gradparity.benchmarks.validation.survey.catalogue import PLANS, model_types
from gradparity.benchmarks.validation.survey.records import (
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
from gradparity.benchmarks.validation.survey.script import MICRO_BATCHES, script_of
from gradparity.benchmarks.validation.survey.templating import filled
from gradparity.benchmarks.validation.wild import ScriptError, run_script
from gradparity.conformance.files import write_whole
from gradparity.conformance.status import plain

__all__ = [
    "COMMAND",
    "Family",
    "FindingRecord",
    "confirm_all",
    "confirmed",
    "families",
    "write_finding",
]

COMMAND = "gradparity bench survey"
THREADS: Mapping[str, str] = {
    "transformers-tp-checkpoint-conversion": (
        "no thread found for `Chunk` and `Concatenate`; "
        "huggingface/transformers#48519 (open) is the same of `Transpose` and "
        "`PermuteForRope`"
    )
}
"""Id of a finding -> a public thread on it, which was found by hand."""
NO_THREAD = "no thread found"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One wrong parameter of one model."""

    model: ModelRecord
    run: Run
    """First run in which the parameter is wrong."""
    parameter: str
    error: float

    @property
    def plan(self) -> str:
        """Plan under which the parameter is wrong."""
        return self.model.plan


@dataclass(frozen=True, kw_only=True)
class Family:
    """Failures that have one cause."""

    accumulates: bool
    """True if only runs with several micro-batches show the failure."""
    rule: Rule
    failures: tuple[Failure, ...]
    """Worst parameter of each model under each plan, sorted by plan and size of
    model."""

    @property
    def id(self) -> str:
        """Id of the finding, which also names its files."""
        cause = self.rule.style or self.rule.module
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cause).lower()
        parts = ["transformers", self.first.plan, words]
        text = "-".join([*parts, *["accumulation"] * self.accumulates])
        return re.sub(r"[^a-z0-9]+", "-", text)

    @property
    def first(self) -> Failure:
        """Failure that the page shows."""
        return self.failures[0]

    @property
    def misloads(self) -> bool:
        """True if the loaded weights are wrong, not the gradients."""
        return self.first.run.misloaded

    @property
    def names(self) -> list[str]:
        """Model types; the plan follows in parentheses if it is not the first one."""
        return [self.name_of(failure) for failure in self.failures]

    def name_of(self, failure: Failure) -> str:
        """Return a failure's model, with the plan unless it is the first one."""
        name = failure.model.model
        return name if failure.plan == self.first.plan else f"{name} ({failure.plan})"


class FindingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one finding: a row in the table of all findings."""

    id: str
    package: str
    version: str
    what: str
    parameter: str
    relative_error: str
    reference: str
    verdict: str
    """``bug`` if the script shows the finding."""
    where: str
    result: str
    """Message of gradparity's failed check."""
    thread: str
    script: str
    date: str
    command: str
    found_by: str
    versions: dict[str, str]
    machine: str
    output: tuple[str, ...]
    """Lines that the script printed."""
    models: tuple[str, ...] = ()
    confirmed: tuple[str, ...] = ()
    """Models with a script that shows the finding."""


def families(survey: Survey) -> list[Family]:
    """Return the failures of a survey grouped by cause, the largest family first."""
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
    """Yield each wrong parameter with the first run in which it is wrong."""
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
    """Return the finding in one sentence; ``plan`` is the family's first by default."""
    if family.misloads:
        return f"weights loaded wrong under the {plan or family.first.plan} plan"
    leaves = sorted({_leaf(f.parameter) for f in family.failures})
    when = ", with several micro-batches" if family.accumulates else ""
    plan = plan or family.first.plan
    return f"gradient of {leaves[0]} wrong under the {plan} plan{when}"


def _leaf(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def script(failure: Failure, title: str, header: Header) -> str:
    """Return the text of a model's script; imports transformers."""
    from gradparity.benchmarks.validation.survey.zoo import (
        WRITTEN_INPUTS,
        Stack,
        config_class,
        model_class,
    )

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
    """Run the script of every failure whose script was not run yet.

    Args:
        survey: the survey, with the results of the scripts that ran already.
        found: families of its failures.
        path: file of the records; scripts are kept beside it.
        console: prints each result.
        jobs: number of scripts that run at the same time.
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
            running[pool.submit(confirmed, file)] = (family.id, plan, name)
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


def confirmed(file: Path) -> tuple[bool, str]:
    """Run a script alone; return True if it shows its finding, and its output."""
    try:
        told, lines = run_script(file)
    except ScriptError as problem:
        return False, str(problem)[-300:]
    return told["verdict"] == "bug", "\n".join(lines)


def write_finding(family: Family, survey: Survey, folder: Path) -> FindingRecord | None:
    """Write script, text and record of a finding; None if no script shows it.

    Args:
        family: family of failures.
        survey: the survey, with the results of the scripts.
        folder: folder of the three files.
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
        result=f"{first.run.law}: {first.run.message}".replace("net.", ""),
        where=family.rule.where,
        thread=THREADS.get(family.id, NO_THREAD),
        script=f"docs/wild/{name}",
        date=header.started[:10],
        command=f"python docs/wild/{name}",
        found_by=f"{COMMAND} --plan {first.plan} --model {first.model.model}",
        versions={"torch": header.torch, "python": header.python},
        machine=header.machine,
        output=tuple(said[first.model.key].text.splitlines()),
        models=tuple(family.names),
        confirmed=tuple(map(family.name_of, shown)),
    )
    write_whole(folder / name, script(first, record.what, header))
    text = filled(
        "finding.md.j2",
        record=record,
        first=first,
        failures=family.failures,
        shown=shown,
        others=[n for n in record.confirmed if n != family.name_of(first)],
        sizes=", ".join(f"{n}={size}" for n, size in PLANS[first.plan].sizes.items()),
        rule=family.rule,
        accumulates=family.accumulates,
        misloads=family.misloads,
        micro_batches=MICRO_BATCHES[first.run.name],
        departed=len(first.run.departed),
    )
    write_whole(folder / f"{family.id}.md", text)
    write_whole(
        folder / f"{family.id}.json",
        msgspec.json.format(msgspec.json.encode(record)).decode() + "\n",
    )
    return record
