"""torch: zero-bubble schedules do not train a stage that follows a frozen one.

python torch-pipeline-frozen-stage.py; exit code 1 where the bug shows.

Four linear layers are four stages on two ranks; the first one is frozen.
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
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import mse_loss

CPU = torch.device("cpu")
V_SHAPED = "ScheduleZBVZeroBubble", "ScheduleDualPipeV"
KINDS = "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", *V_SHAPED


def problem(dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """Return the model, features and targets, the same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[0].requires_grad_(False)
    return model.to(dtype), torch.randn(16, 4).to(dtype), torch.randn(16, 4).to(dtype)


def rank_main(rank: int) -> dict[str, Tensor | None]:
    """Return schedule -> stage 1's gradient after a step, if the stage is here."""
    found = {}
    for kind in KINDS:
        model, x, y = problem(torch.float32)
        mine = [rank, 3 - rank] if kind in V_SHAPED else [rank, rank + 2]
        stages = [PipelineStage(model[s : s + 1], s, 4, CPU) for s in mine]
        schedule = getattr(schedules, kind)(stages, 4, loss_fn=mse_loss)
        # no inputs where the first stage is not, no targets where the last is not
        schedule.step(*([x] if 0 in mine else []), target=y if 3 in mine else None)
        if 1 in mine:
            found[kind] = model[1].weight.grad
    return found


def reference(dtype: torch.dtype) -> Tensor:
    """Return the gradient of stage 1 on one process."""
    model, x, y = problem(dtype)
    mse_loss(model(x), y).backward()
    return model[1].weight.grad


if __name__ == "__main__":
    first, second = on_ranks(rank_main)
    found, exact = first | second, reference(torch.float64)
    errors = {kind: off(found[kind], exact) for kind in KINDS}
    for kind, error in errors.items():
        none = ", there is none" if found[kind] is None else ""
        print(f"{kind}: the gradient of stage 1 is off by {error:.1e}{none}")
    worst, noise = max(errors.values()), off(reference(torch.float32), exact)
    tell(
        not worst < 1e-3,
        "torch",
        parameter="1.weight, the stage after the frozen one",
        relative_error=f"{worst:.2e}",
        reference=f"one process, fp64; fp32 is off by {noise:.0e}",
    )
