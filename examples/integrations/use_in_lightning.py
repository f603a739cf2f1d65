"""Our scaler in PyTorch Lightning, on any mesh: copy this file.

    Trainer(plugins=[MixedPrecision(GradScaler("cuda"))])  # and no precision=

Needs pytorch-lightning; ``lightning_step.py`` beside it runs it in a minute.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pytorch_lightning.plugins import precision
from pytorch_lightning.utilities import GradClipAlgorithmType

from gradparity.scaler import GradScaler


class MixedPrecision(precision.MixedPrecision):  # type: ignore[misc]  # its types are not followed
    """Lightning's plugin with two changes: global clipping, and schedules that wait.

    ``ModelParallelStrategy`` refuses ``precision="16-mixed"``, but accepts a plugin. A
    checkpoint stores the plugin's state under the class name, so Lightning's own plugin
    can read it.
    """

    def __init__(self, scaler: GradScaler, device: str = "cuda") -> None:
        super().__init__("16-mixed", device, scaler)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Any, **kwargs: Any
    ) -> Any:
        """Step as Lightning's plugin does; schedules wait if the step was skipped."""
        if "lr_scheduler_step" not in vars(model):
            # The only hook that Lightning has between a skip and a schedule.
            own = model.lr_scheduler_step
            model.lr_scheduler_step = partial(self.step_schedule, own)
        return super().optimizer_step(optimizer, model, closure, **kwargs)

    def step_schedule(self, own: Any, schedule: Any, metric: Any) -> None:
        """Step a schedule, unless it belongs to an optimizer that was skipped."""
        try:
            was_skipped = self.scaler.step_was_skipped(schedule.optimizer)
        except (AttributeError, ValueError):
            was_skipped = False
        if not was_skipped:
            own(schedule, metric)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip by the global norm with our scaler, or by value as Lightning does."""
        if gradient_clip_algorithm != GradClipAlgorithmType.NORM:
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif clip_val > 0:
            self.scaler.clip_grad_norm_(optimizer, clip_val)
