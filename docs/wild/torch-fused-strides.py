"""torch: fused optimizers on CPU take tensors of other strides for contiguous ones.

python torch-fused-strides.py; exit code 1 where the bug shows.
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
from torch import Tensor, nn

LR = 0.1
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad")


def own_gradient(make: Any, dtype: torch.dtype, fused: bool) -> Tensor:
    """Return the weight after one step with a transposed gradient."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(6, 4, dtype=dtype))
    q, r = torch.linalg.qr(torch.randn(4, 6, dtype=torch.float64))
    # transposed, as low-rank and orthogonalised gradients often are
    weight.grad = (q @ r).to(dtype).t()
    make([weight], lr=LR, fused=fused, foreach=False).step()
    return weight.detach()


def channels_last(make: Any, dtype: torch.dtype, fused: bool) -> Tensor:
    """Return a kernel after two steps; its memory format changes between them."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 2, bias=False).to(dtype)
    images = torch.randn(2, 3, 5, 5).to(dtype)
    optimizer = make(layer.parameters(), lr=LR, fused=fused, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        layer(images).square().sum().backward()
        optimizer.step()
        layer.to(memory_format=torch.channels_last)
    return layer.weight.detach()


if __name__ == "__main__":
    worst: dict[str, float] = {}
    noise = 0.0
    for case in (own_gradient, channels_last):
        for name in OPTIMIZERS:
            make = getattr(torch.optim, name)
            exact = case(make, torch.float64, False)
            plain, fused = (
                off(case(make, torch.float32, f), exact) for f in (False, True)
            )
            noise = max(noise, plain)
            worst[case.__name__] = max(worst.get(case.__name__, 0.0), fused)
            print(f"{case.__name__}, {name}: fused {fused:.1e}, not fused {plain:.1e}")
    error, kernel = worst.values()
    tell(
        not error < 1e-3,
        "torch",
        parameter="weight",
        relative_error=f"{error:.2e}; {kernel:.2e} of the kernel",
        reference=f"not fused, fp64; fp32 is off by {noise:.0e}",
    )
