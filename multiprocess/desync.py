"""Where the ranks' collectives part: a pure function of their trails."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from .rank.trail import Collective

_TWO_SIDED = frozenset({"send", "recv", "recv_anysource"})
_FREE_SHAPES = frozenset(
    {"allgather", "all_to_all_single", "alltoall", "alltoall_base", "gather", "scatter"}
)
"""Collectives whose tensors may differ from rank to rank."""

Trails = Mapping[int, Sequence[Collective]]


def find_desync(trails: Trails) -> str | None:
    """Describe the first collective that the ranks issued differently.

    Args:
        trails: Each rank's last collectives, oldest first.

    Returns:
        One line per rank under a heading, or None if no collective differs.
    """
    calls = _first_difference(trails)
    if not calls:
        return None
    first = next(iter(calls.values()))
    title = f"the ranks disagree on collective #{first.number} of {first.group}:"
    return "\n".join([title, *_lines(calls)])


def find_dissenter(trails: Trails) -> tuple[int, str] | None:
    """Return who issued that collective as the fewest did, and how it differs."""
    calls = _first_difference(trails)
    if not calls:
        return None
    counts = Counter(_signature(call) for call in calls.values())
    rank = min(calls, key=lambda r: (counts[_signature(calls[r])], r))
    mine = calls.pop(rank)
    others = [r for r in calls if _signature(calls[r]) != _signature(mine)]
    other = max(others, key=lambda r: counts[_signature(calls[r])])
    return rank, (
        f"collective #{mine.number} of {mine.group} is {mine.op} {mine.tensors} here "
        f"({mine.where}), and {calls[other].op} {calls[other].tensors} on rank {other}"
    )


def find_missing(trails: Trails) -> str | None:
    """Describe the first collective that only some ranks issued."""
    most: dict[str, dict[int, Collective]] = defaultdict(dict)
    for rank, trail in trails.items():
        for call in trail:
            if call.op not in _TWO_SIDED:
                most[call.group][rank] = call
    for group, last in sorted(most.items()):
        if group != "the default group" and len(last) < 2:
            continue  # nobody else is known to be in it
        everybody = trails if group == "the default group" else last
        numbers = {r: last[r].number if r in last else 0 for r in everybody}
        if len(set(numbers.values())) > 1:
            title = f"the ranks issued different numbers of collectives in {group}:"
            lines = [
                f"  rank {r}: {n}, the last {last[r]}" if n else f"  rank {r}: none"
                for r, n in sorted(numbers.items())
            ]
            return "\n".join([title, *lines])
    return None


def _first_difference(trails: Trails) -> dict[int, Collective]:
    for _, calls in sorted(_by_position(trails).items()):
        if len({_signature(call) for call in calls.values()}) > 1:
            return calls
    return {}


def _by_position(trails: Trails) -> dict[tuple[str, int], dict[int, Collective]]:
    found: dict[tuple[str, int], dict[int, Collective]] = defaultdict(dict)
    for rank, trail in trails.items():
        for call in trail:
            if call.op not in _TWO_SIDED:
                found[call.group, call.number][rank] = call
    return found


def _signature(call: Collective) -> tuple[str, str]:
    return call.op, "" if call.op in _FREE_SHAPES else call.tensors


def _lines(calls: Mapping[int, Collective]) -> list[str]:
    return [
        f"  rank {rank}: {call.op} {call.tensors}, {call.where}"
        for rank, call in sorted(calls.items())
    ]
