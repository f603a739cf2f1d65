"""Without gradparity: what Accelerate 1.15.0 does with torch's scaler on two ranks.

    torchrun --nproc-per-node 2 examples/integrations/confirm_accelerate.py

Needs accelerate. Prints a line for each case, in under half a minute:

1. A fused optimizer is also called on skipped steps: ``optimizer_step_was_skipped`` is
   False and the prepared schedule moves. With an optimizer that is not fused, both are
   right.
2. Under FSDP2 ``load_state`` steps the prepared optimizer, so that the scaler's growth
   tracker and scale are not those that were saved.
3. ``save_state`` also steps the optimizer if it has no state: here before the first
   step that is not skipped.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import nn


def prepared(fused: bool, fsdp: bool) -> tuple[Any, Any, Any, Any]:
    """Return an accelerator with an fp16 scaler, a model, an AdamW and a schedule."""
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = None
    if fsdp:  # CPU ranks get DDP otherwise
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=4)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def step(parts: tuple[Any, Any, Any, Any], bad: bool) -> None:
    """Run forward, backward, optimizer and schedule."""
    accelerator, model, optimizer, scheduler = parts
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    accelerator.backward(loss * (float("inf") if bad else 1.0))
    optimizer.step()
    scheduler.step()


def main() -> None:
    """Print a line for each case."""
    for fused in (False, True):
        parts = prepared(fused, fsdp=False)
        before = parts[3].state_dict()["last_epoch"]
        step(parts, bad=True)
        moved = parts[3].state_dict()["last_epoch"] - before
        says = parts[0].optimizer_step_was_skipped
        if dist.get_rank() == 0:
            print(f"fused {fused}: skipped {says}, schedule moved by {moved}")
    with tempfile.TemporaryDirectory() as mine:
        of_first = [mine]
        dist.broadcast_object_list(of_first)
        check_scaler(of_first[0])
        dist.barrier()  # others may still read
    dist.destroy_process_group()


def check_scaler(folder: str) -> None:
    """Print the scaler's state before and after saving and loading a checkpoint."""
    parts = prepared(fused=False, fsdp=True)
    step(parts, bad=False)
    saved = parts[0].scaler.state_dict()
    parts[0].save_state(f"{folder}/1")
    dist.barrier()
    parts = prepared(fused=False, fsdp=True)  # a new process would have no state either
    parts[0].load_state(f"{folder}/1")
    loaded = parts[0].scaler.state_dict()
    if dist.get_rank() == 0:
        for key in ("scale", "_growth_tracker"):
            print(f"FSDP2, {key}: saved {saved[key]}, after load_state {loaded[key]}")
    parts = prepared(fused=False, fsdp=True)
    step(parts, bad=True)
    parts[1].zero_grad()
    before = parts[0].scaler.state_dict()
    parts[0].save_state(f"{folder}/2")
    after = parts[0].scaler.state_dict()
    if dist.get_rank() == 0:
        for key in ("scale", "_growth_tracker"):
            print(f"FSDP2, {key}: {before[key]}, after save_state {after[key]}")


if __name__ == "__main__":
    main()
