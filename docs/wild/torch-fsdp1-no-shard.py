"""torch: FSDP1's NO_SHARD averages no parameter that the last micro-batch skips.

python torch-fsdp1-no-shard.py; exit code 1 where the bug shows.
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
from contextlib import nullcontext
from functools import partial

from torch import Tensor, nn
from torch.distributed import fsdp
from torch.nn.functional import mse_loss


class Net(nn.Sequential):
    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = self[0](x).tanh()
        return self[2](self[1](x).tanh() if branch else x)


def problem(dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """Return the model, and inputs and targets by rank and micro-batch."""
    torch.manual_seed(0)
    model, (x, y) = Net(*(nn.Linear(4, 4) for _ in "123")), torch.randn(2, 2, 2, 3, 4)
    return model.to(dtype), x.to(dtype), y.to(dtype)


def no_shard(module: nn.Module) -> Any:
    """Wrap each layer, and the whole module, in FSDP1 without shards."""
    for name, layer in module.named_children():
        setattr(module, name, no_shard(layer))
    settings: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    strategy = fsdp.ShardingStrategy.NO_SHARD
    return fsdp.FullyShardedDataParallel(module, None, strategy, **settings)


ddp = partial(nn.parallel.DistributedDataParallel, find_unused_parameters=True)
# wrapper, no_sync before the last micro-batch, True if the last uses the layer
WAYS: dict[str, tuple[Any, bool, bool]] = {
    "NO_SHARD, no_sync": (no_shard, True, True),
    "NO_SHARD, passed by in the last": (no_shard, False, False),
    "DDP, no_sync, passed by in the last": (ddp, True, False),
    "NO_SHARD, no_sync, passed by in the last": (no_shard, True, False),
}


def rank_main(rank: int) -> dict[str, Any]:
    """Return name of a setup in ``WAYS`` -> gradient of the middle layer."""
    found = {}
    for way, (wrap, deferred, branch) in WAYS.items():
        model, x, y = problem(torch.float32)
        layer, stack = model[1], wrap(model)
        with stack.no_sync() if deferred else nullcontext():
            mse_loss(stack(x[rank, 0], True), y[rank, 0]).div(2).backward()
        mse_loss(stack(x[rank, 1], branch), y[rank, 1]).div(2).backward()
        found[way] = layer.weight.grad.clone()
    return found


def reference(dtype: torch.dtype, branch: bool) -> Tensor:
    """Return the middle layer's gradient from one process, over all rows."""
    model, x, y = problem(dtype)
    for part, used in ((0, True), (1, branch)):
        mse_loss(model(x[:, part], used), y[:, part]).div(2).backward()
    return model[1].weight.grad


if __name__ == "__main__":
    first, second = on_ranks(rank_main)
    for way, (*_, branch) in WAYS.items():
        exact = reference(torch.float64, branch)
        wrong = max(off(found[way], exact) for found in (first, second))
        print(f"{way}: off by {wrong:.1e}, ranks by {off(first[way], second[way]):.1e}")
    noise = off(reference(torch.float32, False), exact)
    tell(
        not wrong < 1e-3,
        "torch",
        parameter="1.weight",
        relative_error=f"{wrong:.2e}, on the worse rank",
        reference=f"one process, fp64; fp32 is off by {noise:.0e}",
    )
