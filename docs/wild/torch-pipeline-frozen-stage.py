"""torch: zero-bubble schedules do not train a stage that follows a frozen one.

python torch-pipeline-frozen-stage.py; exit code 1 where the bug shows.

Four linear layers are four stages on two ranks; the first one is frozen.
"""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import mse_loss

RANKS, CPU = 2, torch.device("cpu")
KINDS = ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble",
         "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]  # fmt: skip


def problem(dtype: torch.dtype) -> tuple[nn.Sequential, Tensor, Tensor]:
    """The same model, features and targets on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[0].requires_grad_(False)
    return model.to(dtype), torch.randn(16, 4).to(dtype), torch.randn(16, 4).to(dtype)


def rank_main(rank: int, folder: str, results: Any) -> None:
    """One step of each schedule; the gradients of this rank's stages."""
    dist.init_process_group("gloo", f"file://{folder}/s", rank=rank, world_size=RANKS)
    for kind in KINDS:
        model, x, y = problem(torch.float32)
        v_shaped = kind in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        mine = [rank, 3 - rank] if v_shaped else [rank, rank + 2]
        stages = [PipelineStage(model[s : s + 1], s, 4, CPU) for s in mine]
        schedule = getattr(schedules, kind)(stages, 4, loss_fn=mse_loss)
        # no inputs where the first stage is not, no targets where the last is not
        schedule.step(*([x] if 0 in mine else []), target=y if 3 in mine else None)
        for stage in mine:
            grad = model[stage].weight.grad
            results.put((kind, stage, None if grad is None else grad.tolist()))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Print what was found."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, results), RANKS)
        found = [results.get() for _ in range(4 * len(KINDS))]
    exact = {}
    for dtype in (torch.float64, torch.float32):
        model, x, y = problem(dtype)
        mse_loss(model(x), y).backward()
        exact[dtype] = model[1].weight.grad.double()
    right, worst = exact[torch.float64], 0.0
    print("versions: torch", torch.__version__)
    for kind, stage, grad in found:
        if stage == 1:
            gradient = torch.zeros(4, 4) if grad is None else torch.tensor(grad)
            off = float((gradient - right).norm() / right.norm())
            none = ", there is none" if grad is None else ""
            print(f"{kind}: the gradient of stage 1 is off by {off:.1e}{none}")
            worst = max(worst, off)
    print("parameter: 1.weight, the stage after the frozen one")
    print(f"relative error: {worst:.2e}")
    fp32 = float((exact[torch.float32] - right).norm() / right.norm())
    print(f"reference: one process, fp64; fp32 is off by {fp32:.0e}")
    print("verdict:", "bug" if worst > 1e-3 else "no bug")
    return int(worst > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
