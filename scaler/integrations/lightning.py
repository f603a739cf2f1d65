"""PyTorch Lightning: mixed precision in fp16, also under ``ModelParallelStrategy``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pytorch_lightning import LightningModule
from pytorch_lightning.plugins.precision import MixedPrecision as _MixedPrecision
from pytorch_lightning.utilities import GradClipAlgorithmType

from ..grad_scaler import GradScaler


class MixedPrecision(_MixedPrecision):  # type: ignore[misc]  # its types are not followed
    """Lightning's plugin of this name with a scaler that is right on any mesh.

    ``Trainer(precision="16-mixed")`` refuses ``ModelParallelStrategy``, since torch's
    scaler is wrong there; ``Trainer(plugins=MixedPrecision(...))`` does not. Beyond
    Lightning's plugin it clips by the norm of all ranks, with fused optimizers and
    mixed meshes, too, and holds the schedules back where a step was skipped. The state
    in a checkpoint is that of Lightning's plugin, under the same key.

    Args:
        scaler: by default a new one.
        device: for autocast, and for the default scaler.
    """

    scaler: GradScaler

    def __init__(
        self, scaler: GradScaler | None = None, *, device: str = "cuda"
    ) -> None:
        super().__init__("16-mixed", device, scaler or GradScaler(device))

    def optimizer_step(
        self,
        optimizer: Any,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, unscale, clip, step and update, as Lightning's plugin."""
        if "lr_scheduler_step" not in vars(model):
            # The only hook that Lightning has between a skip and a schedule.
            own = model.lr_scheduler_step
            model.lr_scheduler_step = partial(self._step_schedule, own)
        return super().optimizer_step(optimizer, model, closure, **kwargs)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip by the global norm in one read, or by value as Lightning does."""
        if gradient_clip_algorithm == GradClipAlgorithmType.NORM:
            if clip_val > 0:
                self.scaler.clip_grad_norm_(optimizer, clip_val)
            return
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def _step_schedule(
        self, own: Callable[..., None], scheduler: Any, metric: Any
    ) -> None:
        # One without an optimizer, or before the first step, goes on.
        try:
            skipped = self.scaler.step_was_skipped(scheduler.optimizer)
        except (AttributeError, ValueError):
            skipped = False
        if not skipped:
            own(scheduler, metric)
