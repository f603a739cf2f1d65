"""The ranks' collectives as files that torch's flight-recorder analyser reads.

``python -m torch.distributed.flight_recorder.fr_trace FOLDER`` (the script
``torchfrtrace``) reads one pickle a rank, as torch's ProcessGroupNCCL writes them. Here
the parent writes them, from what it reads in the ranks' memory: so a rank
that was killed or hangs in native code has one, too. These files are only written.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .outcomes import Collective, RankOutcome, TensorShape

VERSION = "2.10"
"""Of the format, as torch 2.13 writes it."""

PREFIX = "flight_record_rank_"
"""Of the files' names; what follows is the rank."""

ANALYSER = "python -m torch.distributed.flight_recorder.fr_trace"

_OPS = {
    "_allgather_base": "_all_gather_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single": "_all_gather_base",
    "all_gather_tensor": "_all_gather_base",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_to_all_single": "all_to_all",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "allreduce_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "monitored_barrier": "barrier",
    "permute_tensor": "all_to_all",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "scatter": "scatter",
}
"""Our name of a collective, that of the method or function, and the analyser's.

Sends and receives are left out: the analyser expects every rank of the group to take
part in each, and would name the others as missing."""

_GATHERS = frozenset(
    {"_all_gather_base", "all_gather", "all_gather_into_tensor_coalesced"}
)
_SCATTERS = frozenset(
    {"_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor_coalesced"}
)
_ONE_SIDED = frozenset({"gather", "scatter"})

Entry = dict[str, Any]


def write_flight_records(outcomes: Sequence[RankOutcome], folder: Path) -> bool:
    """Write one file a rank.

    Args:
        outcomes: Of one call, of every rank of the world.
        folder: Made if it is not there. It should hold nothing else: the analyser reads
            every file in it.

    Returns:
        Whether there was a collective to write.
    """
    if not any(_noted(outcome) for outcome in outcomes):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    groups = _groups(outcomes)
    starts = _starts(outcomes, groups)
    open_ones = {
        (call.group, call.number)
        for outcome in outcomes
        for call in _noted(outcome)
        if not call.ended_ns
    }
    for outcome in outcomes:
        dump = {
            "version": VERSION,
            "rank": outcome.rank,
            "pg_config": {
                name: {"name": name, "desc": desc, "ranks": str(list(ranks))}
                for name, (desc, ranks) in groups.items()
                if outcome.rank in ranks
            },
            "entries": list(_entries(outcome, groups, starts, open_ones)),
        }
        file = folder / f"{PREFIX}{outcome.rank}"
        # Beside the folder: the analyser would read a partial file in it.
        partial = folder.parent / f".{folder.name}-{file.name}.{os.getpid()}"
        partial.write_bytes(pickle.dumps(dump, protocol=2))
        partial.replace(file)
    return True


def how_to_analyse(folder: Path) -> str:
    """Return the lines of a failed world's report on its files."""
    return f"flight records of all ranks: {folder}\n  {ANALYSER} {folder}"


def _noted(outcome: RankOutcome) -> list[Collective]:
    return [call for call in outcome.collectives if call.op in _OPS]


def _groups(
    outcomes: Sequence[RankOutcome],
) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Return description and ranks of each group, by the analyser's name of it."""
    everybody = tuple(outcome.rank for outcome in outcomes)
    found: dict[str, tuple[str, tuple[int, ...]]] = {"0": ("default_pg", everybody)}
    for outcome in outcomes:
        for call in _noted(outcome):
            name = _group_name(call)
            if name == "0":
                continue
            desc, ranks = found.get(name, ("", ()))
            # Of a record that was cut: those that are seen to be in it.
            known = call.ranks or tuple(sorted({*ranks, outcome.rank}))
            found[name] = (desc or call.description or "undefined", known)
    return found


def _group_name(call: Collective) -> str:
    return "0" if call.group == "the default group" else call.group


def _starts(
    outcomes: Sequence[RankOutcome],
    groups: Mapping[str, tuple[str, tuple[int, ...]]],
) -> Mapping[str, float]:
    """Return the first collective of each group that every rank may still have.

    A rank keeps its last records only: what another one no longer has would be said to
    be missing there.
    """
    starts = dict.fromkeys(groups, 0.0)
    for outcome in outcomes:
        if not outcome.collectives or outcome.collectives[0].position == 0:
            continue
        for name, (_, ranks) in groups.items():
            if outcome.rank in ranks:
                left = [c.number for c in _noted(outcome) if _group_name(c) == name]
                starts[name] = max(starts[name], min(left, default=math.inf))
    return starts


def _entries(
    outcome: RankOutcome,
    groups: Mapping[str, tuple[str, tuple[int, ...]]],
    starts: Mapping[str, float],
    open_ones: Container[tuple[str, int]],
) -> Iterator[Entry]:
    calls = [c for c in _noted(outcome) if c.number >= starts[_group_name(c)]]
    for index, call in enumerate(calls):
        group = _group_name(call)
        desc, ranks = groups[group]
        op = _OPS[call.op]
        sent, received = _sides(op, call, len(ranks))
        file, _, line = call.where.rpartition(":")
        yield {
            "record_id": index,
            "pg_id": list(groups).index(group),
            "process_group": (group, desc),
            # Counted from the start of the call, and not since the group was made.
            "collective_seq_id": call.number,
            "p2p_seq_id": 0,
            "op_id": call.number,
            "profiling_name": f"gloo:{op}",
            "time_created_ns": call.issued_ns,
            "input_sizes": [list(shape.sizes) for shape in sent] or [[]],
            "input_dtypes": [_dtype(shape) for shape in sent],
            "output_sizes": [list(shape.sizes) for shape in received] or [[]],
            "output_dtypes": [_dtype(shape) for shape in received],
            # Of the collective, not of the rank: the analyser would take one that has
            # got its answer early for another culprit. The time below is the rank's.
            "state": "scheduled"
            if (call.group, call.number) in open_ones
            else "completed",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": call.ended_ns or None,
            "retired": bool(call.ended_ns),
            "timeout_ms": 0,
            "is_p2p": False,
            "frames": [
                {
                    "name": call.op,
                    "filename": file,
                    "line": int(line) if line.isdigit() else 0,
                }
            ],
        }


def _sides(
    op: str, call: Collective, size: int
) -> tuple[Sequence[TensorShape], Sequence[TensorShape]]:
    """Return what went in and came out, alike for every way to call a collective.

    Lists of tensors and one tensor for all are one tensor each. Functions, which make
    their output themselves, have it derived.
    """
    if op == "barrier":
        return (), ()
    sent, received = list(_each(call.sent)), list(_each(call.received))
    if op in _ONE_SIDED:  # only the root has the other side
        return sent, received
    if not (op in _GATHERS or op in _SCATTERS or op == "all_to_all"):
        return sent, received or sent
    join = _flat if op.endswith("_coalesced") else _joined
    before = join(sent)
    times, over = (size, 1) if op in _GATHERS else (1, size if op in _SCATTERS else 1)
    after = [s._replace(sizes=(s.sizes[0] * times // over,)) for s in before]
    return before, join(received) or after


def _each(shapes: Sequence[TensorShape]) -> Iterator[TensorShape]:
    for shape in shapes:
        yield from [shape._replace(repeats=1)] * shape.repeats


def _joined(shapes: Sequence[TensorShape]) -> list[TensorShape]:
    if not shapes:
        return []
    elements = sum(math.prod(shape.sizes) for shape in shapes)
    return [TensorShape(shapes[0].dtype, (elements,), 1)]


def _flat(shapes: Sequence[TensorShape]) -> list[TensorShape]:
    return [shape._replace(sizes=(math.prod(shape.sizes),)) for shape in shapes]


def _dtype(shape: TensorShape) -> str:
    return _DTYPES.get(shape.dtype, shape.dtype)


_DTYPES = {
    "bfloat16": "BFloat16",
    "bool": "Bool",
    "complex128": "ComplexDouble",
    "complex64": "ComplexFloat",
    "float16": "Half",
    "float32": "Float",
    "float64": "Double",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "int8": "Char",
    "uint8": "Byte",
}
