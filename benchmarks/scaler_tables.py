"""Goals for the measurements of ``scaler.py``, and tables for terminal and page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gradparity.benchmarks.tables import row, write_between

__all__ = ["PAGE", "lines", "rows", "tables", "write_tables"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaler-speed.md"

SMALL, TINY, LARGE = "500 of 64x64", "2000 of 16", "1000 of 256x256"
OPTIMIZERS = "1000 optimizers of one parameter"


class Goal(NamedTuple):
    """A ratio of two times, and its goal.

    Attributes:
        work: kind of work.
        size: size of the problem, a key of the record's ``seconds``.
        over: name of the time in the numerator.
        under: name of the time in the denominator.
        bound: least ratio if torch's time is the numerator, else the largest ratio.
        limit: name of the time that no scaler can beat; it replaces ours in the ratio.
        unit: unit of the ratio.
    """

    work: str
    size: str
    over: str
    under: str
    bound: float
    limit: str
    unit: str


def _faster(work: str, size: str, bound: float) -> Goal:
    # What any scaler must do: touch each gradient once, and agree.
    bare = "bare read" if "fused" in work else "bare kernel"
    limit = f"{bare}, then a collective"
    unit = "times faster than torch"
    return Goal(work, size, f"torch {work}", f"our {work}", bound, limit, unit)


def _near(work: str, bare: str, bound: float) -> Goal:
    limit = f"{bare}, then a collective"
    return Goal(work, LARGE, f"our {work}", bare, bound, limit, f"times the {bare}")


def _alone(size: str) -> Goal:
    over, under = "our step", "torch step"
    return Goal("step, update", size, over, under, 1.05, "bare step", "times torch")


GOALS = (
    _faster("clip, fused", SMALL, 4.0),
    _faster("clip, fused", TINY, 6.0),
    _faster("clip, fused", LARGE, 3.0),
    _faster("clip", LARGE, 1.7),
    Goal(
        "clip_grad_norm_ and step",
        LARGE,
        "torch clip",
        "our clip_grad_norm_ and step",
        1.0,
        "bare kernel, then a collective",
        "times faster than torch",
    ),
    _faster("unscale_", SMALL, 2.0),
    _faster("unscale_ and step", SMALL, 1.0),
    _faster("unscale_ and step", LARGE, 1.0),
    _near("clip, fused", "bare read", 1.3),
    _near("unscale_", "bare kernel", 1.1),
    Goal(
        "step, update",
        OPTIMIZERS,
        "our step",
        "torch step",
        1.5,
        "bare step",
        "times torch",
    ),
)


def rows(seconds: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Compare the times with the goals; return one row for each goal."""
    alone = (_alone(size) for size in seconds if size.startswith("alone"))
    return [_row(goal, seconds[goal.size]) for goal in (*GOALS, *alone)]


def _row(goal: Goal, times: dict[str, float]) -> dict[str, Any]:
    more = goal.over.startswith("torch")
    ratio, bare = times[goal.over] / times[goal.under], times[goal.limit]
    limit = times[goal.over] / bare if more else bare / times[goal.under]
    return {
        "work": f"{goal.work}, {goal.size}",
        "ratio": round(ratio, 3),
        "unit": goal.unit,
        "goal": f"at {'least' if more else 'most'} {goal.bound:g}",
        "met": ratio >= goal.bound if more else ratio <= goal.bound,
        "limit": round(limit, 2),
    }


def lines(record: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the record for a terminal."""
    for each in record["rows"]:
        mark = "met" if each["met"] else "MISSED"
        yield (
            f"{each['work']:44} {each['ratio']:6.2f} {each['unit']:24} "
            f"{each['goal']:14} {mark:7} (limit {each['limit']:g})"
        )
    for way, worlds, found in _counted(record):
        yield (
            f"{way:17} {found['collectives']} collective of {found['bytes']} bytes a "
            f"rank, {found['host_syncs']} numbers read by the host, on {worlds} ranks"
        )


def tables(record: dict[str, Any]) -> dict[str, str]:
    """Return name -> Markdown table, from a record."""
    made = (("speed", _speed), ("counts", _counts))
    return {name: "\n".join(of(record)) for name, of in made}


def write_tables(record: dict[str, Any], page: Path = PAGE) -> None:
    """Replace the tables on the page by the tables of a record."""
    write_between(page, tables(record))


def _speed(record: dict[str, Any]) -> Iterator[str]:
    yield row("work", "measured", "goal", "limit")
    yield "|---|---|---|---|"
    for each in record["rows"]:
        missed = "" if each["met"] else " (missed)"
        measured = f"{each['ratio']:.2f} {each['unit']}{missed}"
        yield row(each["work"], measured, each["goal"], f"{each['limit']:.2f}")
    made = record["provenance"]
    yield ""
    yield (
        f"torch {made['torch']}, Python {made['python']}, {made['cores']} cores, load "
        f"{made['load_average_at_start']:.1f} at the start, {made['date']}."
    )


def _counts(record: dict[str, Any]) -> Iterator[str]:
    columns = "collectives", "bytes a rank", "numbers read by the host"
    yield row("optimizer", "ranks", *columns)
    yield "|---|---|---|---|---|"
    for way, worlds, found in _counted(record):
        yield row(way, worlds, *found.values())


def _counted(record: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    # One line for all worlds that are alike.
    worlds = record["counts"]
    for way in next(iter(worlds.values())):
        alike: dict[tuple[Any, ...], list[str]] = {}
        for ranks, ways in worlds.items():
            alike.setdefault(tuple(ways[way].items()), []).append(ranks)
        for found, ranks_of in alike.items():
            yield way, ", ".join(ranks_of), dict(found)
