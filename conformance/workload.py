"""What a user's own workload must keep, so that a run of it says something.

On one process, before anything is started (bad input, exit code 2): the model and its
batches are the same each time they are made, forward is deterministic, the loss is a
mean over rows, every parameter that trains gets a gradient, the optimizer takes them.
On the ranks (no verdict, exit code 3): all ranks make the same model and batches, and
the layout holds the model's own parameters, whole.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..fixtures import Batch, Kit, is_workload, kit_of, local
from .observe import digest
from .scenario import Scenario
from .trace import RankTrace

__all__ = [
    "WRAPPERS",
    "check_layout",
    "check_whole",
    "check_workload",
    "check_workloads",
    "full_name",
    "same_everywhere",
]

MOST_ELEMENTS = 2**24
"""Of one parameter: its elements are numbered in fp32."""
PARTS = 4
"""A batch is split in so many parts to see what rounding does to a correct run."""
ROUNDING = 2.0**-30
"""What the order of a sum in fp64 may change, by far; what no mean shows is larger."""
WRAPPERS = (
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_orig_mod",
    "module",
)
"""What wrappers put into the names of parameters."""


def full_name(name: str, whole: Container[str]) -> str:
    """The name in the full model of a parameter of a wrapped one.

    A model may have a layer called ``module`` itself: no more is left out than leads to
    a name that it has.

    Args:
        name: a parameter's name once the model is laid out.
        whole: the names that the full model has.

    Returns:
        ``name`` itself where nothing that wrappers do leads to a name in ``whole``.
    """
    parts = name.split(".")
    wrapped = [place for place, part in enumerate(parts) if part in WRAPPERS]
    for count in range(len(wrapped) + 1):
        for out in combinations(wrapped, count):
            found = ".".join(p for place, p in enumerate(parts) if place not in out)
            if found in whole:
                return found
    return name


# - On a rank


def same_everywhere(kit: Kit, call: str, made: Mapping[str, Tensor]) -> None:
    """Compare what a call made with what it made on rank 0.

    Args:
        kit: the workload.
        call: what made it.
        made: the tensors, by name; the same on every rank.

    Raises:
        WorkloadError: on every rank alike, so that none waits for another.
    """
    mine = {name: f"{tuple(t.shape)} {t.dtype} {digest(t)}" for name, t in made.items()}
    all_: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_, mine)
    for rank, theirs in enumerate(all_):
        names = [n for n in {**all_[0], **theirs} if all_[0].get(n) != theirs.get(n)]
        if names:
            raise kit.refuse(
                call,
                f"gave another {names[0]} on rank {rank} than on rank 0: all ranks "
                f"must make the same {call}, whatever their rank",
            )


def check_layout(
    kit: Kit, module: object, whole: Mapping[str, Tensor], tied: Mapping[str, str]
) -> None:
    """Look at what ``parallelize`` returned; parameters hold their element numbers.

    Args:
        kit: the workload.
        module: what its ``parallelize`` returned.
        whole: the model's parameters by name.
        tied: a second name of one of them -> the name in ``whole``.

    Raises:
        WorkloadError: where it is no module, or not one of the model's parameters.
    """
    if not isinstance(module, nn.Module):
        text = f"returned {type(module).__name__}, expected the module to call"
        raise kit.refuse("parallelize", text)
    held = {full_name(n, whole): p for n, p in module.named_parameters()}
    unknown = [n for n in held if n not in whole]
    if unknown and full_name(unknown[0], tied) in tied:
        name = full_name(unknown[0], tied)
        raise kit.refuse(
            "parallelize",
            f"{name} is tied to {tied[name]} in model() and a parameter of its own "
            "after parallelize: tie it again",
        )
    if unknown:
        raise kit.refuse(
            "parallelize",
            f"gave the parameter {unknown[0]!r}, which the model has not: parameters "
            f"keep their names (it has {', '.join([*whole][:8])})",
        )
    for name, parameter in held.items():
        _check_numbers(kit, name, parameter, whole[name].numel())


def _check_numbers(kit: Kit, name: str, parameter: nn.Parameter, count: int) -> None:
    if parameter.dtype != torch.float32:
        text = f"made {name} {parameter.dtype}: parameters stay torch.float32"
        raise kit.refuse("parallelize", text)
    flat = local(parameter.detach()).reshape(-1).cpu().numpy()
    right = (flat >= 0) & (flat < count) & (flat == np.floor(flat))
    if not right.all() or len(np.unique(flat)) != len(flat):
        raise kit.refuse(
            "parallelize",
            f"changed the values of {name}: it is to lay the model out as it is, and "
            "to initialise, copy or scale nothing",
        )


def check_whole(scenario: Scenario, traces: Sequence[RankTrace]) -> None:
    """See that the ranks together hold every element of a user's own model.

    Raises:
        WorkloadError: names the parameter of which something is missing.
    """
    if not is_workload(scenario.data) or not all(t.index for t in traces):
        return
    for name, parameter in scenario.kit.model().named_parameters():
        parts = [t.index[name] for t in traces if name in t.index]
        held = len(np.unique(np.concatenate(parts))) if parts else 0
        if held < parameter.numel():
            text = f"no rank holds {parameter.numel() - held} of {parameter.numel()}"
            raise scenario.kit.refuse("parallelize", f"{text} elements of {name}")


# - On one process


def check_workloads(scenarios: Iterable[Scenario]) -> None:
    """Check the user's own workloads among ``scenarios``, each one once.

    Raises:
        WorkloadError: says which call gave what, and what was expected.
    """
    for data in dict.fromkeys(s.data for s in scenarios):
        if is_workload(data):
            check_workload(data)


@cache
def check_workload(data: str) -> None:
    """Check one workload on this process; see the head of this file.

    Raises:
        WorkloadError: says which call gave what, and what was expected.
    """
    kit = kit_of(data)
    model, batch = _model(kit), _batch(kit)
    _check_loss(kit, model, batch)
    _check_gradients(kit, model)
    _check_mean(kit, model, batch)
    _check_optimizer(kit, model)


def _model(kit: Kit) -> nn.Module:
    model, again = (_seeded(kit) for _ in range(2))
    if not isinstance(model, nn.Module):
        raise kit.refuse("model", f"returned {type(model).__name__}, expected a module")
    twins = dict(again.named_parameters())
    if not any(p.requires_grad for p in model.parameters()):
        raise kit.refuse("model", "has no parameter that trains")
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            got = f"{parameter.dtype} on {parameter.device}"
            raise kit.refuse("model", f"{name} is {got}, expected torch.float32 on cpu")
        if parameter.numel() >= MOST_ELEMENTS:
            text = (
                f"{name} has {parameter.numel()} elements, at most {MOST_ELEMENTS - 1}"
            )
            raise kit.refuse("model", f"{text} can be told apart: make it smaller")
        if name not in twins or digest(parameter) != digest(twins[name]):
            raise kit.refuse(
                "model",
                f"{name} has other values when made again: after the same "
                "torch.manual_seed the model must be the same",
            )
    return model


def _seeded(kit: Kit) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kit.model()


def _batch(kit: Kit) -> Batch:
    batch, again = (kit.batch(0, 0) for _ in range(2))
    if [*map(digest, batch.tensors)] != [*map(digest, again.tensors)]:
        raise kit.refuse(
            "batch",
            "gave other numbers for the same step and seed: draw them from a generator "
            "seeded with both",
        )
    for name, topology in kit.topologies.items():
        shape = topology.mesh_shape(topology.default_world)
        parts = 1
        for axis, size in shape.items():
            parts *= size if axis in topology.data_axes else 1
        for count in (PARTS, 2 * parts):
            if batch.rows % count:
                raise kit.refuse(
                    "batch",
                    f"has {batch.rows} rows, which {count} does not divide: {name} "
                    f"has {parts} parts of data with 2 micro-batches each, references "
                    f"take {PARTS}",
                )
    return batch


def _check_loss(kit: Kit, model: nn.Module, batch: Batch) -> None:
    value, again = (_loss(kit, model, batch) for _ in range(2))
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        got = (
            f"a tensor of shape {list(value.shape)}, {value.dtype}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
        raise kit.refuse("loss", f"returned {got}, expected a 0-d floating tensor")
    if not bool(torch.isfinite(value)):
        raise kit.refuse("loss", f"is {value.item()} on the first batch")
    if value.item() != again.item():
        raise kit.refuse(
            "forward",
            f"gave the losses {value.item():g} and {again.item():g} for one batch: a "
            "random forward (dropout) cannot be compared; turn it off",
        )
    if not value.requires_grad:
        raise kit.refuse("loss", "is not connected with any parameter")
    with kit.calling("backward"):
        value.backward()


def _loss(kit: Kit, model: nn.Module, batch: Batch) -> Any:
    with kit.calling("forward"):
        output = model(batch.inputs)
    return kit.loss(output, batch.targets)


def _check_gradients(kit: Kit, model: nn.Module) -> None:
    lost = [
        n for n, p in model.named_parameters() if p.requires_grad and p.grad is None
    ]
    if lost:
        raise kit.refuse(
            "backward",
            f"gave no gradient to {', '.join(lost[:4])}: use it, or set its "
            "requires_grad to False",
        )
    model.zero_grad()


def _check_mean(kit: Kit, model: nn.Module, batch: Batch) -> None:
    """Ranks see parts of the rows: their losses must average to that of the whole."""
    wide = batch.map(lambda t: t.double() if t.is_floating_point() else t)
    model = model.double()
    with torch.no_grad():
        whole = _loss(kit, model, wide).item()
        parts = [_loss(kit, model, wide.shard(i, PARTS)).item() for i in range(PARTS)]
    mean = sum(parts) / PARTS
    if abs(mean - whole) > ROUNDING * max(map(abs, [whole, *parts])):
        raise kit.refuse(
            "loss",
            f"is {whole:.9g} for the batch and {mean:.9g} on average over its "
            f"{PARTS} parts, in fp64: data parallel training averages over rows, so "
            "the loss must be a mean over them (no sum, no batch norm, no fp32 inside)",
        )
    model.float()


def _check_optimizer(kit: Kit, model: nn.Module) -> None:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    for some in (named, named[:1]):
        for make in kit.optimizers.values():
            made = make(some)
            if not isinstance(made, torch.optim.Optimizer):
                text = f"returned {type(made).__name__}, expected torch's Optimizer"
                raise kit.refuse("optimizer", text)
            held = {id(p) for group in made.param_groups for p in group["params"]}
            lost = [n for n, p in some if id(p) not in held]
            if lost:
                raise kit.refuse("optimizer", f"was given {lost[0]} and left it out")
