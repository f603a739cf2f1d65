"""The leader's ear: who is not heard any more, and who has only been late."""

import time
from typing import Any, cast

import pytest

from gradparity.multiprocess.elastic.pulse import SILENCE_S, Listener


class Store:
    """Beats of ranks 1 and 2, as the test has them."""

    def __init__(self) -> None:
        self.beats = [0, 0]

    def check(self, keys: list[str]) -> bool:
        return keys == ["beat/1", "beat/2"]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [str(beat).encode() for beat in self.beats]


class Ear:
    """A listener whose clock is the test's; it looks once a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.store = Store()
        self.listener = Listener(cast(Any, self.store), 3)

    def heard(self, *beating: int, seconds: int) -> list[list[int]]:
        """What is told in each of the next seconds, in which these ranks beat."""
        told = []
        for _ in range(seconds):
            self.now += 1.0
            for rank in beating:
                self.store.beats[rank - 1] += 1
            told.append(self.listener.silent())
        return told


@pytest.fixture
def ear(monkeypatch: pytest.MonkeyPatch) -> Ear:
    return Ear(monkeypatch)


LIMIT = int(SILENCE_S)


def test_who_beats_is_heard(ear: Ear) -> None:
    assert not any(ear.heard(1, 2, seconds=3 * LIMIT))


def test_one_who_falls_silent_is_told_after_the_limit(ear: Ear) -> None:
    ear.heard(1, 2, seconds=5)
    told = ear.heard(1, seconds=LIMIT + 1)
    assert told[-1] == [2] and not any(told[:-1])


def test_who_fall_silent_at_once_are_told_together(ear: Ear) -> None:
    ear.heard(1, 2, seconds=5)
    ear.heard(1, seconds=3)  # the last beat of rank 1 came through, of rank 2 not
    told = ear.heard(seconds=LIMIT + 1)
    assert told[-1] == [1, 2] and not any(told[:-1])


def test_who_was_only_late_is_not_told_with_the_silent(ear: Ear) -> None:
    ear.heard(1, 2, seconds=5)
    ear.heard(1, seconds=3)
    assert not any(ear.heard(seconds=LIMIT - 1))
    assert ear.heard(1, seconds=1) == [[2]]


def test_a_leader_that_slept_accuses_nobody(ear: Ear) -> None:
    ear.heard(1, 2, seconds=5)
    ear.now += 100.0
    assert ear.listener.silent() == []
    assert not any(ear.heard(1, 2, seconds=LIMIT))
