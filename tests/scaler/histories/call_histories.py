"""The search over call histories, as tests of a scaler.

hypothesis draws a history of calls. All ranks of a warm cluster make these calls with
the scaler, and compare each with the oracle (`follow`). A history in which a call
differs is shrunk. ``tests/scaler/test_histories.py`` searches the scaler of this
repository. To search another one, write a class in a test file::

    from gradparity.tests.scaler.histories.call_histories import CallHistories


    class TestMine(CallHistories):
        scaler = "mine:GradScaler"

``pytest`` draws the same few histories of each family every time. With
``HISTORY_MINUTES=10`` in the environment it draws new ones for ten minutes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from gradparity.multiprocess import Cluster, RankState, WorldError

from .follow import EITHER, HANGS, Departure, follow
from .history import FAMILIES, History, histories, parse

__all__ = ["CallHistories", "Ranks", "Search"]

FIXED, ROUND = 8, 100
"""Number of histories of a family: drawn every time, and in each round of a search."""
SHRINK_S = 20.0
"""Seconds for which a failing history is shrunk."""
QUICK_S, PATIENT_S = 4.0, 15.0
"""Seconds that ranks wait for each other: at first, and to confirm a hang."""


class _Departs(Exception):
    """Raised for a difference, so that hypothesis shrinks the history."""


class Ranks(dict[int, Cluster]):
    """Warm clusters by world size, made on first use."""

    def __missing__(self, world_size: int) -> Cluster:
        self[world_size] = made = Cluster(world_size)
        # what a history imports is imported before ranks wait for each other
        nothing = History(frozenset(), world_size, ())
        made.run(follow, nothing, "torch.amp:GradScaler", ".", PATIENT_S)
        return made

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for cluster in self.values():
            cluster.close()

    def departure(
        self, history: History, scaler: str, *, quick: bool = False
    ) -> Departure | None:
        """Return the first call in which a scaler differs from the oracle, or None.

        Args:
            history: the calls.
            scaler: ``module:attribute``.
            quick: true to report a hang without a second run.
        """
        found = self._departure(history, scaler, QUICK_S)
        if found is not None and HANGS in found.text and not quick:
            # a busy machine is no departure
            found = self._departure(history, scaler, PATIENT_S)
        return found

    def _departure(
        self, history: History, scaler: str, patience_s: float
    ) -> Departure | None:
        # long enough also where each rank waits in each of its calls
        cluster = self[history.world_size].with_options(timeout_s=2 * patience_s + 8)
        try:
            seen = cluster.run(follow, history, scaler, os.getcwd(), patience_s)
        except WorldError as failure:
            text = " ".join(failure.root.headline.split())[:300]
            hung = failure.root.state is RankState.HUNG
            if hung or "wait timeout" in text.lower():
                return Departure(f"{HANGS}: {text}", history.calls)
            raise
        wrong = {rank: at for rank, at in enumerate(seen) if at is not None and at.text}
        if not wrong:
            return None
        text = "; ".join(f"rank {rank}: {at.text}" for rank, at in wrong.items())
        if HANGS in text:  # these ranks may be blocked: begin with new ones
            self.pop(history.world_size).close()
        return Departure(text, next(iter(wrong.values())).made)


class Search:
    """Search of one family for the shortest history in which a scaler differs."""

    def __init__(self, ranks: Ranks, scaler: str, family: str) -> None:
        self.ranks, self.scaler, self.family = ranks, scaler, family
        self.known: dict[History, Departure | None] = {}
        self.smallest: History | None = None
        self.departure = ""

    def run(self, seconds: float | None = None, shrink_s: float = SHRINK_S) -> None:
        """Draw the fixed histories, or new ones for some seconds, until one fails."""
        self.shrink_s = shrink_s
        self.end = math.inf if seconds is None else time.monotonic() + seconds
        search = settings(
            max_examples=FIXED if seconds is None else ROUND,
            derandomize=seconds is None,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )(given(histories(FAMILIES[self.family]))(self._try))
        try:
            search()
            while seconds is not None and time.monotonic() < self.end:
                search()  # hypothesis has no budget of time
        except _Departs:
            pass

    def _try(self, history: History) -> None:
        if history not in self.known:
            if time.monotonic() > self.end:
                return  # what is not known passes, which ends the drawing or shrinking
            hangs = HANGS in self.departure
            found = self.ranks.departure(history, self.scaler, quick=hangs)
            self.known[history] = found
        found = self.known[history]
        # in the same way as the first: no fault hides another
        if found and _kind(found.text) == _kind(self.departure or found.text):
            if not self.departure:
                self.end = time.monotonic() + self.shrink_s
            self.smallest = replace(history, calls=found.made or history.calls)
            self.departure = found.text
            raise _Departs


def _kind(departure: str) -> tuple[bool, ...]:
    words = ("raised", "refused", "accepted", "returned", EITHER)
    hangs = HANGS in departure
    return (hangs, *(word in departure and not hangs for word in words))


class CallHistories:
    """Tests of one scaler; see this module.

    Attributes:
        scaler: ``module:attribute``, imported by each rank.
        families: keys of ``FAMILIES`` to test; all by default. Calls of methods that
            the scaler lacks are left out.
        histories: lines that a failure printed; each is tested again.
    """

    scaler: ClassVar[str]
    families: ClassVar[Collection[str]] = tuple(FAMILIES)
    histories: ClassVar[Collection[str]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls) -> Iterator[Ranks]:
        with Ranks() as made:
            yield made

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.parametrize("case", [*self.families, *self.histories])

    def test_follows_the_oracle(self, ranks: Ranks, case: str) -> None:
        if case in FAMILIES:
            self.search(ranks, case)
        elif found := ranks.departure(parse(case), self.scaler):
            pytest.fail(found.text, pytrace=False)

    def search(self, ranks: Ranks, family: str) -> None:
        """Draw histories of one family; fail if a scaler differs in one."""
        begun, minutes = time.monotonic(), os.environ.get("HISTORY_MINUTES")
        search = Search(ranks, self.scaler, family)
        if minutes is None:
            search.run()
        else:
            workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
            search.run(float(minutes) * 60 * workers / len(self.families))
        tried, calls = len(search.known), sum(len(h.calls) for h in search.known)
        print(f"{family}: {tried} histories, {calls} calls on each rank")
        if search.departure:
            pytest.fail(
                f"{search.departure}\nin {str(search.smallest)!r}, of {tried} "
                f"histories in {time.monotonic() - begun:.0f} s; as one of `histories` "
                "of this class it is run again",
                pytrace=False,
            )
