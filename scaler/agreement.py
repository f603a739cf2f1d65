"""All ranks agree on overflow: one all-reduce of one small message.

1. Each rank writes what it found and what it holds into a message of fixed size.
2. One all-reduce (MAX) over the ranks of :class:`~.groups.Reach`.
3. Every rank reads the same verdict from the result, or raises the same error.

[Note: Closing an iteration]
Ranks may call `step` a different number of times (a stage without parameters, a
forgotten optimizer). A rank that has fewer agreements would leave the others waiting,
or worse: their message would pair with the next collective of the training itself. So
`update` sends a closing message whenever this iteration had another number of
agreements than the largest number seen so far; the first iteration always closes. A
closing message that meets a step differs in ``agreement``, and all ranks raise. When
every iteration is alike, no closing message is sent: one collective per step and no
more. One case is out of reach without a second collective in every iteration: a rank
that suddenly has *more* agreements than ever before, alone.

[Note: An error on one rank]
Reading gradients can fail on one rank alone (an fp16 gradient that is not allowed).
That rank still sends its message, with ``failed`` set, and then raises its own error;
the others raise PeerFailedError instead of waiting. Wrong call order raises without a
message: it is the same mistake on every rank, and nothing was under way.

[Note: Waiting later]
What follows `unscale_` rarely asks for its verdict: the gradients are clipped, then
`step` asks. So `unscale_` sends its message and does not wait; whoever asks first does,
and raises what `unscale_` would have raised. On an accelerator the host never waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .groups import Reach, message_device
from .message import CLOSING, LOADING, Holding, Verdict, as_message, as_numbers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Agreement"]

# Its name before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Agreement:
    """The agreements of one scaler: who takes part, and how many there were.

    Args:
        reach: the ranks that must agree.
        device_type: where to exchange messages if the process group can.
    """

    def __init__(self, reach: Reach, device_type: str) -> None:
        self.reach = reach
        self._device_type = device_type
        self._iteration = 0
        self._count = 0  # agreements in this iteration
        self._most = -1  # largest count of any iteration; -1: none is over yet
        self._unread: list[Verdict] = []

    def agree(
        self,
        group: ProcessGroup,
        holding: Holding,
        call: str,
        attached: torch.Tensor | None = None,
        *,
        later: bool = False,
    ) -> Verdict:
        """Exchange one message for one optimizer step.

        Args:
            group: what ``reach.group`` returned.
            holding: what this rank brings.
            call: name of the calling method, for messages.
            attached: any fixed shape, fp64: gathered from all ranks on the way.
            later: do not wait for it, and leave the check to the caller, if it is on
                its way. See [Note: Waiting later].

        Returns:
            The verdict; checked, if it is there and that costs no synchronisation.

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: the ranks hold different state.
        """
        self._count += 1
        return self._exchange(group, holding, self._count, call, attached, later)

    def compare(self, group: ProcessGroup, holding: Holding, call: str) -> None:
        """Raise unless all ranks bring the same; synchronises.

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: a field of ``SHARED`` differs between ranks.
        """
        verdict = self._exchange(group, holding, LOADING, call)
        if not holding.failed:
            verdict.check()

    def close(self, holding: Callable[[], Holding], call: str) -> None:
        """End the iteration. See [Note: Closing an iteration].

        Args:
            holding: gives what this rank brings; asked only if there is a message.
            call: name of the calling method, for messages.

        Raises:
            RanksDisagreeError: the ranks had different numbers of agreements.
        """
        count, self._count = self._count, 0
        if count != self._most and (group := self.reach.group(tuple)) is not None:
            self._exchange(group, holding(), CLOSING, call)
        self._most = max(self._most, count)
        self._iteration += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unread": []}

    def _exchange(
        self,
        group: ProcessGroup,
        holding: Holding,
        position: int,
        call: str,
        attached: torch.Tensor | None = None,
        later: bool = False,
    ) -> Verdict:
        self._check_unread()
        device = message_device(group, self._device_type)
        sent = as_numbers(holding, self._iteration, position)
        message = as_message(sent, holding, device)
        gathered = arrive = None
        with _explained(group, call):
            if attached is not None:
                message, gathered = _gather(message, attached.to(device), group)
            elif later and device.type == "cpu":
                arrive = _reduce_later(message, group, call)
            else:
                dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
        verdict = Verdict(message, sent, group.rank(), group.size(), call, arrive)
        verdict.gathered = gathered
        if holding.failed or arrive is not None:
            return verdict
        if device.type == "cpu":
            verdict.check()
        else:
            # Reading now would synchronise; every rank reads at its next agreement.
            verdict.start_reading()
            self._unread.append(verdict)
        return verdict

    def _check_unread(self) -> None:
        unread, self._unread = self._unread, []
        for verdict in unread:
            if verdict.is_readable:
                verdict.check()


def _reduce_later(
    message: torch.Tensor, group: ProcessGroup, call: str
) -> Callable[[], None]:
    work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None  # None is for ranks outside of the group

    def arrive() -> None:
        with _explained(group, call):
            work.wait()

    return arrive


def _gather(
    message: torch.Tensor, attached: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    # One collective still: the maximum is then taken here.
    row = torch.cat([message, attached.flatten()])
    rows = row.new_empty(group.size(), len(row))
    _all_gather(rows.flatten(), row, group=group)
    gathered = rows[:, len(message) :].reshape(-1, *attached.shape)
    return rows[:, : len(message)].amax(0), gathered


@contextmanager
def _explained(group: ProcessGroup, call: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            f"gradparity: in the agreement of {call} on rank {group.rank()} of "
            f"{group.size()}. All ranks of the group must call step() and update() in "
            'step; independent models need process_group=, mesh= or agree_over="mesh".'
        )
        raise
