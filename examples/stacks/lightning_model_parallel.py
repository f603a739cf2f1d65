r"""Lightning's ModelParallelStrategy as a workload: FSDP2, and tensor parallelism.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.lightning_model_parallel:Stack

Needs pytorch-lightning. Ends with PASS after half a minute. Each step is one ``fit``.
"""

from typing import Any

from pytorch_lightning import LightningModule, Trainer, strategies
from torch.distributed import fsdp, tensor
from torch.distributed.tensor import parallel as tp

from .shared import Pair, Regression, weighted


class Module(LightningModule):  # type: ignore[misc]  # its types are not followed
    """Lays the model out on Lightning's mesh, in its first ``fit``."""

    def configure_model(self) -> None:
        if not hasattr(self, "own"):
            last = tp.ColwiseParallel(output_layouts=tensor.Replicate())
            plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel(), "4": last}
            tp.parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)
            fsdp.fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
            self.own = self.stack.optimizer([*self.model.named_parameters()])

    def configure_optimizers(self) -> Any:
        return self.own

    def training_step(self, part: tuple[Any, Any, float], _index: int) -> Any:
        inputs, targets, share = part
        loss = self.stack.loss(self.model(inputs), targets) * share
        self.stack.losses.append(loss.detach())
        return loss * self.trainer.accumulate_grad_batches  # it divides by that


class Stack(Regression):
    """Each batch of Lightning's loader is a micro-batch with its share of the rows."""

    meshes = ({"dp": 2, "tp": 1}, {"dp": 1, "tp": 2})
    clip_norm = 0.1

    def parallelize(self, model: Any, mesh: Any) -> Any:
        self.module = Module()
        self.module.stack, self.module.model, self.module.mesh = self, model, mesh
        self.train_step(model, [], None)  # lays out, and trains on nothing
        return model

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        self.losses: list[Any] = []
        parts, mesh = weighted(micro_batches), self.module.mesh
        trainer = Trainer(
            strategy=strategies.ModelParallelStrategy(*mesh.shape),
            accelerator="cpu",
            devices=mesh.size(),
            max_epochs=1,
            barebones=True,
            gradient_clip_val=self.clip_norm,
            accumulate_grad_batches=len(parts) or 1,
        )
        trainer.fit(self.module, iter(parts))
        return sum(self.losses)
