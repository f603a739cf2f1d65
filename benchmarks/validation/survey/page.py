"""Result of a survey: a table for the terminal, and the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from gradparity.benchmarks.validation.survey.catalogue import PLANS, chosen_types
from gradparity.benchmarks.validation.survey.findings import COMMAND, FindingRecord
from gradparity.benchmarks.validation.survey.records import ModelRecord, Survey
from gradparity.benchmarks.validation.survey.script import MICRO_BATCHES
from gradparity.benchmarks.validation.survey.templating import filled
from gradparity.conformance.report.table import legible, row
from gradparity.conformance.status import plain

__all__ = ["print_survey", "render"]


def print_survey(models: Sequence[ModelRecord], console: Console) -> None:
    """Print the number of models by verdict, and each model that is not right."""
    table = Table(box=box.SIMPLE)
    for name in ("plan", "models", *_VERDICTS):
        table.add_column(name)
    for plan, counts in _counts(models):
        cells = (str(counts[v] or "") for v in _VERDICTS)
        table.add_row(plan, str(counts.total()), *cells)
    console.print(table)
    for model in models:
        if model.verdict != "right":
            why = _wrong(model) or _kept(model.replaced)
            text = plain(f"{model.verdict:<10} {model.plan} {model.model}: {why}")
            console.print(text, markup=False, highlight=False, soft_wrap=True)


SHOWN = 4
"""Number of models that the table names for each finding."""
_VERDICTS = (
    "right",
    "wrong",
    "undecided",
    "raises",
    "too slow",
    "crashed",
    "not built",
)


def _counts(models: Sequence[ModelRecord]) -> Iterator[tuple[str, Counter[str]]]:
    for plan in PLANS:
        found = Counter(m.verdict for m in models if m.plan == plan)
        if found:
            yield plan, found


def render(survey: Survey, findings: Sequence[FindingRecord] = ()) -> str:
    """Return the page as Markdown."""
    parts = [_head(survey), "\n".join(_findings(findings))]
    for plan, _ in _counts(survey.models):
        models = [m for m in survey.models if m.plan == plan]
        parts.append("\n".join(_models(plan, models)))
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _findings(findings: Sequence[FindingRecord]) -> Iterator[str]:
    if not findings:
        return
    yield "## Findings\n"
    yield row(("finding", "where", "model types", "confirmed by script", "thread"))
    yield "|---|---|---|---|---|"
    for each in findings:
        yield row(
            (
                f"[{_cell(each.what)}]({each.id}.md)",
                f"`{each.where}`",
                _some(each.models),
                f"{len(each.confirmed)} of {len(each.models)}",
                each.thread,
            )
        )


def _some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _head(survey: Survey) -> str:
    from gradparity.benchmarks.validation.survey.comparing import (
        STEPS,
    )  # here: it imports torch

    plans = " ".join(f"--plan {plan}" for plan, _ in _counts(survey.models))
    return filled(
        "page.md.j2",
        header=survey.headers[-1],
        command=f"{COMMAND} {plans}",
        models=len(survey.models),
        minutes=f"{sum(m.seconds for m in survey.models) / 60:.0f}",
        calls=len(survey.headers),
        steps=STEPS,
        summary="\n".join(_summary(survey)),
    )


def _summary(survey: Survey) -> Iterator[str]:
    names = ("plan", "model types", "tried", "checked", "with parts kept whole")
    yield row((*names, "packages checked", *_VERDICTS))
    yield "|---" * (len(names) + 1 + len(_VERDICTS)) + "|"
    for plan, counts in _counts(survey.models):
        types = chosen_types(plan)
        checked = [m for m in survey.models if m.plan == plan and m.checked]
        folders = {m.folder for m in checked}
        cells = [
            f"`{plan}`: {PLANS[plan].text}",
            str(len(types)),
            str(counts.total()),
            str(len(checked)),
            str(sum(bool(m.replaced) for m in checked)),
            f"{len(folders)} of {len({k.folder for k in types})}",
            *(str(counts[v] or "") for v in _VERDICTS),
        ]
        yield row(cells)


def _models(plan: str, models: Sequence[ModelRecord]) -> Iterator[str]:
    seen = {run.name for model in models for run in model.runs}
    # not in the order in which models were done: they are checked beside each other
    names = [name for name in MICRO_BATCHES if name in seen]
    yield f"## `{plan}`\n\n{PLANS[plan].promise}\n"
    yield row(("model type", "verdict", *names, "why", "seconds"))
    yield "|---" * (4 + len(names)) + "|"
    # models that are right come last: they are the most
    order = [*_VERDICTS[1:], _VERDICTS[0]]
    for model in sorted(models, key=lambda m: (order.index(m.verdict), m.model)):
        runs = {run.name: run.status for run in model.runs}
        cells = [f"`{model.model}`", model.verdict]
        cells += [runs.get(name, "") for name in names]
        why = [_cell(_wrong(model)), _kept(f"`{name}`" for name in model.replaced)]
        cells += ["; ".join(filter(None, why)), f"{model.seconds:.0f}"]
        yield row(cells)


def _kept(names: Iterable[str]) -> str:
    """Return which modules are kept whole; names at most four of them."""
    first = [*names]
    more = f" and {len(first) - 4} more" if len(first) > 4 else ""
    kept = "kept whole, since it raises under its own rules: "
    return f"{kept}{', '.join(first[:4])}{more}" if first else ""


def _wrong(model: ModelRecord) -> str:
    if model.verdict == "right":
        return ""
    bad = next((r for r in model.runs if r.status == "fail"), None)
    if bad is None or not bad.parameter:
        return model.reason
    worst = max(
        (r for r in model.runs if r.status == "fail" and r.parameter),
        key=lambda r: r.error,
    )
    error = f"{worst.parameter}: relative error {worst.error:.2g}"
    if worst.misloaded:
        return f"{worst.message}; {error}"
    return f"{error}, bound {worst.bound:.1g}, {worst.name}"


def _cell(text: str) -> str:
    short = text if len(text) <= 160 else text[:157] + "..."
    return legible(short)
