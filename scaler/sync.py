"""Syncs of one scaler: all ranks exchange one row, and read or raise the same.

[Note: One row]
A row has the same length and dtype on every rank, whatever the rank holds and whichever
method it called. One collective gives all ranks the rows of all ranks, on every device.
A field is either a finding of one rank, or a number that must be equal on all ranks;
nan is not compared. After the fields come the norms of a clip, or zeros in other syncs.
All ranks read the same rows, so they reach the same result.

[Note: What belongs together]
Every sync, of whatever method, begins with the same collective: same operation, shape
and dtype. The row identifies the scaler, the optimizer, the method and the state that
must be equal (`Row`). So calls that do not belong together raise `RanksDisagreeError`
on every rank. A clip that must identify replicas makes more collectives, which begin
only when all ranks know from the rows that they clip.

Scalers and optimizers get a number when a rank syncs them for the first time: the
number that other ranks send in that sync, else the next one. So a rank may lack an
optimizer, or hold an idle one. A new scaler also sends how many of the numbered ones
were created before it. So if a rank uses its scalers in another order, the first sync
of the second scaler raises. One mistake cannot be detected: a rank that steps two
optimizers in another order from the first iteration on.

[Note: Closing an iteration]
Ranks may sync a different number of times (a stage without parameters, a forgotten
optimizer). A rank with fewer syncs would leave the others waiting. So `update` syncs if
the number of syncs in this iteration differs from the largest number so far; the first
iteration always ends with such a closing row. If a closing row meets the row of a step,
they differ in ``call``, and all ranks raise. If all iterations have equally many syncs,
no closing row is sent. One case is detected late, to save a second collective in every
iteration: if a single rank suddenly has *more* syncs than ever, the error comes one
iteration later.

[Note: When the host reads]
On a CPU the host reads the rows in the sync itself. On an accelerator that would wait
for the device, so the host reads and checks them at its next sync. The first iterations
are read at once on an accelerator too: so a wrong set-up is found in its first step,
and a clip finds out which parameters are replicas (`replicas.py`). While a CUDA graph
is captured nothing is read; the rows of its last replay are read at the next sync
outside of the graph.

[Note: An error on one rank]
A rank can fail alone (an fp16 gradient that is not allowed). Such a rank still sends
its row, with ``failed`` set, and then raises its own error; the others raise
PeerFailedError instead of waiting. If the host reads the rows later, ``failed`` implies
``found_inf``, so that no rank steps meanwhile. A rank that reads of a failure at the
next sync sends ``failed`` itself. Wrong call order is reported in the same way, since
it may be the mistake of one rank; nothing has been changed then.

If rows are read at once, every rank knows of a failure in the same sync. From then on
all of them count syncs and iterations anew, whatever each had counted and whether or
not `update` follows: an `update` right after the failure has nothing to close.

A step may be missing on one rank: the optimizer raised after the sync, or the caller
left out a `step` after `unscale_`. Nothing is sent then, because that step makes no
sync. But the number of missed steps is part of the state that must be equal
(``missed``). If it differs between ranks, the next sync raises on every rank, and so
does each later sync, until the ranks load a checkpoint.

If a failure is told while steps are due, all ranks drop these steps, and none is
missed. But if more steps are due on one rank than on another (``pending``), the other
one has taken them already.

[Note: Ranks at different batches]
A rank may raise after its last sync of an iteration (`step` called twice, a bad
``new_scale``). The other ranks read its row in their next iteration. If every rank then
drops its batch, they train on different batches from there on. So a row names the
batch (``batch``). After an error each rank counts iterations from the number of batches
by which it is ahead. ``iteration`` must be equal, so all later syncs raise until the
ranks load a checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .errors import (
    CHECK,
    CLIP,
    LOAD,
    UPDATE,
    PeerFailedError,
    RanksDisagreeError,
    peer_failed,
    ranks_disagree,
)
from .grads import Host, Number, tensor_of
from .sync_group import GroupState, SyncGroup, exchange, message_device, state_of

SETTLES = 8
"""Number of first iterations whose rows are read at once. By then each phase of a GAN,
or of training with frozen parts, has occurred once."""

NOTHING_CHECKED = "No inf checks were recorded prior to update."

NORMS = 12
"""Number of values for a clip after the fields of a row."""


class Row(NamedTuple):
    """Fields of a row; nan is not compared.

    Attributes:
        found_inf: 1 if a gradient of this rank is not finite. The fields up to
            `first_bad` are findings of this rank and may differ.
        failed: 1 if this rank is about to raise.
        has_gradients: 1 if this rank has a gradient.
        was_scaled: 1 if the scale came from `scale()` or a checkpoint on this rank.
        batch: iteration to which this rank's batch belongs; see
            [Note: Ranks at different batches].
        refuses: 1 if this rank raises for a norm that is not finite, or for the order
            of its calls.
        pending: number of optimizers with a finished sync whose step is due; nan on a
            rank that has passed None, since its order of syncs and steps is its own.
        first_bad: code of the first non-finite gradient, 0 if unknown (`history.py`).
        call: CHECK, CLIP, UPDATE or LOAD; nan for `step` with None, which takes part in
            a check or a clip. This field and all that follow must be equal on all
            ranks.
        scaler: number by which the ranks identify the scaler; nan if it is new.
        made_after: for a new scaler: how many scalers that have a number are older.
        iteration: iteration of this scaler, counted by `update`; ranks at different
            batches begin at different numbers.
        position: position of the sync in the iteration, from 1.
        scale: loss scale of this rank.
        growth_tracker: good iterations in a row.
        growth_factor: setting of this rank.
        backoff_factor: setting of this rank.
        growth_interval: setting of this rank.
        hysteresis_left: overflows until the next backoff; 0 without hysteresis.
        min_scale: limit of the scale; this and the next fields are the policy's.
        max_scale: limit of the scale.
        hysteresis: overflows until a backoff.
        refill: 1 if a good step refills the hysteresis.
        max_consecutive_skips: 0 without a limit.
        constant: 1 if the scale is constant.
        missed: number of steps that this rank missed; nan for none on a rank that has
            passed None, which cannot know whether the others step.
        max_norm: bound of a clip.
        norm_type: order of the norm of a clip.
        optimizer: number by which the ranks identify the optimizer; nan if it is new.
    """

    found_inf: Number = 0.0
    failed: float = 0.0
    has_gradients: float = 0.0
    was_scaled: float = 1.0
    batch: float = math.nan
    refuses: float = 0.0
    pending: float = math.nan
    first_bad: float = 0.0
    call: float = math.nan
    scaler: float = math.nan
    made_after: float = math.nan
    iteration: float = 0.0
    position: float = 0.0
    scale: Number = 1.0
    growth_tracker: Number = 0.0
    growth_factor: float = 1.0
    backoff_factor: float = 1.0
    growth_interval: float = 1.0
    hysteresis_left: Number = 0.0
    min_scale: float = 0.0
    max_scale: float = 0.0
    hysteresis: float = 1.0
    refill: float = 0.0
    max_consecutive_skips: float = 0.0
    constant: float = 0.0
    missed: float = 0.0
    max_norm: float = math.nan
    norm_type: float = math.nan
    optimizer: float = math.nan


FIELDS = len(Row._fields)
LENGTH = FIELDS + NORMS
_PLACE = {name: place for place, name in enumerate(Row._fields)}
_FINDINGS = _PLACE["call"]  # fields before it are findings of one rank
_COMPARED = Row._fields[_FINDINGS:]


class Rows:
    """Rows of all ranks, on the host.

    Args:
        table: (number of ranks, LENGTH), fp64, on the CPU.

    Attributes:
        highest: highest value of each field; -inf if no rank compares it.
        lowest: lowest value of each field.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        fields = table[:, :FIELDS]
        ends = torch.stack(
            [
                fields.nan_to_num(-math.inf, math.inf, -math.inf).amax(0),
                fields.nan_to_num(math.inf, math.inf, -math.inf).amin(0),
            ]
        )
        self.highest, self.lowest = map(Row._make, ends.tolist())

    def value(self, name: str) -> float | None:
        """Return the value that all ranks share; None if no rank compares it."""
        value: float = getattr(self.highest, name)
        return None if value == -math.inf else value

    def column(self, name: str) -> list[float]:
        """Return the values of all ranks, in their order."""
        values: list[float] = self.table[:, _PLACE[name]].tolist()
        return values

    def norms(self) -> list[list[float]]:
        """Return mesh, kind and norm of each entry, one rank after the other.

        Unused entries are 0.
        """
        table: list[list[float]] = self.table[:, FIELDS:].reshape(-1, 3).tolist()
        return table

    def differing(self) -> list[str]:
        """Return the names of fields that must be equal and differ."""
        highest, lowest = self.highest[_FINDINGS:], self.lowest[_FINDINGS:]
        fields = zip(_COMPARED, highest, lowest, strict=True)
        names = [name for name, x, y in fields if x != y and x != -math.inf]
        # step(None) takes part in a check or a clip alone
        if self.highest.call > CLIP and any(map(math.isnan, self.column("call"))):
            names = ["call", *(name for name in names if name != "call")]
        return names


@dataclass(eq=False)
class SyncResult:
    """Result of a sync; the same on every rank.

    Attributes:
        group: ranks that took part.
        method: name of the calling method, for messages.
        row: row of this rank.
        rows: rows of all ranks, on the device that exchanged them.
        on_read: called with the rows when the host has read them.
        record: record of the optimizer, or None.
        copy: copy of the rows that is being sent to the host, and the event of its
            arrival.
        host_rows: rows that the host has read without an error, or None.
        was_read: True if the host has read the rows, or has raised their error.
        is_late: True if the host reads the rows at the next sync.
        ends: True for the last sync of an iteration that must have had a gradient.
        lags: True if fewer steps were due on another rank. This and the next attributes
            are set when the rows are read.
        ahead: number of batches by which this rank is ahead of the last one.
        is_apart: True if any rank is ahead.
        is_refused: True if all ranks raise for the order of their calls.
    """

    group: dist.ProcessGroup
    method: str
    row: Row
    rows: torch.Tensor
    on_read: Callable[[SyncResult, Rows], None]
    record: Any = None
    copy: tuple[torch.Tensor, torch.cuda.Event] | None = None
    was_read: bool = False
    is_late: bool = False
    ends: bool = False
    lags: bool = False
    ahead: float = 0.0
    is_apart: bool = False
    is_refused: bool = False
    host_rows: Rows | None = None

    @property
    def found_inf(self) -> torch.Tensor:
        """Flag of a skip: (), fp32, 0 or 1; the host may not know it yet."""
        # A rank that raises makes all ranks skip.
        return self.rows[:, : _PLACE["failed"] + 1].amax().float()

    def read(self) -> Rows:
        """Return the rows on the host; synchronises once at most.

        An error that is raised here is not raised again at the next sync.

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: a field that must be equal differs between ranks.
            AssertionError: no rank has scaled a loss.
        """
        if self.host_rows is None:
            table = self.rows
            if self.copy is not None:
                table, event = self.copy
                event.synchronize()
            self.was_read = True
            rows = Rows(table.cpu())
            self.lags = self.row.pending > rows.lowest.pending
            # ranks that all raise in one call are at one batch, whichever have scaled
            same = rows.lowest.failed and rows.highest.call == rows.lowest.call
            self.ahead = 0.0 if same else self.row.batch - rows.lowest.batch
            self.is_apart = not same and rows.highest.batch > rows.lowest.batch
            self.is_refused = bool(rows.lowest.failed and rows.lowest.refuses)
            if rows.highest.failed:
                calls = enumerate(rows.column("call"))
                failed = rows.column("failed")
                raise self.peer_failed({i: call for i, call in calls if failed[i]})
            if names := rows.differing():
                raise self.disagreement(rows, names)
            if not rows.highest.was_scaled:
                raise AssertionError(
                    f"Attempted {self.method} but _scale is None.  This may indicate "
                    "your script did not use scaler.scale(loss or outputs) earlier in "
                    "the iteration."
                )
            self.host_rows = rows
            self.on_read(self, rows)
        return self.host_rows

    def peer_failed(self, failed: Mapping[int, float]) -> PeerFailedError:
        """Return the error of this rank after other ranks raised, with their calls."""
        rank, size = self.group.rank(), self.group.size()
        return peer_failed(self.method, rank, size, failed, is_apart=self.is_apart)

    def disagreement(self, rows: Rows, names: Sequence[str]) -> RanksDisagreeError:
        """Return the error for fields that differ, with the values of all ranks."""
        own = zip(_COMPARED, map(float, self.row[_FINDINGS:]), strict=True)
        here = {name: value for name, value in own if not math.isnan(value)}
        columns = {name: rows.column(name) for name in names}
        rank, size = self.group.rank(), self.group.size()
        return ranks_disagree(
            self.method, rank, size, here, columns, is_apart=self.is_apart
        )


_made = itertools.count()


class OverflowSync:
    """Syncs of one scaler: which ranks take part, and how many syncs there were.

    Args:
        group: ranks that sync.
        device_type: device type on which rows are exchanged, if the process group can.
        on_read: called with each result and its rows when the host has read them.

    Attributes:
        settles: number of first iterations whose rows the host reads at once.
        sent: number of rows sent in this iteration.
        exchanges: number of rows sent so far.
        is_void: True if every rank knows that a call raised, and no row was sent since.
        is_unusual: True if a call raised in this iteration, so that its number of rows
            may differ from other iterations.
        missed: number of steps that this rank missed, unknown to other ranks.
        lacks: True if this rank has passed None for an optimizer.
        lags: True if, when the last failure was told, another rank had taken steps that
            were due on this rank.
        told: id of the error that the last row reported; 0 for none.
        has_scaled: True if this rank scaled a loss since its last sync or `update`.
        is_apart: True if the ranks were at different batches at the last error.
        is_refused: True if all ranks raised that error for the order of their calls.
    """

    settles = SETTLES
    sent: int
    is_void: bool
    is_unusual: bool

    def __init__(
        self,
        group: SyncGroup,
        device_type: str,
        on_read: Callable[[SyncResult, Rows], None],
    ) -> None:
        self.group = group
        self._device_type = device_type
        self._on_read = on_read
        self._cpu_group: Any = None  # the last group that exchanged rows on the CPU
        self._made = next(_made)
        self._unread: list[SyncResult] = []  # more than one around a captured graph
        self.exchanges = self.told = 0
        self.is_refused = False
        # True if a row that was read in this iteration shows a gradient on any rank.
        self._has_gradients = False
        self.restart()

    def restart(self) -> None:
        """Restart all counts; every rank must call it at the same point."""
        self._begin_anew()
        self.is_void = self._scales = False
        self.missed, self.lags, self.lacks = 0, False, False
        self._optimizers = 0  # number of optimizers that any rank has synced

    def _begin_anew(self, result: SyncResult | None = None) -> None:
        # ``result`` is that of a sync which failed.
        self.is_void = True
        self._iteration = 0 if result is None else int(result.ahead)
        self.is_apart = result is not None and result.is_apart
        self._settled = self._iteration + self.settles
        self.sent = 0
        self.has_scaled = self._scaled_before = False
        self.is_unusual = False
        self._most = -1  # largest count of any iteration; -1: none is over yet

    def settle(self) -> None:
        """Read the rows of the next iterations at once; all ranks must call it."""
        self._settled = self._iteration + SETTLES

    def exchange(
        self,
        group: dist.ProcessGroup,
        method: str,
        row: Row,
        norms: Sequence[Number] = (),
        record: Any = None,
    ) -> SyncResult:
        """Exchange one row with all ranks.

        Args:
            group: result of ``group.find``.
            method: name of the calling method, for messages.
            row: row of this rank; this class fills in its own fields.
            norms: entries of a clip, zeros by default.
            record: record of the optimizer; its ``number`` is set when the host knows
                it.

        Returns:
            The result; the host has read it, or reads it at its next sync. See
            [Note: When the host reads].

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: the ranks hold different state.
            AssertionError: no rank has scaled a loss, or has a gradient.
        """
        with (of_group := state_of(group)).turn:
            self.told = 0
            late = self._late_error() if self._unread else None
            if row.call == LOAD:
                late = None  # a load ends the failed iteration of an earlier error
            row = self._numbered(row, of_group, record, failed=late is not None)
            device = torch.device("cpu")
            if self._cpu_group is not group:
                device = message_device(group, self._device_type, row.scale)
                self._cpu_group = group if device.type == "cpu" else None
            sent = self.sent + (row.call != LOAD)  # loads are outside of iterations
            self._scaled_before |= self.has_scaled
            self.has_scaled = False
            try:
                mine = tensor_of([*row, *(norms or [0.0] * NORMS)], device)
                rows = exchange(group, method, mine)
                self.sent, self.exchanges = sent, self.exchanges + 1
            except RuntimeError:
                # A broken group raises this, and no call can follow. Any other row that
                # was not sent does not count: the row of a failure may follow.
                self.sent, self.exchanges = sent, self.exchanges + 1
                raise
            result = SyncResult(group, method, row, rows, self._on_read, record)
            self.is_void = self.is_void and bool(row.failed)
            # All ranks decide alike. See [Note: When the host reads].
            is_early = self._iteration < self._settled and not _is_captured(rows)
            is_read = is_early or (rows.is_cpu and Host.reads_cpu)
            if row.failed:
                if not _is_captured(rows):
                    with contextlib.suppress(PeerFailedError):  # the caller raises
                        result.read()
                    self.lags, self.is_refused = result.lags, result.is_refused
                if is_read:
                    self._begin_anew(result)
            elif is_read:
                try:
                    rows_read = result.read()
                except (PeerFailedError, RanksDisagreeError):
                    self.lags = result.lags
                    self._begin_anew(result)
                    raise
                self._learn(result, rows_read, of_group)
            else:
                self._unread.append(_on_its_way(result))  # for the next sync of all
            if late is not None:
                self.told = id(late)  # all ranks have read the same rows
                raise late
            return result

    def _numbered(
        self, row: Row, of_group: GroupState, record: Any, *, failed: bool
    ) -> Row:
        fields: dict[str, float] = {"batch": self._batch(row.call)}
        if failed:
            fields["failed"] = 1.0
        number = of_group.numbers.get(self._made)
        if number is not None:
            fields["scaler"] = number
        else:
            # The other ranks use the old number if only this rank made a new scaler.
            numbers = of_group.numbers.items()
            fields["made_after"] = len({n for made, n in numbers if made < self._made})
        if record is not None and record.number is not None:
            fields["optimizer"] = record.number
        elif record is not None and len(record.taken) == self._optimizers:
            # If this rank has stepped all optimizers, it knows the number of a new one.
            # If other ranks step an old one, all ranks find that it is another.
            fields["optimizer"] = self._optimizers + 1
        if row.call != LOAD:  # a rank may have iterated alone before it loads
            fields["iteration"], fields["position"] = self._iteration, self.sent + 1
            # a rank that lacks an optimizer counts only its own errors
            is_silent = self.lacks and not self.missed
            fields["missed"] = math.nan if is_silent else self.missed
        return row._replace(**fields)

    def _batch(self, call: float) -> int:
        # See [Note: Ranks at different batches]. A rank that never scales a loss is
        # taken to call `update` once for each batch.
        if self.has_scaled and 0 < self._most <= self.sent:
            return self._iteration + 1  # of the next batch: `update` was forgotten
        if call == UPDATE and self._scales and not (self.sent or self.has_scaled):
            return self._iteration - 1  # `update` was called twice
        return self._iteration

    def _late_error(self) -> Exception | None:
        # See [Note: When the host reads] and [Note: An error on one rank].
        if _is_captured(self._unread[0].rows):
            return None
        results, self._unread = self._unread, []
        return next(filter(None, map(self._late_error_of, results)), None)

    def _late_error_of(self, result: SyncResult) -> Exception | None:
        if result.was_read and result.host_rows is None:
            return None  # its error was raised when it was read
        try:
            self._learn(result, result.read(), state_of(result.group))
        except (PeerFailedError, RanksDisagreeError, AssertionError) as error:
            self.lags = result.lags
            return error
        if result.ends:
            has_any, self._has_gradients = self._has_gradients, False
            if not has_any:
                return AssertionError(
                    f"{NOTHING_CHECKED} No rank had a gradient in the iteration before."
                )
        return None

    def _learn(self, result: SyncResult, rows: Rows, of_group: GroupState) -> None:
        # All ranks do this, also those without an optimizer.
        if self._made not in of_group.numbers:
            number = rows.value("scaler")
            of_group.scalers += number is None
            of_group.numbers[self._made] = int(number or of_group.scalers)
        if rows.value("call") not in (None, CHECK, CLIP):
            return
        self._has_gradients |= bool(rows.highest.has_gradients)
        number = rows.value("optimizer")
        if number is None and rows.value("call") is None:
            return  # every rank lacks it
        number = int(number or self._optimizers + 1)
        self._optimizers = max(self._optimizers, number)
        record = result.record
        if record is not None and record.number is None:
            if number in record.taken:
                self.missed += 1  # the other ranks raise no error, and step
                raise result.disagreement(rows, ["optimizer"])
            record.number = number

    def tables_of(
        self, result: SyncResult, table: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Return the tables of all ranks, which may differ in their number of rows.

        Raises:
            PeerFailedError: a rank passed None because it could not make its table.
        """
        group, method, device = result.group, result.method, result.rows.device
        length = -1 if table is None else len(table)
        count = torch.tensor([length], dtype=torch.int64, device="cpu").to(device)
        counts = exchange(group, method, count).flatten().tolist()
        if table is None or min(counts) < 0:
            self._begin_anew()
            raise result.peer_failed({i: CLIP for i, n in enumerate(counts) if n < 0})
        padded = table.new_zeros(max(counts), table.shape[1])
        padded[: len(table)] = table
        gathered = exchange(group, method, padded.flatten().to(device)).cpu()
        tables = gathered.reshape(-1, *padded.shape)
        return [each[:count] for each, count in zip(tables, counts, strict=True)]

    def end_iteration(
        self,
        state: Callable[[], Row],
        method: str,
        *,
        must_have_gradients: bool,
    ) -> None:
        """End the iteration. See [Note: Closing an iteration].

        Args:
            state: returns the row; called only if a row is sent.
            method: name of the calling method, for messages.
            must_have_gradients: true to raise if no rank had a gradient; ignored if a
                sync of the iteration has checked it.

        Raises:
            RanksDisagreeError: the ranks had different numbers of syncs.
        """
        # The group of the last sync may be destroyed, so find it again.
        group = self.group.find()
        if group is None or self.is_void:
            self.is_unusual = self._has_gradients = self.has_scaled = False
            return
        count = self.sent
        if count != self._most:
            self.exchange(group, method, state()._replace(call=UPDATE))
        if self._unread:
            self._unread[-1].ends = must_have_gradients
        else:
            self._has_gradients = False
        if not self.is_unusual:
            self._most = max(self._most, count)
        self.sent, self.is_unusual = 0, False
        self._scales = self._scaled_before or self.has_scaled
        self._scaled_before = self.has_scaled = False
        self._iteration += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_unread": [], "_cpu_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _made=next(_made))


def _is_captured(rows: torch.Tensor) -> bool:
    return rows.is_cuda and torch.cuda.is_current_stream_capturing()


def _on_its_way(result: SyncResult) -> SyncResult:
    # The rows are copied to the host meanwhile. A graph writes new rows in each replay,
    # which are read later.
    result.is_late = True
    if result.rows.is_cuda and not _is_captured(result.rows):
        host = torch.empty_like(result.rows, device="cpu", pin_memory=True)
        host.copy_(result.rows, non_blocking=True)
        event = torch.cuda.Event()
        # The copy is on the rows' device, which need not be the current one.
        event.record(torch.cuda.current_stream(result.rows.device))
        result.copy = (host, event)
    return result
