"""Report of a failed world: output of each rank, victims, and last the root cause.

The report also shows where the ranks' collectives differ.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from .outcomes import Collective, RankOutcome, RankState

_LAST = 3
"""Number of each rank's collectives that are shown."""

_MAX_SHOWN = 16
"""Number of ranks, or groups of equal ranks, whose collectives are shown."""

_HEAD, _TAIL = 10, 40
"""Number of lines shown of a rank's output; ``RankOutcome.output`` has more."""

_WIDTH = 1000
"""Number of characters shown of a line."""

# Thread ids differ between ranks; without them equal stacks are shown once.
_THREAD_ID = re.compile(r"(?<=hread )0x[0-9a-f]+ ")

_OF_A_RANK = re.compile(r"(?<=World\(rank=)\d+|(?<= at )0x[0-9a-f]+(?=>)")
"""Parts of a failure's text that differ between ranks: the number in ``World(rank=1``,
and addresses of objects."""

_NOT_KEPT = re.compile(r"\[\.\.\. (\d+) bytes left out \.\.\.\]")
"""Line that replaces the middle of an output that was too long to keep."""

TWO_SIDED = frozenset({"send", "recv", "recv_anysource"})
"""Operations between two ranks, which the other ranks of a group do not issue."""

_FREE_SHAPES = frozenset(
    {"allgather", "all_to_all_single", "alltoall", "alltoall_base", "gather", "scatter"}
)
"""Collectives whose tensors may have different shapes on different ranks."""

Records = Mapping[int, Sequence[Collective]]


def render_failure(outcomes: tuple[RankOutcome, ...], root: RankOutcome) -> str:
    """Return the report of a failed world; it ends with the root cause."""
    return "\n".join(_lines(outcomes, root)).rstrip()


def render_interrupted(outcomes: Sequence[RankOutcome]) -> str:
    """Describe where each rank was when its call was interrupted in the parent."""
    # Not "hung", since no limit has passed.
    running = [
        replace(o, state=RankState.VICTIM) if o.state is RankState.HUNG else o
        for o in outcomes
    ]
    lines = ["the ranks of the call that was interrupted:"]
    lines += _outputs(running)
    lines += _last_collectives(running)
    lines += _section("interrupted", running)
    return "\n".join(lines)


def render_output(outcomes: tuple[RankOutcome, ...]) -> str:
    """Return the output of the ranks of a call, rank by rank."""
    return "".join(
        f"--- rank {outcome.rank} ---\n{_ended(outcome.output)}"
        for outcome in outcomes
        if outcome.output
    )


def _ended(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def _lines(outcomes: tuple[RankOutcome, ...], root: RankOutcome) -> Iterator[str]:
    others = [o for o in outcomes if o is not root and o.rank != root.rank]
    victims = [o for o in others if o.state is RankState.VICTIM]
    failed = [o for o in others if not o.ok and o.state is not RankState.VICTIM]
    fine = [o for o in others if o.ok]
    yield f"world of {len(outcomes)}: {root.headline}"
    yield from _outputs(outcomes)
    yield from _collectives(outcomes, root)
    if fine:
        yield ""
        yield f"returned normally: {_listed(o.rank for o in fine)}"
    below = {_alike(_details(root)): "the root cause, below"}
    yield from _section("victim", victims, below)
    yield from _section("also failed", failed, below)
    yield from _section("root cause", [root])


def _collectives(outcomes: tuple[RankOutcome, ...], root: RankOutcome) -> Iterator[str]:
    records = {outcome.rank: outcome.collectives for outcome in outcomes}
    difference = find_desync(records)
    if difference is None and root.state is RankState.HUNG:
        difference = find_missing(records)
    if difference is not None:
        yield from ("", difference)
    yield from _last_collectives(outcomes)


def _last_collectives(outcomes: Sequence[RankOutcome]) -> Iterator[str]:
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for outcome in outcomes:
        if not outcome.ok and outcome.collectives:
            calls = tuple(map(str, outcome.collectives[-_LAST:]))
            alike[calls].append(outcome.rank)
    if alike:
        yield from ("", "last collectives:")
    every = [*alike.items()]
    for calls, ranks in every[:_MAX_SHOWN]:
        for call in calls:
            yield f"  {_listed(ranks)}: {call}"
    if left := [rank for _, ranks in every[_MAX_SHOWN:] for rank in ranks]:
        yield f"  ... and {len(left)} ranks more"


def _section(
    title: str,
    outcomes: Iterable[RankOutcome],
    elsewhere: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Yield the lines that describe outcomes; equal outcomes share their lines.

    Args:
        title: First words of each entry, such as "victim".
        outcomes: Outcomes of ranks.
        elsewhere: Details shown elsewhere -> words that say where.
    """
    shown = {"": "", **(elsewhere or {})}
    alike: dict[tuple[str, str], list[RankOutcome]] = defaultdict(list)
    for outcome in outcomes:
        alike[_alike(_what(outcome)), _alike(_details(outcome))].append(outcome)
    for (_, key), every in alike.items():
        ranks = _listed(outcome.rank for outcome in every)
        yield from ("", f"{title}: {ranks}: {_what(every[0])}")
        if key not in shown:
            shown[key] = f"rank {every[0].rank}"
            yield from textwrap.indent(_details(every[0]), "  ").splitlines()
        elif key:
            yield f"  (as {shown[key]})"


def _what(outcome: RankOutcome) -> str:
    """Return a rank's headline without its number."""
    return outcome.headline.partition(": ")[2]


def _alike(text: str) -> str:
    """Remove the parts of a text that differ between ranks with equal outcomes."""
    return _OF_A_RANK.sub("", text)


def _listed(ranks: Iterable[int]) -> str:
    """Return the numbers of ranks in words, such as ``rank 0, 2 to 7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    ends = (
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs
    )
    return f"rank {', '.join(ends)}"


def _details(outcome: RankOutcome) -> str:
    parts = [outcome.traceback or ""]
    if outcome.message and not outcome.traceback and "\n" in outcome.message:
        parts.append(outcome.message)
    if outcome.state is RankState.KILLED and outcome.signal == "SIGKILL":
        parts.append("(SIGKILL from outside; the kernel does so when memory is short)")
    if outcome.stacks:
        parts.append("stacks:\n" + _THREAD_ID.sub("", outcome.stacks))
    return "\n".join(part.rstrip() for part in parts if part)


def _outputs(outcomes: Iterable[RankOutcome]) -> Iterator[str]:
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for outcome in outcomes:
        alike[_shown(outcome.output)].append(outcome.rank)
    for lines, ranks in alike.items():
        if lines:
            yield from ("", f"--- output of {_listed(ranks)} ---", *lines)


def _shown(output: str) -> tuple[str, ...]:
    """Return the lines of a rank's output that are shown."""
    lines = [_cut(line) for line in output.splitlines()]
    if len(lines) > _HEAD + _TAIL:
        left_out = lines[_HEAD:-_TAIL]
        marks = [mark for line in left_out if (mark := _NOT_KEPT.fullmatch(line))]
        bytes_ = "".join(f" and {mark[1]} bytes" for mark in marks)
        text = f"[... {len(left_out) - len(marks)} lines{bytes_} left out ...]"
        lines[_HEAD:-_TAIL] = [text]
    return tuple(lines)


def _cut(line: str) -> str:
    more = len(line) - _WIDTH
    return line if more <= 0 else f"{line[:_WIDTH]} [... {more} more characters]"


def find_desync(records: Records) -> str | None:
    """Describe the first collective that the ranks issued differently.

    Args:
        records: Each rank's last collectives, oldest first.

    Returns:
        One line for each rank under a heading; None if no collective differs.
    """
    calls = _first_difference(records)
    if not calls:
        return None
    first = next(iter(calls.values()))
    title = f"the ranks disagree on collective #{first.number} of {first.group}:"
    lines = [
        f"  rank {rank}: {call.op} {call.tensors}, {call.where}"
        for rank, call in sorted(calls.items())
    ]
    return "\n".join([title, *lines])


def find_odd_rank(records: Records) -> tuple[int, str] | None:
    """Return the rank whose collective differs from most others, and a description.

    None if no collective differs.
    """
    calls = _first_difference(records)
    if not calls:
        return None
    counts = Counter(_signature(call) for call in calls.values())
    # The minority, or of two halves the one with the lowest rank, so that each run
    # names the same rank.
    rank = min(calls, key=lambda r: (counts[_signature(calls[r])], r))
    mine = calls.pop(rank)
    others = [r for r in calls if _signature(calls[r]) != _signature(mine)]
    other = max(others, key=lambda r: counts[_signature(calls[r])])
    return rank, (
        f"collective #{mine.number} of {mine.group} is {mine.op} {mine.tensors} here "
        f"({mine.where}), and {calls[other].op} {calls[other].tensors} on rank {other}"
    )


def find_missing(records: Records) -> str | None:
    """Describe a group in which ranks issued different numbers of collectives.

    None if there is no such group.
    """
    for group, issued_by in _groups(records):
        last = {rank: issued[-1] for rank, issued in issued_by.items()}
        members = {rank for call in last.values() for rank in call.ranks}
        numbers = {
            rank: last[rank].number if rank in last else 0
            for rank in members & records.keys() | last.keys()
            if rank in last or _has_all(records[rank])
        }
        if len(set(numbers.values())) > 1:
            title = f"the ranks issued different numbers of collectives in {group}:"
            lines = [
                f"  rank {r}: {n}, the last {last[r]}" if n else f"  rank {r}: none"
                for r, n in sorted(numbers.items())
            ]
            return "\n".join([title, *lines])
    return None


def ended_without(call: Collective, ended: Records) -> int | None:
    """Return a rank that has ended and never issued this collective, or None.

    A rank that is still in the collective then waits for ever.

    Args:
        call: Collective that another rank has issued.
        ended: Last collectives of the ranks that have ended.
    """
    if call.op in TWO_SIDED:
        return None  # see `ended_without_sending`
    for rank in sorted(ended.keys() & set(call.ranks)):
        numbers = [
            c.number
            for c in ended[rank]
            if c.group == call.group and c.op not in TWO_SIDED
        ]
        is_known = numbers or _has_all(ended[rank])
        if is_known and max(numbers, default=0) < call.number:
            return rank
    return None


def ended_without_sending(
    call: Collective, rank: int, issued: Sequence[Collective], ended: Records
) -> int | None:
    """Return the peer if it ended without sending what ``rank`` receives, or None.

    Args:
        call: Operation in which ``rank`` waits.
        rank: Waiting rank.
        issued: Last collectives of ``rank``.
        ended: Last collectives of the ranks that have ended.
    """
    if call.op != "recv" or len(call.ranks) != 1:
        return None
    (peer,) = call.ranks
    if peer not in ended or not (_has_all(issued) and _has_all(ended[peer])):
        return None
    due = [
        c
        for c in issued
        if (c.op, c.group, c.ranks) == ("recv", call.group, call.ranks)
        and c.position <= call.position
    ]
    sent = [
        c
        for c in ended[peer]
        if (c.op, c.group, c.ranks) == ("send", call.group, (rank,))
    ]
    return peer if len(sent) < len(due) else None


def _has_all(issued: Sequence[Collective]) -> bool:
    """Return True if these are all collectives of a rank, and not only the latest."""
    return not issued or issued[0].position == 0


def _first_difference(records: Records) -> dict[int, Collective]:
    for _, issued_by in _groups(records):
        for _, calls in sorted(_by_number(issued_by).items()):
            if len({_signature(call) for call in calls.values()}) > 1:
                return calls
    return {}


def _by_number(records: Records) -> dict[int, dict[int, Collective]]:
    by_number: dict[int, dict[int, Collective]] = defaultdict(dict)
    for rank, issued in records.items():
        for call in issued:
            by_number[call.number][rank] = call
    return by_number


def _groups(records: Records) -> Iterator[tuple[str, Records]]:
    """Yield the name of each process group, and its collectives by rank.

    Groups of different members may have the same name, if a test makes several default
    groups. Each is yielded separately.
    """
    by_name: dict[str, dict[int, list[Collective]]] = {}
    for rank, issued in records.items():
        for call in issued:
            if call.op not in TWO_SIDED:
                by_rank = by_name.setdefault(call.group, {})
                by_rank.setdefault(rank, []).append(call)
    for name, by_rank in sorted(by_name.items()):
        members = {
            rank: {member for call in issued for member in call.ranks}
            for rank, issued in by_rank.items()
        }
        while by_rank:
            first = min(by_rank)
            same = [
                rank
                for rank in by_rank
                if rank in members[first] | {first}
                or first in members[rank]
                or not (members[first] or members[rank])  # unknown on both
            ]
            yield name, {rank: by_rank.pop(rank) for rank in same}


def _signature(call: Collective) -> tuple[str, str]:
    return call.op, "" if call.op in _FREE_SHAPES else call.tensors
