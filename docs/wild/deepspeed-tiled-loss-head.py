"""DeepSpeed: TiledFusedLogitsLoss leaves the gradient of its head unscaled.

python deepspeed-tiled-loss-head.py; exit code 1 where the bug shows.
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
import deepspeed
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

SIZE, WIDTH = 12, 8
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 10000},
}
ROWS = torch.randint(SIZE, (4, 1, 8), generator=torch.manual_seed(1))
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled


def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model[1](x).flatten(0, -2), y.flatten())


class Tiled(nn.Sequential):
    def forward(self, rows: Tensor) -> Any:
        x, y, head = self[0](rows), rows.roll(-1, 1), [self[1].weight]
        return TiledFusedLogitsLoss.apply(loss, self, x, y, None, 4, head, "mean")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return Tiled(nn.Embedding(SIZE, WIDTH), nn.Linear(WIDTH, SIZE, bias=False))


def reference(dtype: torch.dtype) -> list[Any]:
    """Return gradients of the mean over all micro-batches: untiled, one process."""
    whole, rows = model().to(dtype), ROWS.flatten(0, 1)
    loss(whole, whole[0](rows), rows.roll(-1, 1)).backward()
    return [p.grad for p in whole.parameters()]


def rank_main(rank: int) -> list[Tensor]:
    """Return minus the weight changes of an SGD step at rate 1: the gradients."""
    optimizer = torch.optim.SGD((tiled := model()).parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=tiled, optimizer=optimizer, config=CONFIG)
    for row in ROWS[rank::2]:
        engine.backward(engine(row))
        engine.step()
    return [(a - b).detach() for a, b in zip(model().parameters(), tiled.parameters())]


if __name__ == "__main__":
    found = on_ranks(rank_main)[0]  # the same on both ranks
    exact, fp32 = reference(torch.float64), reference(torch.float32)
    (body, error), (_, noise) = (map(off, each, exact) for each in (found, fp32))
    print(f"the embedding's gradient is off by {body:.0e}")
    tell(
        not error < 1e-3,
        "deepspeed",
        parameter="head.weight",
        relative_error=f"{error:.2e}",
        reference=f"untiled on one process, fp64; fp32 is off by {noise:.0e}",
    )
