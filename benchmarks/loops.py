"""Time a step of other people's trainers with torch's scaler, with ours and with none.

gradparity bench loops, from a source checkout; packages that are not
installed are left out and named. Writes results/loops.json and the tables of
docs/integrations/cost.md; with ``--tables`` from the record alone.

On two gloo ranks, one thread each, the three arms of a trainer live in one process, in
a thread each. A trainer that asks for its next batch waits there until it is its turn,
so exactly one of them runs, and the time from one request to the next is a whole step
of its loop. In each round every arm makes one step, in another order; a ratio is of
two steps of the same round. Ranks start each step at one moment of the clock, and the
slower one counts. The processors' time of a step, of all threads of a rank, is taken
beside it: it has no waits, and other load on the machine hardly moves it. A trainer is
made anew in several worlds: where an arm's tensors lie in memory favours it by up to
two percent, for as long as its process lives.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

from gradparity.benchmarks import loop_trainers
from gradparity.benchmarks.loop_trainers import ARMS, LENGTH, LOOPS, ROWS
from gradparity.benchmarks.tables import row, write_between
from gradparity.benchmarks.together import start_together
from gradparity.multiprocess import Cluster
from gradparity.multiprocess.rank import flight_recorder

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "loops.json"
PAGE = ROOT / "docs" / "integrations" / "cost.md"
WORLDS, ROUNDS, LEAST, WARM_UP = 5, 12, 6, 3
GOAL = 1.02
"""Largest permitted ratio of our time to torch's."""


class Turns:
    """Batches for one trainer, which gets each batch only when it has its turn."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        made = torch.Generator().manual_seed(0)
        tokens = torch.randint(256, (ROWS, LENGTH + 1), generator=made)
        self.batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(self.count):
            self.wait()
            yield self.batch
        self.wait()  # one that fetches ahead still has a batch to train on

    def wait(self) -> None:
        """Let the other trainers run until this trainer has its turn."""
        self.done.release()
        self.go.acquire()


class Arm(threading.Thread):
    """Thread that runs one trainer with one scaler."""

    def __init__(self, name: str, train: Callable[..., Any], count: int) -> None:
        super().__init__(daemon=True)
        self.arm, self.train, self.turns = name, train, Turns(count)
        self.scaler: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Train to the end of the data."""
        torch.set_num_threads(1)  # torch keeps this setting per thread
        try:
            self.scaler = self.train(self.arm, self.turns)
        except BaseException as error:
            self.error = error
        finally:
            self.turns.done.release()

    def until_it_waits(self) -> None:
        """Wait until the trainer asks for a batch or has ended."""
        self.turns.done.acquire()
        self.check()

    def to_the_end(self) -> None:
        """Let a trainer that waits for a batch reach the end of its data."""
        self.turns.go.release()
        self.join()
        self.check()

    def check(self) -> None:
        """Raise the trainer's exception, if it had one."""
        if self.error is not None:
            raise RuntimeError(f"the trainer of arm {self.arm!r} stopped") from (
                self.error
            )

    def step(self) -> tuple[float, float]:
        """Return wall and CPU seconds from handing out a batch to the next request."""
        start_together()
        start, cpu = time.perf_counter(), time.process_time()
        self.turns.go.release()
        self.until_it_waits()
        return time.perf_counter() - start, time.process_time() - cpu


def time_steps(
    name: str, rounds: int, warm_up: int = WARM_UP
) -> dict[str, list[tuple[float, float]]]:
    """Return arm -> times of each step, as from ``Arm.step``; runs on every rank.

    The first ``warm_up`` steps are not timed.
    """
    torch.set_num_threads(1)
    flight_recorder.uninstall()  # training has none
    train = LOOPS[name][2]
    count = warm_up + rounds
    arms = {arm: Arm(arm, train, count) for arm in ARMS}
    for arm in arms.values():
        arm.start()
        arm.until_it_waits()  # two setups at the same time would mix their collectives
    seconds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    # Every order equally often: which arm comes first after another must not favour
    # one.
    orders = [*permutations(ARMS)]
    for number in range(count):
        for which in orders[number % len(orders)]:
            seconds[which].append(arms[which].step())
    for arm in arms.values():
        arm.to_the_end()
    # A step that was skipped costs less: a figure with one in it is refused.
    for which in ("torch", "ours"):
        state = arms[which].scaler.state_dict()
        found = (state["scale"], state["_growth_tracker"])
        if found != (loop_trainers.SETTINGS["init_scale"], count):
            raise RuntimeError(
                f"{name}: the scaler of arm {which!r} took {found[1]} of {count} steps "
                f"and has the scale {found[0]:g}: what was timed is not {count} steps"
            )
    return {which: times[warm_up:] for which, times in seconds.items()}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return bounds that contain the median with 95 %, for any distribution.

    The bounds are order statistics: the number of values below the median is binomial.
    """
    ordered, n = sorted(values), len(values)
    # The number of values below the median is binomial (n, 1/2): n / 2, plus or minus
    # 1.96 standard deviations of sqrt(n) / 2.
    below = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2) - 1)
    return ordered[below], ordered[n - 1 - below]


def summary(steps: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return a row of the page, from the steps of the slower rank."""
    none, theirs, ours = (steps[arm] for arm in ARMS)
    ratios = [o / t for o, t in zip(ours, theirs, strict=True)]
    low, high = median_interval(ratios)
    quarters = statistics.quantiles(ratios, n=4)
    met = "met" if high <= GOAL else "missed" if low > GOAL else "undecided"

    def more(arm: Sequence[float]) -> float:
        return statistics.median(a - n for a, n in zip(arm, none, strict=True))

    return {
        "ms": {arm: 1e3 * statistics.median(steps[arm]) for arm in ARMS},
        "scaler_ms": {"torch": 1e3 * more(theirs), "ours": 1e3 * more(ours)},
        "ratio": statistics.median(ratios),
        "interval": [low, high],
        "quartiles": [quarters[0], quarters[2]],
        "goal": met,
    }


def measure(names: Sequence[str], rounds: int, worlds: int) -> dict[str, Any]:
    """Time each trainer on two ranks, in several worlds of many rounds each."""
    found: dict[str, Any] = {}
    for name in names:
        clock: dict[str, list[float]] = {arm: [] for arm in ARMS}
        cpu: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for _ in range(worlds):
            with Cluster(2, timeout_s=600) as cluster:
                ranks = cluster.run(time_steps, name, rounds)
            for arm in ARMS:
                for steps in zip(*(rank[arm] for rank in ranks), strict=True):
                    clock[arm].append(max(by_clock for by_clock, _ in steps))
                    cpu[arm].append(max(of_cpu for _, of_cpu in steps))
        found[name] = {
            **summary(clock),
            "cpu": summary(cpu),
            "steps_ms": _ms(clock),
            "cpu_steps_ms": _ms(cpu),
        }
        print(_line(name, found[name]), flush=True)
    return found


def _ms(steps: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {arm: [round(1e3 * s, 3) for s in times] for arm, times in steps.items()}


def _line(name: str, made: Mapping[str, Any]) -> str:
    low, high = made["interval"]
    times = ", ".join(f"{arm} {made['ms'][arm]:.1f} ms" for arm in ARMS)
    ratio = f"ours over torch's {made['ratio']:.4f} ({low:.4f} to {high:.4f})"
    cpu = f"of CPU time {made['cpu']['ratio']:.4f}"
    return f"{name}: {times}; {ratio}: {made['goal']}; {cpu}"


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the page's table, and the text on how it was measured."""
    made = record["provenance"]
    lines = [
        row(
            "trainer",
            "no scaler, ms",
            "torch's adds, ms",
            "ours adds, ms",
            "ours over torch's",
            "95 % of the median",
            "half of all rounds",
            f"at most {GOAL:g}",
            "of CPU time",
        ),
        row(*["---"] * 9),
    ]
    for name, each in record["loops"].items():
        adds = (each["scaler_ms"][arm] for arm in ("torch", "ours"))
        within = (
            f"{a:.3f} to {b:.3f}" for a, b in (each["interval"], each["quartiles"])
        )
        lines.append(
            row(
                name,
                f"{each['ms']['none']:.1f}",
                *(f"{ms:.2f}" for ms in adds),
                f"{each['ratio']:.3f}",
                *within,
                each["goal"],
                "{:.3f} ({:.3f} to {:.3f})".format(
                    each["cpu"]["ratio"], *each["cpu"]["interval"]
                ),
            )
        )
    versions = ", ".join(f"{n} {v}" for n, v in made["versions"].items())
    absent = ", ".join(made["absent"])
    where = (
        f"`{made['command']}`, {made['worlds']} worlds of {made['rounds']} rounds, "
        f"{made['machine']}, "
        f"{versions}, Python {made['python']}, {made['date']}, load {made['load']} at "
        f"the start, {made['seconds']} s."
    )
    if absent:
        where += f" Not installed: {absent}."
    return {"cost": "\n".join(lines), "made": where}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the record and write the page."""
    parser = argparse.ArgumentParser(
        prog="gradparity bench loops",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*LOOPS],
        default=[*LOOPS],
        metavar="TRAINER",
        help="; ".join(LOOPS),
    )
    parser.add_argument("--worlds", type=int, default=WORLDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in each world")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--tables", action="store_true", help="from the record alone")
    options = parser.parse_args(argv)
    if options.worlds < 1:
        parser.error(f"--worlds: got {options.worlds}, expected at least 1")
    if options.rounds < LEAST:
        parser.error(
            f"--rounds: got {options.rounds}, expected at least {LEAST}: fewer ratios "
            "do not hold their median with 95 %"
        )
    if not options.tables:
        there = {n: importlib.util.find_spec(LOOPS[n][1]) for n in options.only}
        names = [name for name, found in there.items() if found]
        packages = dict.fromkeys(["torch", *(LOOPS[n][0] for n in names)])
        load, start = round(os.getloadavg()[0], 1), time.monotonic()
        found = measure(names, options.rounds, options.worlds)
        record = {
            "provenance": {
                "command": "gradparity bench loops",
                "worlds": options.worlds,
                "rounds": options.rounds,
                "versions": {package: version(package) for package in packages},
                "python": platform.python_version(),
                "machine": f"{os.cpu_count()} cores, CPU, gloo, 2 ranks of one thread",
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "load": load,
                "seconds": round(time.monotonic() - start),
                "absent": [name for name, found in there.items() if not found],
            },
            "loops": found,
        }
        draft = options.json.with_suffix(".new")
        text = json.dumps(record, indent=1)
        # a list of numbers on one line: there are thousands
        text = re.sub(r"\[[^][{}]*\]", lambda part: " ".join(part[0].split()), text)
        draft.write_text(text + "\n")
        draft.replace(options.json)
    if options.json == RESULT:
        write_between(PAGE, tables(json.loads(RESULT.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
