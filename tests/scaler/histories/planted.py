"""Planted scalers: right in torch's own loops, each wrong in one class of histories."""

from typing import Any

import torch

from gradparity.fixtures.faulty import PlainScaler

__all__ = ["PLANTED"]


class DividesEachParameterOnce(torch.amp.GradScaler):
    """Does not divide a parameter's gradient again, even if it is a new one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.divided: set[int] = set()

    def unscale_(self, optimizer: Any) -> None:
        super().unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            if id(parameter) in self.divided and parameter.grad is not None:
                parameter.grad.mul_(self.get_scale())
        self.divided |= {id(p) for p in parameters}

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self.divided = set()


class RefusesAfterADrop(torch.amp.GradScaler):
    """Mistakes a gradient that was zeroed in place for an accumulated one."""

    moved = False

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self.moved = new_scale is not None

    def unscale_(self, optimizer: Any) -> None:
        grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
        if self.moved and any(g is not None and g._version > 0 for g in grads):
            raise RuntimeError("an accumulation mixes scales")
        super().unscale_(optimizer)


class DividesByAnEarlierScale(torch.amp.GradScaler):
    """Divides by the scale of the last scaled loss that required a gradient."""

    seen: Any = None

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        if isinstance(scaled, torch.Tensor) and scaled.requires_grad:
            self.seen = self.get_scale()
        return scaled

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, *rest: Any) -> Any:
        if self.seen is not None:
            inv_scale = torch.tensor(1.0 / self.seen)
        return super()._unscale_grads_(optimizer, inv_scale, *rest)


class _Clips(torch.amp.GradScaler):
    """Clips correctly, by its own method."""

    def norm(self, grads: list[torch.Tensor], order: float) -> torch.Tensor:
        dense = [g.to_dense() if g.is_sparse else g for g in grads]
        return torch.nn.utils.get_total_norm(dense, order)

    def clip_grad_norm_(
        self, optimizer: Any, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        self.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = self.norm(grads, norm_type)
        if norm.isfinite():
            for gradient in grads:
                with torch.no_grad():
                    gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class AddsNoDuplicates(_Clips):
    """Norm of sparse gradients is wrong if an index occurs more than once."""

    def norm(self, grads: list[torch.Tensor], order: float) -> torch.Tensor:
        return super().norm([g._values() if g.is_sparse else g for g in grads], order)


class TakesPowersAsTheyAre(_Clips):
    """Sums powers of gradients without scaling them down, so powers overflow."""

    def norm(self, grads: list[torch.Tensor], order: float) -> torch.Tensor:
        powers = torch.stack([(g * 2.0**20).abs().pow(order).sum() for g in grads])
        return powers.sum().pow(1 / order) / 2.0**20


class KeepsTheUsersScale(torch.amp.GradScaler):
    """Passes a user's grad_scale to the next step again after a skipped one."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        kept = getattr(optimizer, "grad_scale", None)
        grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
        bad = any(g is not None and not bool(g.isfinite().all()) for g in grads)
        result = super().step(optimizer, *args, **kwargs)
        if bad and kept is not None:
            optimizer.grad_scale = kept
        return result


class ScalesGradientsBack(torch.amp.GradScaler):
    """Multiplies gradients by the scale again after the step."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().step(optimizer, *args, **kwargs)
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(self.get_scale())
        return result


class WantsToHash(torch.amp.GradScaler):
    """Uses optimizers as keys of a dictionary, so they must be hashable."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.last = {optimizer: True}
        return super().step(optimizer, *args, **kwargs)


class ForgetsOnRegroup(PlainScaler):
    """Counts iterations and refuses a state where another rank has more of them."""

    def agree(self, found: bool) -> bool:
        return super().agree(found) if torch.distributed.is_initialized() else found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if torch.distributed.get_world_size() > 1:
            numbers = [torch.zeros(1) for _ in range(2)]
            torch.distributed.all_gather(numbers, torch.tensor([float(self.iteration)]))
            if numbers[0] != numbers[1]:
                raise RuntimeError("another iteration")


class TakesTheNormHere(PlainScaler):
    """Clips by the norm of this rank's gradients."""

    def clip_grad_norm_(
        self, optimizer: Any, max_norm: float, norm_type: float = 2.0
    ) -> float:
        self.unscale_(optimizer)
        grads = list(self.gradients(optimizer))
        norm = float(torch.nn.utils.get_total_norm(grads, norm_type))
        for gradient in grads:
            gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
        return norm


class TakesTheNormOfItsGroup(TakesTheNormHere):
    """Accepts a sync group, but clips by the norm of this rank's gradients."""

    def __init__(self, sync_over: Any = None, **settings: Any) -> None:
        super().__init__(**settings)


class KnowsOneClass(torch.amp.GradScaler):
    """Raises for gradients of a subclass of Tensor."""

    def _unscale_grads_(self, optimizer: Any, *rest: Any) -> Any:
        grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
        if any(type(g) is not torch.Tensor for g in grads if g is not None):
            raise TypeError("expected tensors")
        return super()._unscale_grads_(optimizer, *rest)


class KeepsGroups(torch.amp.GradScaler):
    """Raises if an optimizer's list of groups is not that of its first step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.groups: dict[int, Any] = {}

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        kept = self.groups.setdefault(id(optimizer), optimizer.param_groups)
        if kept is not optimizer.param_groups:
            raise RuntimeError("another optimizer")
        return super().step(optimizer, *args, **kwargs)


class HangsOnOneRank(PlainScaler):
    """The first rank makes a second collective after its own overflow."""

    def agree(self, found: bool) -> bool:
        if found and torch.distributed.get_rank() == 0:
            super().agree(found)
        return super().agree(found)


class DividesByVersion(torch.amp.GradScaler):
    """Divides a gradient only once, unless its version has changed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seen: dict[int, tuple[torch.Tensor, int]] = {}

    def unscale_(self, optimizer: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in held if p.grad is not None]
        kept = [
            (g, g.clone())
            for g in grads
            if id(g) in self.seen and self.seen[id(g)][1] == g._version
        ]
        super().unscale_(optimizer)
        for gradient, value in kept:
            gradient.copy_(value)
        self.seen = {id(g): (g, g._version) for g in grads}


class ClipsLater(_Clips):
    """Returns the norm, and clips when it steps."""

    def clip_grad_norm_(
        self, optimizer: Any, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self.kept = [(p, p.grad) for p in held if p.grad is not None]
        for p, gradient in self.kept:
            p.grad = gradient.clone()
        norm = super().clip_grad_norm_(optimizer, max_norm, norm_type)
        for p, gradient in self.kept:
            p.grad = gradient
        return norm


class RemembersAFailure(torch.amp.GradScaler):
    """Counts gradients as divided even if the division raised."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().step(optimizer, *args, **kwargs)
        except Exception:
            state = self._per_optimizer_states[id(optimizer)]
            state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
            raise


class RefusesLongIntervals(torch.amp.GradScaler):
    """Raises for growth intervals above the range of int32."""

    def __init__(self, **settings: Any) -> None:
        if settings["growth_interval"] >= 2**31:
            raise ValueError("more than int32 holds")
        super().__init__(**settings)


class ReadsGroupsAsDicts(torch.amp.GradScaler):
    """Reads keys of param groups that torch's scaler never reads."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.names = [group.get("name") for group in optimizer.param_groups]
        return super().step(optimizer, *args, **kwargs)


class ReadsStatesAsDicts(torch.amp.GradScaler):
    """Assumes that each value of an optimizer's state is a dict."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        states = getattr(optimizer, "state", {}).values()
        self.momenta = [state.get("momentum_buffer") for state in states]
        return super().step(optimizer, *args, **kwargs)


class FindsInTheDefaultDtype(torch.amp.GradScaler):
    """Creates found_inf in the default dtype."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, *rest: Any) -> Any:
        found = super()._unscale_grads_(optimizer, inv_scale, *rest)
        return {device: torch.tensor(float(flag)) for device, flag in found.items()}


class LooksForWrappers(torch.amp.GradScaler):
    """Follows attributes with the same groups, without end if they form a ring."""

    def inner(self, optimizer: Any) -> Any:
        for value in vars(optimizer).values():
            if getattr(value, "param_groups", None) is optimizer.param_groups:
                return self.inner(value)
        return optimizer

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.inner(optimizer)
        return super().step(optimizer, *args, **kwargs)


PLANTED = {
    # the classes of fixtures/faulty, which are gradparity's, too
    "NeverAgrees": "dtensor@2/back:2,inf@1,step",
    "BlindToNan": "dtensor@2/back:2,nan:1,step:1",
    "ZeroesAndSteps": "dtensor@2/back:2,both,step",
    "GrowsOneStepLate": "@1/back,step,update,zero,back,step,update",
    "KeepsTheTrackerOnBackoff": "@2/back,step,update,zero,back,inf@1,step,update",
    "UnscalesTwice": "@1/back,unscale",
    "AcceptsASecondUnscale": "@1/back,unscale,unscale",
    "AcceptsASecondStep": "@1/back,step,step",
    "AcceptsAClosure": "@1/back,closure",
    "RefusesTooLate": "@1/back,unscale,unscale",
    "HasAHiddenCeiling": "@1/set:30,back,step,update,zero,back,step,update",
    "AsksTwiceWhenBad": "dtensor@2/back,inf@1,step,update",
    "DividesByVersion": "shared@1/back:2,step,data:1,step:1",
    "ClipsLater": "@1/back,clip,look",
    "RemembersAFailure": "@1/back:2,fail,back:2,step",
    "RefusesLongIntervals": "interval@1/back,step",
    "ReadsGroupsAsDicts": "bare-groups@1/back,step",
    "ReadsStatesAsDicts": "own-kernel@1/back,step",
    "FindsInTheDefaultDtype": "default-fp64@1/back,step,update",
    "LooksForWrappers": "ring@1/back,step",
    "DividesEachParameterOnce": "shared@1/back:2,step,zero:1,back:2,step:1",
    "RefusesAfterADrop": "@1/back:2,set:6,clear,back,step",
    "DividesByAnEarlierScale": "@1/back,set:6,zero,seed,step",
    "AddsNoDuplicates": "sparse@1/back,clip",
    "TakesPowersAsTheyAre": "@1/back,clip-order",
    "KeepsTheUsersScale": "fused@1/back,inf,user-scale,step,zero,update,back,step",
    "ScalesGradientsBack": "@1/back:2,step",
    "WantsToHash": "duck@1/back,step",
    "ForgetsOnRegroup": "@2/elder@1",
    "TakesTheNormHere": "dtensor@2/back,clip",
    "TakesTheNormOfItsGroup": "dtensor+lone@2/back,clip",
    "KnowsOneClass": "subclass@1/back,step",
    "KeepsGroups": "@1/back,step,update,load,zero,back,step",
    "HangsOnOneRank": "@2/back:2,inf,step",
}
"""Wrong scaler -> a history in which it fails."""
