"""Tensors that only one side trains, steps or changes, and copies of tied weights.

A pipeline may keep a copy of a tied weight on each end. A run without a
pipeline has only one of the two tensors. The two copies must stay equal.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from ..status import counted
from .kept import RESULT
from .merge import Run, Side

__all__ = ["changed_between", "copies", "lacking"]


def lacking(
    one: Side, other: Side, names: Mapping[str, str], steps: Sequence[int]
) -> Iterator[str]:
    """Yield sentences on what only one side does.

    Examples: only one side trains a tensor, steps it, skips its step or has its
    gradient.
    """
    yield from _untrained(one, other, names)
    yield from _untrained(other, one, {its: mine for mine, its in names.items()})
    for step in steps:
        yield from _stale(one, other, step)
        for mine, its in names.items():
            yield from _unlike_steps(((one, mine), (other, its)), step)


def _stale(one: Side, other: Side, step: int) -> Iterator[str]:
    """Yield a sentence if one side alone computes with other weights than it steps.

    A job may step copies of its parameters. It has to write the results back.
    """
    for side, right in ((one, other), (other, one)):
        has, theirs = side.run.has_copied(step), right.run.has_copied(step)
        stale = [name for name, is_written in has.items() if not is_written]
        # rounding at random gives all parameters other values
        is_alone = all(theirs.values()) and (theirs or any(has.values()))
        if stale and is_alone:
            more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
            yield (
                f"step {step}: the optimizer of {side.name} steps copies of the "
                f"weights, and the model does not have the values of {stale[0]}{more}: "
                "does each rank write them back after each step?"
            )


def _untrained(has: Side, lacks: Side, partners: Mapping[str, str]) -> Iterator[str]:
    """Yield one sentence if ``has`` trains tensors that ``lacks`` does not.

    Args:
        has: side that trains the tensors.
        lacks: side that does not train them.
        partners: name on the side ``has`` -> name on the other side.
    """
    stepped, idle = has.run.starts, lacks.run.unstepped
    alone = [name for name in stepped if name in idle]
    # a tensor without a partner has no match if all tensors of ``lacks`` have partners
    if lacks.run.starts.keys() == {*partners.values()} and not lacks.run.unnamed:
        alone += [
            name
            for name in stepped
            if name not in partners and name not in idle
            if not _copied(has.run, name, partners)
        ]
    if alone:
        more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
        yield _untied(has, lacks, alone[0], partners) or (
            f"{lacks.name} does not train {alone[0]}{more}: no recorded optimizer "
            f"steps it, but an optimizer of {has.name} does"
        )


_Pair = tuple[tuple[Side, str], tuple[Side, str]]
"""Both sides, each with its name of one tensor."""


def _unlike_steps(both: _Pair, step: int) -> Iterator[str]:
    """Yield sentences if one side alone steps a tensor, skips it or has a gradient."""
    named = both[0][1]
    steps = [(step, "weight", name) in side.run.tensors for side, name in both]
    if steps[0] != steps[1]:
        (does, _), (idle, _) = _first(steps, both)
        yield f"step {step}: {idle.name} does not step {named}, and {does.name} does"
    skips = [(step, name) in side.run.skipped for side, name in both]
    if skips[0] != skips[1]:
        (skipping, _), (does, _) = _first(skips, both)
        yield (
            f"step {step}: {skipping.name} has found an inf and skips {named}, and "
            f"{does.name} steps it"
        )
    gradients = [(step, name) not in side.run.without_gradient for side, name in both]
    if gradients[0] != gradients[1]:
        (has, its), (lacks, _) = _first(gradients, both)
        if not _does_nothing(has.run, step, its):
            is_zero = _has_zero_gradient(has.run, step, its)
            end = f". That of {has.name} is zero, and its optimizer moves the weight"
            yield (
                f"step {step}: {lacks.name} has no gradient of {named}"
                f"{end if is_zero else ''}"
            )


def _first(does: Sequence[bool], both: _Pair) -> _Pair:
    """Return the pair with the side whose ``does`` is True in first place."""
    return both if does[0] else both[::-1]


def _untied(has: Side, lacks: Side, name: str, paired: Container[str]) -> str:
    """Return a sentence if ``lacks`` may tie the tensor to another one; "" if not."""
    twins = _equal_at_start(has.run, name, paired)
    if name in lacks.run.unstepped or len(twins) != 1:
        return ""
    weights, theirs = (_weights(has.run, each) for each in (name, twins[0]))
    both = sorted(weights.keys() & theirs.keys())
    step = next((s for s in both if weights[s] != theirs[s]), both[0])
    return (
        f"step {step}: {name} and {twins[0]} of {has.name} began equal and do not stay "
        f"so. {lacks.name} has {twins[0]} alone and may tie the two: then {has.name} "
        "must add up their gradients"
    )


def _copied(run: Run, name: str, paired: Container[str]) -> str:
    """Return a paired tensor that equals ``name`` in all steps; "" if there is none.

    A tensor that never moves gives "": its gradients need not be added up.
    """
    twins = _equal_at_start(run, name, paired)
    weights = _weights(run, name) if twins else {}
    if len({*weights.values()}) < 2:
        return ""
    return next((each for each in twins if _weights(run, each) == weights), "")


def _equal_at_start(run: Run, name: str, paired: Container[str]) -> list[str]:
    """Return the tensors in ``paired`` that begin with the bits of ``name``.

    Vectors never count, because all weights of layer norms begin alike.
    """
    step, start = run.starts[name]
    return [
        other
        for other, (at, its) in run.starts.items()
        if len(start.shape) > 1 and other != name and other in paired
        if (at, its.shape, its.digest) == (step, start.shape, start.digest)
    ]


def _weights(run: Run, name: str) -> dict[int, int | None]:
    """Return the digests of a weight by step."""
    return {
        step: whole.digest
        for (step, kind, its), whole in run.tensors.items()
        if (kind, its) == ("weight", name)
    }


def copies(one: Side, other: Side, names: Mapping[str, str]) -> Iterator[str]:
    """Yield sentences on tensors that are copies of another one on one side only."""
    for has, lacks, paired in (
        (one, other, {*names}),
        (other, one, {*names.values()}),
    ):
        for name in has.run.starts:
            if name in paired or name in lacks.run.unstepped:
                continue
            if partner := _copied(has.run, name, paired):
                yield (
                    f"tied: {name} of {has.name} keeps the bits of {partner}, and "
                    f"{lacks.name} has the latter alone"
                )


def changed_between(
    one: Side, other: Side, names: Mapping[str, str], step: int
) -> Iterator[str]:
    """Yield a sentence if only one side changes weights between two optimizer steps."""

    def changed(run: Run, name: str) -> bool:
        result = run.tensors.get((step, RESULT, name))
        after = run.tensors.get((step + 1, "weight", name))
        return (
            result is not None and after is not None and result.digest != after.digest
        )

    pairs = [(changed(one.run, n), changed(other.run, names[n])) for n in names]
    for side, its in ((one, 0), (other, 1)):
        alone = [
            n for n, does in zip(names, pairs, strict=True) if does[its] > does[not its]
        ]
        if alone:
            idle = other if side is one else one
            yield (
                f"between steps {step} and {step + 1}, something other than the "
                f"optimizer changes {counted(len(alone), 'tensor')} of {side.name} "
                f"({alone[0]} first), and not in {idle.name}"
            )


def _does_nothing(run: Run, step: int, name: str) -> bool:
    """Return True if a gradient is zero and the step does not move the weight."""
    before, after = (run.tensors.get((s, "weight", name)) for s in (step, step + 1))
    if before is None or after is None or before.digest != after.digest:
        return False
    return _has_zero_gradient(run, step, name)


def _has_zero_gradient(run: Run, step: int, name: str) -> bool:
    gradient = run.tensors.get((step, "gradient", name))
    return gradient is not None and not (gradient.largest or gradient.norm)
