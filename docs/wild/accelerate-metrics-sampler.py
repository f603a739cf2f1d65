"""accelerate: gather_for_metrics drops samples that no loader repeats.

python accelerate-metrics-sampler.py; exit code 1 where the bug shows.
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
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor
from torch.utils.data import DataLoader, Subset

BATCH, TAKEN = 2, 7  # rows of a rank
DATASETS = 10, 8  # samples
DISPATCH = DataLoaderConfiguration(dispatch_batches=True)


def data(dtype: torch.dtype) -> Tensor:
    """Return the numbers to evaluate, one for each sample."""
    return torch.arange(1, max(DATASETS) + 1).to(dtype).square()


def gathered(size: int, way: str, batch: int = BATCH) -> Tensor:
    """Return all numbers that gather_for_metrics returns in one epoch."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    settings = {"dataloader_config": DISPATCH} if way == "dispatched" else {}
    accelerator = Accelerator(cpu=True, **settings)
    numbers, taken = data(torch.float32)[:size], range(TAKEN)
    if way == "subset":
        loader = DataLoader(Subset(numbers, taken), batch)
    else:
        loader = DataLoader(numbers, batch, sampler=taken)
    batches = accelerator.prepare(loader)
    return torch.cat([accelerator.gather_for_metrics(rows) for rows in batches])


WAYS = "sampler", "subset", "dispatched"


def rank_main(rank: int) -> dict[str, Tensor]:
    """Gather the samples of each dataset with each way of sampling."""
    os.environ["MASTER_ADDR"] = "localhost"  # asked for, not used
    return {f"{n} samples, {way}": gathered(n, way) for n in DATASETS for way in WAYS}


if __name__ == "__main__":
    exact, errors = data(torch.float64)[:TAKEN], {}
    found = on_ranks(rank_main)[0]
    found["10 samples, sampler, one process"] = gathered(10, "sampler", 2 * BATCH)
    for name, numbers in found.items():
        errors[name] = off(numbers.mean(), exact.mean())
        print(
            f"{name}: {len(numbers)} of {TAKEN}, the mean is off by {errors[name]:.1e}"
        )
    wrong = errors["10 samples, sampler"]
    tell(
        not wrong < 1e-3,
        "accelerate",
        parameter="the mean of what is gathered",
        relative_error=f"{wrong:.2e}",
        reference="the mean over the sampler's samples, fp64",
    )
