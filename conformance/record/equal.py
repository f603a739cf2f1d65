"""Starts, rows, settings and replicas of two recordings: they must be equal exactly.

A difference there is the answer, and no number needs to be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .merge import Run, Side

__all__ = [
    "equal_inputs",
    "lacking",
    "listed",
    "other_again",
    "other_inputs",
    "proved_names",
]

SAME_START = (
    "Begin both from the same weights: the same seed, a checkpoint, or record --start"
)
FREE = frozenset({"foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Settings that choose an implementation, and not what is computed."""


def proved_names(one: Run, other: Run) -> tuple[dict[str, str], str]:
    """Match names of the first side to names of the other by their initial weights.

    Returns:
        Name of the first side -> name of the other, and the sentence about the start;
        no names if the sides began with other weights.
    """
    at = min([*one.steps, *other.steps], default=0)
    starts = {n: one.tensors[at, "weight", n] for n in one.names("weight", at)}
    theirs = {n: other.tensors[at, "weight", n] for n in other.names("weight", at)}
    proved, rounded, renamed, differ = dict[str, str](), 0, 0, []
    by_digest: dict[tuple[Any, ...], list[str]] = {}
    for name, whole in theirs.items():
        by_digest.setdefault((whole.shape, whole.digest), []).append(name)
    taken = set[str]()
    for name, mine in starts.items():
        its = theirs.get(name)
        if its is not None and its.shape == mine.shape and its.is_whole:
            if its.digest == mine.digest:
                proved[name] = name
            elif its.rounded == mine.rounded and (its.is_rounded or mine.is_rounded):
                proved[name], rounded = name, rounded + 1
            else:
                differ.append(name)
            taken.add(name)
    for name, mine in starts.items():
        if name in proved or name in differ:
            continue
        same = [
            n for n in by_digest.get((mine.shape, mine.digest), ()) if n not in taken
        ]
        ends = [n for n in same if n.endswith(name) or name.endswith(n)] or same
        if ends:  # equal tensors, such as all ones: the order decides
            proved[name] = ends[0]
            taken.add(ends[0])
            renamed += 1
    words = f"start: {len(proved)} of {len(starts)} tensors have equal bits"
    if rounded:
        words += f", {rounded} of them after rounding to bf16"
    if renamed:
        words += f", {renamed} under another name"
    if differ:
        words = (
            f"another start: {len(differ)} of {len(starts)} tensors began with other "
            f"values, {differ[0]} first. {SAME_START}"
        )
        return {}, words
    return proved, words


def other_inputs(
    one: Run, other: Run, names: Mapping[str, str], step: int
) -> Iterator[str]:
    """Yield different inputs of a step: rows, and settings of parameters."""
    if not _same_rows(one, other, step):
        shared = len(one.rows[step] & other.rows[step])
        yield (
            f"other rows: at step {step} {shared} of {len(one.rows[step])} rows of "
            "the model's inputs are on both sides. Give both the same data in the "
            "same order, for example without shuffling"
        )
    for name, key, mine, its in _settings(one, other, names, step):
        if mine != its:
            yield f"other settings: {key} of {name} is {mine} and {its} at step {step}"


def other_again(side: Side, steps: Sequence[int]) -> Iterator[str]:
    """Yield differences of a noise run from the run that it repeats.

    Weights are compared only at step 0. Later weights may differ by the noise, and
    weights of nudged runs differ from the start.
    """
    advice = (
        "so its noise cannot be used. Seed the job. If it resumes from files that it "
        "wrote, remove them before each run"
    )
    for number, run in enumerate(side.noisy):
        name = f"nudged-{number} of {side.name}" if number else f"again of {side.name}"
        if absent := [step for step in steps if step not in run.steps]:
            yield f"{name} has no step {absent[0]}, which plain has, {advice}"
        for weight in side.run.names("weight", 0) if number == 0 else ():
            key = (0, "weight", weight)
            its = run.tensors.get(key)
            if its is not None and its.digest != side.run.tensors[key].digest:
                yield f"{name} began with other values of {weight} than plain, {advice}"
        for step in steps:
            if not _same_rows(side.run, run, step):
                yield f"{name} had other rows at step {step} than plain, {advice}"


def equal_inputs(
    one: Run, other: Run, names: Mapping[str, str], steps: Sequence[int]
) -> Iterator[str]:
    """Yield at how many steps rows and settings are equal."""
    seen = [step for step in steps if step in one.rows and step in other.rows]
    same = [_same_rows(one, other, step) for step in seen]
    cut = [step for step in seen if one.rows[step] != other.rows[step]]
    pieces = f"; at {len(cut)} only their tokens, cut in other pieces" if cut else ""
    rows = f"rows: equal at {sum(same)} of {len(steps)} steps{pieces}"
    if all(same):
        yield (
            rows if seen else "rows: not recorded, the model was not called as a whole"
        )
    pairs = [[*_settings(one, other, names, step)] for step in steps]
    same = [all(mine == its for *_, mine, its in each) for each in pairs if each]
    settings = f"settings: equal at {sum(same)} of {len(steps)} steps"
    if all(same):
        yield settings if same else "settings: not recorded"


def _same_rows(one: Run, other: Run, step: int) -> bool:
    """Return False if a step had other rows, which are no pieces of the same."""
    if step not in one.rows or step not in other.rows:
        return True
    in_pieces = step in one.bags and one.bags[step] == other.bags.get(step)
    return one.rows[step] == other.rows[step] or in_pieces


def _settings(
    one: Run, other: Run, names: Mapping[str, str], step: int
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (parameter, key, value, that of the other side), where both have one."""
    for mine, its in names.items():
        values = one.settings.get((step, mine), {})
        theirs = other.settings.get((step, its), {})
        for key in values:
            if key in theirs and key not in FREE:
                yield mine, key, values[key], theirs[key]


def lacking(
    one: Side, other: Side, names: Mapping[str, str], steps: Sequence[int]
) -> Iterator[str]:
    """Yield replicas that differ, and tensors that one side lacks."""
    for side in (one, other):
        first_by_name = dict[str, int]()  # step at which its gradient differs
        for step, kind, name in sorted(side.run.replicas):
            if kind == "gradient":
                first_by_name.setdefault(name, step)
        for (step, kind, name), ranks in side.run.replicas.items():
            if kind == "weight":
                end = ""
                if (first := first_by_name.get(name, step)) < step:
                    end = f". Its gradient differs from step {first} on"
                elif step == min(steps):
                    end = ". If these are different tensors, give them different names"
                yield (
                    f"step {step}: replicas of {name} differ: rank {listed(ranks)} of "
                    f"{side.name} has other bits than the first rank with it{end}"
                )
    partners = {its: mine for mine, its in names.items()}
    for has, lacks, paired, its_paired in (
        (one, other, names, partners),
        (other, one, partners, names),
    ):
        stepped = has.run.names("weight", min(steps))
        theirs = {*lacks.run.names("weight", min(steps))}
        # then no tensor there can be the partner of one without a partner
        all_paired = theirs == its_paired.keys() and not lacks.run.unnamed
        alone = [
            name
            for name in stepped
            if name in lacks.run.unstepped or (all_paired and name not in paired)
        ]
        if alone:
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            yield (
                f"{lacks.name} does not train {alone[0]}{more}: no recorded optimizer "
                f"steps it, but one of {has.name} does"
            )
    for step in steps:
        for mine, its in names.items():
            first = (step, mine) not in one.run.without_gradient
            second = (step, its) not in other.run.without_gradient
            if first != second:
                side = other if first else one
                yield f"step {step}: {side.name} has no gradient of {mine}"


def listed(numbers: Sequence[int]) -> str:
    """Numbers with commas between."""
    return ", ".join(map(str, numbers))
