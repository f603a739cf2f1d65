"""Ranks that are threads of one process, on torch's own threaded process group.

One thread runs at a time, and others run while it waits for them: so each rank has its
own generators, streams and settings of the process, which are swapped at these moments.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from .. import linux
from ..errors import NotSimulatedError
from ..messages import Kind, Reply, Simulated, SimulatedRun, Simulation
from ..outcomes import Place
from ..report import ended_without
from . import flight_recorder, flight_records, torch_internals, world
from .global_state import put_state, taken_state
from .worker import made_reply, pickled_result, raised

_LOOK_S = 0.02
_UNWIND_S = 1.0
threaded = torch_internals.threaded_groups()
_Group = threaded.ProcessLocalGroup


def simulate(plan: Simulation) -> SimulatedRun:
    """Run a call on threads; in the process that they share."""
    fd = flight_records.create(plan.world_size)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        # First in, so undone last: what the ranks set goes after all patches have gone.
        stack.callback(put_state, taken_state())
        ranks = _Ranks(plan, fd)
        stack.enter_context(_threaded_world())
        replacements: tuple[tuple[Any, dict[str, Any]], ...] = (
            (_Group, _refused_methods()),
            (_Group, {"_start_coll": ranks.start, "barrier": _barrier}),
            (threaded.Collective, {"join": ranks.joining(threaded.Collective.join)}),
            # Its purpose is that no thread runs ahead, which none does.
            (threaded, {"_store_based_barrier": lambda *args, **kwargs: None}),
            *_refused_calls(),
        )
        for owner, replaced in replacements:
            stack.enter_context(mock.patch.multiple(owner, **replaced))
        stack.enter_context(flight_recorder.recorded_too(_Group))
        return ranks.run()


class _Ranks:
    """The ranks of one simulation."""

    def __init__(self, plan: Simulation, fd: int) -> None:
        self._plan = plan
        self._fd = fd
        self._running = threading.Lock()
        """Held by the one thread that runs."""

        self._store = _SharedStore(HashStore(), self._others_run)
        self._outputs = [io.StringIO() for _ in range(plan.world_size)]
        self._replies: dict[int, Reply] = {}
        self._left_by: dict[int, int] = {}
        self._base = taken_state()

    def run(self) -> SimulatedRun:
        """Run all ranks until they have ended, or will not."""
        began = linux.now_s()
        plan, ranks = self._plan, range(self._plan.world_size)
        threads = [
            threading.Thread(target=self._run_rank, args=(rank,), daemon=True)
            for rank in ranks
        ]
        for thread in threads:
            thread.start()
        until = began + plan.limit_s
        # Looked up once a round: the last rank may reply at any moment.
        while (
            unfinished := [r for r in ranks if r not in self._replies]
        ) and linux.now_s() < until:
            threads[unfinished[0]].join(_LOOK_S)
            failed = any(r.kind is Kind.RAISED for r in self._replies.copy().values())
            if failed or self._waits_without_end():
                until = min(until, linux.now_s() + plan.grace_s)
        # Looked at before the threads that wait are unwound, so that their `finally`
        # blocks run; one that is busy cannot be, and ends with the process.
        took_s, frames = linux.now_s() - began, sys._current_frames()
        found = [self._outcome(r, frames.get(threads[r].ident or 0)) for r in ranks]
        if len(self._replies) < plan.world_size:
            _Group.exception_handle(SystemExit())
        for thread in threads:
            thread.join(_UNWIND_S / plan.world_size)
        return SimulatedRun(ranks=tuple(found), took_s=took_s)

    def _waits_without_end(self) -> bool:
        if self._left_by:
            return False
        ended = {r: flight_records.read(self._fd, r) for r in list(self._replies)}
        for rank in set(range(self._plan.world_size)) - ended.keys():
            call = flight_records.read_current(self._fd, rank)
            without = None if call is None else ended_without(call, ended)
            if without is not None:
                self._left_by[rank] = without
        return bool(self._left_by)

    def _outcome(self, rank: int, frame: Any) -> Simulated:
        reply = self._replies.get(rank)
        return Simulated(
            reply=reply,
            place=flight_records.read_place(self._fd, rank)[0],
            left_by=self._left_by.get(rank),
            stacks="" if reply else _stack(frame),
            collectives=flight_records.read(self._fd, rank),
            output=self._outputs[rank].getvalue(),
        )

    def _run_rank(self, rank: int) -> None:
        """Run one rank; an exception becomes its reply."""
        plan = self._plan
        flight_recorder.record_thread(
            flight_records.RecordWriter(self._fd, rank, plan.world_size)
        )
        with flight_recorder.placed(Place.TURN):
            self._running.acquire()
        put_state(self._base)
        excepthook = sys.excepthook
        self._set_up(rank)
        try:
            dist.init_process_group(
                "threaded", rank=rank, world_size=plan.world_size, store=HashStore()
            )
            sys.excepthook = excepthook  # wrapped again for each rank
            fn, args, kwargs = pickle.loads(plan.payload)
            value = pickled_result(fn(*args, **kwargs))
            reply = made_reply(Kind.OK, value=value)
        except BaseException as error:
            if _Group._terminate.is_set():  # it was unwound  # noqa: SLF001  # torch's threaded group
                return
            reply = raised(error, reusable=True)
        finally:
            # Of a rank that has ended its own group there is none left.
            with contextlib.suppress(AssertionError, ValueError):
                dist.destroy_process_group()
            self._running.release()
        self._replies[rank] = reply

    def _set_up(self, rank: int) -> None:
        plan = self._plan
        sys.stdout = sys.stderr = self._outputs[rank]
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(
            WORLD_SIZE=str(plan.world_size), LOCAL_WORLD_SIZE=str(plan.world_size)
        )
        world._of_thread.world = world.World(  # noqa: SLF001  # its own world
            rank=rank,
            world_size=plan.world_size,
            backend="simulated",
            device=torch.device("cpu"),
            _make_store=lambda: self._store,  # type: ignore[arg-type,return-value]
        )

    @contextlib.contextmanager
    def _others_run(self) -> Iterator[None]:
        """Let other threads run inside this context, and then be as before."""
        state = taken_state()
        self._running.release()
        try:
            yield
        finally:
            with flight_recorder.placed(Place.TURN):
                self._running.acquire()
            put_state(state)

    # What torch's group calls.

    def joining(self, join: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's wait for the other ranks of a collective; they run then."""

        def others_join(running: Any, rank: int, data: Any) -> Any:
            with self._others_run():
                return join(running, rank, data)

        return others_join

    def start(self, collective: Any, group: Any) -> Any:
        """Return what the ranks of a group take part in now."""
        running, name = _Group._cur_coll_on_pgs, group.pg_name  # noqa: SLF001  # torch's threaded group
        if name not in running:
            checked = _Checked(collective)
            running[name] = threaded.Collective(group.size(), checked, type(group))
        first, here = running[name]._collective.kind, type(collective).__name__  # noqa: SLF001  # torch's threaded group
        if first != here:
            raise RuntimeError(
                f"the ranks disagree on a collective: {here} here, {first} on another"
            )
        return running[name]


class _Checked:
    """A collective of torch's group that refuses tensors which must not differ."""

    def __init__(self, collective: Any) -> None:
        self.kind = type(collective).__name__
        self._collective = collective

    def work(self, data: Any) -> None:
        """Do what the collective does, on the tensors of all its ranks."""
        if isinstance(self._collective, threaded.AllReduce | threaded.Broadcast):
            each = [
                [(str(t.dtype), list(t.shape)) for t in threaded.flatten_list(part)]
                for part in data
            ]
            for number, mine in enumerate(each):
                if mine != each[0]:
                    raise RuntimeError(
                        f"the ranks disagree on the tensors of {self.kind}: rank "
                        f"{number} of its group has {mine}, rank 0 has {each[0]}"
                    )
        self._collective.work(data)


class _SharedStore:
    """``World.store``: other ranks run while one waits for a key."""

    def __init__(self, store: HashStore, others_run: Callable[[], Any]) -> None:
        self._store = store
        self._others_run = others_run

    def get(self, key: str) -> bytes:
        """Return a value; wait until another rank has set it."""
        with self._others_run():
            return bytes(self._store.get(key))

    def wait(self, keys: Sequence[str], *limit: Any) -> None:
        """Wait until all of these are set."""
        with self._others_run():
            self._store.wait(list(keys), *limit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def _barrier(group: Any, opts: object = None) -> Any:
    # torch's has the default dtype, which may differ between ranks.
    return group.allreduce([torch.ones(1, dtype=torch.int64)])


@contextlib.contextmanager
def _threaded_world() -> Iterator[None]:
    """Give each thread process groups of its own, and put ours back later."""
    excepthook = sys.excepthook
    try:
        with torch_internals.isolated_threads():
            yield
    finally:
        sys.excepthook = excepthook


def _refused_calls() -> Iterator[tuple[Any, dict[str, Callable[..., Any]]]]:
    """Return what would act on the one process of all ranks, refusing."""
    why = "the simulated ranks share one process"
    names = ("fork", "forkpty", "_exit", "kill", "abort")
    yield os, {name: _refusing(f"os.{name}", why) for name in names}
    names = ("signal", "alarm", "raise_signal", "setitimer", "pthread_kill")
    yield signal, {name: _refusing(f"signal.{name}", why) for name in names}


def _refused_methods() -> dict[str, Callable[..., Any]]:
    why = "torch's threaded process group has none"
    return {
        name: _refusing(name, why)
        for name in flight_recorder.METHODS
        if name not in vars(_Group) and hasattr(_Group, name)
    }


def _refusing(what: str, why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotSimulatedError(
            f'simulated ranks cannot do {what}: {why}; choose backend="gloo"'
        )

    return refuse


def _stack(frame: Any) -> str:
    """Return a stack as faulthandler writes it."""
    found = traceback.extract_stack(frame)[::-1] if frame is not None else []
    lines = [f'  File "{f.filename}", line {f.lineno} in {f.name}' for f in found]
    return "\n".join(["Thread 0x0 (most recent call first):", *lines])
