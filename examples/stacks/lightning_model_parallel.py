r"""Lightning's ModelParallelStrategy as a workload: FSDP2, and tensor parallelism.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.lightning_model_parallel:Stack

Needs pytorch-lightning. Ends with PASS after about half a minute on two cores.

Each step is a ``fit`` of one: the module keeps its optimizer in between.
``configure_model`` lays the model out on Lightning's mesh. Lightning does not report
the gradient norm that it clips by.
"""

import math
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as tp
from torch.utils.data import DataLoader

from .shared import Pair, Regression, weighted


class Module(LightningModule):  # type: ignore[misc]  # its types are not followed
    """Keeps its optimizer from one ``fit`` to the next."""

    def __init__(
        self, stack: "Stack", model: nn.Module, sizes: tuple[int, int]
    ) -> None:
        super().__init__()
        self.stack, self.model, self.sizes = stack, model, sizes
        self.own: Any = None

    def configure_model(self) -> None:
        if self.own is None:  # Lightning calls it in each fit
            last = tp.ColwiseParallel(output_layouts=Replicate())
            plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel(), "4": last}
            tp.parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
            self.own = self.stack.optimizer([*self.model.named_parameters()])
            self.own.register_step_post_hook(self.keep_gradients)

    def keep_gradients(self, *_: Any) -> None:  # backward runs inside of step()
        named = self.model.named_parameters()
        self.seen = {n: p.grad.clone() for n, p in named if p.grad is not None}

    def configure_optimizers(self) -> Any:
        return self.own

    def training_step(self, part: tuple[Tensor, Tensor, float], _index: int) -> Any:
        inputs, targets, share = part
        loss = self.stack.loss(self.model(inputs), targets) * share
        self.losses.append(loss.detach())
        return loss * self.trainer.accumulate_grad_batches  # it divides by that


class Stack(Regression):
    """Each step is a ``fit`` of one."""

    meshes = ({"dp": 2}, {"tp": 2})
    clip_norm = 0.1

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        module = Module(self, model, (sizes.get("dp", 1), sizes.get("tp", 1)))
        self.fit(module, [])
        return module

    def fit(self, module: Module, micro_batches: list[Pair]) -> None:
        module.losses = []
        trainer = Trainer(
            strategy=ModelParallelStrategy(*module.sizes),
            accelerator="cpu", devices=math.prod(module.sizes),
            max_steps=1, accumulate_grad_batches=len(micro_batches) or 1,
            gradient_clip_val=self.clip_norm, use_distributed_sampler=False,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        # Each batch of Lightning's loader is one micro-batch with its share of the
        # rows.
        data: Any = weighted(micro_batches)
        trainer.fit(module, DataLoader(data, batch_size=None))

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        self.fit(stack, micro_batches)
        return torch.stack(stack.losses).sum()

    def weights(self, stack: Any) -> dict[str, Any]:
        return dict(stack.model.named_parameters())

    def gradients(self, stack: Any) -> dict[str, Any]:
        return dict(stack.seen)
