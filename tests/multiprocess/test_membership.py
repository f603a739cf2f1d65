"""The leader's monitor: which agents are silent, and which have only been late."""

import threading
import time
from typing import Any, cast

import pytest

from gradparity.multiprocess import linux
from gradparity.multiprocess.elastic.membership import (
    SILENCE_S,
    Heartbeat,
    HeartbeatMonitor,
)


class Store:
    """Stand-in for torchrun's store, with heartbeats of ranks 1 and 2."""

    def __init__(self) -> None:
        self.beats = [0, 0]

    def check(self, keys: list[str]) -> bool:
        return keys == ["heartbeat/1", "heartbeat/2"]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [str(beat).encode() for beat in self.beats]


class Clock:
    """Heartbeat monitor with a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(linux, "now_s", lambda: self.now)
        self.store = Store()
        self.monitor = HeartbeatMonitor(cast(Any, self.store), 3)

    def pass_time(self, *beating: int, seconds: int) -> list[list[int]]:
        """Return the silent ranks at each second; only ``beating`` send heartbeats."""
        found = []
        for _ in range(seconds):
            self.now += 1.0
            for rank in beating:
                self.store.beats[rank - 1] += 1
            found.append(self.monitor.silent())
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


LIMIT = int(SILENCE_S)


def test_an_agent_with_heartbeats_is_not_silent(clock: Clock) -> None:
    assert not any(clock.pass_time(1, 2, seconds=3 * LIMIT))


def test_a_silent_agent_is_named_after_the_limit(clock: Clock) -> None:
    clock.pass_time(1, 2, seconds=5)
    found = clock.pass_time(1, seconds=LIMIT + 1)
    assert found[-1] == [2] and not any(found[:-1])


def test_agents_that_fall_silent_together_are_named_together(clock: Clock) -> None:
    clock.pass_time(1, 2, seconds=5)
    clock.pass_time(1, seconds=3)  # the last beat of rank 1 came through, of rank 2 not
    found = clock.pass_time(seconds=LIMIT + 1)
    assert found[-1] == [1, 2] and not any(found[:-1])


def test_a_late_agent_is_not_named_with_a_silent_one(clock: Clock) -> None:
    clock.pass_time(1, 2, seconds=5)
    clock.pass_time(1, seconds=3)
    assert not any(clock.pass_time(seconds=LIMIT - 1))
    assert clock.pass_time(1, seconds=1) == [[2]]


def test_a_leader_that_was_suspended_reports_no_agent_as_lost(clock: Clock) -> None:
    clock.pass_time(1, 2, seconds=5)
    clock.now += 100.0
    assert clock.monitor.silent() == []
    assert not any(clock.pass_time(1, 2, seconds=LIMIT))


def test_no_heartbeat_is_on_its_way_when_the_process_goes_on_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began = threading.Event()

    class SlowStore:
        def set(self, key: str, value: str) -> None:
            if value != "0":
                began.set()
                time.sleep(0.5)  # in native code, without the interpreter's lock

    monkeypatch.setattr("gradparity.multiprocess.elastic.membership._INTERVAL_S", 0.0)
    heartbeat = Heartbeat(cast(Any, SlowStore()), 1)
    heartbeat.start()
    began.wait()
    heartbeat.stop()
    assert not heartbeat.is_alive()
