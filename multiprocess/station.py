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
import pickle
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from . import linux, mail, pickling, pulse
from .blame import outcomes_of
from .context import current_context
from .crew import LOST, Crew
from .errors import HarnessError, WorldFailure
from .messages import Kind, Meeting, Reply, Run, Start
from .outcomes import RankOutcome
from .spec import CallOptions, Isolation, WorldSpec
from .watch import Fact, Watch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MEET_S = 600.0
"""How long the stations wait for each other at the start."""

ANSWER_S = 2.0
"""How long a station may take to answer the roll."""

_REPORT_S = 20.0
_LATENESS_S = 0.3


class Ended(BaseException):
    """The run is over for this station; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the leader asks of the stations whose rank is in that world."""

    spec: WorldSpec
    options: CallOptions
    payload: bytes
    """Pickled ``(fn, args, kwargs)``."""

    world: int
    """Number of the world; one that is not known yet asks for new ranks."""

    fresh_group: bool


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The leader's last order."""

    code: int
    """Exit code of every station."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a station tells of itself when it enlists."""

    place: str
    """Stations with the same place can see each other's processes."""

    pid: int
    gpus: int
    """CUDA devices that it can see."""

    local_size: int
    """Ranks on its machine."""

    host: str = "?"
    """What torchrun and the kernel call its machine."""


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
        self._local_rank = int(env.get("LOCAL_RANK", self.rank))
        self._local_size = int(env.get("LOCAL_WORLD_SIZE", self.size))
        self._store = mail.torchrun_store("station")
        self._meeting_prefix = (
            f"gradparity/{self.attempt}/{self.size}/world"  # ranks know no attempt
        )
        self._crews: dict[WorldSpec, tuple[int, Crew]] = {}
        self._calls = 0
        self._terminated = False
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._listener = pulse.Listener(self._store, self.size) if self.leads else None
        self._pulse = None if self.leads else pulse.Pulse(self.rank)
        if self._pulse is not None:
            self._pulse.start()
        card = Card(
            place=_place(),
            pid=os.getpid(),
            gpus=gpus,
            local_size=self._local_size,
            host=f"{env.get('GROUP_RANK', '0')} ({socket.gethostname()})",
        )
        mail.put(self._store, f"card/{self.rank}", pickle.dumps(card))

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
        for spec in list(self._crews):
            self._disband(spec)
        # torchrun ends all when the first has ended: not before our exit code is out
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def cards(self) -> list[Card]:
        """Every station's card, in rank order; waits for all of them.

        Raises:
            HarnessError: One did not come.
        """
        found = [self._card(rank, MEET_S) for rank in range(self.size)]
        missing = [rank for rank, card in enumerate(found) if card is None]
        if missing:
            raise HarnessError(f"rank {missing[0]} did not come within {MEET_S:g} s")
        return [card for card in found if card is not None]

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
                    return order.code
                if self.rank < order.spec.size:
                    self._serve(order)
        except Exception as error:
            text = f"its process raised {type(error).__name__}: {error}"
            mail.put(self._store, f"cause/{self.rank}", text.encode())
            raise

    def finish(self, code: int) -> None:
        """Let the followers go; the leader's last call."""
        self._post_order(Finish(code=code))
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
        first = next(r for r in range(self.size) if self._answers(r))
        return first == self.rank and self._is_gone(0)

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
            raise Ended(self._roll_call())
        silent = self._listener.silent() if self._listener else []
        if silent:
            self._listener = None
            raise HarnessError(self._unheard(silent))

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
            self._disband(order.spec)
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
                raise HarnessError(f"rank {rank}: {self._state(rank)}, {limit_s:g} s")
            mail.remove(self._store, key)
            facts.append(pickle.loads(found))
        return facts

    def _looker(self, rank: int) -> Callable[[], None]:
        """Raises when waiting for ``rank`` has become useless."""
        since = time.monotonic()

        def look() -> None:
            self.check()
            if time.monotonic() - since > _LATENESS_S and self._is_gone(rank):
                raise HarnessError(f"rank {rank}: {self._state(rank)}")

        return look

    def _post_order(self, order: Order | Finish) -> None:
        self._calls += 1
        mail.put(self._store, self._key("order"), pickle.dumps(order))

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
        found = mail.read(self._store, self._key("order"), limit_s, look)
        order: Order | Finish | None = None if found is None else pickle.loads(found)
        return order

    def _serve(self, order: Order) -> None:
        self._post("start", self._muster(order))
        limit_s = order.spec.start_timeout_s + 2 * _REPORT_S
        told = mail.wait(self._store, self._key("go"), limit_s, self.check)
        if told and self._store.get(self._key("go")) == b"go":
            self._post("fact", self._carry_out(order))
        else:
            self._disband(order.spec)

    def _post(self, what: str, fact: Fact) -> None:
        mail.put(self._store, self._key(what, self.rank), pickle.dumps(fact))

    def _muster(self, order: Order) -> Fact:
        """Have this station's rank ready; say so, or what became of it."""
        number, crew = self._crews.get(order.spec, (0, None))
        if number == order.world and crew is not None:
            if crew.intact():
                ready = Reply(kind=Kind.READY, ended_at_s=time.time())
                return Fact(rank=self.rank, reply=ready)
            return Fact(rank=self.rank, exit_code=crew.ranks[0].exit_code or LOST)
        self._disband(order.spec)
        crew = Crew(order.spec, (self.rank,))
        self._crews[order.spec] = order.world, crew
        start = Start(
            spec=order.spec,
            rank=self.rank,
            context=current_context(),
            meeting=self._meeting(order.world),
        )
        crew.ranks[0].send(start, order.spec.start_timeout_s)
        return self._watched(crew, order.spec.start_timeout_s, "start")

    def _carry_out(self, order: Order) -> Fact:
        _, crew = self._crews[order.spec]
        crew.runs += 1
        run = Run(
            payload=order.payload,
            number=crew.runs,
            fresh_group=order.fresh_group,
            context=None,
        )
        crew.ranks[0].send(run, order.options.timeout_s)
        return self._watched(crew, order.options.timeout_s, "run")

    def _watched(self, crew: Crew, limit_s: float, phase: str) -> Fact:
        others = _Others(self._store, self._key("fault", phase), self.check)
        (fact,) = Watch(crew, limit_s, crew.spec.grace_s, others).facts()
        if fact.reply is None:
            self._disband(crew.spec)  # nobody will ask for a rank that hangs
        return _on_common_clock(fact)

    def _disband(self, spec: WorldSpec) -> None:
        _, crew = self._crews.pop(spec, (0, None))
        if crew is not None:
            crew.kill()

    def _meeting(self, world: int) -> Meeting:
        return Meeting(
            host=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            prefix=f"{self._meeting_prefix}{world}",
            local_rank=self._local_rank,
            local_size=self._local_size,
            one_host=self.hosts == 1,
        )

    def _key(self, what: str, who: object = "") -> str:
        return f"{what}/{self._calls}/{who}"

    # -- who is still there

    def _on_sigterm(self, number: int, frame: object) -> None:
        self._terminated = True  # raised where it is safe, by check()

    def _roll_call(self) -> str:
        """Answer the roll and name who does not."""
        mail.flag(self._store, f"here/{self.rank}")
        until = time.monotonic() + ANSWER_S
        silent = [
            rank
            for rank in range(self.size)
            if not mail.wait(
                self._store, f"here/{rank}", max(0.0, until - time.monotonic())
            )
        ]
        if not silent:
            return "ended by torchrun (SIGTERM) on all ranks"
        # who is known to be gone before who may be on a host that hears of it later
        found = sorted(silent, key=lambda rank: not self._is_gone(rank))
        causes = [f"rank {rank}: {self._state(rank)}" for rank in found]
        return f"{'; '.join(causes[:4])} (torchrun then ended the others)"

    def _answers(self, rank: int) -> bool:
        return mail.wait(self._store, f"here/{rank}", 0.0)

    def _state(self, rank: int) -> str:
        """What is known of the station of ``rank``, in words."""
        cause = mail.read(self._store, f"cause/{rank}", 0.0)
        if cause is not None:
            return cause.decode()
        if self._is_gone(rank):
            return "its process is gone"
        return "its process does not answer"

    def _unheard(self, silent: list[int]) -> str:
        by_host: dict[str, list[int]] = {}
        for rank in silent:
            card = self._card(rank, 0.0)
            by_host.setdefault(card.host if card else "?", []).append(rank)
        who = "; ".join(
            f"host {host}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for host, ranks in by_host.items()
        )
        return (
            f"not heard for {pulse.SILENCE_S:g} s: {who}; the link is cut, or the host "
            "is down"
        )

    def _is_gone(self, rank: int) -> bool:
        card = self._card(rank, 0.0)
        if card is None or card.place != _place():
            return False  # not to be seen from here
        return linux.process_state(card.pid) in ("", "Z")

    def _card(self, rank: int, limit_s: float) -> Card | None:
        found = mail.read(self._store, f"card/{rank}", limit_s, self.check)
        card: Card | None = None if found is None else pickle.loads(found)
        return card


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


class _Others:
    """The ranks of the other stations, as far as the store tells of them."""

    def __init__(self, store: Store, key: str, check: Callable[[], None]) -> None:
        self._store = store
        self._key = key
        self._check = check
        self._failed = False

    def failed(self) -> bool:
        """Whether one of them has failed; raises when the run is over."""
        self._check()
        self._failed = self._failed or mail.wait(self._store, self._key, 0.0)
        return self._failed

    def tell(self) -> None:
        """Have them know that one of ours has failed."""
        self._failed = True
        mail.flag(self._store, self._key)


def _on_common_clock(fact: Fact) -> Fact:
    """With times that ranks of several machines have in common."""
    ahead_s = time.time() - time.monotonic()
    reply = fact.reply
    if reply is not None:
        reply = replace(reply, ended_at_s=reply.ended_at_s + ahead_s)
    return replace(fact, reply=reply, ended_at_s=fact.ended_at_s + ahead_s)


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
