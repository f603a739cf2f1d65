"""Merge the recordings of all ranks of a run into whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .batches import (
    bags_of_inputs,
    by_row,
    every_row,
    inputs_of,
    repeated_rows,
    rows_of_blocks,
)
from .files import Recording, Stored, is_muon, read_run
from .kept import ORIGINAL
from .leaders import gradients_that_count
from .modules import GRADIENT, OUTPUT
from .parts import UNNAMED
from .whole import Key, Whole, merge, merge_outputs

__all__ = ["Run", "Side", "read_merged"]

AGAIN = " (optimizer "
"""Start of the suffix of a parameter's name if a second optimizer steps it, too."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a job, merged over its ranks."""

    ranks: int
    tensors: Mapping[Key, Whole]
    settings: Mapping[tuple[int, str], Mapping[str, Any]]
    """(step, parameter) -> settings of its param group, such as the rate."""
    rows_of_ranks: Mapping[int, Mapping[int, frozenset[int]]]
    """Step -> rank -> digests of the rows of the model's inputs."""
    unpadded: Mapping[int, Mapping[int, Sequence[int]]]
    """Two digests without padding of each row of tokens, by step and by the row's
    digest."""
    sums: Mapping[int, Mapping[int, Sequence[float | None]]]
    """Sums of each floating-point row, by step and by the row's digest."""
    bags: Mapping[int, Sequence[int]]
    """Step -> a hash of all elements of each input; equal rows of ranks count once."""
    has_tokens: bool
    """True if rows are rows of tokens."""
    shares: Mapping[int, Sequence[Sequence[int]]]
    """Step -> for each call of the model on any rank: see ``Recording.shares``."""
    losses: Mapping[int, float]
    """Step -> mean loss over ranks and micro-batches, if the model returns a loss."""
    drew: frozenset[int]
    drops: tuple[str, ...]
    outputs: frozenset[str]
    """Dtypes of the model's outputs, on all ranks."""
    in_16_bits: Mapping[str, str]
    """Parameter -> dtype of its own module's output, if that has 16 bits."""
    unstepped: tuple[str, ...]
    without_gradient: frozenset[tuple[int, str]]
    """(step, parameter) pairs without a gradient on any rank."""
    unnamed: int
    notes: tuple[str, ...]
    replicas: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)
    """Ranks whose replica has other bits than the first rank's, by tensor; only for
    tensors with such ranks."""
    other_settings: Mapping[tuple[int, str], Mapping[int, Mapping[str, Any]]] = field(
        default_factory=dict
    )
    """Settings by rank, for each (step, parameter) in which ranks differ."""
    left: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter -> ranks that hold it but do not step it, although other ranks do."""
    absent: Mapping[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    """(step, parameter) -> ranks that step the parameter, but not in this step,
    although other ranks do."""
    orthogonal: frozenset[str] = frozenset()
    """Parameters whose updates an optimizer makes orthogonal by products in bf16."""
    skipped: frozenset[tuple[int, str]] = frozenset()
    """(step, parameter) of steps that all ranks skip because of an inf or nan."""
    skipping: Mapping[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    """(step, parameter) -> ranks that skip the step for an inf, although others step
    the parameter."""
    counts: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """Step -> rank -> number of its rows."""
    repeated: Mapping[int, int] = field(default_factory=dict)
    """Step -> number of rows that several ranks got in different sets of rows."""
    leaders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter -> ranks whose weights other ranks take over after each step. Only
    their gradients and updates count."""
    early: tuple[str, ...] = ()
    """Tensors whose weights after the last step were read before the job made them
    equal on all ranks."""
    evaluations: Mapping[int, int] = field(default_factory=dict)
    """Step -> largest number of times that an optimizer's gradients were computed."""
    norms: Mapping[int, Mapping[int, Sequence[Sequence[float]]]] = field(
        default_factory=dict
    )
    """Step -> rank -> calls of clipping by norm: see ``Recording.norms``."""

    @property
    def steps(self) -> list[int]:
        """Recorded steps in order; includes steps in which no tensor had a gradient."""
        steps = {step for step, kind, _ in self.tensors if kind == "gradient"}
        return sorted(steps.union(step for step, _ in self.without_gradient))

    @cached_property
    def rows(self) -> dict[int, frozenset[int]]:
        """Step -> digests of the rows of the model's inputs, on all ranks."""
        return {
            step: frozenset[int]().union(*of_ranks.values())
            for step, of_ranks in self.rows_of_ranks.items()
        }

    @cached_property
    def starts(self) -> dict[str, tuple[int, Whole]]:
        """Parameter -> its first recorded step, and the weight before that step."""
        stepped, starts = {*self.steps}, dict[str, tuple[int, Whole]]()
        for (step, kind, name), whole in sorted(self.tensors.items(), key=_by_step):
            if kind == "weight" and step in stepped:
                starts.setdefault(name, (step, whole))
        return starts

    def has_copied(self, step: int) -> dict[str, bool]:
        """Return whether parameters have the values of the copies that are stepped.

        Returns:
            Name -> True if the parameter has the bits of its copy, also after rounding
            to bf16. Only parameters whose copies are in no module are returned.
        """
        pairs = {
            name: (original, self.tensors[step, "weight", name])
            for (at, kind, name), original in self.tensors.items()
            if (at, kind) == (step, ORIGINAL)
        }
        return {
            name: original.digest == copy.digest or original.has_rounded_bits_of(copy)
            for name, (original, copy) in pairs.items()
        }

    def names(self, kind: str, step: int) -> list[str]:
        """Return the names of a kind of tensors at a step, in the model's order."""
        return [n for s, k, n in self.tensors if (s, k) == (step, kind)]


def _by_step(item: tuple[Key, Whole]) -> int:
    return item[0][0]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison: a run, its noise runs and its exit code."""

    name: str
    run: Run
    noisy: Sequence[Run] = ()
    """Noise runs: the same job again, unchanged and nudged."""
    code: int = 0
    """Exit code of the recorded job."""
    late: str = ""
    """Optimizer that first stepped after all recorded steps; may be empty."""


def read_merged(*folders: Path, exact: bool = False) -> Run:
    """Read the recording of a run and merge its ranks.

    Args:
        folders: folder of the run; several if each host wrote its own.
        exact: true to keep the bits of the first replica of each gradient. Otherwise,
            if replicas differ, the gradients by which the job steps are merged; see
            ``leaders.py``.

    Raises:
        ValueError: if a rank is missing or a file is broken.
    """
    ranks = dict(read_run(*folders))
    parts: dict[Key, list[tuple[int, Stored]]] = {}
    for rank, recording in ranks.items():
        scales = {(call.optimizer, call.step): call.scale for call in recording.calls}
        owner = dict[str, str]()
        for key, stored in recording.tensors.items():
            optimizer, step, kind, _, name = key.split("/", 4)
            if owner.setdefault(name, optimizer) != optimizer:
                name = f"{name}{AGAIN}{optimizer})"
            if kind == "gradient" and stored.sketch is not None:
                scale = scales.get((int(optimizer), int(step)))
                stored.sketch = stored.sketch / np.float32(scale or 1.0)
            parts.setdefault((int(step), kind, name), []).append((rank, stored))
    steps = {step for step, kind, _ in parts if kind in (OUTPUT, GRADIENT)}
    rows_by_step = {step: rows_of_blocks(ranks, step) for step in steps}
    whole = {
        key: merge(each)
        if key[1] not in (OUTPUT, GRADIENT)
        else merge_outputs(each, rows_by_step[key[0]])
        for key, each in parts.items()
    }
    for which, each in whole.items():
        if which[1] == "gradient" and not each.is_whole:
            whole[which] = merge([*parts[which], *_not_stepped(parts, which)])
    last = max((step for step, kind, _ in whole if kind == "gradient"), default=0)
    early, leaders = list[str](), dict[str, tuple[int, ...]]()
    if not exact:
        early, leaders = gradients_that_count(whole, parts, last)
    # tensors that no module has are left out if ranks begin with different values: they
    # may be unknown shards
    firsts = {k[2]: w for k, w in sorted(whole.items(), reverse=True) if _is_unnamed(k)}
    hidden = {name for name, first in firsts.items() if first.unlike}
    whole = {key: each for key, each in whole.items() if key[2] not in hidden}
    had = {(step, name) for step, kind, name in whole if kind == "gradient"}
    lacking = {
        (call.step, name)
        for recording in ranks.values()
        for call in recording.calls
        for name in call.without_gradient
    }
    first, inputs = ranks[min(ranks)], inputs_of(ranks)
    stepped = {name for _, kind, name in whole if kind == "weight"}
    settings: dict[tuple[int, str], dict[int, Mapping[str, Any]]] = {}
    skipping: dict[tuple[int, str], set[int]] = {}
    unstepped: dict[str, list[int]] = {}
    for rank, recording in ranks.items():
        for call in recording.calls:
            for group in call.settings:
                for name in group.names:
                    by_rank = settings.setdefault((call.step, name), {})
                    by_rank[rank] = group.values
                    if call.found_inf:
                        skipping.setdefault((call.step, name), set()).add(rank)
        for name in recording.unstepped:
            unstepped.setdefault(name, []).append(rank)
    return Run(
        ranks=len(ranks),
        tensors=whole,
        settings={
            key: next(iter(by_rank.values())) for key, by_rank in settings.items()
        },
        other_settings={
            key: by_rank
            for key, by_rank in settings.items()
            if any(each != by_rank[min(by_rank)] for each in by_rank.values())
        },
        left={n: tuple(ranks) for n, ranks in unstepped.items() if n in stepped},
        absent=_absent(settings, ranks),
        rows_of_ranks={
            step: {rank: every_row(rows) for rank, rows in by_rank.items()}
            for step, by_rank in inputs.items()
        },
        counts={
            step: {rank: sum(map(len, rows)) for rank, rows in by_rank.items()}
            for step, by_rank in inputs.items()
        },
        unpadded=by_row((r.rows, r.unpadded) for r in ranks.values()),
        sums=by_row((r.rows_of_floats, r.sums_of_rows) for r in ranks.values()),
        repeated=repeated_rows(ranks, inputs),
        bags=bags_of_inputs(ranks, inputs),
        shares={
            step: sorted(
                each for r in ranks.values() for each in r.shares.get(step, ())
            )
            for step in inputs
        },
        has_tokens=any(recording.rows for recording in ranks.values()),
        losses=_losses(ranks.values()),
        norms={
            step: {rank: r.norms[step] for rank, r in ranks.items() if step in r.norms}
            for step in {step for r in ranks.values() for step in r.norms}
        },
        drew=frozenset(step for r in ranks.values() for step in r.drew),
        drops=tuple(first.drops),
        outputs=frozenset(dtype for r in ranks.values() for dtype in r.outputs),
        in_16_bits={
            name: dtype
            for recording in ranks.values()
            for dtype, names in recording.in_16_bits.items()
            for name in names
        },
        orthogonal=frozenset(
            name
            for recording in ranks.values()
            for call in recording.calls
            for group in call.settings
            if is_muon(call.kind, group.values)
            for name in group.names
        ),
        unstepped=tuple(sorted(unstepped.keys() - stepped)),
        without_gradient=frozenset(lacking - had),
        unnamed=len(hidden)
        + max((c.unnamed for r in ranks.values() for c in r.calls), default=0),
        notes=tuple(f"rank {n}: {text}" for n, r in ranks.items() for text in r.notes),
        replicas={key: each.unlike for key, each in whole.items() if each.unlike},
        evaluations=_evaluations(ranks.values()),
        early=tuple(early),
        leaders=leaders,
        skipped=frozenset(k for k, r in skipping.items() if r == settings[k].keys()),
        skipping={
            key: tuple(sorted(by))
            for key, by in skipping.items()
            if by != settings[key].keys()
        },
    )


def _not_stepped(
    parts: Mapping[Key, Sequence[tuple[int, Stored]]], key: Key
) -> Iterator[tuple[int, Stored]]:
    """Yield zeros for the parts of a gradient that no rank recorded or stepped.

    A part counts as not stepped if its weight has equal bits at the next step. A weight
    that moved was stepped by another rank, so its gradient is not taken as zero.
    """
    step, _, name = key
    stepped = {part.place for _, part in parts[key]}
    after = dict(parts.get((step + 1, "weight", name), ()))
    for rank, weight in parts.get((step, "weight", name), ()):
        moved = rank not in after or after[rank].digest != weight.digest
        if weight.place in stepped or moved:
            continue
        sketch = parts[key][0][1].sketch
        zeros = None if sketch is None else np.zeros_like(sketch)
        numbers = {"square": 0.0, "largest": 0.0, "bad": 0, "sketch": zeros}
        yield rank, msgspec.structs.replace(weight, **numbers)


def _absent(
    settings: Mapping[tuple[int, str], Mapping[int, object]],
    ranks: Mapping[int, Recording],
) -> dict[tuple[int, str], tuple[int, ...]]:
    """Return ranks that leave out a step of a parameter that they step at other times.

    A rank without rows in that step, as within torch's ``join()``, is not returned.

    Args:
        settings: (step, parameter) -> one entry for each rank that makes the step.
        ranks: recording of each rank.

    Returns:
        (step, parameter) -> ranks.
    """
    trains: dict[int, set[int]] = {}
    for rank, recording in ranks.items():
        for step in recording.rows.keys() | recording.rows_of_floats.keys():
            trains.setdefault(step, set()).add(rank)
    ever: dict[str, set[int]] = {}
    for (_, name), by_rank in settings.items():
        ever.setdefault(name, set()).update(by_rank)
    absent: dict[tuple[int, str], tuple[int, ...]] = {}
    for (step, name), by_rank in settings.items():
        idle = ever[name] & trains.get(step, ever[name]) - by_rank.keys()
        if idle:
            absent[step, name] = tuple(sorted(idle))
    return absent


def _is_unnamed(key: Key) -> bool:
    return key[1] == "weight" and key[2].startswith(UNNAMED)


def _evaluations(ranks: Iterable[Recording]) -> dict[int, int]:
    most: dict[int, int] = {}
    for call in (call for recording in ranks for call in recording.calls):
        most[call.step] = max(call.evaluations, most.get(call.step, 1))
    return most


def _losses(ranks: Iterable[Recording]) -> dict[int, float]:
    losses_by_step: dict[int, list[float]] = {}
    for recording in ranks:
        for step, losses in recording.losses.items():
            losses_by_step.setdefault(step, []).extend(losses)
    return {step: sum(each) / len(each) for step, each in losses_by_step.items()}
