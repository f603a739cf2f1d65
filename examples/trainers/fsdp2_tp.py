"""Our scaler in a plain torch loop: FSDP2 x tensor parallel in fp16 on English text.

    torchrun --nproc-per-node 4 examples/trainers/fsdp2_tp.py --steps 12

Needs torch alone; takes about half a minute on two cores. The swap is the import.

Prints step, loss and scale; the first steps overflow on purpose and are skipped, which
halves the scale. Saves a checkpoint in --folder (trained); a second run with more
--steps goes on from it. --scaler torch.amp:GradScaler trains with torch's scaler
instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared import Options, batch_of, leave, parse, report_step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import AdamW

from gradparity.fixtures import MODELS, TOPOLOGIES, loss


def build(mesh: DeviceMesh) -> nn.Module:
    """Return a small transformer, split over ``tp`` and sharded over ``dp``."""
    torch.manual_seed(0)
    # Forward and backward in fp16, sums over ranks in fp32. The optimizer keeps fp32.
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    # parallelize_module, then fully_shard on every block: fixtures/layouts.py
    return TOPOLOGIES["fsdp+tp"].apply(MODELS["text"].make(), mesh, half)


class Everything:
    """Model, optimizer, scaler and the number of steps as one checkpoint."""

    def __init__(self, model: nn.Module, optimizer: AdamW, scaler: Any) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for ``torch.distributed.checkpoint``, including shards."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        scaler = self.scaler.state_dict()
        return dict(model=model, optimizer=optimizer, scaler=scaler, steps=self.steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state into model, optimizer and scaler."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scaler.load_state_dict(state["scaler"])
        self.steps = state["steps"]


def train(options: Options) -> None:
    """Train, from the checkpoint if there is one, and save a checkpoint at the end."""
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp")
    )
    model = build(mesh)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    # swap: from gradparity.scaler import GradScaler
    scaler = options.scaler("cpu", init_scale=options.init_scale, growth_interval=3)
    # end of swap
    run = Everything(model, optimizer, scaler)
    checkpoint = options.folder / "checkpoint"
    if checkpoint.exists():
        # Each rank reads its own shards, and the scaler's state with them.
        dcp.load({"run": run}, checkpoint_id=checkpoint)  # type: ignore[attr-defined]  # torch does not list it
    while run.steps < options.steps:
        # The two ranks of a tensor-parallel pair see the same rows: the share is by dp
        # alone.
        share = batch_of(run.steps, mesh.get_local_rank("dp"), mesh["dp"].size())
        optimizer.zero_grad()
        value = loss(model(share.inputs), share.targets)
        # The usual four lines. On a skip, step() leaves the optimizer alone on every
        # rank, and update() halves the scale.
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        report_step(options, run.steps, value.item(), scaler.get_scale())
        run.steps += 1
    dcp.save({"run": run}, checkpoint_id=checkpoint)  # type: ignore[attr-defined]  # torch does not list it


def main(argv: Sequence[str] | None = None) -> None:
    """Run as one rank of torchrun."""
    options = parse(__doc__ or "", argv)
    dist.init_process_group("gloo")
    train(options)


if __name__ == "__main__":
    main()
    leave()
