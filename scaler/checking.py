"""Looking at gradients: this rank's first, then what all ranks make of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.amp.grad_scaler import OptState

from .eager import eager
from .history import code_of, overflow_of
from .holder import ScaleHolder, never_scaled
from .message import Holding, Verdict
from .states import Divided, divided_before, real_optimizer
from .unscale import check_and_unscale_, local_gradients, parameters_of, widen
from .verdicts import Found, any_of, on_host, reciprocal, spread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

__all__ = ["GradientChecker"]


class _Look(NamedTuple):
    # What one look found here, before the ranks agree on it.
    optimizers: list[Optimizer]
    founds: list[Found]  # one for each of them
    found_inf: torch.Tensor | None  # (), fp32; None without gradients
    culprit: float
    group: ProcessGroup | None
    call: str


class GradientChecker(ScaleHolder):
    """Unscales gradients and agrees on overflow; a base of ``GradScaler``."""

    # A look that the other ranks have not answered yet.
    _unsettled: tuple[_Look, Verdict] | None = None

    @eager
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide this optimizer's gradients by the scale, and agree on overflow.

        Optional: only to look at gradients, or to change them, before `step`. Call it
        once per optimizer and iteration, after all gradients are accumulated. One
        collective when several ranks agree, which the next call that needs its result
        waits for: what the ranks disagree on is raised there. A parameter that another
        optimizer of this iteration shares is divided once.

        Args:
            optimizer: its gradients are changed in place.

        Raises:
            RuntimeError: called twice, or after `step`, in one iteration.
            AssertionError: the gradients cannot have been scaled yet.
            ValueError: an fp16 gradient, and ``fp16_gradients`` is ``"refuse"``.
            RanksDisagreeError: in that next call: the ranks hold different state.
            PeerFailedError: in that next call: another rank raised.
        """
        if not self._enabled:
            return
        divisor = self._divisor("unscale_")
        state = self._state_of(optimizer)
        _refuse_unscaled(state, "unscale_")
        allow_fp16 = self._fp16_gradients != "refuse"
        self._stamps.check(state["optimizer"], state, "unscale_")
        self._look([optimizer], reciprocal(divisor), allow_fp16, "unscale_", later=True)
        state["stage"] = OptState.UNSCALED

    def _look_again(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        # For gradients that were changed since they were unscaled.
        before = list(state["found_inf_per_device"].values())
        scale, _ = self._check_scale_growth_tracker("step")
        self._look([optimizer], torch.ones_like(scale), True, "step")
        if "clipped" in state and before:
            # What overflowed then is still scaled, whatever it was changed to.
            then = any_of(before, scale.device)
            for found in state["found_inf_per_device"].values():
                found.copy_(torch.maximum(found, then.to(found.device)))
            state["verdict"] = None

    # - The protocol of torch's class

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> Found:
        if self._fp16_gradients == "widen":
            widen(optimizer)
        shared = self._divided_before(optimizer)
        own = local_gradients(optimizer, allow_fp16=allow_fp16, without=shared)
        found = check_and_unscale_(own, inv_scale, found_inf)
        for parameter, by_kernel in shared.values():
            rest = _still_to_divide(inv_scale, by_kernel)
            grads = local_gradients([parameter], allow_fp16=allow_fp16)
            start = any_of([found_inf, *found.values()], found_inf.device)
            found.update(check_and_unscale_(grads, rest, start))
        if not found and self._steps_without_gradients:
            found[found_inf.device] = found_inf.clone()
        return found

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        # For optimizers that unscale by themselves: look only, change nothing.
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        one = torch.ones_like(scale)
        self._look([optimizer], one, True, "_check_inf_per_device")
        return self._found_inf_per_device(optimizer)

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        return self._state_of(optimizer)["found_inf_per_device"]  # type: ignore[no-any-return]

    # - Agreement

    def _look(
        self,
        optimizers: list[Optimizer],
        inv_scale: torch.Tensor,
        allow_fp16: bool,
        call: str,
        *,
        later: bool = False,
    ) -> None:
        # Looks at some optimizers; one overflow anywhere is an overflow of them all.
        scale, _ = self._check_scale_growth_tracker(call)
        group = self._group(*optimizers)
        founds: list[Found] = []
        try:
            for optimizer in optimizers:
                zero = torch.zeros_like(scale)
                founds.append(
                    self._unscale_grads_(optimizer, inv_scale, zero, allow_fp16)
                )
        except Exception:
            self._report_failure(group, call)
            raise
        self._conclude(optimizers, founds, group, call, later=later)

    def _report_failure(
        self,
        group: ProcessGroup | None,
        call: str,
        attached: torch.Tensor | None = None,
    ) -> None:
        # See [Note: An error on one rank].
        if group is not None:
            holding = self._holding(None, failed=True)
            self._agreement.agree(group, holding, call, attached)

    def _conclude(
        self,
        optimizers: list[Optimizer],
        founds: list[Found],
        group: ProcessGroup | None,
        call: str,
        attached: torch.Tensor | None = None,
        *,
        asked: tuple[float, ...] = (),
        later: bool = False,
    ) -> Verdict | None:
        # Replaces what this rank found by what any rank found.
        if group is None and len(founds) == 1 and len(founds[0]) < 2:
            self._conclude_alone(optimizers[0], founds[0])
            return None
        scale, _ = self._check_scale_growth_tracker(call)
        flags = [f for found in founds for f in found.values()]
        mine = any_of(flags, scale.device) if flags else None
        culprit = self._culprit(optimizers, mine, group)
        look = _Look(optimizers, founds, mine, culprit, group, call)
        if group is None:
            self._accept(look, None)
            return None
        holding = self._holding(
            mine, culprit=culprit, optimizers=optimizers, asked=asked
        )
        verdict = self._agreement.agree(group, holding, call, attached, later=later)
        self._unsettled = look, verdict
        if not verdict.is_on_its_way:
            self._settle()
        return verdict

    def _settle(self) -> None:
        # Waits for what unscale_ left on its way. See [Note: Waiting later].
        if self._unsettled is None:
            return
        (look, verdict), self._unsettled = self._unsettled, None
        if verdict.is_on_its_way:
            verdict.check()
        self._accept(look, verdict)

    def _accept(self, look: _Look, verdict: Verdict | None) -> None:
        agreed = look.found_inf if verdict is None else verdict.found_inf
        for optimizer, found in zip(look.optimizers, look.founds, strict=True):
            self._note(optimizer, found, agreed, verdict)
        self._remember(look, verdict)
        if verdict is not None:
            self._refuse_empty_step(verdict, look.call)

    def _conclude_alone(self, optimizer: Optimizer, found: Found) -> None:
        # The same for one process, one optimizer and one device, without the detours.
        state = self._state_of(optimizer)
        state["found_inf_per_device"], state["verdict"] = found, None
        if found and on_host(next(iter(found.values()))):
            overflow = overflow_of(code_of(optimizer, 0), 0, optimizer)
            self._history.last_overflow = overflow

    def _note(
        self,
        optimizer: Optimizer,
        found: Found,
        agreed: torch.Tensor | None,
        verdict: Verdict | None,
    ) -> None:
        scale, _ = self._check_scale_growth_tracker("step")
        if not found and verdict is not None:
            found[scale.device] = torch.zeros_like(scale)
        if agreed is not None and (verdict is not None or len(found) > 1):
            spread(agreed, found)
        state = self._state_of(optimizer)
        state["found_inf_per_device"] = found
        state["verdict"] = verdict

    def _culprit(
        self,
        optimizers: list[Optimizer],
        found_inf: torch.Tensor | None,
        group: ProcessGroup | None,
    ) -> float:
        # Only after an overflow, and only where looking costs no synchronisation.
        if found_inf is None or not on_host(found_inf):
            return 0.0
        rank = 0 if group is None else group.rank()
        return max(code_of(optimizer, rank) for optimizer in optimizers)

    def _remember(self, look: _Look, verdict: Verdict | None) -> None:
        culprit = look.culprit
        if verdict is not None and verdict.message.device.type == "cpu":
            culprit = verdict.value("culprit")
        if culprit and look.optimizers:
            rank = 0 if look.group is None else look.group.rank()
            overflow = overflow_of(culprit, rank, look.optimizers[0])
            self._history.last_overflow = overflow

    def _holding(
        self,
        found_inf: torch.Tensor | None,
        *,
        failed: bool = False,
        culprit: float = 0.0,
        optimizers: Iterable[Optimizer] = (),
        asked: tuple[float, ...] = (),
    ) -> Holding:
        scale, tracker = self._check_scale_growth_tracker("agree")
        return Holding(
            found_inf=found_inf,
            scale=scale,
            growth_tracker=tracker,
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            policy=self._policy.fingerprint(*asked) if asked else self._fingerprint,
            hysteresis_left=self._hysteresis_left,
            divisor=self._stamps.divisor(scale) if _any_gradient(optimizers) else None,
            has_gradients=found_inf is not None,
            was_scaled=self._was_scaled,
            failed=failed,
            culprit=culprit,
        )

    def _refuse_empty_step(self, verdict: Verdict, call: str) -> None:
        # What torch refuses on one rank is refused here when it holds for all of them.
        if verdict.message.device.type != "cpu":
            return
        if not verdict.value("was_scaled"):
            raise AssertionError(never_scaled(call, "_scale"))
        if not verdict.value("has_gradients") and not self._steps_without_gradients:
            raise AssertionError("No inf checks were recorded for this optimizer.")

    # - State

    @property
    def _per_optimizer_states(self) -> dict[int, dict[str, Any]]:
        # As torch calls it. Nobody sees what this rank alone has found.
        self._settle()
        return self._states

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: dict[int, dict[str, Any]]) -> None:
        self._settle()
        self._states = states

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        self._settle()
        state = self._states.get(id(optimizer))
        if state is not None and state.get("optimizer") is optimizer:
            return state
        real = real_optimizer(optimizer)
        state = self._states[id(real)]
        # Keeps it alive: the id of a dead optimizer may be given to a new one.
        state["optimizer"] = real
        return state

    def _divided_before(self, optimizer: Optimizer) -> Divided:
        states = self._states
        if len(states) < 2:
            return {}
        mine = id(real_optimizer(optimizer))
        return divided_before(
            optimizer, (state for key, state in states.items() if key != mine)
        )


def _any_gradient(optimizers: Iterable[Optimizer]) -> bool:
    return any(
        parameter.grad is not None
        for optimizer in optimizers
        for parameter in parameters_of(optimizer)
    )


def _refuse_unscaled(state: dict[str, Any], call: str) -> None:
    if state["stage"] is OptState.UNSCALED:
        raise RuntimeError(
            f"{call}() has already been called on this optimizer since the last "
            "update()."
        )
    if state["stage"] is OptState.STEPPED:
        raise RuntimeError(f"{call}() is being called after step().")


def _still_to_divide(
    inv_scale: torch.Tensor, by_kernel: torch.Tensor | None
) -> torch.Tensor:
    # A fused kernel that skipped has left the gradients as they were.
    one = torch.ones_like(inv_scale)
    return one if by_kernel is None else torch.where(by_kernel > 0, inv_scale, one)
