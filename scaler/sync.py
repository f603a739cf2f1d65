"""All ranks sync found_inf: one all-reduce of one small message.

1. Each rank writes what it found and what it holds into a message of fixed size.
2. One all-reduce (MAX) over the ranks of :class:`~.sync_group.SyncGroup`.
3. Every rank reads the same result from it, or raises the same error.

[Note: Closing an iteration]
Ranks may call `step` a different number of times (a stage without parameters, a
forgotten optimizer). A rank that has fewer syncs would leave the others waiting, or
worse: their message would pair with the next collective of the training itself. So
`update` sends a closing message whenever this iteration had another number of syncs
than the largest number seen so far; the first iteration always closes. A closing
message that meets a step differs in ``position``, and all ranks raise. When every
iteration is alike, no closing message is sent: one collective per step and no more. One
case is out of reach without a second collective in every iteration: a rank that
suddenly has *more* syncs than ever before, alone.

[Note: An error on one rank]
Reading gradients can fail on one rank alone (an fp16 gradient that is not allowed).
That rank still sends its message, with ``failed`` set, and then raises its own error;
the others raise PeerFailedError instead of waiting. On an accelerator the host reads
the message later; ``failed`` implies ``found_inf``, so that no rank steps meanwhile.
Wrong call order raises without a message: it is the same mistake on every rank, and
nothing was under way.

[Note: Waiting later]
What follows `unscale_` rarely asks for its result: the gradients are clipped, then
`step` asks. So `unscale_` sends its message and does not wait; the first call that
needs the result does, and raises what `unscale_` would have raised. On an accelerator
the host never waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .errors import PeerFailedError, RanksDisagreeError
from .sync_group import SyncGroup, message_device
from .sync_message import (
    CLOSING,
    LOADING,
    PLACES,
    SHARED,
    LocalState,
    SyncResult,
    full_message,
    full_numbers,
    packed_message,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Its name before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class OverflowSync:
    """The syncs of one scaler: which ranks take part, and how many there were.

    Args:
        group: the ranks that sync.
        device_type: where to exchange messages if the process group can.
    """

    def __init__(self, group: SyncGroup, device_type: str) -> None:
        self.group = group
        self._device_type = device_type
        self._unread: list[tuple[ProcessGroup, SyncResult, LocalState]] = []
        self.restart()

    def restart(self) -> None:
        """Count iterations anew, at a point where all ranks do."""
        self._iteration = 0
        self._count = 0  # syncs in this iteration
        self._most = -1  # largest count of any iteration; -1: none is over yet

    def found_inf(
        self,
        group: ProcessGroup,
        local: LocalState,
        call: str,
        *,
        async_op: bool = False,
    ) -> SyncResult:
        """Exchange one message for one optimizer step.

        Args:
            group: what ``group.find`` returned.
            local: what this rank brings.
            call: name of the calling method, for messages.
            async_op: do not wait for it, and leave the check to the caller, if it is
                on its way. See [Note: Waiting later].

        Returns:
            The result; checked, if it is there and that costs no synchronisation.

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: the ranks hold different state.
        """
        self._count += 1
        return self._exchange(group, local, self._count, call, async_op)

    def found_inf_and_rows(
        self, group: ProcessGroup, local: LocalState, call: str, row: torch.Tensor
    ) -> tuple[SyncResult, torch.Tensor]:
        """Do the same, and gather a tensor of each rank on the way.

        Args:
            group: what ``group.find`` returned.
            local: what this rank brings.
            call: name of the calling method, for messages.
            row: any shape, the same on every rank; fp64.

        Returns:
            The result, and (number of ranks, ...): the rows.
        """
        self._count += 1
        self._check_unread()
        device = message_device(group, self._device_type, local.scale)
        sent = full_numbers(local, self._iteration, self._count, device)
        message = full_message(sent, local, device)
        whole = torch.cat([message, row.to(device, non_blocking=True).flatten()])
        rows = whole.new_empty(group.size(), len(whole))
        with _explained(group, call):
            _all_gather(rows.flatten(), whole, group=group)
        # The maximum is taken here: one collective still.
        result = SyncResult(rows[:, : len(message)].amax(0), sent, call)
        self._check_or_defer(group, local, result)
        return result, rows[:, len(message) :].reshape(-1, *row.shape)

    def assert_same_state(
        self, group: ProcessGroup, local: LocalState, call: str
    ) -> None:
        """Raise unless all ranks bring the same; synchronises.

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: a field of ``SHARED`` differs between ranks.
        """
        # The rank may have iterated alone before, and load in order to join.
        self.restart()
        result = self._exchange(group, local, LOADING, call)
        if not local.failed:
            self.check(group, result, local)

    def end_iteration(self, local: Callable[[], LocalState], call: str) -> None:
        """End the iteration. See [Note: Closing an iteration].

        Args:
            local: gives what this rank brings; asked only if there is a message.
            call: name of the calling method, for messages.

        Raises:
            RanksDisagreeError: the ranks had different numbers of syncs.
        """
        count, self._count = self._count, 0
        group = self.group.find(()) if self.group.is_known else None
        if group is None:
            return
        if count != self._most:
            self._exchange(group, local(), CLOSING, call)
        self._most = max(self._most, count)
        self._iteration += 1

    def check(
        self, group: ProcessGroup, result: SyncResult, local: LocalState
    ) -> SyncResult:
        """Raise if a rank failed or the ranks disagree.

        Args:
            group: over which ``result`` was exchanged.
            result: synchronises to read it.
            local: what this rank brought.

        Returns:
            The result. Where a packed one says that no rank with an optimizer has
            scaled, it is that of a full message, since another rank may have.

        Raises:
            PeerFailedError: another rank raised while it read its gradients.
            RanksDisagreeError: a field of ``SHARED`` differs between ranks.
        """
        rank, size, call = group.rank(), group.size(), result.call
        if result.summary.failed:
            raise PeerFailedError(
                f"{call} on rank {rank} of {size}: another rank raised while it read "
                "its gradients, so no rank steps. The cause is in that rank's "
                "traceback.",
                rank=rank,
                call=call,
            )
        summary = result.summary
        if result.is_packed and (summary.differ or not summary.was_scaled):
            # Every rank sees the same, so all of them come here.
            message = full_message(result.sent, local, torch.device("cpu"))
            with _explained(group, call):
                dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
            result = SyncResult(message, result.sent, call)
        if result.summary.differ:
            raise _disagreement(result, rank, size)
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unread": []}

    def _exchange(
        self,
        group: ProcessGroup,
        local: LocalState,
        position: int,
        call: str,
        async_op: bool = False,
    ) -> SyncResult:
        self._check_unread()
        device = message_device(group, self._device_type, local.scale)
        sent = full_numbers(local, self._iteration, position, device)
        if device.type != "cpu":
            message = full_message(sent, local, device)
        else:
            message = packed_message(local, sent)
        async_op = async_op and device.type == "cpu"
        with _explained(group, call):
            work = dist.all_reduce(
                message, op=dist.ReduceOp.MAX, group=group, async_op=async_op
            )
        if async_op:
            return SyncResult(message, sent, call, _waiting(work, group, call))
        result = SyncResult(message, sent, call)
        return self._check_or_defer(group, local, result)

    def _check_or_defer(
        self, group: ProcessGroup, local: LocalState, result: SyncResult
    ) -> SyncResult:
        if local.failed:
            return result
        if result.is_on_host:
            return self.check(group, result, local)
        # Reading now would synchronise; every rank reads at its next sync.
        result.start_reading()
        self._unread.append((group, result, local))
        return result

    def _check_unread(self) -> None:
        unread, self._unread = self._unread, []
        for group, result, local in unread:
            if result.is_readable:  # not while a CUDA graph is captured
                self.check(group, result, local)


def _waiting(work: Any, group: ProcessGroup, call: str) -> Callable[[], None]:
    def wait() -> None:
        with _explained(group, call):
            work.wait()

    return wait


@contextmanager
def _explained(group: ProcessGroup, call: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            f"gradparity: in the sync of {call} on rank {group.rank()} of "
            f"{group.size()}. All ranks of the group must call step() and update() the "
            "same number of times; independent models need process_group=, mesh= or "
            'agree_over="mesh".'
        )
        raise


def _disagreement(result: SyncResult, rank: int, size: int) -> RanksDisagreeError:
    differ = result.differences()
    shown = "; ".join(
        f"{name} differs"
        if name == "policy"
        else f"{name} is {_shown(name, here)} here, and over all ranks between "
        f"{_shown(name, lowest)} and {_shown(name, highest)}"
        for name, (here, lowest, highest) in differ.items()
    )
    way_out = next(text for names, text in _WAYS_OUT if names & differ.keys())
    return RanksDisagreeError(
        f"{result.call} on rank {rank} of {size}: {shown}. All ranks must hold the "
        f"same. {way_out}",
        rank=rank,
        world_size=size,
        call=result.call,
        here={name: result.sent[PLACES[name]] for name in SHARED},
        lowest={name: lowest for name, (_, lowest, _) in differ.items()},
        highest={name: highest for name, (_, _, highest) in differ.items()},
    )


_WAYS_OUT = (
    (
        {"position"},
        "Call step() for the same number of optimizers on every rank before update(); "
        "a rank without parameters calls step_without_optimizer() instead.",
    ),
    (
        {"optimizer"},
        "Step the optimizers in the same order on every rank. They are numbered in the "
        "order in which they first stepped; a set has another order on every rank.",
    ),
    (
        {"max_norm", "norm_type"},
        "Call clip_grad_norm_() with the same max_norm and norm_type on every rank.",
    ),
    (
        set(SHARED),
        "Build the scaler with the same arguments on every rank and load the same "
        "state_dict on every rank; if these ranks train independent models, pass "
        'process_group=, mesh= or agree_over="mesh".',
    ),
)


def _shown(name: str, value: float) -> str:
    if name == "position":
        other = {CLOSING: "update()", LOADING: "load_state_dict()"}
        return other.get(int(value), f"step {value:g} of the iteration")
    return f"{value:g}"
