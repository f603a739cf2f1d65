"""torch: FSDP1's HYBRID_SHARD never averages over replicas of unsharded weights.

python torch-fsdp1-hybrid-one.py; exit code 1 where the bug shows.
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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.functional import mse_loss

CPU = torch.device("cpu")
HYBRID = ShardingStrategy.HYBRID_SHARD
LAYOUTS = {
    "HYBRID_SHARD, 2 replicas x 1 shard": (HYBRID, (2, 1)),
    "HYBRID_SHARD, 1 replica x 2 shards": (HYBRID, (1, 2)),
    "NO_SHARD": (ShardingStrategy.NO_SHARD, (2,)),
}


def problem(dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """Return the model, features and targets, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(dtype)
    return model, torch.randn(8, 4).to(dtype), torch.randn(8, 3).to(dtype)


def rank_main(rank: int) -> dict[str, Tensor]:
    """Return layout -> weight after one step of SGD."""
    found = {}
    for name, (strategy, shape) in LAYOUTS.items():
        model, x, y = problem(torch.float32)
        axes = ("replicate", "shard")[-len(shape) :]
        sharded = FullyShardedDataParallel(
            model,
            device_mesh=init_device_mesh("cpu", shape, mesh_dim_names=axes),
            sharding_strategy=strategy,
            device_id=CPU,
        )
        optimizer = torch.optim.SGD(sharded.parameters(), lr=1.0)
        mse_loss(sharded(x.chunk(2)[rank]), y.chunk(2)[rank]).backward()
        optimizer.step()
        with FullyShardedDataParallel.summon_full_params(sharded):
            found[name] = model.weight.detach().clone()
    return found


def reference(dtype: torch.dtype) -> Tensor:
    """Return the weight after one step of SGD on one process, over all rows."""
    model, x, y = problem(dtype)
    mse_loss(model(x), y).backward()
    return (model.weight - model.weight.grad).detach()


if __name__ == "__main__":
    first, second = on_ranks(rank_main)
    start, exact = problem(torch.float64)[0].weight.detach(), reference(torch.float64)
    errors = {}
    for name in LAYOUTS:
        errors[name] = [off(w[name] - start, exact - start) for w in (first, second)]
        apart = off(first[name], second[name])
        print("{}: the update is off by {:.1e} and {:.1e}".format(name, *errors[name]))
        print(f"    the weights of the two ranks differ by {apart:.1e}")
    wrong = max(errors["HYBRID_SHARD, 2 replicas x 1 shard"])
    noise = off(reference(torch.float32) - start, exact - start)
    tell(
        not wrong < 1e-3,
        "torch",
        parameter="weight",
        relative_error=f"{wrong:.2e} of the update, on the worse rank",
        reference=f"one process, fp64; fp32 is off by {noise:.0e}",
    )
