"""Ranks that are threads of one process, on torch's threaded process group.

Torch's group exchanges the tensors; :mod:`.turns` decides which thread runs: one at a
time, in the same order in every run, each with separate settings, generators and
streams.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from ..errors import NotSimulatedError
from ..messages import Kind, Reply, Simulated, SimulatedRun, Simulation
from . import flight_recorder, flight_records, world
from .global_state import put_state, taken_state
from .turns import Abandoned, Expired, RankThread, Turns
from .worker import made_reply, pickled_result, raised

REAL = 'choose backend="gloo"'


def simulate(plan: Simulation) -> SimulatedRun:
    """Run a call on threads; in the process that they share."""
    with _simulated(plan) as ranks:
        return ranks.run()


class _Ranks:
    """The ranks of one simulation."""

    def __init__(self, plan: Simulation, records_fd: int) -> None:
        self._plan = plan
        self._store = HashStore()
        self._records_fd = records_fd
        self._replies: list[Reply | None] = [None] * plan.size
        self._outputs = [io.StringIO() for _ in range(plan.size)]
        self._writers = [
            flight_records.RecordWriter(records_fd, rank, plan.size)
            for rank in range(plan.size)
        ]
        self.sums = _Sums()
        self.turns = Turns([self._state_of(rank) for rank in range(plan.size)])

    def run(self) -> SimulatedRun:
        """Run all ranks; return their outcomes."""
        took_s = self.turns.run(self._body, self._plan.limit_s)
        return SimulatedRun(
            ranks=tuple(self._outcome(thread) for thread in self.turns.ranks),
            took_s=took_s,
            busy=None if self.turns.in_time else self.turns.current.rank,
            summed=self.sums.largest,
            epsilon=self.sums.epsilon,
        )

    def _state_of(self, rank: int) -> tuple[Any, ...]:
        with (
            mock.patch.multiple(
                sys, stdout=self._outputs[rank], stderr=self._outputs[rank]
            ),
            mock.patch.dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank)),
        ):
            os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(
                self._plan.size
            )
            return taken_state()

    def _outcome(self, thread: RankThread) -> Simulated:
        return Simulated(
            reply=self._replies[thread.rank],
            ended_at_s=thread.ended_at_s,
            stacks=thread.stacks,
            collectives=flight_records.read(self._records_fd, thread.rank),
            output=self._outputs[thread.rank].getvalue(),
        )

    def _body(self, rank: int) -> None:
        """Run one rank; an exception becomes its reply."""
        plan = self._plan
        excepthook = sys.excepthook
        world._of_thread.world = world.World(
            rank=rank,
            size=plan.size,
            backend="simulated",
            device=torch.device("cpu"),
            seed=plan.seed,
            make_store=lambda: _SharedStore(self._store, self.turns),  # type: ignore[arg-type,return-value]
        )
        try:
            dist.init_process_group(
                "threaded", rank=rank, world_size=plan.size, store=HashStore()
            )
            sys.excepthook = excepthook  # wrapped again for each rank
            fn, args, kwargs = pickle.loads(plan.payload)
            value = pickled_result(fn(*args, **kwargs))
            self._replies[rank] = made_reply(Kind.OK, value=value)
        except Abandoned:
            raise
        except BaseException as error:
            self._replies[rank] = raised(error, reusable=True)
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    # What torch's group calls, in place of waiting on locks.

    def start(self, collective: Any, group: Any) -> Any:
        """Return what the ranks of a group take part in now."""
        running = threaded.ProcessLocalGroup._cur_coll_on_pgs
        name = group.pg_name
        if name not in running:
            running[name] = threaded.Collective(group.size(), collective, type(group))
        elif type(running[name]._collective) is not type(collective):
            self._never()
        return running[name]

    def join(self, running: Any, rank: int, data: Any) -> Any:
        """Take part in a collective, as rank ``rank`` of its group."""
        # The last rank to come does the work for all, as in torch's group; the threads
        # of the others have no turn before.
        running._data[rank] = data
        running._count += 1
        if running._count == running._world_size:
            if self._differ(running):
                self._never()
            self.sums.see(running)
            running._collective.work(running._data)
            running._done = True
        else:
            self.turns.wait(lambda: bool(running._done))
        return threaded.ret_work(data)

    def record(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Note a collective of the rank whose turn it is, as a ``RecordWriter``."""
        return self._writers[self.turns.current.rank].record(*args, **kwargs)

    def ended(self, record: tuple[int, int]) -> None:
        """Note its end."""
        self._writers[self.turns.current.rank].ended(record)

    def _never(self) -> None:
        """Wait forever, as real ranks do; once all ranks wait, the world ends."""
        self.turns.wait(lambda: False)

    @staticmethod
    def _differ(running: Any) -> bool:
        """Whether the ranks' tensors differ where they must not."""
        if not isinstance(running._collective, _ALIKE):
            return False
        first = _signature(running._data[0])
        return any(_signature(data) != first for data in running._data[1:])


class _Sums:
    """How large a difference the order of summation can make."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.epsilon = 0.0

    def see(self, running: Any) -> None:
        """Look at what a collective is about to add up."""
        work, data = running._collective, running._data
        # Two addends have one sum: floating-point addition commutes.
        ordered = running._world_size > 2
        if not ordered or getattr(work, "op", None) not in _ADDING:
            return
        if isinstance(work, threaded.AllReduce):
            addends = list(zip(*data, strict=True))
        elif isinstance(work, threaded.ReduceScatter):
            addends = list(zip(*(each[1][0] for each in data), strict=True))
        else:
            return
        for tensors in addends:
            if tensors[0].is_floating_point() and tensors[0].numel():
                total = torch.stack([t.detach().double().abs() for t in tensors]).sum(0)
                finite = total[total.isfinite()]
                largest = float(finite.max()) if finite.numel() else 0.0
                self.largest = max(self.largest, largest)
                self.epsilon = max(self.epsilon, torch.finfo(tensors[0].dtype).eps / 2)


def _signature(tensors: Any) -> list[tuple[Any, ...]]:
    return [(t.dtype, t.shape) for t in threaded.flatten_list(tensors)]


_ALIKE = (threaded.AllReduce, threaded.Broadcast)
_ADDING = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


class _SharedStore:
    """``World.store``: waiting for a key gives the turn to other ranks."""

    def __init__(self, store: HashStore, turns: Turns) -> None:
        self._store = store
        self._turns = turns

    def get(self, key: str) -> bytes:
        """Return a value; wait until another rank has set it."""
        self.wait([key])
        return bytes(self._store.get(key))

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """Wait until all of these are set.

        Raises:
            DistStoreError: No rank is left that could set them.
        """
        try:
            self._turns.wait(
                lambda: bool(self._store.check(list(keys))),
                may_expire=timeout is not None,
            )
        except Expired:
            raise dist.DistStoreError(f"no rank sets {', '.join(keys)}") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@contextlib.contextmanager
def _simulated(plan: Simulation) -> Iterator[_Ranks]:
    """Have torch's group and this package serve threads."""
    group = threaded.ProcessLocalGroup
    fd = flight_records.create(plan.size)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        # First in, so undone last: what the ranks set goes after all patches have gone.
        stack.callback(put_state, taken_state())
        ranks = _Ranks(plan, fd)
        stack.enter_context(threaded_world())
        replacements: tuple[tuple[Any, dict[str, Any]], ...] = (
            (group, _refused_methods(group)),
            (group, {"_start_coll": ranks.start, "barrier": _barrier}),
            (threaded.Collective, {"join": lambda *args: ranks.join(*args)}),
            # Its purpose is that no thread runs ahead, which none does.
            (threaded, {"_store_based_barrier": lambda *args, **kwargs: None}),
            *refused_calls(),
        )
        for owner, replaced in replacements:
            stack.enter_context(mock.patch.multiple(owner, **replaced))
        stack.enter_context(flight_recorder.redirected(ranks, group))  # type: ignore[arg-type]
        yield ranks


def _barrier(group: threaded.ProcessLocalGroup, opts: object = None) -> Any:
    # torch's has the default dtype, which may differ between ranks.
    return group.allreduce([torch.ones(1, dtype=torch.int64)])


@contextlib.contextmanager
def threaded_world() -> Iterator[None]:
    """Give each thread process groups of its own, and put ours back later."""
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    excepthook = sys.excepthook
    threaded._install_threaded_pg()
    isolate(True)
    threaded.ProcessLocalGroup.reset()
    try:
        yield
    finally:
        isolate(False)
        threaded._uninstall_threaded_pg()
        sys.excepthook = excepthook


def refused_calls() -> Iterator[tuple[Any, dict[str, Callable[..., Any]]]]:
    """Return what would act on the one process of all ranks, refusing."""
    why = "the simulated ranks share one process"
    for owner, names in ((os, ("fork", "forkpty", "_exit", "kill", "abort")),):
        yield owner, {n: refusing(f"os.{n}", why) for n in names}
    names = ("signal", "alarm", "raise_signal", "setitimer", "pthread_kill")
    yield signal, {n: refusing(f"signal.{n}", why) for n in names}


def refusing(what: str, why: str, way_out: str = REAL) -> Callable[..., Any]:
    """Return a function that says that a simulated rank cannot do this."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotSimulatedError(f"simulated ranks cannot do {what}: {why}; {way_out}")

    return refuse


def _refused_methods(group: type[dist.ProcessGroup]) -> dict[str, Callable[..., Any]]:
    why = "torch's threaded process group has none"
    return {
        name: refusing(name, why)
        for name in flight_recorder.METHODS
        if name not in vars(group) and hasattr(group, name)
    }
