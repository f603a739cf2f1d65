"""Derive from the recorded events which optimizers decide together, and what they step.

While a workload trains, a rank only records what happens to optimizers (``Event``).
Afterwards :func:`fold` combines the events of all ranks:

- **Decision groups** are connected components. All parameters that one call of an
  optimizer steps are connected. An optimizer is connected to any optimizer that steps
  inside its calls. The n-th optimizers of two ranks are connected, because one line of
  the program calls both; their parameters may differ, in a pipeline or with ZeRO.
- **Ranks with fewer optimizers** are joined to other ranks by the parameters that both
  have. For an optimizer without such parameters the number on the other ranks is
  unknown. Then ranks are joined by order, and ``RankTrace.unjoined`` says so.
- **Parameters without an optimizer** form one more group. Optimizers of other tensors,
  such as fp32 copies, decide for that group. If the group is empty, these optimizers
  train tensors outside of the model.
- **A parameter is left to another rank** if that rank uses its gradient, with the same
  elements, and this rank does not. If some rank steps the parameter by an optimizer
  inside another optimizer (ZeRO-1), the inner call counts, on every rank.
- **A step is skipped by the workload's own decision**, and not by a scaler's, if three
  things hold on all ranks: no optimizer or scaler was asked to step, no weight moved,
  and the rank counted a skip (``skipped_steps``).
- **Settings** are read when an optimizer is passed to the scaler, else when it steps.
  The innermost call is read last, because the scaler may change settings in its call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .methods import STEPS
from .trace import Constants, Decision, Event, Kind, RankTrace, Setting, StepTrace

__all__ = ["fold", "steps_again"]

Member = str | int | tuple[int, int]
"""Member of a decision group: a parameter, a position in the order of the optimizers,
or (rank, number of an optimizer)."""
Elements = tuple[str, str]
"""(name of a parameter, digest of its positions). Equal on replicas."""


def fold(ranks: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    """Return the traces of one world with decisions, settings and ``left`` filled in.

    Args:
        ranks: traces of all ranks, as :func:`observe_rank` returns them.
    """
    groups, own = _Groups.of(ranks), _own_skips(ranks)
    return tuple(
        replace(
            trace,
            owned=groups.names,
            unjoined=groups.unjoined,
            left=left,
            steps=[
                replace(_folded(seen, trace, groups, left), own_skip=number in own)
                for number, seen in enumerate(trace.steps)
            ],
        )
        for trace, left in zip(ranks, _left(ranks), strict=True)
    )


def _own_skips(ranks: Sequence[RankTrace]) -> set[int]:
    """Return the steps that all ranks skipped by the workload's own decision."""
    # not strict: a rank that stopped early has fewer steps
    steps = zip(*(trace.steps for trace in ranks), strict=False)
    return {n for n, seen in enumerate(steps) if all(map(_is_own_skip, seen))}


def _is_own_skip(seen: StepTrace) -> bool:
    before, after = seen.skips or (0, 0)
    asked = any(event.kind is Kind.BEGINS for event in seen.events)
    asked |= not seen.calls.isdisjoint(STEPS)
    return seen.complete and after > before and not asked and not seen.changed


def steps_again(events: Iterable[Event]) -> int | None:
    """Return the index of the first optimizer that steps a parameter again, or None.

    A step inside the step of another optimizer does not count.
    """
    stepped: set[str] = set()
    for event, outer in _calls(events):
        if event.kind is Kind.BEGINS and outer is None:
            if stepped & event.with_grad:
                return event.optimizer
            stepped |= event.with_grad
    return None


def _calls(events: Iterable[Event]) -> Iterator[tuple[Event, int | None]]:
    """Yield (event, optimizer) for each event except ``CHANGED``.

    The optimizer is that of the enclosing call; None if the event is in no other call.
    """
    under_way: list[int] = []
    for event in events:
        if event.kind is Kind.CHANGED:
            continue
        if event.kind in (Kind.RETURNED, Kind.STEPPED):
            # events above it in the stack never ended: they raised
            while event.optimizer in under_way:
                if under_way.pop() == event.optimizer:
                    break
        outer = [each for each in under_way if each != event.optimizer]
        yield event, outer[-1] if outer else None
        if event.kind in (Kind.HANDED, Kind.BEGINS):
            under_way.append(event.optimizer)


@dataclass(frozen=True)
class _Groups:
    """Decision groups of a world: optimizers that decide together."""

    names: list[list[str]]
    """Parameters of each group."""
    of_optimizer: Mapping[tuple[int, int], int]
    """(rank, number of an optimizer) -> index of its group, if it has one."""
    unjoined: tuple[int, ...]
    """Number of optimizers of each rank, if optimizers of different ranks were joined
    by their order only; empty if parameters joined them."""

    def decided_by(self, rank: int, optimizer: int) -> list[str]:
        """Return the parameters for which an optimizer decides."""
        group = self.of_optimizer.get((rank, optimizer))
        return [] if group is None else self.names[group]

    @classmethod
    def of(cls, ranks: Sequence[RankTrace]) -> _Groups:
        parts, unjoined = _parts(ranks)
        named_parts = [part for part in parts if any(isinstance(m, str) for m in part)]
        order = dict.fromkeys(name for trace in ranks for name in trace.index)
        rest = set[Member](order).difference(*named_parts)
        if rest:
            beside = [part for part in parts if part not in named_parts]
            named_parts.append(rest.union(*beside))
        named_parts.sort(key=_first_place)
        return cls(
            names=[[name for name in order if name in part] for part in named_parts],
            of_optimizer={
                member: number
                for number, part in enumerate(named_parts)
                for member in part
                if isinstance(member, tuple)
            },
            unjoined=unjoined,
        )


def _parts(ranks: Sequence[RankTrace]) -> tuple[list[set[Member]], tuple[int, ...]]:
    """Return the members of each group, and each rank's number of optimizers.

    The numbers are empty unless ranks were joined only by the order of optimizers.
    """
    together = [[*_together(trace)] for trace in ranks]
    counts = tuple(
        len({m for each in sets for m in each if isinstance(m, int)})
        for sets in together
    )
    most = max(counts)
    shared = _components(
        each if count == most else {m for m in each if not isinstance(m, int)}
        for sets, count in zip(together, counts, strict=True)
        for each in sets
    )
    # only ranks with fewer optimizers hold these parts: no other rank shows the owner
    apart = [part for part in shared if not any(isinstance(m, int) for m in part)]
    if not any(isinstance(m, str) for part in apart for m in part):
        return shared, ()
    return _components(each for sets in together for each in sets), counts


def _together(trace: RankTrace) -> Iterator[set[Member]]:
    """Yield one set per event of a rank: optimizers and parameters that it connects."""
    places: dict[int, int] = {}
    for seen in trace.steps:
        for event, outer in _calls(seen.events):
            mine: set[Member] = {(trace.rank, event.optimizer), *event.names}
            if outer is None:
                mine.add(places.setdefault(event.optimizer, len(places)))
            else:
                mine.add((trace.rank, outer))
            yield mine


def _components(sets: Iterable[set[Member]]) -> list[set[Member]]:
    """Merge sets that share a member."""
    components: list[set[Member]] = []
    for members in sets:
        apart = [part for part in components if part.isdisjoint(members)]
        touched = [part for part in components if not part.isdisjoint(members)]
        components = [*apart, members.union(*touched)]
    return components


def _first_place(part: set[Member]) -> float:
    return min((m for m in part if isinstance(m, int)), default=float("inf"))


def _left(ranks: Sequence[RankTrace]) -> Iterator[frozenset[str]]:
    """Yield for each rank the parameters that it leaves to other ranks' optimizers."""
    used, outside, inside = zip(*map(_uses, ranks), strict=True)
    anywhere, inner = set[Elements]().union(*used), set[Elements]().union(*inside)
    for trace, mine, outer, own in zip(ranks, used, outside, inside, strict=True):
        # a gradient that an inner optimizer uses, on any rank, is not the outer one's
        taken = mine - ((outer & inner) - own)
        left = anywhere.intersection(trace.shards.items()) - taken
        yield frozenset(name for name, _ in left)


def _uses(trace: RankTrace) -> tuple[set[Elements], set[Elements], set[Elements]]:
    """Return the gradients that optimizers of a rank use, in any step.

    Returns:
        Three sets: all of these gradients; those used in an outermost call; those used
        in a call inside another call.
    """
    used, outside, inside = set[str](), set[str](), set[str]()
    for seen in trace.steps:
        used.update(seen.gradients)
        for event, outer in _calls(seen.events):
            if event.kind is Kind.USES and outer is None:
                outside.update(event.recorded)
            elif event.kind is Kind.USES:
                inside.update(event.names)

    def held(names: set[str]) -> set[Elements]:
        return {each for each in trace.shards.items() if each[0] in names}

    return held(used), held(outside), held(inside)


def _folded(
    seen: StepTrace, trace: RankTrace, groups: _Groups, left: frozenset[str]
) -> StepTrace:
    """Return a step with the facts derived from its events."""
    settings: dict[str, dict[str, Setting]] = {}
    constants: dict[str, Constants] = {}
    copies: dict[int, list[dict[str, Setting]]] = {}
    handed: set[int] = set()
    for event, _ in _calls(seen.events):
        if event.kind is Kind.HANDED:
            handed.add(event.optimizer)
        elif event.kind is not Kind.USES or event.optimizer in handed:
            continue
        set_groups = [group for group in event.groups if group.settings]
        if set_groups and not event.names:
            copies[event.optimizer] = [group.settings for group in set_groups]
        for group in set_groups:
            for name in group.names:
                # an optimizer of parameters without grad keeps gradients of its own
                if name in event.with_grad or not event.with_grad:
                    settings[name] = group.settings
                    constants[name] = group.constants
    late = [
        name
        for event in _after_a_step(seen.events)
        for name in event.names or groups.decided_by(trace.rank, event.optimizer)
    ]
    return replace(
        seen,
        decisions=_decisions(seen, trace, groups) if seen.complete else [],
        settings=settings,
        constants=constants,
        copies=[each for of_one in copies.values() for each in of_one],
        late=late,
        gradients={n: g for n, g in seen.gradients.items() if n not in left},
    )


def _after_a_step(events: Iterable[Event]) -> Iterator[Event]:
    """Yield uses of gradients whose forward ran after the step had moved weights.

    New autograd nodes show that a forward ran. Hooks on modules are not used, because
    they would be traced into code that a user compiles. A logged sum of losses also
    creates nodes, so a gradient must have been written as well. New nodes are enough
    for an optimizer of copies, whose writes are unknown, and for frozen parameters,
    which have no gradient.
    """
    moved: int | None = None  # autograd nodes when the first optimizer had stepped
    evaluated: dict[int, int] = {}  # optimizer -> autograd nodes at its first use
    for event in events:
        if event.kind is Kind.STEPPED and moved is None:
            moved = event.nodes
        elif event.kind is Kind.USES:
            # a closure evaluates the loss again after the optimizer has moved weights
            again = evaluated.setdefault(event.optimizer, event.nodes) != event.nodes
            moved = -1 if again else moved
            wrote = bool(event.written) or not (event.names and event.with_grad)
            if moved is not None and event.nodes != moved and wrote:
                yield event


def _decisions(seen: StepTrace, trace: RankTrace, groups: _Groups) -> list[Decision]:
    bad = seen.bad
    moved = {
        groups.of_optimizer.get((trace.rank, event.optimizer))
        for event in seen.events
        if event.kind is Kind.CHANGED
    }
    decisions = []
    training_by_group = [trace.trains.intersection(names) for names in groups.names]
    for number, names in enumerate(groups.names):
        training = training_by_group[number]
        decisions.append(
            Decision(
                non_finite=[name for name in names if name in bad],
                parameters_changed=bool(training & seen.changed) if training else None,
                state_changed=number in moved,
                others=sum(map(bool, training_by_group)) - bool(training),
                names=[name for name in names if name in training],
            )
        )
    return decisions
