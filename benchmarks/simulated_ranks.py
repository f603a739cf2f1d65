"""Every rank of a large world in one process: which collectives would it issue?

1. ``compare``: ranks run one after another. Torch's fake process group knows their
   subgroups, but exchanges nothing. An all-reduce returns the maximum of the messages
   of this rank and rank 0; an all-gather returns rank 0's message for all other ranks.
   Rank 0 has every kind of tensor that other ranks have. The collectives of a scaler
   must not depend on the tensors of its rank: then all sequences are equal.
2. ``together``: ranks are threads of torch's threaded group, which really exchanges. A
   scaler whose ranks issue different sequences would hang.

The calls of a rank are a situation (``situations.py``).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from gradparity.benchmarks.situations import Rank, Situation

MESHES = {
    256: ((256,), (16, 16), (4, 8, 8), (4, 4, 4, 4)),
    1024: ((1024,), (32, 32), (8, 8, 16), (4, 4, 8, 8)),
}
"""World size -> meshes of one to four axes."""


class Call(NamedTuple):
    """One collective.

    Attributes:
        op: name of the collective.
        group: ``world``, or the mesh axis whose ranks take part.
        tensors: shape and dtype of each tensor that is sent.
        size: number of bytes that the rank sends.
    """

    op: str
    group: str
    tensors: str
    size: int

    def __str__(self) -> str:
        return f"{self.op} over {self.group} of {self.tensors}"


class Calls(TorchDispatchMode):
    """Records each collective with its group.

    Args:
        mesh: mesh whose axes name the groups.
        answers: messages that another rank sent into each all-reduce and all-gather.

    Attributes:
        seen: recorded collectives.
        sent: messages that this rank sent into all-reduces and all-gathers.
    """

    def __init__(
        self, mesh: DeviceMesh, answers: tuple[torch.Tensor, ...] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.seen: list[Call] = []
        self.sent: list[torch.Tensor] = []
        self._answers = iter(answers)
        self._names = {
            str(mesh.get_group(i).group_name): f"axis {i}" for i in range(mesh.ndim)
        }
        self._names[_world_name()] = "world"
        self._is_fake = dist.get_backend() == "fake"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record ``func`` if it is a collective, and run it."""
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its inner calls come here
        op = ""
        if func.namespace in ("c10d", "_c10d_functional"):
            op = func.name().split("::")[1].strip("_").split(".")[0]
            if op not in ("wait_tensor", "wrap_tensor_autograd"):
                self.seen.append(self._call(op, args))
            if op == "allreduce":
                self._answer(args[0][0])
        result = func(*args, **(kwargs or {}))
        if op == "allgather_base" and self._is_fake:
            self._gather(*args[:2])
        return result

    def _gather(self, gathered: torch.Tensor, mine: torch.Tensor) -> None:
        self.sent.append(mine.clone())
        answer, rows = next(self._answers, mine), gathered.view(-1, len(mine))
        rows[:] = answer if answer.shape == mine.shape else mine
        rows[dist.get_rank() % len(rows)] = mine

    def _answer(self, message: torch.Tensor) -> None:
        self.sent.append(message.clone())
        answer = next(self._answers, message)
        if answer.shape == message.shape and answer.dtype == message.dtype:
            torch.maximum(message, answer, out=message)

    def _call(self, op: str, args: Any) -> Call:
        # c10d's own operators take the outputs first, and then what is sent.
        gathers = ("gather" in op or "alltoall" in op) and not isinstance(
            args[1], str | int
        )
        sent = list(_flat(args[1] if gathers else args[0]))
        text = " ".join(f"{list(t.shape)} {t.dtype}" for t in sent)
        size = sum(t.numel() * t.element_size() for t in sent)
        return Call(op, self._group(args), text.replace("torch.", ""), size)

    def _group(self, args: Any) -> str:
        for argument in args:
            if isinstance(argument, str) and argument in self._names:
                return self._names[argument]
            if isinstance(argument, torch.ScriptObject) and _is_group(argument):
                name = dist.ProcessGroup.unbox(argument).group_name
                return self._names.get(name, "another group")
        return "another group"


def _is_group(argument: torch.ScriptObject) -> bool:
    return str(argument._type()).endswith("ProcessGroup")


def _world_name() -> str:
    world = dist.group.WORLD
    assert world is not None
    return str(world.group_name)


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)


# - One rank after the other


@dataclass(frozen=True)
class Different:
    """Rank that issues other collectives than rank 0 in the same situation."""

    situation: str
    rank: int
    calls: tuple[Call, ...]
    of_rank_0: tuple[Call, ...]

    def __str__(self) -> str:
        here, there = (
            ", ".join(map(str, c)) or "nothing" for c in (self.calls, self.of_rank_0)
        )
        return f"{self.situation}: rank {self.rank} issues {here}; rank 0 {there}"


@dataclass
class Compared:
    """Result of ``compare``.

    Attributes:
        calls: situation -> collectives of rank 0.
        different: ranks that issue other collectives.
    """

    calls: dict[str, tuple[Call, ...]] = field(default_factory=dict)
    different: list[Different] = field(default_factory=list)


def compare(
    make: Callable[[], Any], mesh: tuple[int, ...], situations: tuple[Situation, ...]
) -> Compared:
    """Run every rank of a world one after the other.

    Args:
        make: creates a scaler.
        mesh: shape of the mesh, which has all ranks of the world.
        situations: situations to run, each with a new scaler.
    """
    compared = Compared()
    answers: dict[str, tuple[torch.Tensor, ...]] = {}
    for number in range(torch.Size(mesh).numel()):
        with _fake(number, mesh) as rank:
            for each in situations:
                name = each.__name__
                calls = Calls(rank.mesh, answers.get(name, ()))
                with calls:
                    each(rank, _scaled(make))
                answers.setdefault(name, tuple(calls.sent))
                first = compared.calls.setdefault(name, tuple(calls.seen))
                if tuple(calls.seen) != first:
                    found = Different(name, number, tuple(calls.seen), first)
                    compared.different.append(found)
    return compared


@contextmanager
def _fake(number: int, mesh: tuple[int, ...]) -> Iterator[Rank]:
    world = torch.Size(mesh).numel()
    with mock.patch.object(sys, "excepthook"):  # torch wraps it again for each rank
        dist.init_process_group(
            "fake", rank=number, world_size=world, store=FakeStore()
        )
    try:
        yield Rank(number, world, init_device_mesh("cpu", mesh))
    finally:
        dist.destroy_process_group()


def _scaled(make: Callable[[], Any]) -> Any:
    scaler = make()
    scaler.scale(torch.ones(()))
    return scaler


# - All ranks at once, a thread each


@contextmanager
def _threads() -> Iterator[None]:
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    threaded._install_threaded_pg()
    isolate(True)
    threaded.ProcessLocalGroup.reset()
    try:
        yield
    finally:
        isolate(False)
        threaded._uninstall_threaded_pg()


def together(
    make: Callable[[], Any], mesh: tuple[int, ...], situations: tuple[Situation, ...]
) -> list[dict[str, Outcome]]:
    """Run all ranks at once, with real exchanges.

    Returns:
        For each rank: situation -> its outcome.

    Raises:
        RuntimeError: if a rank raised; names the first such rank.
    """
    world = torch.Size(mesh).numel()
    store = torch._C._distributed_c10d.HashStore()
    found: list[dict[str, Outcome]] = [{} for _ in range(world)]
    errors: list[tuple[int, BaseException]] = []

    def body(number: int) -> None:
        try:
            dist.init_process_group(
                "threaded", rank=number, world_size=world, store=store
            )
            rank = Rank(number, world, init_device_mesh("cpu", mesh))
            for each in situations:
                _issuing.calls = []
                scaler = _scaled(make)
                each(rank, scaler)
                calls = tuple(_issuing.calls)
                found[number][each.__name__] = Outcome(calls, scaler.get_scale())
        except BaseException as error:  # or the others would wait for ever
            errors.append((number, error))
            threaded.ProcessLocalGroup.exception_handle(error)

    with _threads(), _noted():
        all_of_them = [threading.Thread(target=body, args=(i,)) for i in range(world)]
        for thread in all_of_them:
            thread.start()
        for thread in all_of_them:
            thread.join()
    for number, error in errors[:1]:
        raise RuntimeError(f"rank {number} of {world} raised") from error
    return found


class Outcome(NamedTuple):
    """Collectives that a rank issued in a situation, and its scale at the end."""

    calls: tuple[str, ...]
    scale: float


_issuing = threading.local()


@contextmanager
def _noted() -> Iterator[None]:
    # A process group in Python is called directly, past the dispatcher.
    group = threaded.ProcessLocalGroup
    with mock.patch.multiple(group, **{n: _noting(group, n) for n in _METHODS}):
        yield


_METHODS = ("allreduce", "allgather", "all_gather_single", "broadcast", "barrier")


def _noting(group: Any, name: str) -> Any:
    kept = getattr(group, name)

    @functools.wraps(kept)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(_issuing, "calls"):
            sizes = " ".join(f"{list(t.shape)} {t.dtype}" for t in _flat(args))
            _issuing.calls.append(f"{name} over {self.size()} of {sizes}")
        return kept(self, *args, **kwargs)

    return noting
