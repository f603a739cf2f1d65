"""The oracle: a history run on plain mathematics and on torch's own class.

`Mathematics` never scales: it has the correct gradients in double precision and applies
only the rule of the scale. `AgreedTorch` is torch's class with found_inf shared between
ranks, because by itself it would let ranks disagree. All ranks are simulated in one
process, call by call. If torch's outcome is the mathematical one, a tested scaler must
have the same outcome. If torch is wrong or raises, the scaler may do as mathematics or
as torch, or refuse.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from .history import FUSED, Call, History
from .replica import CLIPS, STEPS, Replica, norm_of

__all__ = [
    "BACKOFF",
    "GROWTH",
    "INTERVAL",
    "Track",
    "first_scale",
    "tracks_of",
]

GROWTH, BACKOFF, INTERVAL = 4.0, 0.25, 2
LIMIT = 2.0**128
"""Smallest power of two above fp32's range; a scale stays below it."""


def interval_of(history: History) -> int:
    """Return the number of good iterations before the scale grows."""
    return 10**10 if "interval" in history.words else INTERVAL


def first_scale(history: History) -> float:
    """Return the scale that a history starts with."""
    for word in history.words:
        if word.startswith("scale-"):
            return 2.0 ** int(word.removeprefix("scale-"))
    return 1024.0


@dataclass
class Facts:
    """Facts over all ranks before a call."""

    bad: list[bool]
    """For each optimizer: true if a gradient on any rank is not finite."""
    any: list[bool]
    """For each optimizer: true if any rank has a gradient."""
    norm: float
    """Global norm of the gradients that the call clips, unscaled."""
    unscaled: list[torch.Tensor] = field(default_factory=list)
    """Unscaled gradients of the optimizers of the call, on all ranks."""
    counted: list[torch.Tensor] = field(default_factory=list)
    """Gradients that belong to the norm, each element once."""


class _Beyond:
    """Methods that torch's class lacks, built from ``unscale_`` and ``step``."""

    replica: Replica
    facts: Callable[[], Facts]
    skipped: dict[int, bool]

    def __init__(self, replica: Replica, facts: Callable[[], Facts], **settings: Any):
        super().__init__(**settings)
        self.replica, self.facts, self.skipped = replica, facts, {}

    def number(self, optimizer: Any) -> int:
        pairs = zip(self.replica.optimizers, self.replica.inner, strict=True)
        return [optimizer is one or optimizer is two for one, two in pairs].index(True)

    def clip_grad_norm_(
        self: Any, optimizer: Any, max_norm: float, norm_type: float
    ) -> float:
        """Multiply gradients by the factor that torch computes from the global norm."""
        facts: Facts = self.facts()
        if optimizer is not None:
            which = self.number(optimizer)
            if not self.is_unscaled(optimizer):
                self.unscale_(optimizer)
            _clip(self.replica, which, max_norm, facts)
        return facts.norm

    def clip_and_step(
        self: Any, optimizer: Any, max_norm: float, norm_type: float
    ) -> float:
        norm: float = self.clip_grad_norm_(optimizer, max_norm, norm_type)
        if optimizer is not None:
            self.step(optimizer)
        return norm

    def step_was_skipped(self, optimizer: Any) -> bool:
        return self.skipped[self.number(optimizer)]

    def step_scheduler(self, scheduler: Any) -> bool:
        return not self.step_was_skipped(scheduler.optimizer)

    def lacking(self) -> dict[int, bool]:
        """Return {number: overflow on any rank} of optimizers that this rank lacks."""
        used = self.replica.clipped | self.replica.stepped
        bad = self.facts().bad
        return {which: bad[which] for which in used if self.replica.lacks(which)}


class Mathematics(_Beyond):
    """Trains without scaling, and follows the rule by which the scale moves."""

    def __init__(self, replica: Replica, facts: Callable[[], Facts], scale: float):
        super().__init__(replica, facts)
        self.value, self.tracker = scale, 0
        self.interval = interval_of(replica.history)
        self.found: dict[int, bool] = {}
        self.unscaled: set[int] = set()
        self.stepped: set[int] = set()

    def scale(self, loss: Any) -> Any:
        return loss

    def get_scale(self) -> float:
        return self.value

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.value, "_growth_tracker": self.tracker}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.tracker = state["scale"], state["_growth_tracker"]

    def factor(self, which: int) -> float:
        """Factor that unscales gradients."""
        return 1.0

    def has_found(self, optimizer: Any) -> bool:
        return self.found.get(self.number(optimizer), False)

    def is_unscaled(self, optimizer: Any) -> bool:
        return self.number(optimizer) in self.unscaled

    def unscale_(self, optimizer: Any) -> None:
        which = self.number(optimizer)
        if which in self.unscaled | self.stepped:
            raise RuntimeError("unscale_ comes once, before step")
        self.unscaled.add(which)
        self.found[which] = self.facts().bad[which]

    def step(self, optimizer: Any, closure: Any = None) -> None:
        which = self.number(optimizer)
        if closure is not None or which in self.stepped:
            raise RuntimeError("step comes once, and without a closure")
        if which not in self.found:
            self.found[which] = self.facts().bad[which]
        of_user = getattr(optimizer, "grad_scale", None)
        # as torch deletes it after a fused step
        if of_user is not None:
            del optimizer.grad_scale
        self.skipped[which] = self.found[which]
        if not self.found[which]:
            for parameter in self.replica.held(which):
                if of_user is not None and parameter.grad is not None:
                    parameter.grad.div_(of_user)
            optimizer.step()
        self.stepped.add(which)  # not if it raised

    def update(self, new_scale: float | None = None) -> None:
        self.found |= self.lacking()
        if new_scale is not None:
            self.value = new_scale
        elif not self.found:
            raise RuntimeError("update comes after unscale_ or step")
        elif any(self.found.values()):
            self.value, self.tracker = self.value * BACKOFF, 0
        elif self.tracker + 1 < self.interval:
            self.tracker += 1
        else:
            grown = self.value * GROWTH
            self.value = grown if grown < LIMIT else self.value
            self.tracker = 0
        self.found, self.unscaled, self.stepped = {}, set(), set()


class AgreedTorch(_Beyond, torch.amp.GradScaler):
    """torch's class with found_inf shared between ranks."""

    def __init__(self, replica: Replica, facts: Callable[[], Facts], scale: float):
        super().__init__(
            replica,
            facts,
            device="cpu",
            init_scale=scale,
            growth_factor=GROWTH,
            backoff_factor=BACKOFF,
            growth_interval=interval_of(replica.history),
        )

    def factor(self, which: int) -> float:
        """Factor that unscales gradients."""
        optimizer = self.replica.optimizers[which] if self.replica.optimizers else None
        return 1.0 if self.is_unscaled(optimizer) else 1.0 / self.get_scale()

    def has_found(self, optimizer: Any) -> bool:
        state = self._per_optimizer_states.get(id(optimizer), {})
        return any(map(bool, state.get("found_inf_per_device", {}).values()))

    def is_unscaled(self, optimizer: Any) -> bool:
        state = self._per_optimizer_states.get(id(optimizer), {})
        return state.get("stage", OptState.READY) is not OptState.READY

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
    ) -> Any:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        facts, which = self.facts(), self.number(optimizer)
        # where no rank has a gradient torch records nothing, and its step raises
        if self.replica.size > 1 and facts.any[which]:
            found[torch.device("cpu")] = torch.tensor(float(facts.bad[which]))
        return found

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step as torch does; note whether it was skipped."""
        result = super().step(optimizer, *args, **kwargs)
        self.skipped[self.number(optimizer)] = self.has_found(optimizer)
        return result

    def update(self, new_scale: Any = None) -> None:
        """Update as torch does, also on an idle rank."""
        # torch makes its scale in the first call of scale
        self.scale(torch.ones(()))
        for which, bad in self.lacking().items():
            found = {torch.device("cpu"): torch.tensor(float(bad))}
            self._per_optimizer_states[which]["found_inf_per_device"] = found
        super().update(new_scale)


class PlainTorch(AgreedTorch):
    """`AgreedTorch` whose clip leaves gradients unchanged after an overflow."""

    def clip_grad_norm_(
        self, optimizer: Any, max_norm: float, norm_type: float
    ) -> float:
        """Clip by hand, after unscale_, unless a gradient is not finite."""
        facts = self.facts()
        if optimizer is None or not facts.bad[self.number(optimizer)]:
            return super().clip_grad_norm_(optimizer, max_norm, norm_type)
        held = self.replica.held(self.number(optimizer))
        before = [None if p.grad is None else p.grad.clone() for p in held]
        norm = super().clip_grad_norm_(optimizer, max_norm, norm_type)
        for parameter, gradient in zip(held, before, strict=True):
            parameter.grad = gradient
        return norm


class TidyTorch(AgreedTorch):
    """`AgreedTorch` whose step cleans up a fused optimizer if the step raises."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step as torch does."""
        try:
            return super().step(optimizer, *args, **kwargs)
        except Exception:  # any that a hook of the optimizer raises; it is raised again
            for name in ("grad_scale", "found_inf"):
                if hasattr(optimizer, name):
                    delattr(optimizer, name)
            raise


def _clip(replica: Replica, which: int, max_norm: float, facts: Facts) -> None:
    # after an overflow there is nothing to clip: step will skip
    factor = min(1.0, max_norm / (facts.norm + 1e-6))
    if facts.bad[which] or not math.isfinite(facts.norm) or factor == 1.0:
        return
    for parameter in replica.held(which):
        if parameter.grad is not None:
            with torch.no_grad():
                parameter.grad.mul_(factor)


@dataclass
class Seen:
    """Outcome of one call on one rank."""

    raised: str
    value: Any
    state: dict[str, Any]


class Track:
    """All ranks of a history with one of the oracle's scalers."""

    def __init__(self, history: History, scaler: Any, *, exact: bool) -> None:
        self.facts = Facts([False, False], [False, False], 0.0)
        scale = first_scale(history)
        self.replicas = [
            Replica(
                history,
                rank,
                lambda replica: scaler(replica, lambda: self.facts, scale),
                exact=exact,
            )
            for rank in range(history.world_size)
        ]

    def make(self, call: Call) -> list[Seen]:
        """Make one call on every rank."""
        self.facts = self._facts(call)
        made = [seen(replica, call) for replica in self.replicas]
        for replica, each in zip(self.replicas, made, strict=True):
            looks = call.kind in ("unscale", "look")
            skipped = looks and self.facts.bad[call.which]
            if call.kind in STEPS:
                skipped = replica.scaler.skipped.get(call.which, False)
            if skipped:  # the values of the gradients do not matter
                each.value = None
        return made

    def _facts(self, call: Call) -> Facts:
        sides = self.replicas
        bad = [any(r.is_bad(which) for r in sides) for which in range(2)]
        present = [any(r.has_gradients(which) for r in sides) for which in range(2)]
        norm, counted = 0.0, []
        if call.kind in CLIPS:
            counted = [
                gradient * replica.scaler.factor(call.which)
                for replica in sides
                for gradient in replica.counted(call.which)
            ]
            norm = norm_of(counted, CLIPS[call.kind][1])
            if bad[call.which]:  # perhaps in a replica that is not counted
                norm = math.inf
        # gradients may have gone or changed since: use the recorded found_inf
        if call.kind == "update":
            bad = self._found()
        unscaled = [
            gradient * replica.scaler.factor(call.which)
            for replica in sides
            if call.kind in ("unscale", "look", *STEPS, *CLIPS)
            for gradient in replica.gradients(call.which)
        ]
        return Facts(bad, present, norm, unscaled, counted)

    def _found(self) -> list[bool]:
        first = self.replicas[0]  # found_inf is shared
        return [first.scaler.has_found(each) for each in first.optimizers]


def seen(replica: Replica, call: Call) -> Seen:
    """Make one call on one rank and record its outcome."""
    try:
        value = replica.make(call)
    except Exception as error:
        text = " ".join(str(error).split())
        return Seen(f"{type(error).__name__}: {text[:300]}", None, replica.state())
    return Seen("", value, replica.state())


def tracks_of(history: History) -> list[Track]:
    """Return the tracks of the oracle: mathematics, torch and corrected torch.

    Where torch is wrong, a scaler may do as torch does, or as torch would do without
    the cause. So further tracks run torch without the known causes:

    - an optimizer and its wrapper are two optimizers for torch;
    - after an overflow a fused step leaves gradients undivided, so a later step of
      another optimizer that shares one may be right by chance;
    - a fused step that raised leaves ``grad_scale`` behind, and the next step
      multiplies it;
    - a clip that overflows may divide gradients or not: that is not specified.
    """
    tracks = [
        Track(history, Mathematics, exact=True),
        Track(history, AgreedTorch, exact=False),
    ]
    kinds = {call.kind for call in history.calls}
    words, retries = history.words - {"wrapped"}, "retry" in kinds
    if "shared" in words or retries:
        words -= {*FUSED}
    if words != history.words or not kinds.isdisjoint(CLIPS):
        plain = replace(history, words=words)
        tracks.append(Track(plain, PlainTorch, exact=False))
    if retries and history.words & {*FUSED}:
        tracks.append(Track(history, TidyTorch, exact=False))
    return tracks
