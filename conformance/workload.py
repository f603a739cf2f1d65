"""What a user's own workload must keep, so that a run of it says something.

On one process, before anything is started (bad input, exit code 2): the model and its
batches are the same each time they are made, forward is deterministic, the loss is a
mean over rows, every parameter that trains gets a gradient, the optimizer takes them.
On the ranks (no verdict, exit code 3): all ranks make the same model and batches, and
the layout holds the model's own parameters, whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..fixtures import Batch, Kit, is_workload, kit_of, local
from .held import full_name
from .observe import digest
from .randomness import turn_off_random_layers
from .scenario import Scenario
from .trace import RankTrace

__all__ = [
    "ROUNDING",
    "check_layout",
    "check_share",
    "check_whole",
    "check_workload",
    "check_workloads",
    "same_everywhere",
]

MOST_ELEMENTS = 2**24
"""Of one parameter: its elements are numbered in fp32."""
PARTS = 4
"""A batch is split in so many parts to see what rounding does to a correct run."""
ROUNDING = 2.0**-30
"""What the order of a sum in fp64 may change, by far; what no mean shows is larger."""


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
        if kit.train_step is not None:
            text += ": a stack of another type needs weights(stack)"
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


def check_share(
    kit: Kit, batch: Batch, share: Batch, groups: Sequence[dist.ProcessGroup]
) -> None:
    """See that the shares of all ranks of data together are the global batch.

    Args:
        kit: the workload.
        batch: the global batch.
        share: this rank's part of it.
        groups: those of the mesh's axes along which ranks see different parts.

    Raises:
        WorkloadError: on every rank alike, where elements are missing or seen twice.
    """
    found = torch.tensor([share.elements, _content(share)])
    for group in groups:
        dist.all_reduce(found, group=group)  # whole numbers, which wrap around
    count, content = found.tolist()
    if count != batch.elements:
        what = "leave a hole" if count < batch.elements else "overlap"
        raise kit.refuse(
            "shard",
            f"the parts of all ranks {what}: together they have {count} elements of "
            f"the targets, the batch has {batch.elements}; where some are padding, let "
            "the loss be (sum, count)",
        )
    if content != _content(batch):
        text = "the parts of all ranks overlap and leave a hole: together they have as"
        raise kit.refuse("shard", f"{text} many elements as the batch, but not its own")


def _content(batch: Batch) -> int:
    """A digest of what is compared, whatever its order; that of parts adds up."""
    total = 0
    for tensor in batch.counted:
        bits = tensor.detach().cpu().double().reshape(-1).numpy().view(np.uint64)
        mixed = (bits ^ (bits >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        total += int((mixed ^ (mixed >> np.uint64(32))).sum().view(np.int64))
    return (total + 2**63) % 2**64 - 2**63


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
        model = kit.model()
    turn_off_random_layers(model)
    return model


def _batch(kit: Kit) -> Batch:
    batch, again = (kit.batch(0, 0) for _ in range(2))
    if [*map(digest, batch.tensors)] != [*map(digest, again.tensors)]:
        raise kit.refuse(
            "batch",
            "gave other numbers for the same step and seed: draw them from a generator "
            "seeded with both",
        )
    for name, topology in kit.topologies.items():
        if kit.shard is None and batch.rows % topology.shares:
            raise kit.refuse(
                "batch",
                f"has {batch.rows} rows, which {topology.shares} does not divide: so "
                f"many ranks of {name} see different rows; write shard(batch, mesh) "
                "where they are not split equally",
            )
    return batch


def _check_loss(kit: Kit, model: nn.Module, batch: Batch) -> None:
    (value, count), again = (_objective(kit, model, [batch]) for _ in range(2))
    if not bool(torch.isfinite(value)):
        raise kit.refuse("loss", f"is {value.item()} on the first batch")
    if count == 0:
        raise kit.refuse("loss", "the count of the whole first batch is 0")
    if (value.item(), count) != (again[0].item(), again[1]):
        raise kit.refuse(
            "forward",
            f"gave the losses {value.item():g} and {again[0].item():g} for one batch, "
            "with every probability of dropout set to 0: what a random forward "
            "computes cannot be compared. Keep the probability, or size, of other "
            "noise in an attribute with 'drop' or 'jitter' in its name, and draw "
            "nothing where it is 0",
        )
    if not value.requires_grad:
        raise kit.refuse("loss", "is not connected with any parameter")
    with kit.calling("backward"):
        value.backward()


def _objective(
    kit: Kit, model: nn.Module, parts: Iterable[Batch]
) -> tuple[Tensor, float | None]:
    """The mean of means, weighted by rows, and None; or sum and count of them all."""
    found, parts = [], [*parts]
    for part in parts:
        with kit.calling("forward"):
            output = model(part.inputs)
        found.append(kit.objective(output, part.targets))
    counts = [count for _, count in found if count is not None]
    if counts:
        return torch.stack([value for value, _ in found]).sum(), sum(counts)
    weights = [part.elements for part in parts]
    values = [v * w for (v, _), w in zip(found, weights, strict=True)]
    return torch.stack(values).sum() / sum(weights), None


def _check_gradients(kit: Kit, model: nn.Module) -> None:
    """A parameter may be left unused, or wait for another batch; not all of them."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if all(p.grad is None or not p.grad.any() for _, p in named):
        text = f"gave no gradient but zero to any of {', '.join(n for n, _ in named)}"
        raise kit.refuse("backward", text)
    model.zero_grad()


def _check_mean(kit: Kit, model: nn.Module, batch: Batch) -> None:
    """What ranks and micro-batches see must make up the loss of the whole."""
    wide = batch.map(lambda t: t.double() if t.is_floating_point() else t)
    model = model.double()
    own = kit.micro_batches
    with torch.no_grad():
        if own is not None:
            parts = own(wide)
            elements = sum(part.elements for part in parts)
            if not kit.counted and elements != wide.elements:
                raise kit.refuse(
                    "micro_batches",
                    f"leave out rows or repeat them: together they have {elements} "
                    f"elements of the targets, the batch has {wide.elements}; where "
                    "some are padding, let the loss be (sum, count)",
                )
            _check_made_up(kit, model, wide, parts, "micro_batches")
        else:
            _check_made_up(kit, model, wide, wide.in_parts(PARTS), "loss")
    model.float()


def _check_made_up(
    kit: Kit, model: nn.Module, whole: Batch, parts: list[Batch], call: str
) -> None:
    value, count = _objective(kit, model, [whole])
    made, of_parts = _objective(kit, model, parts)
    largest = max(abs(value.item()), abs(made.item()))
    if count is not None:
        if count != of_parts or abs(value - made) > ROUNDING * largest * len(parts):
            raise kit.refuse(
                call,
                f"the batch has the sum {value.item():.9g} and the count {count:g}, "
                f"its {len(parts)} parts together {made.item():.9g} and {of_parts:g}, "
                "in fp64: sums and counts of parts must add up",
            )
    elif abs(value - made) > ROUNDING * largest:
        raise kit.refuse(
            call,
            f"is {value.item():.9g} for the batch and {made.item():.9g} on average "
            f"over its {len(parts)} parts, in fp64: data parallel training averages "
            "over rows, so the loss must be a mean over them (no sum, no batch norm, "
            "no fp32 inside), or (sum, count)",
        )


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
