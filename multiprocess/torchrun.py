"""The same calls on ranks that torchrun made: every rank runs the same program.

Nobody watches from outside here, so each rank watches itself:

1. all ranks meet over the store, and the clock starts;
2. a thread looks after the call: on the limit, or soon after another rank's fault, it
   dumps the stacks, aborts the process group and interrupts the main thread;
3. each rank posts what it saw; all wait until all have posted (the store is torchrun's,
   not the group under test) and come to the same verdict.
"""

from __future__ import annotations

import datetime
import faulthandler
import io
import itertools
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

# A public name of torch.distributed, which does not export it to mypy.
from torch._C._distributed_c10d import PrefixStore

from . import linux
from .elastic import store as mail
from .elastic.orders import pack, unpack
from .errors import HarnessError, WorldFailure
from .messages import Kind, Reply
from .outcomes import RankOutcome
from .parent.root_cause import outcomes_of
from .parent.watch import Fact
from .rank import trail, worker
from .rank import world as world_module
from .rank.flight_recorder import install, uninstall
from .rank.global_state import restored_settings, seed_everything
from .rank.world import World
from .spec import CallOptions, Isolation, WorldSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MEET_S = 600.0
"""How long a rank waits for the others to come to a call."""

_REPORT_S = 20.0
_POLL_S = 0.05
_OWN_FRAME = re.compile(r"/multiprocess/(pytest_plugin/remote|torchrun)\.py")
_INTERRUPT = signal.SIGUSR2

_numbers = itertools.count()
"""Of the clusters that this program makes, the same on every rank."""


class Interrupted(BaseException):
    """Raised in the main thread of a rank that its own watch gave up."""


class TorchrunCluster:
    """A ``Cluster`` on the ranks of torchrun; every rank makes the same calls."""

    def __init__(self, **settings: Any) -> None:
        """Join the ranks that torchrun made.

        Args:
            **settings: Fields of ``WorldSpec``; the size is torchrun's.
        """
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        self.spec = WorldSpec(size=self.size, **settings)
        self._store = mail.torchrun_store(f"cluster{next(_numbers)}")
        self._kept = linux.sockets()
        self._calls = 0
        self._groups = 0
        self._fresh = True
        self._closed = False
        self._world = self._make_world()
        self._trail_fd = trail.create(1)
        self._trail = trail.TrailWriter(self._trail_fd, 0, 1)
        install(self._trail)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the process group; the others leave after rank 0.

        torchrun ends all ranks when one has failed: rank 0 must have reported by then.
        Collectives are torch's own again.
        """
        if self._closed:
            return
        self._closed = True
        uninstall()
        os.close(self._trail_fd)
        if self.rank == 0:
            self._store.set("closed", "")
        else:
            with suppress(HarnessError):  # rank 0 may have held the store
                mail.wait(self._store, "closed", MEET_S)
        if dist.is_initialized():
            dist.destroy_process_group()
        world_module._set_current(None)

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        isolation: Isolation | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn`` on every rank; return every rank's result, on every rank."""
        options = CallOptions(
            timeout_s=self.spec.timeout_s if timeout_s is None else timeout_s,
            isolation=isolation or self.spec.isolation,
        )
        outcomes = self.submit(options, fn, *args, **kwargs)
        return [outcome.value for outcome in outcomes]

    def submit(
        self, options: CallOptions, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[RankOutcome, ...]:
        """Call ``fn`` on every rank; return every rank's outcome, on every rank."""
        self._calls += 1
        self._meet()
        if self._fresh or options.isolation != "pool":
            self._make_group()
        fact = self._observed(options, lambda: fn(*args, **kwargs))
        limit_s = options.timeout_s + self.spec.grace_s + _REPORT_S
        facts = self._exchange(fact, limit_s)
        outcomes, root = outcomes_of(facts)
        self._fresh = root is not None or any(
            fact.reply is None or not fact.reply.reusable for fact in facts
        )
        if root is not None:
            raise WorldFailure(outcomes, outcomes[root])
        return outcomes

    def _make_world(self) -> World:
        local = int(os.environ.get("LOCAL_RANK", self.rank))
        made = World(
            rank=self.rank,
            size=self.size,
            backend=self.spec.backend,
            device=worker._device(self.spec, local),
            seed=self.spec.seed,
            make_store=lambda: PrefixStore(f"user{self._calls}", self._store),
        )
        world_module._set_current(made)
        return made

    def _make_group(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self._world._new_group()
        self._groups += 1
        dist.init_process_group(
            self.spec.backend,
            store=PrefixStore(f"group{self._groups}", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(hours=2),
        )
        self._fresh = False

    def _meet(self) -> None:
        self._store.set(f"meet/{self._calls}/{self.rank}", "")
        for rank in range(self.size):
            if not mail.wait(self._store, f"meet/{self._calls}/{rank}", MEET_S):
                raise HarnessError(
                    f"rank {rank} did not come to call {self._calls} within {MEET_S} s"
                )

    def _observed(self, options: CallOptions, call: Callable[[], Any]) -> Fact:
        output = io.StringIO()
        self._trail.clear()
        self._world._new_call()
        watch = _SelfWatch(
            self._store, self._kept, self._calls, options.timeout_s, self.spec.grace_s
        )
        group = dist.group.WORLD
        reply: Reply | None
        with (
            restored_settings(),
            redirect_stdout(output),
            redirect_stderr(output),
        ):
            seed_everything(self.spec.seed)
            try:
                with watch:
                    value = call()
                pickled = worker._pickled_result(value)
                reply = worker._reply(Kind.OK, value=pickled)
            except BaseException as error:
                watch.report_fault()
                reply = None if watch.gave_up else worker._raised(error, reusable=True)
        same = dist.is_initialized() and dist.group.WORLD is group
        return Fact(
            rank=self.rank,
            # The ranks may be on several machines: their only common clock.
            reply=reply and replace(reply, ended_at_s=time.time(), reusable=same),
            waited_s=watch.waited_s,
            stacks=watch.stacks,
            collectives=trail.read(self._trail_fd, 0),
            output=worker._encodable(output.getvalue()),
        )

    def _exchange(self, fact: Fact, limit_s: float) -> list[Fact]:
        prefix = f"fact/{self._calls}"
        mail.put(self._store, f"{prefix}/{self.rank}", pack(fact))
        facts = []
        for rank in range(self.size):
            key = f"{prefix}/{rank}"
            found = mail.read_by_all(self._store, key, self.size, limit_s)
            missing = Fact(rank=rank, waited_s=limit_s)
            facts.append(missing if found is None else unpack(found, Fact))
        return facts


class _SelfWatch:
    """Ends the main thread's call when its time is up or another rank failed."""

    def __init__(
        self,
        store: Store,
        kept: frozenset[str],
        call: int,
        limit_s: float,
        grace_s: float,
    ) -> None:
        self._store = store
        self._key = f"fault/{call}"
        self._began = time.monotonic()
        self._until = self._began + limit_s
        self._grace_s = grace_s
        self._kept = kept
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self.gave_up = False
        self.stacks = ""
        self.waited_s = 0.0

    def __enter__(self) -> None:
        self._handler = signal.signal(_INTERRUPT, self._interrupt)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        signal.signal(_INTERRUPT, self._handler)
        self.waited_s = time.monotonic() - self._began

    def report_fault(self) -> None:
        """Tell the others that this rank has failed."""
        self._store.set(self._key, "")

    def _look(self) -> None:
        noticed = False
        while not self._done.wait(_POLL_S):
            if not noticed and self._store.check([self._key]):
                noticed = True
                self._until = min(self._until, time.monotonic() + self._grace_s)
            if time.monotonic() >= self._until:
                return self._give_up()

    def _give_up(self) -> None:
        stacks = _stacks()
        if self._done.is_set():
            return  # it has just ended: the stacks are not of the call
        self.gave_up, self.stacks = True, stacks
        self._store.set(self._key, "")
        group = dist.group.WORLD
        if group is not None:
            group.abort()  # wakes who waits in an NCCL collective
        linux.shut_sockets(self._kept)  # ... in a gloo one
        main = threading.main_thread().ident
        while main is not None and not self._done.wait(0.5):
            signal.pthread_kill(main, _INTERRUPT)  # ... and anywhere else

    def _interrupt(self, number: int, frame: object) -> None:
        if not self._done.is_set():
            raise Interrupted("given up by the rank's own watch")


def _stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    # The main thread comes last; below the test's own frames there is only pytest.
    main = "Thread 0x" + text.rpartition("hread 0x")[2]
    lines = main.splitlines()
    ours = (n for n, line in enumerate(lines) if _OWN_FRAME.search(line))
    return "\n".join(lines[: next(ours, None)])
