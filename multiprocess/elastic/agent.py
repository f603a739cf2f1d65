"""Station: a process of torchrun that looks after one rank of each world.

The rank itself is a child, forked as those of a ``Cluster`` are: whatever becomes of
it, even in native code, the station sees it end or ends it, and can tell.

1. All stations enlist in torchrun's store. Rank 0's leads: its ``StationCluster`` takes
   calls; the others ``follow``.
2. The leader posts an order. The stations whose rank is in that world muster it: fork,
   join the process group; the others wait for the next order. When all are ready the
   leader says go, and the clock starts.
3. Each station watches its rank and posts what it saw. The leader judges.
4. On SIGTERM, which torchrun sends when one of its processes has ended, the stations
   call the roll: who does not answer is the cause. Where that is the leader, the first
   that is left stands in for it.

Nothing here goes through the process group under test.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from .. import pickling
from ..errors import HarnessError, WorldFailure
from ..messages import Kind
from ..outcomes import RankOutcome
from ..parent.root_cause import outcomes_of
from ..parent.watch import Fact
from ..spec import CallOptions, Isolation, WorldSpec
from . import pulse
from . import store as mail
from .local_rank import OthersRanks, OwnRanks
from .membership import ANSWER_S, MEET_S, Roll
from .orders import Card, Finish, Order, pack, unpack

_REPORT_S = 20.0
_LATENESS_S = 0.3


class Ended(BaseException):
    """The run is over for this station; the text says why."""


class Station:
    """This process's part in a run under torchrun; a context manager."""

    def __init__(self, gpus: int = 0) -> None:
        """Enlist.

        Args:
            gpus: CUDA devices that this process can see.
        """
        env = os.environ
        self.rank = int(env["RANK"])
        self.size = int(env["WORLD_SIZE"])
        self.attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.hosts = int(env.get("GROUP_WORLD_SIZE", "1"))
        local_size = int(env.get("LOCAL_WORLD_SIZE", self.size))
        self._store = mail.torchrun_store("station")
        run = f"gradparity/{self.attempt}/{self.size}"  # ranks know no attempt
        self._own = OwnRanks(self.rank, local_size, self.hosts, run)
        self._roll = Roll(self._store, self.rank, self.size)
        self._calls = 0
        self._terminated = False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._listener = pulse.Listener(self._store, self.size) if self.leads else None
        self._pulse = None if self.leads else pulse.Pulse(self.rank)
        if self._pulse is not None:
            self._pulse.start()
        self._roll.enlist(gpus, local_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def leads(self) -> bool:
        """Whether this is the leader."""
        return self.rank == 0

    def close(self) -> None:
        """End the ranks of this station; the process is expected to end, too."""
        if self._pulse is not None:
            self._pulse.stop()
        self._own.end()
        # torchrun ends all when the first has ended: not before our exit code is out
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def cards(self) -> list[Card]:
        """Every station's card, in rank order; waits for all of them.

        Raises:
            HarnessError: One did not come.
        """
        return self._roll.cards(self.check)

    def follow(self) -> int:
        """Take part in what the leader orders until it is done.

        Returns:
            The exit code.

        Raises:
            Ended: torchrun ended the stations.
        """
        try:
            while True:
                order = self._next_order()
                if isinstance(order, Finish):
                    mail.flag(self._store, f"bye/{self.rank}")
                    return order
                if self.rank < order.spec.size:
                    self._serve(order)
        except Exception as error:
            self._roll.confess(f"its process raised {type(error).__name__}: {error}")
            raise

    def finish(self, code: int) -> None:
        """Let the followers go; the leader's last call."""
        self._post_order(code)
        # torchrun ends all when the first has failed: it should not be told of -15
        until = time.monotonic() + ANSWER_S
        for rank in range(1, self.size):
            mail.wait(self._store, f"bye/{rank}", max(0.0, until - time.monotonic()))

    def note(self, name: str, text: str) -> None:
        """Leave a note for who may have to stand in for the leader."""
        mail.put(self._store, f"note/{name}", text.encode())

    def noted(self, name: str) -> str:
        """What the leader noted, or the empty string."""
        found = mail.read(self._store, f"note/{name}", 0.0)
        return "" if found is None else found.decode()

    def stands_in(self) -> bool:
        """Whether the leader is gone and this is the first station that is left."""
        return self._roll.first_left() == self.rank and self._roll.is_gone(0)

    def wait_for_the_end(self) -> int:
        """Wait for the leader, or for who stands in for it, to have reported."""
        mail.wait(self._store, "reported", ANSWER_S + _REPORT_S)
        return 3

    def reported(self) -> None:
        """Tell the others that the report is written: they may end."""
        mail.flag(self._store, "reported")

    def check(self) -> None:
        """Raise if the run is over.

        Raises:
            Ended: torchrun has asked this process to end.
            HarnessError: Stations are no longer heard; the leader finds out.
        """
        if self._terminated:
            self._terminated = False  # said once; the rest is an orderly end
            raise Ended(self._roll.call())
        silent = self._listener.silent() if self._listener else []
        if silent:
            self._listener = None
            raise HarnessError(self._roll.unheard(silent))

    # -- the leader's side of one call

    def _lead(self, order: Order) -> tuple[bool, list[Fact]]:
        """Carry out ``order`` on all stations.

        Returns:
            Whether all ranks were ready, and one fact a rank: of the call, or of the
            muster.
        """
        try:
            return self._led(order)
        except HarnessError:
            self._call_off()
            raise

    def _led(self, order: Order) -> tuple[bool, list[Fact]]:
        self._post_order(order)
        size = order.spec.size
        limit_s = order.spec.start_timeout_s + _REPORT_S
        ready = self._gather("start", self._muster(order), size, limit_s)
        going = all(f.reply and f.reply.kind is Kind.READY for f in ready)
        mail.flag(self._store, self._key("go"), "go" if going else "no")
        if not going:
            self._own.disband(order.spec)
            return False, ready
        fact = self._carry_out(order)
        limit_s = order.options.timeout_s + order.spec.grace_s + _REPORT_S
        return True, self._gather("fact", fact, size, limit_s)

    def _call_off(self) -> None:
        """Have who can still be reached leave this call and look for the next order."""
        with contextlib.suppress(HarnessError):  # the store itself may be gone
            mail.flag(self._store, self._key("go"), "no")
            for phase in ("start", "run"):
                mail.flag(self._store, self._key("fault", phase))

    def _gather(self, what: str, own: Fact, size: int, limit_s: float) -> list[Fact]:
        facts = [own]
        for rank in range(1, size):
            key = self._key(what, rank)
            found = mail.read(self._store, key, limit_s, self._looker(rank))
            if found is None:
                raise HarnessError(
                    f"rank {rank}: {self._roll.state(rank)}, {limit_s:g} s"
                )
            mail.remove(self._store, key)
            facts.append(unpack(found, Fact))
        return facts

    def _looker(self, rank: int) -> Callable[[], None]:
        """Raises when waiting for ``rank`` has become useless."""
        since = time.monotonic()

        def look() -> None:
            self.check()
            if time.monotonic() - since > _LATENESS_S and self._roll.is_gone(rank):
                raise HarnessError(f"rank {rank}: {self._roll.state(rank)}")

        return look

    def _post_order(self, order: Order | Finish) -> None:
        self._calls += 1
        if self.size > 1:
            mail.put(self._store, self._key("order"), pack(order))

    # -- every station's side

    def _next_order(self) -> Order | Finish:
        self._calls += 1
        while True:
            try:
                found = self._read_order(MEET_S, self.check)
            except Ended:
                found = self._read_order(0.0)
                if not isinstance(found, Finish):
                    raise
            if found is not None:
                return found

    def _read_order(
        self, limit_s: float, look: Callable[[], None] = lambda: None
    ) -> Order | Finish | None:
        key, followers = self._key("order"), self.size - 1
        found = mail.read_by_all(self._store, key, followers, limit_s, look)
        if found is None:
            return None
        order: Order | Finish = unpack(found, Order | Finish)  # type: ignore[arg-type]
        return order

    def _serve(self, order: Order) -> None:
        self._post("start", self._muster(order))
        limit_s = order.spec.start_timeout_s + 2 * _REPORT_S
        told = mail.wait(self._store, self._key("go"), limit_s, self.check)
        if told and self._store.get(self._key("go")) == b"go":
            self._post("fact", self._carry_out(order))
        else:
            self._own.disband(order.spec)

    def _post(self, what: str, fact: Fact) -> None:
        mail.put(self._store, self._key(what, self.rank), pack(fact))

    def _muster(self, order: Order) -> Fact:
        """Have this station's rank ready; say so, or what became of it."""
        return self._own.muster(order, self._others("start"))

    def _carry_out(self, order: Order) -> Fact:
        return self._own.carry_out(order, self._others("run"))

    def _others(self, phase: str) -> OthersRanks:
        return OthersRanks(self._store, self._key("fault", phase), self.check)

    def _key(self, what: str, who: object = "") -> str:
        return f"{what}/{self._calls}/{who}"

    def _on_sigterm(self, number: int, frame: object) -> None:
        self._terminated = True  # raised where it is safe, by check()


class StationCluster:
    """A ``Cluster`` whose ranks the stations look after; for the leader."""

    def __init__(self, station: Station, spec: WorldSpec) -> None:
        """Describe the world; nothing is started yet.

        Args:
            station: The leader.
            spec: What the world is asked to be.
        """
        if not station.leads:
            raise HarnessError(f"rank {station.rank} cannot lead: rank 0 does")
        if spec.size > station.size:
            raise HarnessError(f"needs {spec.size} ranks, torchrun made {station.size}")
        self.spec = spec
        self._station = station
        self._world = 0
        self._fresh_group = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass  # the ranks end with their stations

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        isolation: Isolation | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn`` on every rank of the world; return every rank's result.

        Raises:
            WorldFailure: At least one rank did not return.
            HarnessError: A station cannot be reached any more.
            Ended: torchrun ended the stations.
        """
        options = CallOptions(
            timeout_s=self.spec.timeout_s if timeout_s is None else timeout_s,
            isolation=isolation or self.spec.isolation,
        )
        outcomes = self.submit(options, fn, *args, **kwargs)
        return [outcome.value for outcome in outcomes]

    def submit(
        self, options: CallOptions, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[RankOutcome, ...]:
        """Call ``fn`` on every rank of the world; return every rank's outcome."""
        payload = pickling.dumps((fn, args, kwargs))
        warm = self._world > 0 and options.isolation != "process"
        ready, facts = self._attempt(options, payload, new=not warm)
        if warm and not ready:  # lost between two calls: nobody's fault
            _, facts = self._attempt(options, payload, new=True)
        outcomes, root = outcomes_of(facts)
        if root is not None:
            self._world = 0
            raise WorldFailure(outcomes, outcomes[root])
        replies = [fact.reply for fact in facts]
        self._fresh_group = not all(reply and reply.reusable for reply in replies)
        return outcomes

    def _attempt(
        self, options: CallOptions, payload: bytes, *, new: bool
    ) -> tuple[bool, list[Fact]]:
        if new:
            self._world = self._station._calls + 1  # never used before
        order = Order(
            spec=self.spec,
            options=options,
            payload=payload,
            world=self._world,
            fresh_group=not new and (self._fresh_group or options.isolation == "group"),
        )
        return self._station._lead(order)
