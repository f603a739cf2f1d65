"""A scaler on a stack: agreement, skips, the rule of the scale, unscaled gradients."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....fixtures import PLACES, local
from ...space.recipes import CLIP_NORM, CLIP_VALUE, MANUAL_STEP
from .parity import departures, local_values
from .ranks import (
    Layout,
    Phase,
    Row,
    Rows,
    Stack,
    checksum,
    differing_replicas,
    train_on_ranks,
)

__all__ = ["NoScaler", "ScaledStack", "clip_norm", "clip_value", "main"]

Tensors = dict[str, Tensor]
Names = list[str]


@dataclass(frozen=True, kw_only=True)
class ScaledStack(Stack):
    """A stack with the calls of the scaler."""

    scaler: Callable[..., Any]
    init_scale: float
    growth: float
    backoff: float
    interval: int
    enabled: bool = True
    primed: bool = False  # scale() is called on zero before the first step
    manual: float | None = None  # update(scale) at step 2
    resumes: bool = False  # a new scaler takes the state of the old one
    reshard: Any = None  # carries all states to the ranks of the next phase
    resume_step: int = 0
    unscale: bool = False
    clip: Callable[..., Tensors] | None = None
    split: Callable[[Names], Sequence[Names]] | None = None  # two optimizers
    order: Callable[[Any], Any] = list  # of an optimizer's parameters
    decay: float = 0.0  # factor of the learning rate, in each step
    parity: bool = False  # of the first gradients with those of one process


class NoScaler:
    """Trains without a scaler: the script tests the stack alone."""

    def __init__(self, **_: Any) -> None:
        pass

    def scale(self, losses: Any) -> Any:
        """As they are."""
        return losses

    def unscale_(self, optimizer: Any) -> None:
        """Nothing to do."""

    def step(self, optimizer: Any) -> None:
        """Always."""
        optimizer.step()

    def update(self) -> None:
        """Nothing to do."""

    def get_scale(self) -> float:
        """None."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """None."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


def due_faults(
    faults: Sequence[Any], step: int, holdings: list[dict[str, int]]
) -> Iterator[tuple[str, Callable[[int], int], float]]:
    """Faults due on this rank; replicas of a tensor overflow together."""
    me = dist.get_rank()
    for fault in faults:
        for rank in range(len(holdings)) if fault.rank is None else [fault.rank]:
            names = [n for n in holdings[rank] if n != "loss"]
            name = fault.parameter
            if name in PLACES and names:
                name = names[PLACES[name](len(names))]
            mine = rank == me or not fault.alone
            if fault.step in (None, step) and mine and name in holdings[me]:
                if holdings[me][name] == holdings[rank].get(name):
                    yield name, PLACES[fault.place], float(fault.kind)


def train(stack: ScaledStack, phase: Phase, folder: str) -> Iterator[Row]:
    """Train on this rank; yield its observations, step by step."""
    warnings.simplefilter("ignore")  # fully_shard warns of views
    layout = Layout(stack, phase)
    params, places = layout.parameters()
    held = {
        n: checksum(places[n])
        for n, p in params.items()
        if local(p).numel() and p.requires_grad
    }
    if phase.faults:
        mine = {**held, "loss": layout.rows}  # equal where the same rows are seen
        holdings: list[dict[str, int]] = [{}] * dist.get_world_size()
        # ranks with equal checksums of places hold replicas
        dist.all_gather_object(holdings, mine)
    owned = [[*params]]
    if stack.split:
        owned = [*stack.split(owned[0])]
    named = [stack.order([(n, params[n]) for n in names]) for names in owned]
    optimizers = [stack.workload.optimizer(each) for each in named]

    def make() -> Any:
        return stack.scaler(
            device="cpu",
            init_scale=stack.init_scale,
            growth_factor=stack.growth,
            backoff_factor=stack.backoff,
            growth_interval=stack.interval,
            enabled=stack.enabled,
        )

    def state() -> tuple[float, int | None]:
        return float(scaler.get_scale()), scaler.state_dict().get("_growth_tracker")

    def start(losses: Any, part: int, parts: int) -> Any:
        if phase.faults:
            for name, place, factor in due_faults(phase.faults, step, holdings):
                if name == "loss" and place(parts) == part:
                    several = isinstance(losses, list)
                    first = losses[0] if several else losses
                    losses = (
                        [first * factor, *losses[1:]] if several else first * factor
                    )
        return scaler.scale(losses)

    def look(number: int, optimizer: Any) -> None:
        divisor = getattr(optimizer, "grad_scale", None)  # fused ones divide themselves
        divisor = 1.0 if divisor is None else float(local(divisor))
        for name in [n for n in owned[number] if n in expected]:
            grad = local(params[name].grad) / divisor  # type: ignore[arg-type]  # it has one
            # not bitwise: a scaler may multiply by the reciprocal of the scale, which
            # rounds
            if not torch.allclose(grad, expected[name], rtol=1e-5, atol=0):
                wrong[number].append(name)

    for number, optimizer in enumerate(optimizers):
        optimizer.register_step_pre_hook(lambda o, *_, number=number: look(number, o))
    scaler = make()
    if stack.primed:
        scaler.scale(torch.zeros(()))
    if stack.reshard:
        moved = stack.reshard(folder, params, optimizers[0], places)
        if phase.steps.start:
            scaler.load_state_dict(moved.load())
    for step in phase.steps:
        if stack.resumes and step == stack.resume_step:
            saved, scaler = scaler.state_dict(), make()
            scaler.load_state_dict(saved)
        for optimizer in optimizers:
            optimizer.zero_grad()
        phase.passes(layout, step, start)
        grads = {n: local(p.grad) for n, p in params.items() if p.grad is not None}
        if phase.faults:
            for name, place, value in due_faults(phase.faults, step, holdings):
                if name in grads:
                    where = torch.tensor(place(grads[name].numel()))
                    grads[name][torch.unravel_index(where, grads[name].shape)] = value
        row: Row = {"start": state()}
        scale = row["start"][0]
        expected = {n: g / scale for n, g in grads.items()}
        if stack.parity and step == 0:
            used = {n: p.grad for n, p in params.items() if p.grad is not None}
            seen = local_values(used, params, places)
            row["gradient"] = {n: (g / scale, where) for n, (g, where) in seen.items()}
        bad = {n for n, g in expected.items() if not g.isfinite().all()}
        row["bad"] = [[n for n in names if n in bad] for names in owned]
        before = effects(params, owned, optimizers)
        wrong: list[Names] = [[] for _ in owned]
        if stack.unscale:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if stack.clip:
            expected = stack.clip(params, held, grads, expected)
        for optimizer in optimizers:
            scaler.step(optimizer)
        if stack.manual and step == MANUAL_STEP:
            scaler.update(stack.manual)
        else:
            scaler.update()
        if stack.decay:
            for group in [g for o in optimizers for g in o.param_groups]:
                group["lr"] *= stack.decay
        total = torch.ones(())
        dist.all_reduce(total)  # a stray collective would pair with it
        row |= {"after": state(), "wrong": wrong, "total": float(total)}
        row["checksum"] = effects(params, owned, optimizers)
        row["moved"] = [
            now != was if {*names} & held.keys() else None
            for now, was, names in zip(row["checksum"], before, owned, strict=True)
        ]
        row["replicas"] = {(n, held[n]): checksum(params[n]) for n in held}
        yield row
    if stack.reshard and not phase.steps.start:
        moved.save(scaler.state_dict())


Held = dict[str, int]


def clip_value(
    params: dict[str, Any], held: Held, grads: Tensors, expected: Tensors
) -> Tensors:
    """The right gradients after clipping by value."""
    for p in params.values():
        nn.utils.clip_grad_value_(p, CLIP_VALUE, foreach=False)
    return {n: g.clamp(-CLIP_VALUE, CLIP_VALUE) for n, g in expected.items()}


def clip_norm(
    params: dict[str, Any], held: Held, grads: Tensors, expected: Tensors
) -> Tensors:
    """The right gradients after clipping by their global norm."""
    holdings: list[Held] = [{}] * dist.get_world_size()
    dist.all_gather_object(holdings, held)
    square = torch.zeros((), dtype=torch.float64)
    for name in grads.keys() & held.keys():  # each element once
        copies = sum(other.get(name) == held[name] for other in holdings)
        square += grads[name].double().square().sum() / copies
    dist.all_reduce(square)
    factor = (CLIP_NORM / (square.sqrt() + 1e-6)).clamp(max=1).float()
    for gradient in grads.values():
        gradient.mul_(factor)
    return {n: g * factor for n, g in expected.items()}


def effects(
    params: dict[str, Any], owned: Sequence[Names], optimizers: list[Any]
) -> list[int]:
    """Of each optimizer a checksum of its parameters and of its state on this rank."""
    found = []
    for names, optimizer in zip(owned, optimizers, strict=True):
        states = [v for s in optimizer.state.values() for v in s.values()]
        kept = [v for v in states if torch.is_tensor(v) and local(v).count_nonzero()]
        found.append(checksum(*(params[n] for n in names), *kept))
    return found


def rule(
    stack: ScaledStack, scale: float, good: int, step: int, bad: Any
) -> tuple[float, int]:
    """(scale, good steps since the last growth) after one update, as documented."""
    if not stack.enabled:
        return scale, good
    if stack.manual and step == MANUAL_STEP:
        return stack.manual, good
    good = 0 if bad else (good + 1) % stack.interval
    # fp32 does not hold 2**128: torch then leaves the scale as it is
    grown = scale * (stack.backoff if bad else 1.0 if good else stack.growth)
    return grown if grown < 2.0**128 else scale, good


def violations(stack: ScaledStack, rows: Rows) -> Iterator[str]:
    """All violations; those after the first bad step may be its consequences."""
    scale, good = 0.0, 0
    left: dict[int, Any] = {}
    for step, ranks in sorted(rows.items()):
        each = {key: {r: ranks[r][key] for r in sorted(ranks)} for key in ranks[0]}
        bad = {rank: [n for b in bads for n in b] for rank, bads in each["bad"].items()}
        all_bad = {rank: names[0] for rank, names in bad.items() if names}
        begin, end = f"step {step}: ", f"; not finite: {all_bad or 'nothing'}"
        if stack.reshard and step == stack.resume_step:
            left = dict.fromkeys(ranks, left[0])
        for rank, start in each["start"].items():
            if start != left.get(rank, start):
                text = f"rank {rank}: starts with (scale, growth tracker) {start}"
                yield f"{begin}{text}, {left[rank]} was left{end}"
        left = each["after"]
        if len({*left.values()}) > 1:
            yield f"{begin}ranks disagree on (scale, growth tracker): {left}{end}"
        for number in range(len(ranks[0]["bad"])):  # each optimizer decides for itself
            skips = any(names[number] for names in each["bad"].values())
            moved = {rank: moves[number] for rank, moves in each["moved"].items()}
            moved = {rank: move for rank, move in moved.items() if move is not None}
            if any(moved.values()) if skips else not all(moved.values()):
                sums = {rank: found[number] for rank, found in each["checksum"].items()}
                text = f"each rank stepped or not: {moved}, checksums {sums}"
                yield f"{begin}{text}{end}"
            for rank, names in each["wrong"].items():
                if names[number] and not skips:
                    text = f"rank {rank}: gradient / scale is wrong in {names[number]}"
                    yield f"{begin}{text}{end}"
        scale, good = rule(stack, scale or ranks[0]["start"][0], good, step, all_bad)
        for rank, (after, tracker) in left.items():
            if not 0 < after < float("inf"):
                yield f"{begin}rank {rank}: scale {after}{end}"
            elif after != scale and scale >= 2.0**-126:  # below it may be a floor
                yield f"{begin}rank {rank}: scale {after}, the rule says {scale}{end}"
            elif tracker not in (None, good):
                text = f"rank {rank}: tracker {tracker}, the rule says {good}"
                yield f"{begin}{text}{end}"
        # below the smallest normal number the rule goes on from the scaler's own floor
        scale = left[0][0] if scale < 2.0**-126 else scale
        if {*each["total"].values()} != {len(ranks)}:
            text = f"a later all-reduce returned {each['total']}, not {len(ranks)}"
            yield f"{begin}{text}{end}"
        if stack.parity and step == 0:
            for _, text in departures({0: ranks}, stack):
                yield f"{begin}{text}{end}"
        if torn := differing_replicas(ranks):
            yield f"{begin}replicas differ: {', '.join(torn)}{end}"


def main(stack: ScaledStack, phases: Sequence[Phase]) -> int:
    """Train, and print one line a violation."""
    rows: Rows = {}
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for phase in phases:
            if not errors:
                seen, errors = train_on_ranks(train, stack, phase, folder)
                rows |= seen
    found = [*violations(stack, rows), *errors]
    print("\n".join(found) or "no violation")
    return 1 if found else 0
