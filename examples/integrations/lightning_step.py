r"""PyTorch Lightning 2.6.6 in fp16 as a workload: its ``MixedPrecision`` plugin.

    gradparity run --quick --precision fp16-autocast \
        --workload examples.integrations.lightning_step:DdpOurs

Needs pytorch-lightning. Ends with PASS, in about a minute on two cores. Ddp and
ModelParallel have Lightning's plugin, and end with FAIL: its schedules move on skipped
steps. The classes named Ours have our integration; docs/integrations has all results.

``ModelParallelStrategy`` and CPUs refuse ``precision="16-mixed"``, but accept a plugin.
Each step is a ``fit`` of one step; optimizer and schedule are kept between them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from .shared import Pair, Place, Stepped, lay_out, weighted
from .use_in_lightning import MixedPrecision as OurPrecision

Meshes = tuple[dict[str, int], ...]


class Module(LightningModule):  # type: ignore[misc]  # its types are not followed
    """Keeps optimizer, schedule and plugin from one ``fit`` to the next."""

    def __init__(self, stack: Ddp, model: nn.Module, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.stack, self.model, self.sizes = stack, model, sizes
        self.own: Any = None
        self.place = Place()
        self.plugin = stack.plugin(self.place)

    def configure_model(self) -> None:
        if self.own is not None:  # Lightning calls it in each fit
            return
        if self.stack.sharded:
            named = zip(("data_parallel", "tensor_parallel"), self.sizes, strict=True)
            axes = tuple(name for name, size in named if size > 1)
            # Lightning names its axes data_parallel and tensor_parallel: `lay_out`
            # knows fsdp and tp.
            renamed = self.device_mesh[axes]
            names = {"data_parallel": "fsdp", "tensor_parallel": "tp"}
            mesh = DeviceMesh(
                "cpu", renamed.mesh, mesh_dim_names=tuple(names[a] for a in axes)
            )
            lay_out(self.model, mesh, self.stack.whole_tp)
        self.own = self.stack.optimizer([*self.model.named_parameters()])
        self.own.register_step_post_hook(self.keep_gradients)
        self.scheduler = self.stack.scheduler(self.own)

    def keep_gradients(self, *_: Any) -> None:  # backward runs inside of step()
        named = self.model.named_parameters()
        self.seen = {n: p.grad.clone() for n, p in named if p.grad is not None}

    def configure_optimizers(self) -> Any:
        schedule = {"scheduler": self.scheduler, "interval": "step"}
        return {"optimizer": self.own, "lr_scheduler": schedule}

    def training_step(self, part: tuple[Tensor, Tensor, float], _index: int) -> Any:
        inputs, targets, share = part
        loss = self.stack.loss(self.model(inputs), targets) * share
        self.losses.append(loss.detach())
        return loss * self.trainer.accumulate_grad_batches  # it divides by that


class Ddp(Stepped):
    """DDP with Lightning's plugin."""

    meshes: Meshes = ({"ddp": 2},)
    checkpoint = "scaler"
    sharded, whole_tp = False, True

    def plugin(self, place: Place) -> Any:
        return MixedPrecision("16-mixed", device="cpu", scaler=place)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        data = sizes.get("ddp", sizes.get("fsdp", 1))
        module = Module(self, model, (data, sizes.get("tp", 1)))
        self.fit(module, [])
        return module

    def fit(self, module: Any, micro_batches: list[Pair]) -> None:
        module.losses = []
        strategy = ModelParallelStrategy(*module.sizes) if self.sharded else None
        trainer = Trainer(
            strategy=strategy or DDPStrategy(),
            plugins=[module.plugin],
            accelerator="cpu",
            devices=math.prod(module.sizes),
            max_steps=1,
            accumulate_grad_batches=len(micro_batches) or 1,
            gradient_clip_val=self.clip_norm,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data: Any = weighted(micro_batches)
        trainer.fit(module, DataLoader(data, batch_size=None))

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.place.use(scaler)
        self.fit(stack, micro_batches)
        return torch.stack(stack.losses).sum()

    def weights(self, stack: Any) -> dict[str, Any]:
        return dict(stack.model.named_parameters())

    def save_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        stack.place.use(scaler)
        path = f"{folder}/{stack.global_rank}.pt"
        torch.save(stack.plugin.state_dict(), path)  # which Lightning writes itself

    def load_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        stack.place.use(scaler)
        path = f"{folder}/{stack.global_rank}.pt"
        stack.plugin.load_state_dict(torch.load(path, weights_only=True))


class ModelParallel(Ddp):
    """FSDP2, tensor parallel and both, with Lightning's plugin."""

    meshes: Meshes = ({"fsdp": 2}, {"tp": 2}, {"fsdp": 2, "tp": 2})
    sharded = True


class Mixed(ModelParallel):
    """Tensor parallel, with plain parameters beside DTensors."""

    meshes: Meshes = ({"tp": 2},)
    whole_tp = False


class DdpOurs(Ddp):
    """DDP with our plugin."""

    def plugin(self, place: Place) -> Any:
        return OurPrecision(place, device="cpu")  # type: ignore[arg-type]  # it stands for a scaler


class ModelParallelOurs(ModelParallel):
    """FSDP2, tensor parallel and both, with our plugin."""

    plugin = DdpOurs.plugin


class MixedOurs(Mixed):
    """Tensor parallel with plain parameters beside DTensors, with our plugin."""

    plugin = DdpOurs.plugin
