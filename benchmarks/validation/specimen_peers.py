"""Common ways to check training, on the specimens: curves, weights, hashes.

Each workload is trained for 100 steps on its ranks and on one process, in fp32, from
the same weights and on the same batches; loops of our own take two micro-batches.

[Note: Thresholds]
A loss curve is compared with that of one process by their relative difference.
Megatron's functional tests allow 5 % for ``lm loss`` at all but 1 % of the steps. A
strict reader of curves would allow 1 % at every step. Weights are compared by
``assert_close`` with its defaults. DebugMode's hashes are compared only if both runs
make the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._debug_mode import DebugMode

from gradparity.fixtures import named
from gradparity.multiprocess import Cluster, WorldError

__all__ = ["STEPS", "peers_of"]

STEPS = 100
STRICT = 0.01
"""Relative difference of a loss that is allowed at any step."""
USUAL = 0.05
"""Relative difference of a loss that Megatron's tests allow at all but 1 % of steps."""
Batch = tuple[Any, Any]
Places = Mapping[str, Tensor]
"""Name -> positions of a rank's elements in the flat whole tensor."""
DATA_AXES = ("dp", "dp_replicate", "dp_shard", "ep")


def peers_of(cluster: Callable[[int], Cluster], spec: str) -> dict[str, Any]:
    """Return way of checking -> True if it would raise an alarm for a workload.

    Args:
        cluster: returns ranks by world size.
        spec: the workload.

    Returns:
        Alarms by way of checking, and the figures behind them.
    """
    workload = named("workload", spec, "")
    world = math.prod(workload.meshes[0].values())
    try:
        ranks = cluster(world).with_options(timeout_s=300).run(_on_rank, spec)
    except WorldError as failure:
        raised = " ".join(failure.root.headline.split())[:120]
        ways = ("loss_1_percent", "loss_5_percent", "assert_close")
        return {**dict.fromkeys(ways, True), "hashes": None, "raised": raised}
    losses, weights = _one_process(workload)
    mean = [_mean(row) for row in zip(*(r["losses"] for r in ranks), strict=True)]
    off = [
        abs(a - b) / abs(b) if math.isfinite(a) else math.inf
        for a, b in zip(mean, losses, strict=True)
    ]
    most = max(off)
    return {
        "loss_1_percent": most > STRICT,
        "loss_5_percent": sum(x > USUAL for x in off) > STEPS // 100,
        "assert_close": not all(_close(r, weights) for r in ranks),
        "hashes": ranks[0]["hashes"],
        "most_off": most if math.isfinite(most) else "inf",
    }


def _mean(values: tuple[float | None, ...]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known)


def _close(rank: dict[str, Any], weights: Mapping[str, Tensor]) -> bool:
    for name, places in rank["places"].items():
        try:
            expected = weights[name].reshape(-1)[places]
            torch.testing.assert_close(rank["weights"][name], expected)
        except AssertionError:
            return False
    return True


# - One process


def _one_process(workload: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = _model(workload)
    optimizer = workload.optimizer(list(model.named_parameters()))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(_passes(workload, model, workload.batch(step, 0)))
        clip_norm = getattr(workload, "clip_norm", None)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def _model(workload: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = workload.model()
    return model


def _passes(workload: Any, model: Any, batch: Batch) -> float:
    """Train on two micro-batches, or on one if the loss is (sum, count)."""
    first = workload.loss(model(batch[0]), batch[1])
    if isinstance(first, tuple):
        loss = first[0] / first[1]
        loss.backward()
        return float(loss.detach())
    total = 0.0
    for inputs, targets in _cut(batch, 2):
        loss = workload.loss(model(inputs), targets) / 2
        loss.backward()
        total += float(loss.detach())
    return total


def _cut(batch: Batch, parts: int) -> Iterator[Batch]:
    for part in range(parts):
        yield _rows(batch[0], part, parts), _rows(batch[1], part, parts)


def _rows(tree: Any, part: int, parts: int) -> Any:
    if isinstance(tree, Tensor):
        return tree.chunk(parts)[part]
    return tuple(_rows(each, part, parts) for each in tree)


# - On a rank


def _on_rank(spec: str) -> dict[str, Any]:
    workload = named("workload", spec, "")
    shape: dict[str, int] = workload.meshes[0]
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    stack, places = _laid_out(workload, mesh)
    own = getattr(workload, "train_step", None) is not None
    # DebugMode needs the same calls on both sides, which a train_step has not
    hashes = None if own else _hashes_differ(workload, stack, mesh)
    optimizer = None
    if not own:
        optimizer = workload.optimizer(list(stack.named_parameters()))
    losses: list[float | None] = []
    for step in range(STEPS):
        batch = _share(workload, workload.batch(step, 0), mesh)
        if optimizer is None:
            losses.append(_own_step(workload, stack, batch))
            continue
        optimizer.zero_grad()
        losses.append(_passes(workload, stack, batch))
        optimizer.step()
    held = {n: _local(t).reshape(-1).clone() for n, t in _held(workload, stack).items()}
    return {"losses": losses, "weights": held, "places": places, "hashes": hashes}


def _own_step(workload: Any, stack: Any, batch: Batch) -> float | None:
    cuts = getattr(workload, "micro_batches", lambda whole: [whole])
    found = workload.train_step(stack, cuts(batch), None)
    loss = found[0] if isinstance(found, tuple) else found
    return None if loss is None else float(loss)


def _laid_out(workload: Any, mesh: DeviceMesh) -> tuple[Any, dict[str, Tensor]]:
    """Return the stack, and the positions of this rank's elements in the whole.

    If the workload has no ``weights``, the positions are read from a second stack,
    whose parameters are element numbers.
    """
    stack = workload.parallelize(_model(workload), mesh)
    if hasattr(workload, "weights"):
        wholes = dict(_model(workload).named_parameters())
        held = workload.weights(stack)
        return stack, {n: _of_slices(wholes[n], h) for n, h in held.items()}
    numbers = _model(workload)
    for parameter in numbers.parameters():
        count = torch.arange(parameter.numel(), dtype=torch.float32)
        parameter.detach().copy_(count.view_as(parameter))
    held = _held(workload, workload.parallelize(numbers, mesh))
    places = {n: _local(t).reshape(-1).long().clone() for n, t in held.items()}
    torch.manual_seed(100)
    return workload.parallelize(_model(workload), mesh), places


def _of_slices(whole: Tensor, held: Any) -> Tensor:
    numbers = torch.arange(whole.numel())
    if not isinstance(held, tuple):
        return numbers
    where = held[1]
    shaped = numbers if isinstance(where, slice) else numbers.view(whole.shape)
    return shaped[where].reshape(-1)


def _held(workload: Any, stack: Any) -> dict[str, Tensor]:
    if hasattr(workload, "weights"):
        found = workload.weights(stack)
        return {n: h[0] if isinstance(h, tuple) else h for n, h in found.items()}
    return {n.removeprefix("module."): p for n, p in stack.named_parameters()}


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _share(workload: Any, batch: Batch, mesh: DeviceMesh) -> Batch:
    if hasattr(workload, "shard"):
        found: Batch = workload.shard(batch, mesh)
        return found
    part, parts = 0, 1
    for axis in mesh.mesh_dim_names or ():
        if axis in DATA_AXES and axis not in getattr(workload, "model_axes", ()):
            size = mesh[axis].size()
            part, parts = part * size + mesh[axis].get_local_rank(), parts * size
    return _rows(batch[0], part, parts), _rows(batch[1], part, parts)


def _hashes_differ(workload: Any, stack: Any, mesh: DeviceMesh) -> bool | None:
    """Compare hashes of a forward and backward pass with the hashes on one process.

    Returns:
        True if they differ; None if their calls differ, which DebugMode refuses.
    """
    logs = []
    batch = workload.batch(0, 0)
    model = _model(workload)
    for each, part in ((model, batch), (stack, _share(workload, batch, mesh))):
        with DebugMode() as mode, DebugMode.log_tensor_hashes():
            workload.loss(each(part[0]), part[1]).backward()
        logs.append(mode.logs)
    stack.zero_grad()
    dist.barrier()
    try:
        return bool(DebugMode.check_hash_mismatches(*logs))
    except ValueError:
        return None
