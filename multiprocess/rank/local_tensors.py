"""Ranks that are parts of one tensor: torch's ``LocalTensor``.

The body runs once, and every tensor holds the values of all ranks. So nothing in Python
may depend on the rank; operations for which torch would silently give a wrong result
are refused here.
"""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _local_tensor as local
from torch.distributed.tensor import DTensor
from torch.fx.experimental import sym_node
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from ..errors import NotSimulatedError
from ..messages import Kind, Reply, Simulated, SimulatedRun, Simulation
from . import world
from .simulation import REAL, refused_calls, refusing, threaded_world
from .worker import made_reply, pickled_result, raised

_OTHERS = f'choose backend="simulated", or {REAL.removeprefix("choose ")}'
_TORCH = os.path.dirname(torch.__file__) + os.sep
_IN_LOCAL = os.path.dirname(local.__file__) + os.sep
_SYMINT = (torch.__file__, sym_node.__file__)
"""Where the methods of ``SymInt`` are."""

# They name internals of LocalTensor: such an error says nothing to the caller.
_ITS_WORDS = ("LocalIntNode", "LocalTensor", "LocalRunnerMode", "__src_rank__")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def simulate_local(plan: Simulation) -> SimulatedRun:
    """Run a call once, on tensors of all ranks."""
    began = time.monotonic()
    with _local_ranks(plan):
        try:
            fn, args, kwargs = pickle.loads(plan.payload)
            value = fn(*args, **kwargs)
            replies = [_reply_of(value, rank) for rank in range(plan.size)]
        except BaseException as error:
            replies = [raised(_explained(error), reusable=True)]
    return SimulatedRun(
        ranks=tuple(Simulated(reply=reply) for reply in replies),
        took_s=time.monotonic() - began,
    )


@contextlib.contextmanager
def _local_ranks(plan: Simulation) -> Iterator[None]:
    ranks = torch.SymInt(local.LocalIntNode({rank: rank for rank in range(plan.size)}))
    of_all = world.World(
        rank=ranks,  # type: ignore[arg-type]  # of every rank at once
        size=plan.size,
        backend="local",
        device=torch.device("cpu"),
        seed=plan.seed,
        make_store=refusing("world.store", "the body runs once", _OTHERS),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(threaded_world())
        # It has the world's size and exchanges nothing: LocalTensorMode does each
        # collective on the values of all ranks.
        dist.init_process_group("fake", rank=0, world_size=plan.size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        replacements: tuple[tuple[Any, dict[str, Any]], ...] = (
            (dist, {"get_rank": _get_rank(ranks)}),
            (dist.distributed_c10d, {"_check_not_self_rank": _refuse_send}),
            (local.LocalIntNode, {name: _compared(name) for name in _COMPARISONS}),
            *refused_calls(),
        )
        for owner, replaced in replacements:
            stack.enter_context(mock.patch.multiple(owner, **replaced))
        stack.enter_context(local.LocalTensorMode(plan.size))
        world._of_thread.world = of_all
        stack.callback(delattr, world._of_thread, "world")
        yield


def _get_rank(ranks: torch.SymInt) -> Callable[..., Any]:
    real = dist.get_rank

    def get_rank(group: Any = None) -> Any:
        # torch's own code works out the place of one rank, as it would on that rank.
        if group is None and not _asked_by_torch():
            return ranks
        return real(group)

    return get_rank


_refuse_send = refusing("send", "the body runs once, for all ranks", _OTHERS)


def _compared(name: str) -> Callable[..., Any]:
    """Return a comparison that answers for all ranks or not at all.

    torch's own returns False if the ranks differ: ``if rank == 0`` would silently be
    skipped for every rank.
    """
    real = getattr(local.LocalIntNode, name)
    compare: Callable[[Any, Any], bool] = getattr(operator, name)

    def compared(self: Any, other: Any) -> Any:
        mine = self._local_ints
        each = {compare(mine[r], local._int_on_rank(other, r)) for r in mine}
        if len(each) > 1 and not _asked_by_torch():
            raise NotSimulatedError(_DIFFERS)
        return real(self, other)

    return compared


_DIFFERS = (
    "local ranks cannot do what depends on the rank in Python: the body runs once, for "
    f"all ranks; {_OTHERS}"
)


def _asked_by_torch() -> bool:
    # 0 is this function, 1 the replacement that asks, 2 what called that.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _SYMINT:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def _explained(error: BaseException) -> BaseException:
    """Return one line for what fails inside of LocalTensor."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = frames and frames[-1].filename.startswith(_IN_LOCAL)
    text = str(error)
    if isinstance(error, NotSimulatedError):
        return error.with_traceback(None)
    if not inside and not any(word in text for word in _ITS_WORDS):
        return error
    own = [f for f in frames if not f.filename.startswith((_TORCH, _PACKAGE))]
    where = f" at {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
    first = text.strip().split("\n")[0] or type(error).__name__
    first = next((said for part, said in _SAID.items() if part in text), first)
    return NotSimulatedError(f"local ranks cannot do this{where}: {first}; {_OTHERS}")


_SAID = {
    "Non Tensor or int rank": "a Python value differs from rank to rank",
    "has no attribute 'int_'": "a Python value differs from rank to rank",
    "__src_rank__": "send and receive are of two ranks, and the body runs for all",
}
"""What torch says, and what it means here."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def _reply_of(value: Any, rank: int) -> Reply:
    own = pytree.tree_map(lambda leaf: _of_rank(leaf, rank), value)
    return made_reply(Kind.OK, value=pickled_result(own))


def _of_rank(leaf: Any, rank: int) -> Any:
    if isinstance(leaf, DTensor):
        leaf = leaf.to_local()
    if isinstance(leaf, local.LocalTensor):
        return leaf._local_tensors[rank]
    if isinstance(leaf, torch.SymInt) and isinstance(leaf.node, local.LocalIntNode):
        return leaf.node._local_ints[rank]
    return leaf
