"""All ranks sync found_inf by one all-reduce, and read or raise the same from it.

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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .errors import PeerFailedError, RanksDisagreeError
from .grads import Number
from .sync_group import SyncGroup, message_device
from .sync_message import (
    CLOSING,
    LOADING,
    SHARED,
    LocalState,
    Sent,
    Summary,
    decode_full,
    decode_packed,
    differences,
    full_message,
    packed_message,
    shared_values,
)

# Its name before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(eq=False)
class SyncResult:
    """The reduced message of one sync; the same on every rank.

    Attributes:
        message: int64 if packed, else fp64; reduced once ``work`` is done. Or those of
            all ranks, (number of ranks, ...), to be reduced by the host.
        group: over which it was reduced.
        local: what this rank brought.
        sent: iteration and position in the message.
        call: name of the calling method, for messages.
        is_deferred: reading it would synchronise with an accelerator.
        work: what is still on its way; None if nothing is.
        rows: what each rank sent beside its message, (number of ranks, elements).
        copy: on its way to the host, and the event of its arrival.
    """

    message: torch.Tensor
    group: dist.ProcessGroup
    local: LocalState
    sent: Sent
    call: str
    is_deferred: bool
    work: Any = None
    rows: torch.Tensor | None = None
    copy: tuple[torch.Tensor, torch.cuda.Event] | None = None
    _summary: Summary | None = None

    @property
    def found_inf(self) -> torch.Tensor:
        """(), fp32, exactly 0 or 1, on an accelerator that alone knows it."""
        return self.message[0].float()

    def read(self) -> Summary:
        """Return the result on the host; waits for it, and synchronises once at most.

        Raises:
            PeerFailedError: another rank raised while it read its gradients.
            RanksDisagreeError: a field of ``SHARED`` differs between ranks.
        """
        if self._summary is not None:
            return self._summary
        if self.work is not None:
            with _explained(self.group, self.call):
                self.work.wait()
            self.work = None
        message = self.message
        if self.copy is not None:
            message, event = self.copy
            event.synchronize()
        numbers, is_packed = message.tolist(), message.dtype is torch.int64
        if message.dim() > 1:
            numbers = list(map(max, *numbers))
        summary = decode_packed(numbers) if is_packed else decode_full(numbers)
        if summary.failed:
            rank = self.group.rank()
            raise PeerFailedError(
                f"{self.call} on rank {rank} of {self.group.size()}: another rank "
                "raised while it read its gradients, so no rank steps. The cause is in "
                "that rank's traceback.",
                rank=rank,
                call=self.call,
            )
        if is_packed and (summary.differ or not summary.was_scaled):
            # Something differs, but not what; or only a rank without an optimizer may
            # have scaled. Every rank sees the same, so all of them come here.
            message = full_message(self.local, self.sent, torch.device("cpu"))
            with _explained(self.group, self.call):
                dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.group)
            numbers = message.tolist()
            summary = decode_full(numbers)
        if summary.differ:
            raise self._disagreement(numbers)
        self._summary = summary
        return summary

    def _disagreement(self, numbers: list[float]) -> RanksDisagreeError:
        rank, size = self.group.rank(), self.group.size()
        differ = differences(numbers)
        here = shared_values(self.local, self.sent)
        shown = "; ".join(
            f"{name} differs"
            if name == "policy"
            else f"{name} is {_shown(name, here.get(name))} here, and over all ranks "
            f"between {_shown(name, lowest)} and {_shown(name, highest)}"
            for name, (lowest, highest) in differ.items()
        )
        way_out = next(text for names, text in _WAYS_OUT if names & differ.keys())
        return RanksDisagreeError(
            f"{self.call} on rank {rank} of {size}: {shown}. All ranks must hold the "
            f"same. {way_out}",
            rank=rank,
            world_size=size,
            call=self.call,
            here=here,
            lowest={name: lowest for name, (lowest, _) in differ.items()},
            highest={name: highest for name, (_, highest) in differ.items()},
        )


class OverflowSync:
    """The syncs of one scaler: which ranks take part, and how many there were.

    Args:
        group: the ranks that sync.
        device_type: where to exchange messages if the process group can.
    """

    def __init__(self, group: SyncGroup, device_type: str) -> None:
        self.group = group
        self._device_type = device_type
        self._last: SyncResult | None = None
        self._unread: list[SyncResult] = []
        self.restart()

    def restart(self) -> None:
        """Count iterations anew, at a point where all ranks do."""
        self._iteration = 0
        self._count = 0  # syncs in this iteration
        self._most = -1  # largest count of any iteration; -1: none is over yet

    def found_inf(
        self,
        group: dist.ProcessGroup,
        local: LocalState,
        call: str,
        *,
        position: int | None = None,
        async_op: bool = False,
        row: Sequence[Number] = (),
    ) -> SyncResult:
        """Exchange one message.

        Args:
            group: what ``group.find`` returned.
            local: what this rank brings.
            call: name of the calling method, for messages.
            position: CLOSING or LOADING; None is the next step of the iteration.
            async_op: do not wait for it. See [Note: Waiting later].
            row: numbers, as many on every rank: gathered on the way.

        Returns:
            The result; read, unless it is on its way or on an accelerator.

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: the ranks hold different state.
        """
        if position is None:
            self._count += 1
            position = self._count
        unread, self._unread = self._unread, []
        for result in unread:
            # Waits for its own copy only; not while a CUDA graph is captured.
            if result.message.is_cpu or result.copy is not None:
                result.read()
        if self._last is not None and self._last.group is group:
            device = self._last.message.device
        else:
            device = message_device(group, self._device_type, local.scale)
        sent, is_deferred = (self._iteration, position), self._is_deferred(device)
        work = rows = None
        if is_deferred or row:
            message = full_message(local, sent, device, row)
        else:
            message = packed_message(local, sent)
        with _explained(group, call):
            if not row:
                work = dist.all_reduce(
                    message,
                    op=dist.ReduceOp.MAX,
                    group=group,
                    async_op=async_op and not is_deferred,
                )
            else:
                gathered = message.new_empty(group.size(), len(message))
                _all_gather(gathered.flatten(), message, group=group)
                # The maximum is taken here: one collective still.
                message, rows = gathered[:, : -len(row)], gathered[:, -len(row) :]
                message = message.amax(0) if is_deferred else message
        result = SyncResult(message, group, local, sent, call, is_deferred, work, rows)
        self._last = result
        if work is None and not local.failed:
            if is_deferred:
                # Reading now would synchronise; every rank reads at its next sync.
                if message.is_cuda and not torch.cuda.is_current_stream_capturing():
                    host = torch.empty_like(message, device="cpu", pin_memory=True)
                    host.copy_(message, non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
                    result.copy = (host, event)
                self._unread.append(result)
            else:
                result.read()
        return result

    def assert_same_state(
        self, group: dist.ProcessGroup, local: LocalState, call: str
    ) -> None:
        """Raise unless all ranks bring the same; synchronises.

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: a field of ``SHARED`` differs between ranks.
        """
        # The rank may have iterated alone before, and load in order to join.
        self.restart()
        result = self.found_inf(group, local, call, position=LOADING)
        if not local.failed:
            result.read()

    def end_iteration(self, local: Callable[[], LocalState], call: str) -> None:
        """End the iteration. See [Note: Closing an iteration].

        What this rank brings is asked for only if there is a message.

        Raises:
            RanksDisagreeError: the ranks had different numbers of syncs.
        """
        count, self._count = self._count, 0
        # Not the group of the last sync: it may have been destroyed since.
        group = self.group.find_known()
        if group is None:
            return
        if count != self._most:
            self.found_inf(group, local(), call, position=CLOSING)
        self._most = max(self._most, count)
        self._iteration += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None, "_unread": []}

    @staticmethod
    def _is_deferred(device: torch.device) -> bool:
        return device.type != "cpu"


@contextmanager
def _explained(group: dist.ProcessGroup, call: str) -> Iterator[None]:
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


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "not compared"
    if name == "position":
        other = {CLOSING: "update()", LOADING: "load_state_dict()"}
        return other.get(int(value), f"step {value:g} of the iteration")
    return f"{value:g}"
