"""Part of a standalone script for a run with a scaler."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...fixtures import LOSS, PLACES, Fault, local
from ..formulas import clip_factor
from .template import Training, gathered

__all__ = ["Scaled"]

State = tuple[float, int | None]  # scale, and good steps since its last growth


class Scaled:
    """Calls of a scaler in a step, and their expected effects."""

    skips = False  # True if the last step had to be skipped

    def __init__(
        self,
        make: Callable[..., Any],
        settings: dict[str, Any],
        *,
        unscale: bool = False,  # call it before the step
        clip_norm: float | None = None,
        primed: bool = False,  # scale() is called once before the first step
        faults: Sequence[Fault] = (),
    ) -> None:
        self.make, self.settings, self.primed = make, settings, primed
        self.unscale, self.clip_norm, self.faults = unscale, clip_norm, faults
        self.left: list[State] = []
        self.good = 0  # good steps since the last growth

    def begin(self, training: Training) -> None:
        """Construct the scaler, and find which rank holds which elements."""
        self.scaler = self.make(device="cpu", **self.settings)
        if self.primed:
            self.scaler.scale(torch.zeros(()))
        numbers = training.named(training.build(numbered=True))
        self.held = {n: bits([p]) for n, p in numbers.items() if local(p).numel()}
        self.holdings = gathered(self.held | {LOSS: training.share})

    def state(self) -> State:
        """Return scale and growth tracker."""
        tracker = self.scaler.state_dict().get("_growth_tracker")
        return float(self.scaler.get_scale()), tracker

    def step(self, training: Training, number: int) -> dict[str, Any]:
        """Run one step on this rank; return its effects."""
        if not number:
            self.begin(training)
        optimizer, params = training.optimizer, training.params
        start = self.state()
        due = [*self.due(dist.get_rank(), number)]

        def scale(loss: Tensor, index: int, count: int) -> Any:
            for fault, name in due:
                if name == LOSS and PLACES[fault.place](count) == index:
                    loss = loss * float(fault.kind)
            return self.scaler.scale(loss)

        optimizer.zero_grad()
        training.run.passes(training, number, scale)
        grads = {n: local(p.grad) for n, p in params.items() if p.grad is not None}
        for fault, name in due:
            if name in grads:
                at = torch.tensor(PLACES[fault.place](grads[name].numel()))
                grads[name][torch.unravel_index(at, grads[name].shape)] = float(
                    fault.kind
                )
        bad = [name for name, g in grads.items() if not g.isfinite().all()]
        before = self.effects(training)
        if self.unscale:
            self.scaler.unscale_(optimizer)
        if self.clip_norm:
            parts = {
                (n, self.held[n]): float(g.double().norm()) for n, g in grads.items()
            }
            once = {key: norm for rank in gathered(parts) for key, norm in rank.items()}
            norm = float(torch.tensor([*once.values()]).norm())
            for gradient in grads.values():
                gradient.mul_(clip_factor(norm, self.clip_norm))
        self.scaler.step(optimizer)
        self.scaler.update()
        moved = self.effects(training) != before if self.held else None
        return {"start": start, "bad": bad, "moved": moved, "after": self.state()}

    def effects(self, training: Training) -> int:
        """Return a checksum of this rank's weights and of the optimizer's state."""
        states = [s for p in training.optimizer.state.values() for s in p.values()]
        tensors = [s for s in states if torch.is_tensor(s) and local(s).count_nonzero()]
        return bits([*training.params.values(), *tensors])

    def due(self, me: int, step: int) -> Iterator[tuple[Fault, str]]:
        """Yield (fault, parameter) for faults of ``step`` on ``me`` or its replicas."""
        for fault in self.faults:
            ranks = range(len(self.holdings)) if fault.rank is None else [fault.rank]
            for holding in [
                self.holdings[rank] for rank in ranks if fault.step in (None, step)
            ]:
                names = [name for name in holding if name != LOSS]
                name = fault.parameter
                if name in PLACES and names:
                    name = names[PLACES[name](len(names))]
                same = name in holding and holding[name] == self.holdings[me].get(name)
                if same and (holding is self.holdings[me] or not fault.alone):
                    yield fault, name

    def violations(self, step: int, ranks: list[dict[str, Any]]) -> list[str]:
        """Describe effects on ranks that differ from the documentation."""
        bad = {rank: row["bad"][0] for rank, row in enumerate(ranks) if row["bad"]}
        begin, end = f"step {step}: ", f"; not finite: {bad or 'nothing'}"
        self.skips, wrong = bool(bad), []
        after = dict(enumerate(row["after"] for row in ranks))
        if len({*after.values()}) > 1:
            wrong.append(f"ranks disagree on (scale, growth tracker): {after}")
        moved = {
            r: row["moved"] for r, row in enumerate(ranks) if row["moved"] is not None
        }
        if any(moved.values()) if bad else not all(moved.values()):
            wrong.append(f"each rank stepped or not: {moved}")
        scale, good = self.ruled(ranks[0]["start"][0], bool(bad))
        for rank, row in enumerate(ranks):
            if self.left and row["start"] != self.left[rank]:
                text = f"starts with {row['start']}, {self.left[rank]} was left"
                wrong.append(f"rank {rank}: {text}")
            if not 0 < row["after"][0] < float("inf"):
                wrong.append(f"rank {rank}: scale {row['after'][0]}")
            # Below the smallest normal number a scaler may have a floor.
            elif scale >= 2.0**-126 and row["after"] not in (
                (scale, good),
                (scale, None),
            ):
                text = f"scale, growth tracker {row['after']}"
                wrong.append(f"rank {rank}: {text}, the rule says {(scale, good)}")
        self.left = [row["after"] for row in ranks]
        return [begin + text + end for text in wrong]

    def ruled(self, scale: float, bad: bool) -> tuple[float, int]:
        """Count a step, and return (scale, growth tracker) after its update.

        Both follow the documented rule of torch's ``GradScaler``.
        """
        settings = self.settings
        self.good = 0 if bad else (self.good + 1) % settings["growth_interval"]
        if bad:
            return scale * settings["backoff_factor"], 0
        grown = scale * (1.0 if self.good else settings["growth_factor"])
        # fp32 does not hold 2**128: torch then leaves the scale as it is
        return grown if grown < 2.0**128 else scale, self.good


def bits(tensors: Sequence[Tensor]) -> int:
    """Return a checksum of the elements on this rank."""
    parts = (local(t).detach().contiguous().view(-1).view(torch.uint8) for t in tensors)
    return zlib.crc32(b"".join(part.numpy().tobytes() for part in parts))
