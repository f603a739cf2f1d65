"""A failed world in words: root cause, victims, the rest, output rank by rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .desync import find_desync, find_missing
from .outcomes import RankOutcome, RankState

_LAST = 3
"""So many of each rank's collectives are shown."""

_THREAD_ID = re.compile(r"(?<=hread )0x[0-9a-f]+ ")


def render_failure(outcomes: tuple[RankOutcome, ...], root: RankOutcome) -> str:
    """Return the report of a failed world, root cause first."""
    return "\n".join(_lines(outcomes, root)).rstrip()


def _lines(outcomes: tuple[RankOutcome, ...], root: RankOutcome) -> Iterator[str]:
    others = [o for o in outcomes if o is not root and o.rank != root.rank]
    victims = [o for o in others if o.state is RankState.VICTIM]
    failed = [o for o in others if not o.ok and o.state is not RankState.VICTIM]
    fine = [o for o in others if o.ok]
    yield f"world of {len(outcomes)}: {root.headline}"
    yield from _section("root cause", [root])
    yield from _section("also failed", failed)
    yield from _section("victim", victims)
    if fine:
        yield ""
        yield f"returned normally: rank {', '.join(str(o.rank) for o in fine)}"
    yield from _collectives(outcomes, root)
    for outcome in outcomes:
        yield from _block(f"output of rank {outcome.rank}", outcome.output)


def _collectives(outcomes: tuple[RankOutcome, ...], root: RankOutcome) -> Iterator[str]:
    trails = {outcome.rank: outcome.collectives for outcome in outcomes}
    parting = find_desync(trails)
    if parting is None and root.state is RankState.HUNG:
        parting = find_missing(trails)
    if parting is not None:
        yield from ("", parting)
    waiting = [o for o in outcomes if not o.ok and o.collectives]
    if waiting:
        yield from ("", "last collectives:")
    for outcome in waiting:
        for call in outcome.collectives[-_LAST:]:
            yield f"  rank {outcome.rank}: {call}"


def _section(title: str, outcomes: Iterable[RankOutcome]) -> Iterator[str]:
    told: dict[str, int] = {}
    for outcome in outcomes:
        yield ""
        yield f"{title}: {outcome.headline}"
        details = _details(outcome)
        if details and details in told:
            yield f"  (as rank {told[details]})"
        else:
            told[details] = outcome.rank
            yield from _indent(details)


def _details(outcome: RankOutcome) -> str:
    parts = [outcome.traceback or ""]
    if outcome.message and not outcome.traceback and "\n" in outcome.message:
        parts.append(outcome.message)
    if outcome.state is RankState.KILLED and outcome.signal == "SIGKILL":
        parts.append("(SIGKILL from outside; the kernel does so when memory is short)")
    if outcome.stacks:
        parts.append("stacks:\n" + _THREAD_ID.sub("", outcome.stacks))
    return "\n".join(part.rstrip() for part in parts if part)


def _indent(text: str) -> Iterator[str]:
    return (f"  {line}".rstrip() for line in text.splitlines())


def _block(title: str, text: str) -> Iterator[str]:
    if text:
        yield ""
        yield f"--- {title} ---"
        yield text.rstrip("\n")
