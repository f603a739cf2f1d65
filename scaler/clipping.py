"""clip_grad_norm_: look, unscale and clip from one read of the gradients.

1. Norms of the local gradients, still scaled (``norms.py``), are this rank's shares of
   the global norm, and its finding: a norm is finite if and only if its tensor is.
2. One collective brings the shares of all ranks, with the agreement (``totals.py``).
3. One factor, 1 / scale times the clip factor, multiplies the gradients; a fused
   optimizer gets it as ``grad_scale`` and no gradient is written.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from .checking import GradientChecker
from .eager import eager
from .settings import HIGHEST_SCALE, check_clip
from .totals import MESHES, Held, Shares, global_norm, held_by, shares_of
from .unscale import local_of, refuse_fp16, widen
from .verdicts import Number, any_of, may_enlarge, number_of, on_host

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

__all__ = ["GradientClipper"]


class GradientClipper(GradientChecker):
    """Clips by the global norm; a base of ``GradScaler``."""

    @eager
    def clip_grad_norm_(
        self,
        optimizer: Optimizer | None,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Unscale this optimizer's gradients and clip them by their global norm.

        Takes the place of `unscale_` and ``torch.nn.utils.clip_grad_norm_``, and reads
        the gradients once. The norm is that of all gradients on all ranks that agree,
        each shard added and each replica counted once (see [Note: Each replica once] in
        ``totals.py``). With a fused optimizer the gradients themselves stay as they
        are: `step` divides and clips them. Call it once per optimizer and iteration;
        one collective when several ranks agree.

        Args:
            optimizer: plain tensors and DTensors on up to four meshes. None on a rank
                without parameters, which then calls `step_without_optimizer`.
            max_norm: largest norm after the call, at least 0; the same on all ranks.
            norm_type: order of the norm, 2 or any other above 0, also infinite; the
                same on all ranks.
            error_if_nonfinite: raise if the norm is not finite; synchronises.

        Returns:
            (), fp32, on the device of the scale: the norm of the unscaled gradients
            before clipping, the same on every rank. Not finite after an overflow; the
            gradients are then left as they are, and `step` will skip.

        Raises:
            InvalidSettingError: ``max_norm`` or ``norm_type`` is no such number.
            RuntimeError: called after `step` or twice, or the norm is not finite and
                ``error_if_nonfinite`` is set.
            AssertionError: the gradients cannot have been scaled yet.
            ValueError: an fp16 gradient, and ``fp16_gradients`` is ``"refuse"``;
                ``agree_over="local"`` with sharded gradients; or a parameter that
                another optimizer has already unscaled.
            RanksDisagreeError: the ranks hold different state, or clip differently.
            PeerFailedError: another rank raised.
        """
        max_norm, norm_type = float(max_norm), float(norm_type)
        if not self._enabled:
            return self._clip_unscaled(optimizer, max_norm, norm_type)
        scale = self._divisor("clip_grad_norm_")
        state = self._clip_state(optimizer)
        if optimizer is not None and self._divided_before(optimizer):
            raise ValueError(
                "clip_grad_norm_() cannot clip a parameter that another optimizer of "
                "this iteration shares. Use unscale_() on both and clip by hand."
            )
        if state["stage"] is OptState.STEPPED or "clipped" in state:
            raise RuntimeError(
                "clip_grad_norm_() was called after step(), or twice since update()."
            )
        if optimizer is not None:
            self._stamps.check(state["optimizer"], state, "clip_grad_norm_")
        unscaled = state["stage"] is OptState.UNSCALED
        if optimizer is not None and not unscaled and may_enlarge(scale):
            # What overflows while it is divided shows only afterwards.
            self.unscale_(optimizer)
            unscaled = True
        held, norm = self._global_norm(optimizer, max_norm, norm_type)
        if not unscaled:
            norm = norm / number_of(scale)
        state["clipped"] = True
        if optimizer is not None:
            state["stage"] = OptState.UNSCALED
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(_not_finite(norm_type, float(norm)))
        self._apply(optimizer, held, _factor(norm, max_norm), unscaled, state)
        return _fp32(norm, scale.device)

    def _clip_state(self, optimizer: Optimizer | None) -> dict[str, Any]:
        if optimizer is not None:
            return self._state_of(optimizer)
        return self._per_optimizer_states[id(None)]

    def _global_norm(
        self, optimizer: Optimizer | None, max_norm: float, norm_type: float
    ) -> tuple[Held, Number]:
        scale, _ = self._check_scale_growth_tracker("clip_grad_norm_")
        optimizers = [] if optimizer is None else [optimizer]
        group = self._group(*optimizers)
        try:
            check_clip(max_norm, norm_type)
            held, shares = self._shares(optimizer, group, norm_type, scale.device)
        except Exception:
            nothing = torch.zeros(MESHES, 3, dtype=torch.float64)
            self._report_failure(group, "clip_grad_norm_", nothing)
            raise
        found = {} if shares.found_inf is None else {scale.device: shares.found_inf}
        verdict = self._conclude(
            optimizers,
            [found] * len(optimizers),
            group,
            "clip_grad_norm_",
            shares.entries,
            asked=(max_norm, norm_type),
        )
        entries = shares.entries[None]
        if verdict is not None and verdict.gathered is not None:
            entries = verdict.gathered
        if optimizer is None:
            agreed = torch.zeros_like(scale)
            if verdict is not None:
                agreed.copy_(verdict.found_inf)
            flags = self._clip_state(None)["found_inf_per_device"]
            flags[len(flags)] = agreed
        norm = global_norm(entries, norm_type)
        if isinstance(norm, torch.Tensor):
            norm = norm.to(scale.device)
        return held, norm

    def _shares(
        self,
        optimizer: Optimizer | None,
        group: ProcessGroup | None,
        norm_type: float,
        device: torch.device,
    ) -> tuple[Held, Shares]:
        if optimizer is None:
            return {}, shares_of({}, norm_type, device)
        if self._enabled and self._fp16_gradients == "widen":
            widen(optimizer)
        rank = 0 if group is None else group.rank()
        held = held_by(optimizer, local_of, rank)
        if self._fp16_gradients == "refuse":
            for groups in held.values():
                refuse_fp16(groups)
        if group is None and any(len(place.ranks) > 1 for place in held):
            raise ValueError(
                "clip_grad_norm_ needs the gradients of all ranks of a mesh, and this "
                "scaler agrees with nobody. Do not pass agree_over='local'."
            )
        return held, shares_of(held, norm_type, device)

    def _apply(
        self,
        optimizer: Optimizer | None,
        held: Held,
        factor: Number,
        unscaled: bool,
        state: dict[str, Any],
    ) -> None:
        # factor: the clip factor only.
        scale = self._divisor("clip_grad_norm_")
        if optimizer is None:
            return
        if on_host(any_of(state["found_inf_per_device"].values(), scale.device)):
            return
        scaled = 1.0 if unscaled else number_of(scale)
        if getattr(optimizer, "_step_supports_amp_scaling", False) and _fits(
            scaled, factor
        ):
            state["folded"] = _fp32(scaled / factor, scale.device)
            return
        multiply_(held, _fp32(factor / scaled, scale.device))
        state["folded"] = None

    def _clip_unscaled(
        self, optimizer: Optimizer | None, max_norm: float, norm_type: float
    ) -> torch.Tensor:
        # Disabled: the gradients are as they should be, there is nothing to agree on
        # but the norm, and a scaler that is off issues no agreement.
        check_clip(max_norm, norm_type)
        parameters = [] if optimizer is None else optimizer.param_groups
        return torch.nn.utils.clip_grad_norm_(
            [p for group in parameters for p in group["params"]], max_norm, norm_type
        )


def multiply_(held: Held, factor: torch.Tensor) -> None:
    """Multiply local gradients in place.

    Args:
        held: the gradients.
        factor: (), fp32, any device.
    """
    with torch.no_grad():
        for groups in held.values():
            for (device, _), tensors in groups.items():
                torch._foreach_mul_(tensors, factor.to(device, non_blocking=True))


def _fits(scaled: Number, factor: Number) -> bool:
    # A norm beyond fp32 can ask for a divisor beyond fp32. On an accelerator, where
    # looking would synchronise, it then clips to zero.
    if isinstance(scaled, torch.Tensor) or isinstance(factor, torch.Tensor):
        return True
    return scaled <= HIGHEST_SCALE * factor


def _factor(norm: Number, max_norm: float) -> Number:
    # As torch's clip_grad_norm_ has it, in fp64.
    factor = max_norm / (norm + 1e-6)
    if isinstance(factor, torch.Tensor):
        return factor.clamp(max=1.0)
    return min(factor, 1.0)  # of nan and 1 it is nan


def _fp32(value: Number, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=device)


def _not_finite(norm_type: float, norm: float) -> str:
    return (
        f"The total norm of order {norm_type} of the gradients is {norm}, so they "
        "cannot be clipped. Pass error_if_nonfinite=False to let step() skip instead."
    )
