"""Sentences beside the result of a comparison: hints, and what was not compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from ..status import counted
from .differences import COARSE, Row, rows_of_sides
from .equal import listed
from .kept import BUFFER, IDLE, RESULT
from .merge import Run, Side

__all__ = [
    "batch_norms",
    "factor_of_a_count",
    "late",
    "left_out",
    "losses",
    "narrower",
    "padded_batches",
    "precisions",
    "shown_later",
    "unequal_shares",
    "wider",
]

COUNT = 1e-3
"""Largest relative difference of a factor from a number of ranks or forwards."""


def precisions(one: Side, other: Side) -> Iterator[str]:
    """Yield a note on the dtypes of the models' outputs, if the sides share none."""
    dtypes = [sorted(side.run.outputs) for side in (one, other)]
    if all(dtypes) and one.run.outputs.isdisjoint(other.run.outputs):
        mine, its = map(" and ".join, dtypes)
        yield (
            f"precision: the model returns {mine} in {one.name} and {its} in "
            f"{other.name}. Record both in one precision"
        )


def padded_batches(one: Side, other: Side, at: int) -> Iterator[str]:
    """Yield a lead if ranks of one side alone share rows at a step."""
    counts = [side.run.repeated.get(at, 0) for side in (one, other)]
    if bool(counts[0]) != bool(counts[1]):
        side, count = max(zip((one, other), counts, strict=True), key=lambda x: x[1])
        rows = counted(len(side.run.rows.get(at, ())), "row")
        yield (
            f"rows: several ranks of {side.name} got the same {count} of {rows} at "
            f"step {at}: a sampler may pad the batch. Drop the rest (drop_last=True)"
        )


def narrower(one: Side, other: Side, names: Mapping[str, str], step: int) -> str:
    """Return a sentence if only the second side computes in 16 bits; else "".

    The first side counts as computing in 32 bits if no module is known to return the
    same dtype, and if its noise is that of 32 bits. The noise is needed because hooks
    do not see the modules of a compiled model.
    """
    dtypes, mine = other.run.in_16_bits, {*one.run.in_16_bits.values()}
    narrow = [name for name in names if dtypes.get(names[name], "") not in ("", *mine)]
    own = {name: name for name in names}
    alone = replace(one, noisy=())
    rows = rows_of_sides(one, alone, own, [step], ["gradient"])
    if not narrow or median([row.noise for row in rows] or [0.0]) > COARSE:
        return ""
    dtype = dtypes[names[narrow[0]]]
    return (
        f"precision: modules with {len(narrow)} of {len(names)} tensors return {dtype} "
        f"in {other.name}, and none does in {one.name} ({narrow[0]} first). Up to that "
        "rounding they are the same. Record both in one precision"
    )


def wider(one: Side, other: Side, names: Mapping[str, str]) -> Iterator[str]:
    """Yield a note if only modules of the first side are known to return 16 bits."""
    dtypes = {one.run.in_16_bits[n] for n in names if n in one.run.in_16_bits}
    if dtypes and not other.run.in_16_bits:
        yield (
            f"precision: modules return {' and '.join(sorted(dtypes))} in {one.name}, "
            f"and none is known to in {other.name}"
        )


def unequal_shares(one: Side, other: Side, at: int) -> Iterator[str]:
    """Yield a lead if forwards of one side have unequal numbers of rows, or of labels.

    Yields nothing if all numbers are the same on both sides.
    """
    shares = [side.run.shares.get(at, ()) for side in (one, other)]
    if shares[0] == shares[1]:
        return
    for side, calls in zip((one, other), shares, strict=True):
        # integer inputs with ignored elements are labels
        columns = [*zip(*calls, strict=False)]
        labels = [columns[n] for n in range(1, len(columns), 2) if any(columns[n + 1])]
        for what, counts in (("rows", columns[:1]), ("labels that count", labels)):
            unequal = [each for each in counts if len({*each}) > 1]
            for each in unequal[:1]:
                yield (
                    f"{what}: at step {at} a forward of {side.name} has {min(each)} to "
                    f"{max(each)}. A mean of their means weighs them unequally: divide "
                    "each sum by the count of the whole batch"
                )
                return


def factor_of_a_count(
    one: Side, other: Side, names: Mapping[str, str], at: int
) -> Iterator[str]:
    """Yield a lead if gradients are off by a number of ranks or forwards.

    The factor of all gradients is this number, or its inverse.

    Args:
        one: the reference.
        other: the side to check.
        names: name on the first side -> name on the second one.
        at: step at which all gradients have one factor.
    """
    norms = [
        (mine.norm, its.norm)
        for name, partner in names.items()
        if (mine := one.run.tensors.get((at, "gradient", name))) is not None
        if (its := other.run.tensors.get((at, "gradient", partner))) is not None
    ]
    first, second = max(norms)
    factor = second / first
    times = max(factor, 1 / factor) if second else math.inf
    for side in (other, one):
        ranks, calls = side.run.ranks, len(side.run.shares.get(at, ()))
        counts = {"ranks": ranks, "forwards in a step": calls // ranks}
        matches = [
            f"{count} {what}"
            for what, count in counts.items()
            if count > 1 and abs(times / count - 1) <= COUNT
        ]
        if matches:
            share, why = "", "does one side add up what the other one averages"
            if factor < 1:
                share, why = "1 / ", "does one side average twice, or a part"
            yield (
                f"the factor is {share}{round(times)}, and {side.name} has "
                f"{' and '.join(matches)}: {why}?"
            )
            return


def batch_norms(one: Side, other: Side, wrong: Sequence[Row]) -> Iterator[str]:
    """Yield a lead if batch norms of the two sides may normalise different rows.

    Args:
        one: the reference.
        other: the side to check.
        wrong: tensors that differ at the first step with a difference.
    """
    for side in (one, other):
        keys = (key for key in side.run.replicas if key[1] == BUFFER)
        tensors = side.run.tensors
        names = (key[2] for key in keys if tensors[key].sketch is not None)
        if name := next(names, ""):
            yield (
                f"batch norms: ranks of {side.name} have different {name}: each "
                "normalises its own rows. One process must do the same, in one forward "
                "for the rows of each rank, or ranks use SyncBatchNorm"
            )
            return
    if name := next((row.name for row in wrong if row.kind == BUFFER), ""):
        yield (
            f"batch norms: {name} differs, too. They normalise the rows of one "
            "forward: give both sides the same rows in each forward"
        )


def losses(one: Run, other: Run, steps: Sequence[int]) -> Iterator[str]:
    """Yield a line with the losses of both sides; they decide nothing.

    A mean over ranks is not the loss of the batch if ranks have unequal tokens.
    """
    seen = [step for step in steps if step in one.losses and step in other.losses]
    if seen:
        pairs = (f"{one.losses[s]:.6g} and {other.losses[s]:.6g}" for s in seen)
        yield f"loss, a mean over ranks, at steps {listed(seen)}: {', '.join(pairs)}"


def shown_later(one: Side, other: Side, steps: Sequence[int]) -> Iterator[str]:
    """Yield sentences on faults that only one more recorded step can show."""
    for side in (one, other):
        if len(steps) == 1 and _summed_later(side.run, steps):
            yield (
                f"the optimizer of {side.name} sums gradients in its step, and the "
                "next step shows whether its factor is right"
            )
        starts = side.run.starts
        new = [n for n in side.run.left if n in starts and starts[n][0] == steps[-1]]
        for name in new[:1]:
            yield (
                f"rank {listed(side.run.left[name])} of {side.name} holds {name} and "
                "does not step it, and the next step shows whether it gets the new "
                "values"
            )


def late(one: Side, other: Side) -> Iterator[str]:
    """Yield a line on an optimizer that first stepped after the recorded steps."""
    for side in (one, other):
        if side.late:
            yield (
                f"not recorded: {side.late} in {side.name}, as it first stepped after "
                "all recorded steps. To record that training, put its loop into "
                "`with gradparity.record(model, optimizer):`"
            )
            return


def left_out(
    one: Run,
    other: Run,
    names: Mapping[str, str],
    rows: Sequence[Row],
    steps: Sequence[int],
) -> Iterator[str]:
    """Yield sentences on tensors that were not compared, with reasons.

    Sentences on replicas with different gradients, on leaders (``leaders.py``), and on
    errors of the recorder follow.

    Args:
        one: the reference.
        other: the side to check.
        names: name on the first side -> name on the second one.
        rows: all compared tensors.
        steps: steps of both sides.
    """
    every = one.starts
    if unproved := [name for name in every if name not in names]:
        yield (
            f"not compared: {len(unproved)} of {len(every)} tensors, because no tensor "
            f"of the other side has their initial values ({unproved[0]} first)"
        )
    compared = {(row.step, row.kind, row.name) for row in rows}
    absent: dict[str, list[tuple[int, str]]] = {}
    for step in steps:
        for name in names:
            gradient = one.tensors.get((step, "gradient", name))
            if gradient is None or (step, "gradient", name) in compared:
                continue
            if (step, name) in one.skipped:
                why = (
                    "because a scaler skips the step on both sides, for an inf: record "
                    "later --steps"
                )
            elif not gradient.is_finite:
                why = "because they are not finite on both sides"
            elif _is_of_unknown_ranks(other, step, names[name]):
                why = (
                    "because ranks of the other side have other gradients, and which "
                    "ones count is not known"
                )
            else:
                why = "because elements were not recorded on both sides"
            absent.setdefault(why, []).append((step, name))
    for why, keys in absent.items():
        step, name = keys[0]
        yield (
            f"not compared: {counted(len(keys), 'gradient')}, {why} ({name}, step "
            f"{step}, first)"
        )
    written = [
        (step, name)
        for step, kind, name in compared
        if kind == "gradient"
        and (step, "update", name) not in compared
        and one.tensors[step, kind, name].is_summed
        and other.tensors[step, kind, names[name]].is_summed
    ]
    if written:
        step, name = min(written)
        yield (
            f"not compared: {counted(len(written), 'update')}, because the optimizer "
            "writes into the gradient, or the gradient is laid out otherwise than the "
            f"weight ({name}, step {step}, first)"
        )
    idle = [
        (step, name)
        for step, kind, name in compared
        if kind == "gradient" and (step, IDLE, name) not in compared
        if (whole := one.tensors.get((step, IDLE, name))) is not None and whole.digest
    ]
    if idle:
        step, name = min(idle)
        yield (
            f"not compared: {counted(len(idle), 'update')} of elements without a "
            "gradient, because in other runs other elements have none "
            f"({name}, step {step}, first)"
        )
    blind = [row for row in rows if row.bound >= 1 and not row.differs]
    if blind:
        yield (
            f"not compared: {len(blind)} of {len(rows)}, because noise is as large as "
            f"the tensor ({blind[0].what}, step {blind[0].step}, first)"
        )
    gradients = [key for key in other.replicas if key[1] == "gradient"]
    if gradients:
        step, _, name = min(gradients)
        ranks = listed(other.replicas[step, "gradient", name])
        yield (
            f"replicas differ: the gradient of {name} at step {step} has other bits on "
            f"rank {ranks} than on the first rank that holds it"
        )
    if partial := _summed_later(other, steps):
        yield (
            f"not summed when the optimizer is called: "
            f"{counted(len(partial), 'gradient')}, {partial[0]} first. Sums or means "
            "over ranks were compared, and not the updates"
        )
    for leading, of_ranks in itertools.islice(other.leaders.items(), 1):
        yield (
            f"compared: the gradient of rank {listed(of_ranks)} alone, of "
            f"{counted(len(other.leaders), 'tensor')} ({leading} first). Other ranks "
            "have other gradients, and take that rank's weights over"
        )
    if other.early:
        yield (
            f"not compared: {counted(len(other.early), 'weight')} after the last step, "
            f"{other.early[0]} first. They differ between ranks there, and the job "
            "made them equal after earlier steps"
        )
    if other.unnamed:
        unnamed = counted(other.unnamed, "parameter")
        yield f"not compared: {unnamed} that no module names"
    for side in (one, other):
        if side.notes:
            yield f"the recorder noted: {side.notes[0]}"


def _is_of_unknown_ranks(side: Run, step: int, name: str) -> bool:
    """Return True if a parameter was stepped, but whose gradient counts is unknown.

    Such a gradient was removed; see ``leaders.py``.
    """
    stepped = (step, RESULT, name) in side.tensors
    return stepped and (step, "gradient", name) not in side.tensors


def _summed_later(run: Run, steps: Sequence[int]) -> list[str]:
    """Return parameters whose gradients no rank had summed before the first step.

    Either the optimizer itself sums such gradients, or they are never summed.
    """
    return [
        name
        for (step, kind, name), whole in run.tensors.items()
        if kind == "gradient" and step == min(steps) and not whole.is_summed
    ]
