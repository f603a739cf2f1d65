"""All ranks exchange one message in a sync, and read or raise the same from it.

[Note: What belongs together]
Every sync, of whatever method, begins with the same collective: same operation, shape
and dtype. Its content names the scaler, the optimizer, the method and the state that
must be equal, so calls that do not belong together raise `RanksDisagreeError` on every
rank. A clip needs a second collective on a CPU, which begins only when all ranks know
from the first one that they clip.

Scalers and optimizers get a number when a rank syncs them for the first time: that of
its peers' in that sync, else the next one. So a rank may lack an optimizer, or hold an
idle one. A scaler that is new also says how many of the numbered ones were made before
it, so that scalers used in another order on another rank raise at the second one. What
cannot be told apart: two optimizers that a rank steps in another order from the very
first iteration on.

[Note: Closing an iteration]
Ranks may sync a different number of times (a stage without parameters, a forgotten
optimizer). A rank that has fewer syncs would leave the others waiting. So `update`
syncs whenever this iteration had another number of syncs than the largest number seen
so far; the first iteration always closes. A closing message that meets a step differs
from it in ``call``, and all ranks raise. When every iteration is alike, no closing
message is sent. One case is out of reach without a second collective in every
iteration: a rank that suddenly has *more* syncs than ever before, alone, is heard in
the next iteration.

[Note: An error on one rank]
A rank can fail alone (an fp16 gradient that is not allowed). It still sends its
message, with ``failed`` set, and then raises its own error; the others raise
PeerFailedError instead of waiting. On an accelerator the host reads the message later;
``failed`` implies ``found_inf``, so that no rank steps meanwhile, and whoever reads of
a failure at the next sync sends that it fails there, too. Wrong call order is told in
the same way, since it may be the mistake of one rank; nothing was under way then.

On a CPU every rank knows of a failure in the same sync. From there on all of them count
syncs and iterations anew, whatever each had counted and whether or not `update` comes:
an `update` that follows at once has nothing to close.

A call may also raise after its sync (in an optimizer's step). Nothing is sent, for the
others are past it. But the number of such calls is part of the state that must be equal
(``failures``): if they did not raise alike, the next sync raises on every rank, and so
does each one after it, until the ranks load a checkpoint.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .errors import PeerFailedError, RanksDisagreeError
from .grads import Number
from .sync_group import SyncGroup, message_device
from .sync_message import (
    CALLS,
    CHECK,
    CLIP,
    FULL_LENGTH,
    LOAD,
    UPDATE,
    Local,
    Shared,
    Summary,
    decode_full,
    decode_packed,
    differences,
    full_message,
    packed_message,
)

ROW_LENGTH = 12
"""Numbers that a rank sends beside the message of a clip."""

# Its name before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(eq=False)
class SyncResult:
    """What a sync came to; the same on every rank.

    Attributes:
        group: over which it was made.
        method: name of the calling method, for messages.
        shared: what this rank brought.
        message: the reduced message.
        is_deferred: reading it would synchronise with an accelerator.
        rows: what each rank sent beside its message, (number of ranks, elements).
        copy: on its way to the host, and the event of its arrival.
        record: of the optimizer, None without one.
        was_read: the host has read it, or has raised what it says.
        number: that the ranks know the optimizer by; 0 until the host knows.
    """

    group: dist.ProcessGroup
    method: str
    shared: Shared
    message: torch.Tensor
    is_deferred: bool = False
    rows: torch.Tensor | None = None
    copy: tuple[torch.Tensor, torch.cuda.Event] | None = None
    record: Any = None
    was_read: bool = False
    number: int = 0
    _summary: Summary | None = None

    @property
    def found_inf(self) -> torch.Tensor:
        """(), fp32, exactly 0 or 1, on the accelerator that alone knows it."""
        return self.message[0].float()

    def read(self) -> Summary:
        """Return the result on the host; synchronises once at most.

        What it raises once it does not raise again at the next sync.

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: a field of `Shared` differs between ranks.
        """
        if self._summary is None:
            message = self.message
            if self.copy is not None:
                message, event = self.copy
                event.synchronize()
            self.was_read = True
            self._summary = self._decoded(message.tolist())
        return self._summary

    def _decoded(self, numbers: list[float]) -> Summary:
        summary = decode_full(numbers)
        if summary.failed:
            raise self.peer_failed()
        if differ := differences(numbers):
            raise self.disagreement(differ)
        return summary

    def peer_failed(self) -> PeerFailedError:
        """Return the error for an exception on another rank."""
        rank = self.group.rank()
        return PeerFailedError(
            f"{self.method} on rank {rank} of {self.group.size()}: another rank raised "
            "before or while it read its gradients, so no rank steps. The cause is in "
            "that rank's traceback.",
            rank=rank,
            call=self.method,
        )

    def disagreement(
        self, differ: dict[str, tuple[float, float]]
    ) -> RanksDisagreeError:
        """Return the error for fields that differ, with the lowest and the highest."""
        rank, size = self.group.rank(), self.group.size()
        pairs = self.shared._asdict().items()
        here = {name: float(value) for name, value in pairs if value is not None}
        # A message of another call has another position, too: the first one is told.
        names, way_out = next(
            (names & differ.keys(), text)
            for names, text in _WAYS_OUT
            if names & differ.keys()
        )
        shown = "; ".join(
            f"{name} differs"
            if name == "policy"
            else f"{name} is {_shown(name, here.get(name))} here, and over all ranks "
            f"between {_shown(name, lowest)} and {_shown(name, highest)}"
            for name, (lowest, highest) in differ.items()
            if name in names
        )
        return RanksDisagreeError(
            f"{self.method} on rank {rank} of {size}: {shown}. All ranks must hold the "
            f"same. {way_out}",
            rank=rank,
            world_size=size,
            call=self.method,
            here=here,
            lowest={name: lowest + 0.0 for name, (lowest, _) in differ.items()},
            highest={name: highest for name, (_, highest) in differ.items()},
        )


@dataclass
class _OfGroup:
    # What this process knows of a group. Threads that sync over it take turns: gloo
    # aborts on calls at one time.
    turn: Any = field(default_factory=threading.Lock)
    scalers: int = 0  # that any rank has synced over it
    numbers: dict[int, int] = field(default_factory=dict)  # of this rank's, as made


_groups: weakref.WeakKeyDictionary[Any, _OfGroup] = weakref.WeakKeyDictionary()
_made = itertools.count()


class Clip(NamedTuple):
    """What one sync of a clip must share beside the state of the scaler."""

    max_norm: float
    norm_type: float


class OverflowSync:
    """The syncs of one scaler: which ranks take part, and how many there were.

    Args:
        group: the ranks that sync.
        device_type: where to exchange messages if the process group can.

    Attributes:
        sent: number of messages sent in this iteration.
        exchanges: number of messages sent so far.
        is_void: every rank has heard that a call raised, and no message was sent since.
        failures: calls of this rank that raised after their sync, which the other ranks
            do not hear of.
        told: id of the error that the last message was about; 0 for none.
    """

    sent: int
    is_void: bool

    def __init__(self, group: SyncGroup, device_type: str) -> None:
        self.group = group
        self._device_type = device_type
        self._cpu_group: Any = None  # the last group that exchanges messages there
        self._made = next(_made)
        self._unread: SyncResult | None = None
        self.exchanges = self.told = 0
        self.restart()

    def restart(self) -> None:
        """Count iterations and optimizers anew, at a point where all ranks do."""
        self._begin_anew()
        self.is_void = False
        self.failures = 0
        self._optimizers = 0  # that any rank has synced
        # By the number of an optimizer, 0 for none: what the ranks last synced after
        # it, which a rank without an optimizer expects them to sync again.
        self._next: dict[int, tuple[int, Clip | None, int]] = {}
        self._latest: tuple[int, Clip | None, int] = (CHECK, None, 0)
        self._last = 0

    def _begin_anew(self) -> None:
        self.is_void = True
        self._iteration = 0
        self.sent = 0
        self._most = -1  # largest count of any iteration; -1: none is over yet

    def exchange(
        self,
        group: dist.ProcessGroup,
        method: str,
        call: int | None,
        state: Shared,
        local: Local,
        clip: Clip | None = None,
        row: Sequence[Number] = (),
        record: Any = None,
    ) -> SyncResult:
        """Exchange one message.

        Args:
            group: what ``group.find`` returned.
            method: name of the calling method, for messages.
            call: what it is made for; None takes part in CHECK and CLIP.
            state: of the scaler; what this class knows is filled in.
            local: what this rank found.
            clip: what it clips to, if it does.
            row: ROW_LENGTH numbers, zeros by default: where reading the first message
                would synchronise they travel with it.
            record: of the optimizer; gets its ``number`` when the host knows it.

        Returns:
            The result, read unless it is on an accelerator.

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: the ranks hold different state.
        """
        self.told = 0
        late = self._late_error()
        if late is not None:
            local = local._replace(failed=True)
        of_group = _groups.setdefault(group, _OfGroup())
        number = of_group.numbers.get(self._made)
        after = None
        if number is None:
            after = sum(made < self._made for made in of_group.numbers)
            local = local._replace(is_new=True)
        if record is not None and record.number is None:
            # A rank that has all optimizers so far knows the number of a new one. If
            # the others step an old one, all of them see that it is another.
            has_all = len(record.taken) == self._optimizers
            state = state._replace(optimizer=self._optimizers + 1 if has_all else None)
        # A rank that loads may have iterated alone before, and load in order to join.
        joins = call == LOAD
        shared = state._replace(
            call=call,
            scaler=number,
            made_after=after,
            iteration=0 if joins else self._iteration,
            position=0 if joins else self.sent + 1,
            failures=0 if joins else self.failures,
            **{} if clip is None else clip._asdict(),
        )
        device = torch.device("cpu")
        if self._cpu_group is not group:
            device = message_device(group, self._device_type, state.scale)
            self._cpu_group = group if device.type == "cpu" else None
        with of_group.turn, _explained(group, method):
            if self._is_deferred(device):
                result = self._gathered(group, method, shared, local, device, row)
            else:
                result = self._reduced(group, method, shared, local)
        self.is_void = self.is_void and local.failed
        result.record = record
        if result.is_deferred and not local.failed:
            self._unread = result  # every rank reads it at its next sync
        elif not local.failed:
            self._learn(result)
        if late is not None:
            raise late
        return result

    def _reduced(
        self, group: dist.ProcessGroup, method: str, shared: Shared, local: Local
    ) -> SyncResult:
        expected = shared
        if shared.optimizer is None and shared.call in (None, CHECK, CLIP):
            call, clip, optimizer = self._next.get(self._last, self._latest)
            expected = shared._replace(optimizer=optimizer)
            if shared.call is None:
                known = {} if clip is None else clip._asdict()
                expected = expected._replace(call=call, **known)
        message = packed_message(expected, local)
        with self._counted():
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
        summary = decode_packed(message.tolist(), expected)
        result = SyncResult(group, method, shared, message, _summary=summary)
        if summary is None:
            message = full_message(shared, local, torch.device("cpu"))
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
            result.message = message
            if local.failed:
                self._begin_anew()
                return result
            try:
                result.read()
            except (PeerFailedError, RanksDisagreeError):
                self._begin_anew()
                raise
        return result

    @contextmanager
    def _counted(self) -> Iterator[None]:
        # A message that was not sent does not count, and may be followed by that of a
        # failure; over a broken group, which raises RuntimeError, nothing can follow.
        try:
            yield
        except RuntimeError:
            self.sent, self.exchanges = self.sent + 1, self.exchanges + 1
            raise
        self.sent, self.exchanges = self.sent + 1, self.exchanges + 1

    def _gathered(
        self,
        group: dist.ProcessGroup,
        method: str,
        shared: Shared,
        local: Local,
        device: torch.device,
        row: Sequence[Number],
    ) -> SyncResult:
        row = row or [0.0] * ROW_LENGTH
        message = full_message(shared, local, device, row)
        gathered = message.new_empty(group.size(), len(message))
        with self._counted():
            _all_gather(gathered.flatten(), message, group=group)
        message, rows = gathered[:, :FULL_LENGTH].amax(0), gathered[:, FULL_LENGTH:]
        result = SyncResult(group, method, shared, message, True, rows)
        # Reading now would synchronise.
        if message.is_cuda and not torch.cuda.is_current_stream_capturing():
            host = torch.empty_like(message, device="cpu", pin_memory=True)
            host.copy_(message, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            result.copy = (host, event)
        return result

    def _late_error(self) -> Exception | None:
        # See [Note: An error on one rank].
        result, self._unread = self._unread, None
        # Waits for its own copy only; not while a CUDA graph is captured.
        is_here = result is not None and (result.message.is_cpu or result.copy)
        if result is None or not is_here:
            return None
        if result.was_read and result._summary is None:
            return None  # it was raised where it was read
        try:
            self._learn(result)
        except (PeerFailedError, RanksDisagreeError) as error:
            return error
        return None

    def _learn(self, result: SyncResult) -> None:
        # On all ranks alike, those without an optimizer too.
        summary = result.read()
        if summary.is_full:
            of_group = _groups[result.group]
            of_group.scalers += not summary.scaler
            of_group.numbers.setdefault(self._made, summary.scaler or of_group.scalers)
        if summary.call not in (CHECK, CLIP):
            return
        number, clip = summary.optimizer or self._optimizers + 1, None
        if summary.max_norm is not None and summary.norm_type is not None:
            clip = Clip(summary.max_norm, summary.norm_type)
        if len(self._next) > 4096:  # optimizers that are long gone
            self._next.clear()
        self._next[self._last] = self._latest = summary.call, clip, number
        self._last = number
        self._optimizers = max(self._optimizers, number)
        if result.record is not None and result.record.number is None:
            if number in result.record.taken:
                self.failures += 1  # the other ranks see nothing wrong
                raise result.disagreement({"optimizer": (number, number)})
            result.record.number = number
        result.number = number

    def sum_of(self, result: SyncResult, value: float, norm_type: float) -> float:
        """Return the sum over the ranks; the maximum for an infinite ``norm_type``."""
        op = dist.ReduceOp.SUM if norm_type < float("inf") else dist.ReduceOp.MAX
        total = torch.tensor(value, dtype=torch.float64, device="cpu")
        with _groups[result.group].turn, _explained(result.group, result.method):
            dist.all_reduce(total, op=op, group=result.group)
        (found,) = total.reshape(1).tolist()
        return float(found)

    def rows_of(self, result: SyncResult, row: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, (number of ranks, elements)."""
        rows = row.new_empty(result.group.size(), len(row))
        with _groups[result.group].turn, _explained(result.group, result.method):
            _all_gather(rows.flatten(), row, group=result.group)
        return rows

    def tables_of(
        self, result: SyncResult, table: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Return the tables of all ranks; each has its own number of rows.

        Raises:
            PeerFailedError: a rank could not make its table, and has None.
        """
        length = -1 if table is None else len(table)
        count = torch.tensor([length], dtype=torch.int64, device="cpu")
        counts = self.rows_of(result, count).flatten().tolist()
        if table is None or min(counts) < 0:
            self._begin_anew()
            raise result.peer_failed()
        padded = table.new_zeros(max(counts), table.shape[1])
        padded[: len(table)] = table
        rows = self.rows_of(result, padded.flatten()).reshape(-1, *padded.shape)
        return [each[:count] for each, count in zip(rows, counts, strict=True)]

    def end_iteration(
        self, state: Callable[[], Shared], method: str, *, is_usual: bool
    ) -> None:
        """End the iteration. See [Note: Closing an iteration].

        ``state`` is asked for only if there is a message. ``is_usual``: no call of it
        has raised, so that the next ones will be like it.

        Raises:
            RanksDisagreeError: the ranks had different numbers of syncs.
        """
        # Not the group of the last sync: it may have been destroyed since.
        group = self.group.find_known()
        if group is None or self.is_void:
            return
        count = self.sent
        if count != self._most:
            self.exchange(group, method, UPDATE, state(), Local())
        if is_usual:
            self._most = max(self._most, count)
        self.sent = 0
        self._iteration += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unread": None, "_cpu_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _made=next(_made))

    @staticmethod
    def _is_deferred(device: torch.device) -> bool:
        return device.type != "cpu"


@contextmanager
def _explained(group: dist.ProcessGroup, method: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, (PeerFailedError, RanksDisagreeError)):
            error.add_note(
                f"gradparity: in the sync of {method} on rank {group.rank()} of "
                f"{group.size()}. Each of these ranks must call step() and update() "
                "the same number of times. If only this rank has a scaler, or ranks "
                'need not agree, pass agree_over="local" to it; if some ranks have '
                "one, process_group= or mesh=; if ranks train independent models, "
                'agree_over="mesh".'
            )
        raise


_WAYS_OUT = (
    (
        {"failures"},
        "A call raised on some ranks only, after all ranks had agreed to step: their "
        "weights differ. Load a checkpoint on every rank.",
    ),
    (
        {"scaler", "made_after"},
        "Use the scalers in the same order on every rank, and make them in the same "
        "order; scalers of independent models need process_group=, mesh= or "
        'agree_over="mesh".',
    ),
    (
        {"call"},
        "Make the same calls on every rank between two update(); a rank without "
        "parameters calls step_without_optimizer() where the others step or clip.",
    ),
    (
        {"iteration", "position"},
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
        set(Shared._fields),
        "Build the scaler with the same arguments on every rank and load the same "
        "state_dict on every rank; if these ranks train independent models, pass "
        'process_group=, mesh= or agree_over="mesh".',
    ),
)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "not compared"
    if name == "call":
        return CALLS[int(value)]
    if name == "made_after":
        return f"made after {value:g} others"
    if name == "position":
        return f"sync {value:g} of the iteration"
    return f"{value:g}"
