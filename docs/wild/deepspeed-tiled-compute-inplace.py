"""DeepSpeed: sequence_tiled_compute divides its incoming gradient in place.

python deepspeed-tiled-compute-inplace.py; exit code 1 where the bug shows.
One process: the fault needs no ranks.
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
from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

VOCABULARY, WIDTH, LENGTH = 12, 8, 16
ROWS = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.manual_seed(1))


class Model(nn.Module):
    """Embedding, router with an auxiliary loss, and head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy of the head's output."""
        return cross_entropy(self.head(x).flatten(0, 1), y.flatten())

    def forward(self, tiles: int) -> Any:
        """Return the mean loss of next tokens plus the router's z-loss."""
        x, y = self.body(ROWS), ROWS.roll(-1, 1)
        auxiliary = self.router(x).logsumexp(-1).square().mean()
        if not tiles:
            return self.loss(x, y) + auxiliary
        tiled = sequence_tiled_compute(
            self.loss,
            LENGTH,
            tiles,
            {"x": x, "y": y},
            {},
            "x",
            [self.head.weight],
            output_unshard_dimension=0,
            output_reduction="mean",
        )
        return tiled + auxiliary


def gradients(dtype: torch.dtype, tiles: int) -> dict[str, Tensor]:
    """Return the gradients of the sum of both losses."""
    model = Model().to(dtype)
    model(tiles).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


if __name__ == "__main__":
    found, fp32 = gradients(torch.float32, 4), gradients(torch.float32, 0)
    exact = gradients(torch.float64, 0)
    errors = {name: off(found[name], right) for name, right in exact.items()}
    print("errors:", {name: f"{error:.1e}" for name, error in errors.items()})
    worst = max(errors, key=lambda name: errors[name])
    noise = off(fp32[worst], exact[worst])
    tell(
        not errors[worst] < 1e-3,
        "deepspeed",
        parameter=worst,
        relative_error=f"{errors[worst]:.2e}",
        reference=f"untiled, fp64; fp32 is off by {noise:.0e}",
    )
