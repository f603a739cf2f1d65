"""torchmetrics: NormalizedRootMeanSquaredError is wrong on more than two ranks.

python torchmetrics-nrmse-ranks.py; exit code 1 where the bug shows.
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
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.regression import MeanSquaredError, NormalizedRootMeanSquaredError

ROWS, OUTPUTS = 5, 4
NORMALIZED = "mean", "range", "std", "l2"


def problem(dtype: torch.dtype, ranks: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Return predictions and targets by rank; ranks and outputs differ in level."""
    torch.manual_seed(0)
    shape = ranks, ROWS, outputs
    levels = 1 + torch.arange(ranks)[:, None, None] + torch.arange(outputs)
    targets = levels + torch.rand(shape)
    predictions = targets + torch.randn(shape)
    return predictions.to(dtype), targets.to(dtype)


def rank_main(rank: int, ranks: int) -> dict[str, Any]:
    """Return metric -> its value over all ranks, or its error."""
    found: dict[str, Any] = {}
    for outputs in (1, OUTPUTS):
        x, y = (t[rank] for t in problem(torch.float32, ranks, outputs))
        metrics: dict[str, Metric] = {
            name: NormalizedRootMeanSquaredError(name, num_outputs=outputs)
            for name in NORMALIZED
        }
        metrics["not"] = MeanSquaredError(squared=False, num_outputs=outputs)
        for name, metric in metrics.items():
            metric.update(x.squeeze(-1), y.squeeze(-1))
            try:
                found[f"{outputs}, {name}"] = metric.compute()
            except IndexError as error:
                found[f"{outputs}, {name}"] = f"raises IndexError: {error}"
    return found


def reference(dtype: torch.dtype, ranks: int, case: str) -> Tensor:
    """Return a metric's value from all rows, by the documented formula."""
    outputs, name = case.split(", ")
    x, y = (t.flatten(0, 1) for t in problem(dtype, ranks, int(outputs)))
    by: dict[str, Any] = {
        "mean": y.mean(0),
        "range": y.amax(0) - y.amin(0),
        "std": y.std(0, correction=0),
        "l2": y.square().sum(0).sqrt(),
        "not": 1.0,
    }
    return (x - y).square().mean(0).sqrt() / by[name]


if __name__ == "__main__":
    wrong = {}
    for ranks in (2, 3):
        for case, value in on_ranks(rank_main, ranks, ranks=ranks)[0].items():
            told = value
            if isinstance(value, Tensor):
                wrong[ranks, case] = off(value, reference(torch.float64, ranks, case))
                told = f"off by {wrong[ranks, case]:.1e}"
            print(f"{ranks} ranks, outputs and normalization {case}: {told}")
    worst = max((case for case in wrong if case[0] == 3), key=wrong.__getitem__)
    exact = reference(torch.float64, *worst)
    noise = off(reference(torch.float32, *worst), exact)
    tell(
        not wrong[worst] < 1e-3,
        "torchmetrics",
        parameter=f"{worst[0]} ranks, outputs and normalization {worst[1]}",
        relative_error=f"{wrong[worst]:.2e}",
        reference=f"the formula on all rows, fp64; fp32 is off by {noise:.0e}",
    )
