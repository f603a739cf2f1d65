"""What a training loop wants to know: skipped or not, how often, because of what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .clipping import GradientClipper
from .eager import eager
from .history import Counters, Overflow
from .states import real_optimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Answerer"]


class Answerer(GradientClipper):
    """Answers questions about past steps; a base of ``GradScaler``."""

    @eager
    def step_was_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the last `step` of this optimizer was skipped.

        Right for fused optimizers too; also after `update`. Synchronises if the finding
        is on an accelerator.

        Raises:
            ValueError: this scaler has not stepped this optimizer yet.
        """
        if not self._enabled:
            return False
        found = self._stamps.found_by_last_step(real_optimizer(optimizer))
        if found is None:
            raise ValueError(
                "step_was_skipped() was asked about an optimizer that this scaler has "
                f"not stepped yet: {type(optimizer).__name__}."
            )
        return bool(found.tolist())

    @eager
    def step_scheduler(self, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        """Step a learning-rate scheduler, unless its optimizer's step was skipped.

        Args:
            scheduler: anything with ``step``; its ``optimizer`` decides.
            *args: handed to ``scheduler.step``.
            **kwargs: handed to ``scheduler.step``.

        Returns:
            Whether the scheduler stepped.

        Raises:
            ValueError: this scaler has not stepped the scheduler's optimizer yet.
        """
        if self.step_was_skipped(scheduler.optimizer):
            return False
        scheduler.step(*args, **kwargs)
        return True

    @property
    def counters(self) -> Counters:
        """Steps, skips, growths and backoffs since the scaler was made.

        Counted by `update`. Synchronises if the scale is on an accelerator.
        """
        return self._history.counters()

    @property
    def last_overflow(self) -> Overflow | None:
        """The parameter and rank of the last overflow, None before the first.

        Known on every rank alike where the scale is on a CPU; on an accelerator each
        rank knows its own overflows, after a step that was not fused.
        """
        self._settle()
        return self._history.last_overflow
