"""What a scaler holds: the scale, its settings, and how they are saved.

This is the half of ``GradScaler`` that knows nothing of optimizers.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import torch
from torch.amp.grad_scaler import GradScaler as _TorchGradScaler

from .agreement import Agreement
from .errors import InvalidSettingError
from .groups import AgreeOver, Reach
from .history import History
from .message import Holding
from .multiply import multiply
from .policy import Policy
from .saved import Loaded, checked
from .settings import (
    check_backoff_factor,
    check_growth_factor,
    check_growth_interval,
    check_scale,
)
from .stamps import Stamps
from .states import fresh_state
from .unscale import parameters_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

__all__ = ["Fp16Gradients", "ScaleHolder", "never_scaled"]

Fp16Gradients = Literal["refuse", "in place", "widen"]
"""``refuse``: unscale_ raises, as torch.amp does. ``in place``: divide them where they
are, which flushes small values to zero, as torch's ShardedGradScaler does. ``widen``:
replace them by fp32 gradients, which keeps small values; needs an optimizer that takes
them (SGD, not fused; not Adam with fp16 states)."""


class ScaleHolder(_TorchGradScaler):
    """The scale, its settings and their persistence; the base of ``GradScaler``."""

    _keeps_loss_dtype = False
    _steps_without_gradients = False

    # - Lazily made by scale(), or by the first agreement on ranks that never scale
    _scale: torch.Tensor | None
    _growth_tracker: torch.Tensor | None
    _hysteresis_left: torch.Tensor | None

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        agree_over: AgreeOver = "world",
        process_group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        fp16_gradients: Fp16Gradients = "refuse",
        policy: Policy | None = None,
        recheck: bool = False,
    ) -> None:
        self._device = device
        self._enabled = enabled and _is_usable(device)
        if self._enabled:
            growth_factor = check_growth_factor(growth_factor)
            backoff_factor = check_backoff_factor(backoff_factor)
            growth_interval = check_growth_interval(growth_interval)
            init_scale = check_scale(init_scale, "init_scale")
            (policy or Policy()).check_start(init_scale)
        if fp16_gradients not in get_args(Fp16Gradients):
            raise InvalidSettingError(
                f"fp16_gradients must be one of {get_args(Fp16Gradients)}, "
                f"got {fp16_gradients!r}."
            )
        # A disabled scaler has them too, so that its getters work.
        self._init_scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        self._scale = None
        self._growth_tracker = None
        self._states: dict[int, dict[str, Any]] = defaultdict(fresh_state)
        self._fp16_gradients: Fp16Gradients = fp16_gradients
        self._policy = policy or Policy()
        self._recheck = recheck
        self._fingerprint = self._policy.fingerprint()
        self._init_hysteresis_left = self._policy.hysteresis
        self._hysteresis_left = None
        self._history = History()
        # True once the scale came from scale() or a checkpoint, not from a default.
        self._was_scaled = False
        self._stamps = Stamps()
        self._agreement = Agreement(Reach(agree_over, process_group, mesh), device)

    # - The scale

    def _check_scale_growth_tracker(
        self, funcname: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is not None and self._growth_tracker is not None:
            return self._scale, self._growth_tracker
        # Ranks of a pipeline that never see a loss get their scale here; so does a run
        # that resumes. Alone and without either, the gradients cannot have been scaled.
        if self._scale is None and (self._was_scaled or self._group() is not None):
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        for name, tensor in (
            ("_scale", self._scale),
            ("_growth_tracker", self._growth_tracker),
        ):
            if tensor is None:
                raise AssertionError(never_scaled(funcname, name))
        assert self._scale is not None and self._growth_tracker is not None
        return self._scale, self._growth_tracker

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full(
            (), self._init_growth_tracker, dtype=torch.int32, device=dev
        )
        if self._policy.hysteresis > 1:
            self._hysteresis_left = torch.full(
                (), self._init_hysteresis_left, dtype=torch.int32, device=dev
            )

    @overload
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...
    @overload
    def scale(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]: ...
    @overload
    def scale(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]: ...
    @overload
    def scale(self, outputs: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]: ...

    def scale(
        self, outputs: torch.Tensor | Iterable[torch.Tensor]
    ) -> torch.Tensor | Iterable[torch.Tensor]:
        """Multiply a loss, or any nest of losses, by the scale.

        Args:
            outputs: tensors of any shape, dtype and device.

        Returns:
            The products in the same nest; the outputs themselves if disabled.

        Raises:
            ValueError: something that is neither a tensor nor iterable.
        """
        if not self._enabled:
            return outputs
        return multiply(
            outputs,
            self._scale_for,
            keep_dtype=self._keeps_loss_dtype,
            watch=lambda product: self._stamps.watch(product, self),
        )

    def _scale_for(self, device: torch.device) -> torch.Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        self._was_scaled = True
        assert self._scale is not None
        return self._scale

    def _divisor(self, call: str) -> torch.Tensor:
        # (), fp32: what the gradients were scaled by. See [Note: Scale stamps].
        scale, _ = self._check_scale_growth_tracker(call)
        return self._stamps.divisor(scale)

    def _group(self, *optimizers: Optimizer) -> ProcessGroup | None:
        def parameters() -> Iterable[Any]:
            return chain.from_iterable(map(parameters_of, optimizers))

        return self._agreement.reach.group(parameters)

    # - Settings

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows.

        Raises:
            InvalidSettingError: not finite, or not above 1.
        """
        self._growth_factor = check_growth_factor(new_factor)

    def get_backoff_factor(self) -> float:
        """Return the factor by which the scale backs off."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale backs off.

        Raises:
            InvalidSettingError: not strictly between 0 and 1.
        """
        self._backoff_factor = check_backoff_factor(new_factor)

    def get_growth_interval(self) -> int:
        """Return the number of good steps before the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of good steps before the scale grows.

        Raises:
            InvalidSettingError: not an integer of at least 1.
        """
        self._growth_interval = check_growth_interval(new_interval)
        self._limit_tracker()

    def _limit_tracker(self) -> None:
        # torch's kernel asks for equality: a tracker beyond a lowered interval would
        # never grow the scale again.
        most = self._growth_interval - 1
        self._init_growth_tracker = min(self._init_growth_tracker, most)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=most)

    # - State

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the keys of torch; empty if disabled.

        A policy with hysteresis adds the key ``"_hysteresis_left"``. Synchronises with
        the device. Call it after `update`.
        """
        if not self._enabled:
            return {}
        state = {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }
        if self._policy.hysteresis > 1:
            state["_hysteresis_left"] = self._get_hysteresis_left()
        return state

    def _get_hysteresis_left(self) -> int:
        if self._hysteresis_left is None:
            return self._init_hysteresis_left
        return int(self._hysteresis_left.item())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that this class or torch's saved; nothing if disabled.

        All ranks must call it, with the same state: one collective compares them before
        anything is changed (with ``agree_over="mesh"`` and no step so far, the next
        agreement does).

        Raises:
            RuntimeError: the state is empty, as a disabled scaler saves it.
            InvalidSettingError: a value that no run can work with; nothing is changed.
            RanksDisagreeError: the ranks load different states; nothing is changed.
            PeerFailedError: another rank raised; nothing is changed.
        """
        if not self._enabled:
            return
        group = self._group() if self._agreement.reach.is_known else None
        try:
            new = checked(state_dict, self._policy)
        except Exception:
            if group is not None:
                failed = Loaded(1.0, 2.0, 0.5, 1, 0, 0)
                self._compare(group, failed, failed=True)
            raise
        if group is not None:
            self._compare(group, new)
        self._init_scale, self._init_growth_tracker = new.scale, new.growth_tracker
        self._init_hysteresis_left = new.hysteresis_left
        self._growth_factor = new.growth_factor
        self._backoff_factor = new.backoff_factor
        self._growth_interval = new.growth_interval
        self._was_scaled = True
        if self._scale is not None:
            before = self._scale.clone()
            self._scale.fill_(new.scale)
            self._stamps.moved(before, self._scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(new.growth_tracker)
        if self._hysteresis_left is not None:
            self._hysteresis_left.fill_(new.hysteresis_left)
        self._limit_tracker()

    def _compare(
        self, group: ProcessGroup, new: Loaded, *, failed: bool = False
    ) -> None:
        holding = Holding(
            found_inf=None,
            scale=torch.tensor(new.scale),
            growth_tracker=torch.tensor(new.growth_tracker),
            growth_factor=new.growth_factor,
            backoff_factor=new.backoff_factor,
            growth_interval=new.growth_interval,
            policy=self._fingerprint,
            hysteresis_left=torch.tensor(new.hysteresis_left),
            failed=failed,
        )
        self._agreement.compare(group, holding, "load_state_dict")

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._enabled:
            if self._states:
                raise AssertionError(
                    "A GradScaler instance may only be pickled at the beginning of an "
                    "iteration, or at the end after scaler.update()."
                )
            state["_init_scale"] = self.get_scale()
            state["_init_growth_tracker"] = self._get_growth_tracker()
            state["_init_hysteresis_left"] = self._get_hysteresis_left()
            state["_scale"] = state["_growth_tracker"] = None
            state["_hysteresis_left"] = None
        return state


def _is_usable(device: str) -> bool:
    if device != "cuda" or not torch.cuda.amp.common.amp_definitely_not_available():
        return True
    warnings.warn(
        "GradScaler is enabled for device 'cuda', but CUDA is not available. "
        "Disabling.",
        stacklevel=3,
    )
    return False


def never_scaled(call: str, name: str) -> str:
    """Return the message for ``call`` on gradients that nothing can have scaled."""
    return (
        f"Attempted {call} but {name} is None.  This may indicate your script did not "
        "use scaler.scale(loss or outputs) earlier in the iteration."
    )
