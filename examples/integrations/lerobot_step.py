r"""lerobot 0.4.4 in fp16 as a workload: its own ``update_policy``, under DDP.

    gradparity run --quick --precision fp16-autocast \
        --workload examples.integrations.lerobot_step:LeRobotOurs

LeRobot is the package's own step, which moves the schedule on skipped steps.
LeRobotOurs uses our scaler, and a schedule that waits.
Needs accelerate, and lerobot installed with --no-deps.

scripts/lerobot_train.py, line 59: autocast, backward, clip, step and schedule are
Accelerate's; ``step_scheduler_with_optimizer=False`` (line 184) is its own choice.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .absent import stand_in
from .accelerate_step import Ddp
from .shared import Pair, Place, weighted

stand_in("lerobot")

from lerobot.scripts.lerobot_train import update_policy  # noqa: E402


class Policy(nn.Module):
    """Model whose forward returns the loss, as lerobot expects."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: tuple[Any, Any, float]) -> tuple[Tensor, dict[str, Any]]:
        inputs, targets, share = batch
        return self.loss(self.model(inputs), targets) * share, {}


class LeRobot(Ddp):
    """One micro-batch for each step, as in lerobot; checkpoints lack the scaler."""

    save_checkpoint = None  # type: ignore[assignment]  # it takes no scaler
    load_checkpoint = None  # type: ignore[assignment]

    def accelerator(self) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True, step_scheduler_with_optimizer=False)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        accelerator = self.accelerator()
        policy = Policy(model, self.loss)
        optimizer = self.optimizer([*model.named_parameters()])
        accelerator.scaler = place = Place()
        scheduler = self.scheduler(optimizer, place)
        policy, *others = accelerator.prepare(policy, optimizer, scheduler)
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"
        stack: Any = policy
        stack.optimizer, stack.scheduler = others
        stack.accelerator, stack.place, stack.skipped = accelerator, place, 0
        return stack

    def weights(self, stack: Any) -> dict[str, Any]:
        named = stack.named_parameters()
        return {name.removeprefix("module.model."): p for name, p in named}

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.place.use(scaler)
        ((inputs, targets, share),) = weighted(micro_batches)
        told = SimpleNamespace()
        update_policy(
            told,
            stack,
            (inputs, targets, share),
            stack.optimizer,
            self.clip_norm,
            stack.accelerator,
            stack.scheduler,
        )
        stack.skipped += stack.accelerator.optimizer_step_was_skipped
        return told.loss, told.grad_norm


class LeRobotOurs(LeRobot):
    """LeRobot with our scaler, and a schedule that waits on skipped steps."""

    waits = True
