"""Megatron-FSDP: without overlap_param_gather, ZeRO 1 and 2 never gather new weights.

python megatron-fsdp-param-gather.py; exit code 1 where the bug shows.
"""

# - The frame, the same in all scripts. Exit code 1: bug, 0: no bug, 3: no verdict.
import os
import sys
import tempfile
from importlib.metadata import version
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def crashed(*error: Any) -> NoReturn:
    """Print an error, such as a failed import, and exit with 3: no verdict."""
    sys.__excepthook__(*error)
    sys.exit(3)


def as_rank(rank: int, main: Any, given: Any, ranks: int, folder: str) -> None:
    """Run main on one rank of a process group, and save its result."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ |= {name: str(number) for name, number in where.items()}
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=ranks
    )
    try:
        torch.save(main(rank, *given), f"{folder}/{rank}.pt")
        dist.barrier()  # no rank leaves while another still needs it
    finally:
        dist.destroy_process_group()


def on_ranks(main: Any, *given: Any, ranks: int = 2) -> list[Any]:
    """Run main(rank, *given) on all ranks; return their results, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(as_rank, (main, given, ranks, folder), ranks)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)]


def off(found: Any, exact: torch.Tensor) -> float:
    """Return the relative error of a gradient; a missing one counts as zero."""
    return float(((0 if found is None else found) - exact).norm() / exact.norm())


def tell(bug: bool, package: str, **lines: str) -> NoReturn:
    """Print versions, lines and verdict; exit with 1 for a bug, else 0."""
    versions = {name: version(name) for name in dict.fromkeys((package, "torch"))}
    print("versions:", *(f"{name} {number}" for name, number in versions.items()))
    for key, text in lines.items():
        print(f"{key.replace('_', ' ')}: {text}")
    print("verdict:", "bug" if bug else "no bug", flush=True)
    sys.exit(int(bug))


sys.excepthook = crashed
# - The finding
# - The stand-in for CUDA, as in examples/stacks/without_cuda.py
# isort: split
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch


class Ended:
    """Stand-in for a stream, event or collective that has already ended."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return Ended


class Scaled(float):
    """Factor of NCCL's premultiplied sum: inputs are multiplied by it, then added."""


def at_once(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Ended:
    """Run a collective without CUDA's asynchrony; it has ended on return."""
    if isinstance(factor := kwargs.get("op"), Scaled):
        kwargs["op"] = dist.ReduceOp.SUM
        if "input" not in kwargs:
            args[0].mul_(factor)
        else:  # NCCL does not write to it
            kwargs["input"] = kwargs["input"] * factor
    call(*args, **kwargs | {"async_op": False})
    return Ended()


@contextmanager
def without_cuda() -> Iterator[None]:
    """Let packages that ask for CUDA import, lay out and train on the CPU."""
    names = "Stream", "Event", "current_stream", "synchronize", "empty_cache"
    device: dict[str, Any] = dict.fromkeys(names, Ended) | {"stream": nullcontext}
    calls = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"
    groups: dict[str, Any] = {n: partial(at_once, getattr(dist, n)) for n in calls}
    groups["_coalescing_manager"] = lambda *_, **__: nullcontext(Ended())
    with (
        patch.multiple(torch.cuda, current_device=lambda: 0, **device),
        patch.multiple(torch.Tensor, cuda=lambda tensor, *_, **__: tensor),
        patch.multiple(dist, _make_nccl_premul_sum=Scaled, **groups),
    ):
        yield


# - On a CPU
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

CPU, LR, STEPS = torch.device("cpu"), 0.5, 3
sys.modules["megatron"] = None  # a Megatron-Core beside it may be too old for it
SYNCHRONOUS = {"overlap_param_gather": False}  # True is the default
SETTINGS = {
    "ZeRO 1, overlap_param_gather=False": {"zero_dp_strategy": 1} | SYNCHRONOUS,
    "ZeRO 2, overlap_param_gather=False": {"zero_dp_strategy": 2} | SYNCHRONOUS,
    "ZeRO 1": {"zero_dp_strategy": 1},
    "ZeRO 2": {"zero_dp_strategy": 2},
    "ZeRO 0": {"zero_dp_strategy": 0},
}


def problem(dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """Return the model, and all steps' features and targets: same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    x, y = torch.randn(STEPS, 16, 8), torch.randn(STEPS, 16, 4)
    return model, x.to(dtype), y.to(dtype)


@without_cuda()
def rank_main(rank: int) -> dict[str, list[float]]:
    """Return setting -> this rank's loss of each step, by the documented loop."""
    from megatron_fsdp import fully_shard_model, fully_shard_optimizer

    mesh, found = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), {}
    for name, setting in SETTINGS.items():
        module, x, y = problem(torch.float32)
        setting = setting | {"fsdp_unit_modules": [nn.Linear], "device": CPU}
        model = fully_shard_model(module, mesh, "dp", tp_dim="tp", **setting)
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=LR))
        found[name] = []
        for rows, targets in zip(x.chunk(2, 1)[rank], y.chunk(2, 1)[rank]):
            loss = mse_loss(model(rows), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[name].append(loss.item())
    return found


def reference(dtype: torch.dtype) -> Tensor:
    """Return the loss of each step on one process, over all rows."""
    model, x, y = problem(dtype)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LR), []
    for rows, targets in zip(x, y):
        losses.append(mse_loss(model(rows), targets))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach()


if __name__ == "__main__":
    first, second = on_ranks(rank_main)
    exact, errors = reference(torch.float64), {}
    for name in SETTINGS:
        losses = (torch.tensor(first[name]) + torch.tensor(second[name])) / 2
        errors[name] = off(losses, exact)
        print(f"{name}: the losses are off by {errors[name]:.1e}")
    wrong = max(errors[name] for name in SETTINGS if "False" in name)
    noise = off(reference(torch.float32), exact)
    tell(
        not wrong < 1e-4,
        "megatron-fsdp",
        parameter="all weights, from the second step on",
        relative_error=f"{wrong:.2e} of the losses of {STEPS} steps",
        reference=f"one process, fp64; fp32 is off by {noise:.0e}",
    )
