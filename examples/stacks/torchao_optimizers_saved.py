r"""torchao's low-bit optimizers, saved and loaded by torch's distributed checkpoints.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torchao_optimizers_saved:Eight

Needs torchao, and a C++ compiler.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh

from . import torchao_optimizers
from .shared import Pair, weighted


class Eight(torchao_optimizers.Eight):
    """Adam with 8-bit moments; codes and scales are in the checkpoint."""

    def parallelize(self, model: Any, mesh: DeviceMesh) -> Any:
        super().parallelize(model, mesh)
        model.optimizer = self.optimizer([*model.named_parameters()])
        return model

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Tensor:
        stack.optimizer.zero_grad()
        losses = [
            self.loss(stack(inputs), targets) * share
            for inputs, targets, share in weighted(micro_batches)
        ]
        for loss in losses:
            loss.backward()
        stack.optimizer.step()
        return torch.stack(losses).detach().sum()

    def save_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        model, optimizer = get_state_dict(stack, stack.optimizer)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        model, optimizer = get_state_dict(stack, stack.optimizer)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(
            *(stack, stack.optimizer),
            model_state_dict=model,
            optim_state_dict=optimizer,
        )


class Four(Eight):
    """Adam with 4-bit moments; codes and scales are in the checkpoint."""

    kind = torchao_optimizers.Four.kind
