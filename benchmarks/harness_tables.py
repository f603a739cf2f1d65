"""Tables of docs/harness-inside.md from the record of ``harness.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradparity.benchmarks.tables import row, write_between

PAGE = Path(__file__).resolve().parents[1] / "docs" / "harness-inside.md"
_SIZES = ("size_2", "size_4")
_GOALS_MS = {"pool": "5, 10", "group": "80 at 4", "process": "250 at 4"}
_GOALS = {"MultiProcContinuousTest": 4, "MultiProcessTestCase": 50}

_NOISE_S = 0.2
"""Seconds by which two sessions without ranks may differ; less does not count."""
_ADOPTED_GOALS = {"MultiProcContinuousTest": "1/10", "MultiProcessTestCase": "1/50"}


def tables(record: dict[str, Any]) -> dict[str, str]:
    """Return name -> Markdown table, from a record."""
    return {
        name: "\n".join(lines(record))
        for name, lines in (
            ("sessions", _sessions),
            ("calls", _calls),
            ("faults", _faults),
            ("turns", _turns),
            ("rest", _rest),
            ("cost", _cost),
        )
    }


def write_tables(record: dict[str, Any], page: Path = PAGE) -> None:
    """Replace the tables on the page by the tables of a record."""
    write_between(page, tables(record))


def _sessions(record: dict[str, Any]) -> Iterator[str]:
    found, made = record["sessions"], record["provenance"]
    ours = found["gradparity"]["cpu_s"]
    what = f"{found['tests']} trivial all_reduce tests through pytest, world 2"
    above = "times ours, above the first row"
    yield row(what, "CPU seconds of the whole tree", "times ours", above, "goal")
    yield "|---|---|---|---|---|"
    alone = found["torch imported, no ranks"]["cpu_s"]
    yield row("no ranks at all, torch imported", f"{alone:.1f}", "", "", "")
    yield row("gradparity", f"{ours:.1f}", "", "", "")
    for peer, goal in _GOALS.items():
        if peer in found:
            seconds = found[peer]["cpu_s"]
            ratios = seconds / ours, (seconds - alone) / (ours - alone)
            yield row(
                f"`{peer}`", f"{seconds:.1f}", *(f"{r:.1f}" for r in ratios), goal
            )
    yield ""
    yield (
        f"torch {made['torch']}, Python {made['python']}, {made['cores']} cores, load "
        f"{made['load']} at the start, commit {made['commit']}, {made['started'][:10]}."
    )


def _calls(record: dict[str, Any]) -> Iterator[str]:
    what = "median milliseconds of a warm call above its own work"
    yield row(what, "world 2", "world 4", "goal")
    yield "|---|---|---|---|"
    for name, goal in _GOALS_MS.items():
        cells = (f"{record['calls'][size][f'{name}_ms']:.3g}" for size in _SIZES)
        yield row(f"`{name}`", *cells, goal)


def _faults(record: dict[str, Any]) -> Iterator[str]:
    yield row("fault of one rank of 4", "median seconds to the error", "promised")
    yield "|---|---|---|"
    for name, found in record["faults_size_4"].items():
        yield row(name, f"{found['median_s']:.2f}", f"{found['promised_s']:g}")


def _turns(record: dict[str, Any]) -> Iterator[str]:
    found = record["turns"]
    yield row(
        "woken threads of a rank",
        "median milliseconds",
        f"collectives above {found['slow_above_ms']:g} ms",
    )
    yield "|---|---|---|"
    for what, name in (("preempt", "preempt"), ("wait for their turn", "wait")):
        share = f"{found[f'{name}_slow']:.0%}"
        yield row(what, f"{found[f'{name}_ms']:.2f}", share)


def _cost(record: dict[str, Any]) -> Iterator[str]:
    found = record["cost"]
    made, start, memory = found["provenance"], found["start"], found["memory"]
    yield row("what it costs", "measured", "goal")
    yield "|---|---|---|"
    if tests := found.get("trains"):  # left out where the machine is too busy
        ours = tests["session_cpu_s"] - tests["empty_session_cpu_s"]
        plain = tests["plain_processes_cpu_s"]
        yield row(
            f"{tests['tests']} tests of {tests['size']} ranks that train, to the same "
            "bodies in processes forked for each",
            f"{ours:.1f} s to {plain:.1f} s of CPU: {tests['ratio']:.2f}",
            1.3,
        )
    for one in found.get("adopted", ()):
        above, ours = one["above_cpu_s"], one["adopted_above_cpu_s"]
        share = f": 1/{above / ours:.0f}" if ours > _NOISE_S else ""
        classes = f"{one['classes']} classes" if one["classes"] > 1 else "one class"
        yield row(
            f"{one['tests']} trivial tests of `{one['name']}`, {classes}, adopted, to "
            "those on torch's class",
            f"{one['adopted_cpu_s']:.1f} s to {one['cpu_s']:.1f} s of CPU: "
            f"1/{one['ratio']:.1f}; above a session that imports the same and has no "
            f"ranks ({one['empty_cpu_s']:.1f} s) {max(ours, 0):.2f} s to "
            f"{above:.1f} s{share}",
            _ADOPTED_GOALS[one["name"]],
        )
    yield row(
        f"start of {start['ranks']} ranks",
        f"{record['large']['start_s']:.1f} s as recorded above; "
        f"{start['cpu_s']:.2f} s of CPU in this run",
        "0.7 s",
    )
    yield row(
        f"memory that a rank of {memory['ranks']} does not share, the largest",
        f"{memory['started_mib']:.1f} MiB; {memory['after_all_reduce_mib']:.1f} after "
        "a collective",
        "20 MiB",
    )
    yield ""
    yield (
        f"torch {made['torch']}, Python {made['python']}, {made['cores']} cores, CPU, "
        f"gloo, load {made['load']} at the start, commit {made['commit']}, "
        f"{made['started'][:10]}."
    )


def _rest(record: dict[str, Any]) -> Iterator[str]:
    large, at_once = record["large"], record["concurrent_runs"]
    yield (
        f"{large['ranks']} ranks: start {large['start_s']:.1f} s, all_reduce "
        f"{large['all_reduce_s']:.1f} s, stop {large['stop_s']:.1f} s, "
        f"{large['memory_mib']} MiB for all of them. {at_once['runs']} such sessions "
        f"at once: {at_once['wall_s']:.0f} s and {at_once['cpu_s']:.0f} s of CPU."
    )
