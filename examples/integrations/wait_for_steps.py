"""Schedules that wait in a trainer that steps them anyway: copy this file.

    wait_for_steps(scheduler, scaler)  # before the trainer wraps the scheduler

A loop of your own calls ``scaler.step_scheduler(scheduler)`` and needs none of this.
"""

from __future__ import annotations

from typing import Any

from gradparity.scaler import GradScaler


def wait_for_steps(scheduler: Any, scaler: GradScaler) -> None:
    """Make a schedule wait whenever the last iteration was skipped.

    The trainer still calls ``scheduler.step()`` after every batch. The scheduler's
    state does not change, so old checkpoints load.

    Args:
        scheduler: a learning-rate scheduler, not yet wrapped by the trainer.
        scaler: the scaler. Its last `update` decides: if any of several optimizers was
            skipped, the schedule waits. On an accelerator this synchronises.
    """
    # Change the class: attributes of the instance would be saved with its state.
    scheduler.__class__ = _waiting(type(scheduler), scaler)


def _waiting(kind: type, scaler: GradScaler) -> type:
    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if not scaler.counters.consecutive_skips:
            kind.step(self, *args, **kwargs)  # type: ignore[attr-defined]  # a scheduler

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _restored, (kind, scaler, self.__dict__)

    members = {"step": step, "__reduce_ex__": reduce}
    return type(kind.__name__, (kind,), members)


def _restored(kind: type, scaler: GradScaler, state: dict[str, Any]) -> Any:
    scheduler: Any = object.__new__(_waiting(kind, scaler))
    scheduler.__dict__.update(state)
    return scheduler
