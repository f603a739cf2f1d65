"""The benchmark of steps in trainers' loops: turns, ratios, and record."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gradparity.benchmarks import loops
from gradparity.benchmarks.loop_trainers import ARMS
from gradparity.benchmarks.loops import Arm, Turns, median_interval, summary
from gradparity.multiprocess import Cluster

STEPS = 4


class Busy:
    """Counts trainers that run at once, and the batches of each."""

    def __init__(self) -> None:
        self.now, self.most, self.lock = 0, 0, threading.Lock()
        self.trained: dict[str, int] = {}

    def train(self, arm: str) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self.trained[arm] = self.trained.get(arm, 0) + 1
        with self.lock:
            self.now -= 1


def plain(busy: Busy, arm: str, batches: Turns) -> None:
    for _ in batches:
        busy.train(arm)


def fetches_ahead(busy: Busy, arm: str, batches: Turns) -> None:
    source: Iterator[Any] = iter(batches)
    held = next(source, None)
    while held is not None:
        following = next(source, None)
        busy.train(arm)
        held = following


def counts_steps(busy: Busy, arm: str, batches: Turns) -> None:
    source = iter(batches)
    for _ in range(len(batches)):
        next(source)
        busy.train(arm)


def test_one_trainer_runs_at_a_time_and_all_of_them_to_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loops, "start_together", lambda: None)
    busy = Busy()
    arms = [
        Arm(loop.__name__, lambda a, b, loop=loop: loop(busy, a, b), STEPS)
        for loop in (plain, fetches_ahead, counts_steps)
    ]
    for arm in arms:
        arm.start()
        arm.until_it_waits()
    assert not busy.trained
    for _ in range(STEPS):
        for arm in arms:
            assert min(arm.step()) >= 0
    for arm in arms:
        arm.to_the_end()
    assert busy.most == 1
    assert list(busy.trained.values()) == [STEPS] * 3


def test_a_trainer_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "start_together", lambda: None)

    def breaks(_arm: str, batches: Turns) -> None:
        for _ in batches:
            raise ValueError("no such layer")

    arm = Arm("ours", breaks, STEPS)
    arm.start()
    arm.until_it_waits()
    with pytest.raises(RuntimeError, match="arm 'ours' stopped") as caught:
        arm.step()
    assert "no such layer" in str(caught.value.__cause__)
    arm.join()


def times(ours: list[float]) -> dict[str, list[float]]:
    return {"none": [0.9] * len(ours), "torch": [1.0] * len(ours), "ours": ours}


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        ([1.0] * 20, "met"),
        ([1.01] * 17 + [1.5] * 3, "met"),
        ([1.03] * 20, "missed"),
        ([1.0] * 10 + [1.05] * 10, "undecided"),
    ],
)
def test_a_goal_is_met_only_where_the_whole_interval_is(
    ours: list[float], told: str
) -> None:
    found = summary(times(ours))
    assert found["goal"] == told
    assert found["ms"] == pytest.approx(
        {"none": 900, "torch": 1000, "ours": found["ms"]["ours"]}
    )
    assert found["scaler_ms"]["torch"] == pytest.approx(100)


def test_the_interval_of_the_median_follows_from_order_statistics() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    # of 100 tosses of a fair coin 40 to 60 are heads, with 96.5 %
    assert median_interval([float(n) for n in range(1, 101)]) == (40.0, 61.0)


def test_the_page_shows_what_was_recorded() -> None:
    record = json.loads(loops.RESULT.read_text())
    page = loops.PAGE.read_text()
    for name, table in loops.tables(record).items():
        assert f"<!-- recorded: {name} -->\n\n{table}\n\n<!-- end -->" in page
    for each in record["loops"].values():
        steps = {arm: [ms / 1e3 for ms in each["steps_ms"][arm]] for arm in ARMS}
        assert summary(steps)["ratio"] == pytest.approx(each["ratio"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.extras("accelerate")
@pytest.mark.filterwarnings("ignore")  # the package warns about itself
def test_a_real_trainer_is_timed_step_by_step() -> None:
    with Cluster(2, timeout_s=200) as cluster:
        for found in cluster.run(loops.time_steps, "accelerate, DDP", 1, 0):
            assert list(found) == list(ARMS)
            for steps in found.values():
                assert len(steps) == 1
                assert all(clock > 0 and cpu > 0 for clock, cpu in steps)
