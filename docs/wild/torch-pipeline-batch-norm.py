"""torch: a pipeline that infers shapes fills running statistics with unset memory.

python torch-pipeline-batch-norm.py; exit code 1 where the bug shows.

Two stages on two ranks, the second one with a batch norm, after one step.
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
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss

CPU = torch.device("cpu")
PARTS = 2


def problem(dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """Return both stages, features and targets, the same on all ranks."""
    torch.manual_seed(0)
    stages = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()))
    return stages.to(dtype), torch.randn(16, 4).to(dtype), torch.randn(16, 4).to(dtype)


def rank_main(rank: int, gives_shapes: bool) -> Tensor | None:
    """Return the running variance after a step, on the rank that has the batch norm."""
    unset = torch.full((1 << 16,), 1e30)  # memory that a stage may get next
    model, x, y = problem(torch.float32)
    first = x[: len(x) // PARTS]
    passed = first.clone().requires_grad_()
    shapes = {"input_args": passed if rank else first, "output_args": passed}
    del unset
    stage = PipelineStage(model[rank], rank, 2, CPU, **(shapes if gives_shapes else {}))
    schedule = ScheduleGPipe(stage, PARTS, loss_fn=mse_loss)
    schedule.step(*([] if rank else [x]), target=y if rank else None)
    return model[1][0].running_var if rank else None


def reference(dtype: torch.dtype) -> Tensor:
    """Return the running variance after the same micro-batches on one process."""
    model, x, _ = problem(dtype)
    for part in x.chunk(PARTS):
        model(part)
    return model[1][0].running_var


if __name__ == "__main__":
    exact = reference(torch.float64)
    errors = {how: off(on_ranks(rank_main, how)[1], exact) for how in (False, True)}
    for how, error in errors.items():
        shapes = "with input_args and output_args" if how else "with inferred shapes"
        print(f"{shapes}: the running variance is off by {error:.1e}")
    noise = off(reference(torch.float32), exact)
    tell(
        not max(errors.values()) < 1e-3,
        "torch",
        parameter="running_var of the second stage",
        relative_error=f"{errors[False]:.2e}",
        reference=f"one process, fp64; fp32 is off by {noise:.0e}",
    )
