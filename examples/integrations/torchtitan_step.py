r"""torchtitan 0.3.0 in fp16 as a workload: its optimizers and clipping, our recipe.

    gradparity run --quick --precision fp16-autocast --topology dp_shard2 \
        --workload examples.integrations.torchtitan_step:Ours

Needs torchtitan, installed as docs/stacks.md says. Ends with PASS in about a minute on
two cores. Ours has the recipe of docs/integrations, Theirs torch's way: unscale_,
torchtitan's clipping, step. The other topologies add tensor parallelism and a pipeline,
which takes no micro-batches of unequal rows: that run has no verdict.

trainer.py, lines 939 to 949: clip_grad_norm_, optimizers.step(), lr_schedulers.step().
torchtitan has no scaler. The pipeline is torch's GPipe schedule, as torchtitan uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torchtitan.components.optimizer.optimizer import (
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.distributed.utils import clip_grad_norm_

from .shared import Named, Pair, Place, Stepped, lay_out, weighted

PARTS = 2
"""Number of micro-batches in the pipeline's schedule."""


class Theirs(Stepped):
    """FSDP2, also with tensor parallelism or a pipeline; torchtitan clips."""

    checkpoint = "scaler"
    meshes = (
        {"dp_shard": 2},
        {"dp_shard": 2, "tp": 2},
        {"pp": 2, "dp_shard": 2},
        {"pp": 2, "dp_shard": 2, "tp": 2},
    )
    data_axes = ("dp_shard",)
    model_axes = ("pp", "tp")
    implementation: Any = "for-loop"

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in parameters], lr=1e-2)

    def container(self, module: nn.Module) -> Any:
        group = ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}
        )
        config = OptimizersContainer.Config(
            param_groups=[group], implementation=self.implementation
        )
        return OptimizersContainer(config, model_parts=[module])

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        names = mesh.mesh_dim_names or ()
        stage = None
        if "pp" in names:
            stage = mesh.get_local_rank("pp")
            kept = (
                {"0": "0123", "1": "4"}[str(stage)]
                if mesh["pp"].size() > 1
                else "01234"
            )
            layers = [(n, m) for n, m in model.named_children() if n in kept]
            model = nn.Sequential(OrderedDict(layers))
        rest = tuple(n for n in names if n != "pp")
        module = lay_out(model, mesh[rest])
        optimizers = self.container(module)
        stack = SimpleNamespace(
            module=module,
            optimizers=optimizers,
            mesh=mesh,
            place=Place(),
            scheduler=self.scheduler(optimizers.optimizers[0]),
            pp=mesh["pp"] if stage is not None else None,
        )
        if stack.pp is not None:
            assert stage is not None
            made = PipelineStage(
                module,
                stage,
                stack.pp.size(),
                torch.device("cpu"),
                group=stack.pp.get_group(),
            )
            stack.schedule = ScheduleGPipe(
                made,
                PARTS,
                loss_fn=lambda y, t: self.loss_of(stack, y, t),
                scale_grads=False,
            )
        return stack

    def loss_of(self, stack: Any, output: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(output, targets) * stack.share / PARTS
        stack.losses.append(loss.detach())
        scaled: Tensor = stack.place.scale(loss)
        return scaled

    def passes(self, stack: Any, micro_batches: list[Pair]) -> Tensor | None:
        stack.total = torch.zeros(())
        for inputs, targets, share in weighted(micro_batches):
            if stack.pp is None:
                loss = self.loss(stack.module(inputs), targets) * share
                stack.total += loss.detach()
                stack.place.scale(loss).backward()
                continue
            stack.share, at, stack.losses = share, stack.pp.get_local_rank(), []
            last = at == stack.pp.size() - 1
            stack.schedule.step(
                *([inputs] if at == 0 else []), **({"target": targets} if last else {})
            )
            # its first call also makes one of no data, to learn the shapes
            stack.total += sum(stack.losses[-PARTS:])
        known = stack.pp is None or stack.pp.get_local_rank() == stack.pp.size() - 1
        return stack.total if known else None

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.place.use(scaler)
        stack.optimizers.zero_grad()
        loss = self.passes(stack, micro_batches)
        norm = self.step(stack)
        return loss, norm

    def step(self, stack: Any) -> Tensor:
        stack.place.unscale_(stack.optimizers)
        norm: Tensor = clip_grad_norm_(
            stack.module.parameters(), self.clip_norm, foreach=True, pp_mesh=stack.pp
        )
        stack.place.step(stack.optimizers)
        stack.place.update()
        stack.scheduler.step()
        return norm

    def save_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        dcp.save({"scaler": scaler}, checkpoint_id=folder)  # type: ignore[attr-defined]  # torch does not list it

    def load_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        dcp.load({"scaler": scaler}, checkpoint_id=folder)  # type: ignore[attr-defined]  # torch does not list it


class Ours(Theirs):
    """Theirs with our recipe: the scaler clips, and the schedule waits on a skip."""

    def step(self, stack: Any) -> Tensor:
        norm: Tensor = stack.place.clip_grad_norm_(stack.optimizers, self.clip_norm)
        stack.place.step(stack.optimizers)
        stack.place.update()
        # A skipped step must not move the schedule.
        if not stack.place.step_was_skipped(stack.optimizers):
            stack.scheduler.step()
        return norm


class TheirsFused(Theirs):
    """Theirs with fused AdamW, torchtitan's default."""

    implementation = "fused"


class OursFused(Ours):
    """Ours with fused AdamW."""

    implementation = "fused"
