"""torch's own distributed tests, unchanged, on torch's processes and on our ranks.

``gradparity bench adopted FOLDER`` takes a folder with test files and a line of
provenance in ``origin.txt``; the files themselves are not part of this project. For
each file and each of torch's base classes, such as ``MultiProcessTestCase``, a seeded
sample of tests runs in three sessions:

1. on torch's spawned processes; not all of the sample, because each test takes ten
   seconds of CPU or more;
2. on forked processes in place of spawned ones, for the verdicts of the whole sample;
3. on our ranks, with ``--gradparity-adopt``.

For each test its verdicts, and the CPU seconds of its whole process tree, are recorded
in ``results/adopted.json``, or in the file that ``--out`` names. The table of a record
is written into ``docs/adopted.md``, at the mark with the name of the record's file.
``--side`` runs one session alone (``none``: the table only). A run that was cut off
continues with the tests that have no verdict yet.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gradparity.conformance.files import write_whole

RESULTS = Path(__file__).parents[1] / "results" / "adopted.json"
DOCS = Path(__file__).parents[2] / "docs" / "adopted.md"
SIDES = {
    "torch": (),
    "forked": ("--torch-forks",),
    "adopted": ("--gradparity-adopt",),
}
"""Session -> its options: torch's classes unchanged; torch's classes with forked
instead of spawned processes; the same tests on our ranks."""

BASES = ("MultiProcContinuousTest", "MultiProcessTestCase", "MultiThreadedTestCase")
_RECORD = "GRADPARITY_ADOPTED_RECORD"
"""Environment variable with the path to which this module writes, as a plugin."""

_POISONED = "Previous test failed"
"""Reason with which ``MultiProcContinuousTest`` skips all tests after a failure."""

_SPAWNED_S = 0.05
"""CPU seconds; any process of torch's classes takes more for a test."""

_TICKS = os.sysconf("SC_CLK_TCK")


# -- inside a session: one line for each test


class Recorder:
    """Writes one line of JSON for each test."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = 0.0
        self._seen: dict[str, dict[str, Any]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write the tests, and for each the class that runs it."""
        if session.config.option.collectonly:
            for item in session.items:
                self._write({"id": item.nodeid, "base": base_of(item)})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure one test with its setup and teardown."""
        before = tree_cpu_s()
        result = yield
        found = self._seen.pop(item.nodeid)
        self._write({**found, "cpu_s": round(tree_cpu_s() - before, 3)})
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the verdict; a failure of any phase counts."""
        found = self._seen.setdefault(report.nodeid, {"id": report.nodeid})
        if report.when == "call" or report.outcome != "passed":
            if found.get("verdict") == "failed":
                return
            found["verdict"] = report.outcome
            found["reason"] = _reason(report)

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for measurements inside the session."""
    parser.addoption("--torch-forks", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    """Record, in a session that this module has started."""
    if config.option.torch_forks:
        _have_torch_fork()
    if _RECORD in os.environ:
        config.pluginmanager.register(Recorder(Path(os.environ[_RECORD])))


def _have_torch_fork() -> None:
    """Make torch's classes fork: the same verdicts in a tenth of the time."""
    import torch.multiprocessing as processes
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    processes.set_start_method("fork", force=True)

    def fork(self: Any) -> None:
        self._start_processes(processes.get_context("fork").Process)

    setattr(MultiProcessTestCase, "_spawn_processes", fork)  # noqa: B010


def base_of(item: pytest.Item) -> str:
    """Return the class of torch that runs a test; "" if none does."""
    cls = getattr(item, "cls", None)
    names = [base.__name__ for base in (cls.__mro__ if cls else ())]
    return next((name for name in names if name in BASES), "")


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process and its descendants, even ended ones."""
    children, ticks = defaultdict(list), {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text()
            except OSError:
                continue  # it has ended
            # The name, in brackets, may hold anything.
            fields = text.rpartition(")")[2].split()
            pid = int(entry.name)
            children[int(fields[1])].append(pid)
            ticks[pid] = sum(int(field) for field in fields[11:15])
    todo, total = [os.getpid()], 0
    while todo:
        pid = todo.pop()
        total += ticks.get(pid, 0)
        todo += children[pid]
    return total / _TICKS


def _reason(report: pytest.TestReport) -> str:
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    lines = [line for line in report.longreprtext.splitlines() if line.strip()]
    # What was raised, before lines of source that speak of an error.
    raised = [line[1:] for line in lines if line.startswith("E  ")]
    marked = [line for line in lines if "Error" in line or line.startswith("world of")]
    return (raised or marked or lines or [""])[0].strip()[:200]


# -- outside: two sessions, and what they recorded


def session(folder: Path, ids: Sequence[str], record: Path, *options: str) -> float:
    """Run one session on some tests; return its CPU seconds, all of the tree."""
    # Bytecode is kept, as it is where nothing else is asked for.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = os.times()
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "gradparity.benchmarks.validation.adopted", f"--rootdir={folder}"),
            *("-W", "ignore", "-o", "addopts=", *options, *ids),
        ],
        cwd=folder,
        env={**env, _RECORD: str(record)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        check=False,
    )
    after = os.times()
    return (
        after.children_user
        + after.children_system
        - (before.children_user + before.children_system)
    )


def read(record: Path) -> dict[str, dict[str, Any]]:
    """Return id of a test -> its line in a record."""
    if not record.exists():
        return {}
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    return {line["id"]: line for line in lines}


def sample(
    tests: dict[str, dict[str, Any]], most: int, share: float, seed: int
) -> list[str]:
    """Draw some tests of each file and base.

    Args:
        tests: All tests.
        most: Number of tests to draw of each file and base.
        share: Fraction of them to draw, if that is more than ``most``.
        seed: Seed of the draw.
    """
    groups = defaultdict(list)
    for name, line in tests.items():
        if line["base"]:
            groups[name.split("::")[0], line["base"]].append(name)
    chosen = set[str]()
    for group, names in groups.items():
        # Drawn group by group: a run with more of them goes on with one with fewer.
        drawn = random.Random(f"{seed} {group}").sample(sorted(names), len(names))
        chosen.update(drawn[: max(most, math.ceil(share * len(names)))])
    return [name for name in tests if name in chosen]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; write the record and the table."""
    parser = argparse.ArgumentParser(prog="gradparity bench adopted")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, default=12, help="tests of a file and base")
    parser.add_argument(
        "--share",
        type=float,
        default=0.15,
        help="or this share of them, if that is more",
    )
    parser.add_argument("--spawned", type=int, default=1, help="of these, by spawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", choices=[*SIDES, "none"], action="append")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    folder: Path = options.folder.resolve()
    if not (folder / "origin.txt").is_file():
        parser.error(f"{folder}/origin.txt must say in one line where the files are of")
    work = folder / "records"
    work.mkdir(exist_ok=True)
    if not (work / "ids.jsonl").exists():
        files = sorted(path.name for path in folder.glob("test_*.py"))
        session(folder, files, work / "ids.jsonl", "--collect-only")
    tests = read(work / "ids.jsonl")
    chosen = sample(tests, options.most, options.share, options.seed)
    few = sample(tests, options.spawned, 0.0, options.seed)
    # These spawn once for a class: a few tests of it would pay that of all.
    spawned = [t for t in chosen if t in few or tests[t]["base"] == BASES[0]]
    made = None
    for side in options.side or SIDES:
        wanted = {"torch": spawned, "none": []}.get(side, chosen)
        left = [name for name in wanted if name not in read(work / f"{side}.jsonl")]
        if left:
            made = provenance(options)
            session(folder, left, work / f"{side}.jsonl", *SIDES[side])
    if made is None and options.out.exists():  # nothing has been measured anew
        made = json.loads(options.out.read_text())["provenance"]
    result = {
        "origin": (folder / "origin.txt").read_text().strip(),
        "provenance": made or provenance(options),
        "tests": list(pairs(tests, work)),
    }
    write_whole(options.out, json.dumps(result, indent=1) + "\n")
    text, mark = DOCS.read_text(), f"<!-- {options.out.stem} -->"
    if options.out.resolve().parent == RESULTS.parent and mark in text:
        before, rest = text.split(mark)
        _, after = rest.split("<!-- end -->", maxsplit=1)
        lines = [mark, *table(result), "<!-- end -->"]
        write_whole(DOCS, before + "\n".join(lines) + after)
    return 0


def pairs(tests: Mapping[str, dict[str, Any]], work: Path) -> Iterator[dict[str, Any]]:
    """Yield each test that was run both on torch's classes and on our ranks."""
    found = {side: read(work / f"{side}.jsonl") for side in SIDES}
    for name, line in tests.items():
        # If forked processes give another verdict than ours, the spawned ones count.
        theirs = found["forked"].get(name) or found["torch"].get(name)
        ours = found["adopted"].get(name)
        if theirs and ours and theirs["verdict"] != ours["verdict"]:
            theirs = found["torch"].get(name) or theirs
        if theirs and ours:
            spawned = found["torch"].get(name, {}).get("cpu_s")
            yield {
                "id": name,
                "base": line["base"],
                "torch": theirs["verdict"],
                "ours": ours["verdict"],
                "torch_reason": theirs["reason"],
                "our_reason": ours["reason"],
                "torch_spawned_cpu_s": spawned,
                "torch_forked_cpu_s": found["forked"].get(name, {}).get("cpu_s"),
                "our_cpu_s": ours["cpu_s"],
            }


def table(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page's table."""
    groups = defaultdict(list)
    for test in result["tests"]:
        groups[test["id"].split("::")[0], test["base"]].append(test)
    left_out = [t for t in result["tests"] if _POISONED in t["torch_reason"]]
    tests = [t for t in result["tests"] if t not in left_out]
    same = sum(test["torch"] == test["ours"] for test in tests)
    yield ""
    yield (
        f"{len({file for file, _ in groups})} files, {len(tests)} tests, "
        f"{same} with the same verdict ({100 * same / max(1, len(tests)):.1f} %)."
    )
    if left_out:
        passed = sum(test["ours"] == "passed" for test in left_out)
        yield (
            f"{len(left_out)} more were skipped by torch's class because an earlier "
            f"test of theirs had failed: here {passed} of them pass and "
            f"{len(left_out) - passed} fail."
        )
    yield ""
    for base in BASES:
        of_base = [t for t in tests if t["base"] == base]
        theirs_s, ours_s, count = cost(of_base)
        if ours_s:
            each = [cost([t]) for t in of_base]
            times = statistics.median(a / max(b, 0.01) for a, b, n in each if n)
            yield (
                f"`{base}`: {count} tests run by spawned processes, too; CPU of both, "
                f"test by test, from setUp to tearDown: {theirs_s:.1f} s by torch's "
                f"class, {ours_s:.1f} s here, 1/{theirs_s / ours_s:.0f}"
                # The others spawn once for a class: its first test pays for all.
                + (
                    f"; the median test takes 1/{times:.0f}." * (base == BASES[1])
                    or "."
                )
            )
            floor = [t["torch_forked_cpu_s"] for t in of_base if cost([t])[2]]
            if None not in floor:
                yield (
                    "By torch's class with forked processes, which import nothing, "
                    f"they take {sum(floor):.1f} s, which is about the tests' own work."
                )
            yield ""
    yield (
        "| file | class | tests | same verdict | passed | CPU s of n tests: torch's, "
        "spawned (n) | here | times | median of all here |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for (file, base), group in groups.items():
        theirs_s, ours_s, count = cost(group)
        figures = "| | |"
        if count:
            times = theirs_s / max(ours_s, 0.01)
            figures = f"{theirs_s:.1f} ({count}) | {ours_s:.2f} | {times:.0f} |"
        yield (
            f"| `{file}` | `{base}` | {len(group)} | "
            f"{sum(t in tests and t['torch'] == t['ours'] for t in group)} | "
            f"{sum(t['ours'] == 'passed' for t in group)} | {figures} "
            f"{statistics.median(t['our_cpu_s'] for t in group):.2f} |"
        )
    yield ""
    for test in tests:
        if test["torch"] != test["ours"]:
            yield (
                f"- `{test['id']}`: {test['torch']} by torch's class "
                f"({test['torch_reason'] or 'no reason'}), {test['ours']} here "
                f"({test['our_reason'] or 'no reason'})"
            )
    made = result["provenance"]
    yield ""
    yield (
        f"{result['origin']}. torch {made['torch']}, Python {made['python']}, "
        f"{made['cores']} cores, CPU, gloo, load {made['load']}, {made['date']}; "
        f"seed {made['seed']}."
    )
    yield ""


def cost(tests: Iterable[Mapping[str, Any]]) -> tuple[float, float, int]:
    """Return the CPU seconds of torch's classes and of ours, and the number of tests.

    Args:
        tests: Tests; those that spawned no process (skipped ones) are left out.
    """
    both = [t for t in tests if (t["torch_spawned_cpu_s"] or 0.0) > _SPAWNED_S]
    theirs_s = sum(t["torch_spawned_cpu_s"] for t in both)
    return theirs_s, sum(t["our_cpu_s"] for t in both), len(both)


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    """Return the versions and the machine of the figures."""
    return {
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "most": options.most,
        "share": options.share,
        "seed": options.seed,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    sys.exit(main())
