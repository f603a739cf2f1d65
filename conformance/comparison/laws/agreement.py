"""Agreement: at every step all ranks hold the same state and make the same decision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from ...rank.trace import Decision, StepTrace
from ..law import (
    ANY_SHARE,
    Evidence,
    Finding,
    bad_gradient,
    count_or_inconclusive,
    failed,
    law,
    of_buffer,
    rank_list,
    skipped,
)

Seen = TypeVar("Seen", StepTrace, Decision)

DRIFT = (
    "Ranks that disagree train with different effective learning rates or on different "
    "steps. Weights drift apart without an error."
)


def _disagreement(
    evidence: Evidence, what: str, read: Callable[[StepTrace], object]
) -> Finding:
    """Return a finding on the first step at which ``read`` differs between ranks.

    Ranks for which ``read`` returns None are left out: they do not know the value.
    """
    return _first_split(evidence, what, evidence.steps(), read)


def _first_split(
    evidence: Evidence,
    what: str,
    steps: Iterable[tuple[int, Sequence[Seen]]],
    read: Callable[[Seen], object],
) -> Finding:
    if len(evidence.ranks) == 1:
        return skipped("a single rank cannot disagree")
    compared, alone = 0, 0
    for step, seen in steps:
        groups: dict[object, list[int]] = defaultdict(list)
        for trace, rank in zip(seen, evidence.ranks, strict=True):
            value = read(trace)
            if value is not None:
                groups[value].append(rank.rank)
        n_agreeing = sum(map(len, groups.values()))
        compared += n_agreeing if n_agreeing > 1 else 0  # one rank agrees with itself
        alone += len(seen) - (n_agreeing if n_agreeing > 1 else 0)
        if len(groups) > 1:
            split = _split(step, what, groups, bad_gradient(evidence, seen))
            return replace(split, compared=compared, not_compared=alone)
    if alone and not compared:
        return skipped(f"no two ranks have a {what}")
    return count_or_inconclusive(
        compared, f"rank-steps compared by their {what}", alone + evidence.unseen
    )


def _split(
    step: int, what: str, groups: dict[object, list[int]], cause: str
) -> Finding:
    # the smaller group is named as the one that differs
    minority = min(groups.values(), key=len)
    parts = [f"{rank_list(r)} {_words(what, v)}" for v, r in groups.items()]
    return failed(
        message=f"{'; '.join(parts)}{cause and f' ({cause})'}",
        step=step,
        ranks=tuple(minority),
        numbers={
            f"rank {rank}": float(value)
            for value, ranks in groups.items()
            for rank in ranks
            if isinstance(value, int | float)
        },
    )


def _words(what: str, value: object) -> str:
    if isinstance(value, bool):
        return "stepped" if value else "skipped"
    return f"{what} {value:g}" if isinstance(value, float) else f"{what} {value}"


@law("agreement.scale", "After every step all ranks have the same scale.", DRIFT)
def scale(evidence: Evidence) -> Finding:
    """Compare the scale that ``get_scale`` returns, between ranks after every step."""
    return _disagreement(evidence, "scale", lambda s: s.scale_after)


@law(
    "agreement.growth",
    "After every step all ranks have the same growth state.",
    "If growth trackers differ, the scales differ some steps later.",
)
def growth(evidence: Evidence) -> Finding:
    """Compare the growth tracker in the state dict between ranks, if there is one."""
    return _disagreement(evidence, "growth tracker", lambda s: s.growth_after)


@law(
    "agreement.skip",
    "At every step either all ranks step or all ranks skip.",
    DRIFT,
    of_stack=True,
    # such a decision moves nothing on any rank, as when a warm-up begins at a rate of 0
    least=ANY_SHARE,
    decides=True,
)
def skip(evidence: Evidence) -> Finding:
    """Check that each optimizer's parameters changed on all ranks or on none."""
    return _first_split(
        evidence, "decision", evidence.decisions(), lambda d: d.parameters_changed
    )


@law(
    "agreement.replicas",
    "After every step all replicas of a parameter, and of a buffer that training "
    "changes, are bitwise equal.",
    "Replicas that differ are different models. Running statistics of a rank's own "
    "rows depend on the rank that saves them.",
    of_stack=True,
)
def replicas(evidence: Evidence) -> Finding:
    """Compare digests of replicated parameters, and of buffers, between ranks."""
    sets = _replica_sets(evidence)
    compared = 0
    for step, seen in evidence.steps():
        for (name, _), positions in sets.items():
            digests = [seen[i].digests[name] for i in positions]
            compared += len(digests) - 1
            if len(set(digests)) > 1:
                ranks = [evidence.ranks[i].rank for i in positions]
                torn = _torn(step, name, ranks, digests)
                parity = evidence.parity
                other = parity.other_setting(step) if parity is not None else ""
                text = f"{torn.message}; {other}" if other else torn.message
                return replace(torn, message=text, compared=compared)
        for name, digest_by_rank in _moved_buffers(evidence, seen).items():
            compared += len(digest_by_rank) - 1
            ranks, digests = [*digest_by_rank], [*digest_by_rank.values()]
            if len(set(digests)) > 1:
                torn = _torn(step, name, ranks, digests)
                text = f"{torn.message}; {of_buffer(name)}"
                return replace(torn, message=text, compared=compared)
    ended = all(t.problem is None and not t.hung for t in evidence.ranks)
    if ended and not (sets or compared):
        return skipped("no parameter has a replica on this mesh")
    pairs = sum(len(positions) - 1 for positions in sets.values())
    missed = pairs * evidence.unseen // len(evidence.ranks)
    return count_or_inconclusive(compared, "pairs of replicas compared bitwise", missed)


def _moved_buffers(
    evidence: Evidence, seen: Sequence[StepTrace]
) -> dict[str, dict[int, str]]:
    """Return digests, by name and rank, of the buffers that changed on some rank."""
    moved: dict[str, dict[int, str]] = defaultdict(dict)
    still: dict[str, bool] = defaultdict(lambda: True)
    for s, trace in zip(seen, evidence.ranks, strict=True):
        for name, now in s.buffer_digests.items():
            moved[name][trace.rank] = now
            still[name] &= now == trace.buffer_digests.get(name)
    return {name: by_rank for name, by_rank in moved.items() if not still[name]}


def _replica_sets(evidence: Evidence) -> dict[tuple[str, str], list[int]]:
    sets: dict[tuple[str, str], list[int]] = defaultdict(list)
    for position, trace in enumerate(evidence.ranks):
        for name, shard in trace.shards.items():
            # empty shards have equal digests, and are no replicas
            if len(trace.index[name]):
                sets[name, shard].append(position)
    return {key: ranks for key, ranks in sets.items() if len(ranks) > 1}


def _torn(
    step: int, name: str, ranks: Sequence[int], digests: Sequence[str]
) -> Finding:
    odd = [r for r, d in zip(ranks, digests, strict=True) if d != digests[0]]
    same = [r for r, d in zip(ranks, digests, strict=True) if d == digests[0]]
    return failed(
        message=f"{name} on {rank_list(odd)} differs from its replica on "
        f"{rank_list(same)}",
        step=step,
        ranks=tuple(odd),
        parameter=name,
    )
