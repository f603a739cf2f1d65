"""Gradients by which a job steps, if ranks with replicas have different gradients.

Ranks that hold replicas may compute different gradients, and still have equal weights
when the next step begins:

- An optimizer sums or averages gradients in its own step, or the job averages weights
  after each step. The mean of all gradients counts.
- One rank sends its weights to all others, for example the rank that summed the
  gradients. Then only the gradients of this rank, the leader, count.

A leader's weights have the same bits after its step and when the next step begins.
Other ranks' weights change in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from .files import Stored
from .kept import IDLE, RESULT
from .whole import Key, Whole, merge

__all__ = ["gradients_that_count"]

Ranks = tuple[int, ...]
Parts = Mapping[Key, Sequence[tuple[int, Stored]]]
"""Rank and numbers of each part of a tensor."""


def gradients_that_count(
    whole: dict[Key, Whole], parts: Parts, last: int
) -> tuple[list[str], dict[str, Ranks]]:
    """Put the gradients that count into ``whole``, where replicas have unequal ones.

    Weights after step ``last`` are read before the job can make them equal. If the job
    made most weights equal after earlier steps, and left none unequal, then weights
    that differ between ranks after step ``last`` are removed.

    Args:
        whole: merged tensors, which are changed.
        parts: numbers of each rank.
        last: number of the last recorded step.

    Returns:
        Names of the removed weights, and the leaders of each parameter.
    """
    equal_by_step, unequal = dict[int, list[str]](), set[str]()
    for at, what, name in sorted(key for key, each in whole.items() if each.unlike):
        before, after = (whole.get((s, "weight", name)) for s in (at, at + 1))
        if what != "gradient" or before is None or after is None:
            continue
        if after.unlike and at < last:
            unequal.add(name)
        # a step that moved nothing does not show how gradients are summed
        if not after.unlike and before.digest != after.digest:
            equal_by_step.setdefault(at, []).append(name)
    by_name: dict[str, set[Ranks | None]] = {}
    for (at, name), leaders in _leaders_of_job(parts, equal_by_step).items():
        _merge_again(whole, parts, (at, name), leaders)
        by_name.setdefault(name, set()).add(leaders)
    always = {name: next(iter(s)) for name, s in by_name.items() if len(s) == 1}
    leaders_by_name = {name: leaders for name, leaders in always.items() if leaders}
    every = {name for _, kind, name in whole if kind == "weight"}
    if unequal or 2 * len({*chain(*equal_by_step.values())}) <= len(every):
        return [], leaders_by_name
    ends = ((name, whole.get((last + 1, "weight", name))) for name in every)
    early = sorted(name for name, end in ends if end is not None and end.unlike)
    for name in early:
        del whole[last + 1, "weight", name]
        if (last, "gradient", name) in whole:
            leaders = always.get(name) if name in by_name else ()
            _merge_again(whole, parts, (last, name), leaders)
    return early, leaders_by_name


def _leaders_of_job(
    parts: Parts, names_by_step: Mapping[int, Sequence[str]]
) -> dict[tuple[int, str], Ranks | None]:
    """Return the leaders by (step, name).

    If one parameter has no leader, the mean of all ranks counts for all parameters: in
    few bits, the mean of another parameter may equal the result of one rank by chance.
    All ranks may also have the same result, as in the first step of Adam. Such a
    parameter gets the leaders that all other parameters share.

    Returns:
        For each step and name: the leaders; empty if the mean counts; None if unknown.
    """
    every = {
        (step, name): _leaders(parts, step, name)
        for step, names in names_by_step.items()
        for name in names
    }
    sets = [leaders for leaders in every.values() if leaders is not None]
    if not sets or not all(sets):
        return dict.fromkeys(every, ())
    common = tuple(sorted(set(sets[0]).intersection(*sets))) or None
    return {key: leaders or common for key, leaders in every.items()}


def _leaders(parts: Parts, step: int, name: str) -> Ranks | None:
    """Return the ranks whose result of a step other ranks have taken over.

    Returns None if all ranks have kept their result, and no ranks if an element has no
    leader.
    """
    results = parts.get((step, RESULT, name), ())
    after = dict(parts.get((step + 1, "weight", name), ()))
    leaders = {r: p for r, p in results if r in after and after[r].digest == p.digest}
    if len(leaders) == len(results):
        return None
    places = ({each.place for each in of} for of in (leaders.values(), after.values()))
    return tuple(leaders) if len({*map(frozenset, places)}) == 1 else ()


def _merge_again(
    whole: dict[Key, Whole],
    parts: Parts,
    which: tuple[int, str],
    leaders: Ranks | None,
) -> None:
    """Merge the gradient and the update of a parameter again.

    Args:
        whole: merged tensors, which are changed.
        parts: numbers of each rank.
        which: step and name of the parameter.
        leaders: ranks that count; empty if the mean of all ranks counts. None if
            unknown: then gradient and update are removed, and not compared.
    """
    step, name = which
    kinds: tuple[str, ...] = ("gradient", "update", IDLE, RESULT)
    if leaders is None:
        del whole[step, "gradient", name]
    if not leaders:  # updates were multiplied by gradients before the sum
        for kind in ("update", IDLE):
            whole.pop((step, kind, name), None)
        kinds = () if leaders is None else ("gradient",)
    for kind in kinds:
        every = parts.get((step, kind, name), ())
        if of_ranks := [each for each in every if not leaders or each[0] in leaders]:
            whole[step, kind, name] = merge(of_ranks, averages=not leaders)
