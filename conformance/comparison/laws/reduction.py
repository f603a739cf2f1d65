"""Dtypes: gradients are reduced in the dtype that the workload declares."""

from __future__ import annotations

import torch

from ...rank.trace import RankTrace, Reduction
from ..law import Evidence, Finding, count_or_inconclusive, failed, law, skipped


@law(
    "dtype.reduction",
    "Gradients are reduced over ranks in the dtype that the workload promises "
    "(reduce_dtype), or in a wider one.",
    "A sum over many ranks in bf16 loses precision; on few ranks the error stays "
    "within the noise. Check compression hooks, the engine's settings and tensor "
    "parallelism: before torch 2.15 it sums partial gradients in the compute dtype, "
    "and fully_shard casts them afterwards (pytorch#190626). There sum them yourself "
    "in reduce_dtype, or use a wider param_dtype.",
    of_stack=True,
    hidden="the workload promises reduce_dtype, and no reducing collective of torch "
    "was seen for the other gradients, between the begin of backward and the step",
)
def reduction(evidence: Evidence) -> Finding:
    """Check each reduction of gradients, from backward to the optimizer's step."""
    if not any(trace.reduce_dtype for trace in evidence.ranks):
        return skipped("the workload promises no reduce_dtype")
    compared, missed, sizes = 0, 0, _sizes(evidence)
    topology = evidence.scenario.parsed_topology
    mesh = topology.mesh_shape(evidence.scenario.world_size)
    over_data = any(mesh.get(axis, 1) > 1 for axis in topology.data_axes)
    for step, seen in evidence.steps():
        for s, trace in zip(seen, evidence.ranks, strict=True):
            reduced = 0
            for each in s.reductions:
                parameters = _parameters(trace, sizes, each)
                # a tensor smaller than any parameter and than their number is a norm or
                # a count
                if not parameters and each.elements <= len(trace.index):
                    continue
                reduced += each.elements
                if not _holds(each.dtype, trace.reduce_dtype):
                    return _narrower(step, trace, each, parameters, compared + reduced)
            # fully_shard reduces more: whole gradients, of which a rank keeps a part
            due = sum(len(trace.index[n]) for n in s.gradients if n in trace.index)
            compared += min(reduced, due)
            missed += max(0, due - reduced) if over_data else 0
    if not compared and not over_data:
        return skipped("every rank sees all data: no gradient is reduced over it")
    return count_or_inconclusive(
        compared,
        "elements of gradients reduced in the promised dtype",
        evidence.unseen + missed,
    )


def _sizes(evidence: Evidence) -> dict[str, int]:
    """Return parameter -> its number of elements on all ranks together."""
    last: dict[str, int] = {}
    for trace in evidence.ranks:
        for name, places in trace.index.items():
            end = int(places.max()) + 1 if len(places) else 0
            last[name] = max(last.get(name, 0), end)
    return last


def _parameters(trace: RankTrace, sizes: dict[str, int], seen: Reduction) -> list[str]:
    """Return the parameters whose local or whole size is that of a reduced tensor."""
    return [
        name
        for name, places in trace.index.items()
        if len(places) and seen.elements in (len(places), sizes[name])
    ]


def _holds(dtype: str, promised: str) -> bool:
    """Return True if ``dtype`` represents every number of ``promised``."""
    got: torch.dtype = getattr(torch, dtype)
    return torch.promote_types(got, getattr(torch, promised)) == got


def _narrower(
    step: int, trace: RankTrace, seen: Reduction, parameters: list[str], compared: int
) -> Finding:
    whose = f", as many elements as {' or '.join(parameters[:4])}" if parameters else ""
    return failed(
        message=f"rank {trace.rank} reduced gradients in {seen.dtype}, "
        f"promised is {trace.reduce_dtype}: {seen.collective}{whose}",
        step=step,
        ranks=(trace.rank,),
        parameter=parameters[0] if len(parameters) == 1 else None,
        cause=f"{seen.collective.call.partition('[')[0]} in {seen.dtype}",
        compared=compared,
    )
