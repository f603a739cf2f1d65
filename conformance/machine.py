"""The distributed state machine: call histories on all ranks against the oracle.

Steps: hypothesis draws a history, legal and illegal calls as they come; every rank of
a warm cluster makes the calls on two small optimizers whose parameters are sharded and
replicated, and holds each result against the oracle; a departure is shrunk to the
shortest history and told as a line that runs it again.

All numbers are powers of two and small sums of them, so every comparison is exact.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from rich.console import Console
from rich.text import Text
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..fixtures import local
from ..multiprocess import Cluster, RankState, WorldFailure, current_world
from .oracle import (
    BACKOFF,
    GROWTH,
    INIT_SCALE,
    INTERVAL,
    KINDS,
    OPTIMIZERS,
    Call,
    Oracle,
    history_text,
)
from .spec import NO_SCALER, growth_tracker, load_scaler, refuse_unfit
from .status import UsageError
from .terminal import plain

__all__ = ["Departure", "MachineSettings", "drive", "histories", "machine"]

GRADIENT, RATE, START = 0.5, 0.25, 1.0
SCALES = (-10, 0, 6, 126)
"""log2 of the scales that a user sets; from the last one growth would overflow."""
MOST_CALLS = 30
ROUND = 20
"""Histories drawn between two looks at the clock."""
PATIENCE = timedelta(seconds=20)
History = tuple[Call, ...]


# - On a rank


class _Side:
    """The judged scaler on this rank, with its optimizers and the oracle."""

    def __init__(self, factory: Any) -> None:
        world = current_world()
        self.device, self.rank = torch.device(world.device), world.rank
        self.mesh = world.mesh((world.size,), ("dp",))
        # both orders: what is true of the first gradient must not be taken for all
        self.sharded = [self._parameter(Shard(0)) for _ in range(OPTIMIZERS)]
        self.replicated = [self._parameter(Replicate()) for _ in range(OPTIMIZERS)]
        pairs = list(zip(self.replicated, self.sharded, strict=True))
        self.optimizers = [
            torch.optim.SGD(p[::-1] if i % 2 else p, lr=RATE, foreach=False)
            for i, p in enumerate(pairs)
        ]
        self.factory = factory
        self.scaler = self._construct()
        self.oracle = Oracle(rank=self.rank, world=world.size)
        self._refresh()

    def _parameter(self, placement: Any) -> nn.Parameter:
        part = torch.full((2,), START, device=self.device)
        return nn.Parameter(
            DTensor.from_local(part, self.mesh, [placement], run_check=False)
        )

    def _construct(self) -> Any:
        scaler = self.factory(
            device=self.device.type,
            init_scale=INIT_SCALE,
            growth_factor=GROWTH,
            backoff_factor=BACKOFF,
            growth_interval=INTERVAL,
            enabled=True,
        )
        scaler.scale(torch.ones((), device=self.device))  # torch is ready only then
        return scaler

    def _held(self, which: int) -> list[nn.Parameter]:
        return [self.replicated[which], self.sharded[which]]

    def _refresh(self) -> None:
        """Give every parameter the gradient that a scaled backward would."""
        loss = torch.tensor(GRADIENT, device=self.device)
        value = float(self.scaler.scale(loss))
        for parameter in (p for i in range(OPTIMIZERS) for p in self._held(i)):
            part = torch.full((2,), value, device=self.device)
            data: Any = parameter.data
            parameter.grad = DTensor.from_local(
                part, self.mesh, data.placements, run_check=False
            )

    def make(self, call: Call) -> str:
        """Make one call and return how it departs from the oracle, or nothing."""
        strikes, before = self.oracle.strikes(call), self._gradients()
        legal = self.oracle.after(call)
        try:
            wrong = _ACTS[call.kind](self, call, strikes) or ""
        except Exception as error:
            if legal:
                text = f"{type(error).__name__}: {str(error)[:200]}"
                return f"a legal call raised {text}"
            changed = self._gradients() != before
            wrong = "a refused call changed gradients" if changed else ""
        else:
            if not legal:
                return "a call in the wrong order was accepted"
        return wrong or self._state_departs() or self._parameters_depart()

    def _gradients(self) -> str:
        held = (p.grad for i in range(OPTIMIZERS) for p in self._held(i))
        return repr([None if g is None else local(g).tolist() for g in held])

    def _state_departs(self) -> str:
        scale = float(self.scaler.get_scale())
        tracker = growth_tracker(self.scaler.state_dict())
        got, want = (scale, tracker), (self.oracle.scale, self.oracle.tracker)
        if got == want or (tracker is None and scale == self.oracle.scale):
            return ""
        return (
            f"scale {got[0]:g}, growth tracker {got[1]}; the rule says {want[0]:g}, "
            f"{want[1]}"
        )

    def _parameters_depart(self) -> str:
        for which, taken in enumerate(self.oracle.taken):
            want = START - RATE * GRADIENT * taken
            got = [local(p.detach()).tolist() for p in self._held(which)]
            if got != [[want] * 2] * 2:
                return (
                    f"optimizer {which} holds {got}; after {taken} steps it should "
                    f"hold {want} everywhere"
                )
        return ""

    # - What a call does, and what is wrong with its result

    def scale(self, call: Call, strikes: bool) -> str:
        """Scale a list of losses and look at every product."""
        loss = torch.tensor(3.0, device=self.device)
        one, (two,) = self.scaler.scale([loss, (loss,)])
        want = loss * self.oracle.scale
        right = float(one) == float(two) == float(want)
        return "" if right else f"3 was scaled to {float(one):g}, {float(two):g}"

    def spoil(self, call: Call, strikes: bool) -> None:
        """A gradient becomes bad, or is not there."""
        here = self.rank == call.rank
        if not strikes or not (here or call.kind == "both"):
            return
        if call.kind == "none":
            for parameter in self._held(call.which):
                parameter.grad = None
            return
        struck = self.replicated if call.kind == "both" else self.sharded
        gradient = struck[call.which].grad
        assert gradient is not None
        # the first element for one kind, the last for the other
        local(gradient)[-1 if call.kind == "nan" else 0] = float(
            "nan" if call.kind == "nan" else "inf"
        )

    def unscale(self, call: Call, strikes: bool) -> str:
        """Unscale, and look at the gradients."""
        self.scaler.unscale_(self.optimizers[call.which])
        held = [p.grad for p in self._held(call.which)]
        got: list[Any] = [local(g).tolist() for g in held if g is not None]
        if call.which in self.oracle.bad or got == [[GRADIENT] * 2] * len(got):
            return ""
        return f"unscaled gradients are {got} and not {GRADIENT} everywhere"

    def step(self, call: Call, strikes: bool) -> None:
        """Step."""
        self.scaler.step(self.optimizers[call.which])

    def closure(self, call: Call, strikes: bool) -> None:
        """Step with a closure, which no skip could undo."""
        self.scaler.step(self.optimizers[call.which], closure=lambda: 1.0)

    def update(self, call: Call, strikes: bool) -> str:
        """End the iteration and begin the next one."""
        self.scaler.update()
        return self._begin()

    def set(self, call: Call, strikes: bool) -> str:
        """End the iteration with a scale of the user's own."""
        self.scaler.update(2.0**call.which)
        return self._begin()

    def reload(self, call: Call, strikes: bool) -> str:
        """Save, and load into a new scaler."""
        state = self.scaler.state_dict()
        self.scaler = self._construct()
        self.scaler.load_state_dict(state)
        return self._begin()

    def _begin(self) -> str:
        self._refresh()
        value = torch.tensor([self.rank + 1.0], device=self.device)
        dist.all_reduce(value)
        want = sum(range(1, self.oracle.world + 1))
        got = value.item()
        return "" if got == want else f"the next all-reduce gave {got:g}, not {want}"


_ACTS: dict[str, Callable[[_Side, Call, bool], str | None]] = {
    **{kind: getattr(_Side, kind) for kind in KINDS if hasattr(_Side, kind)},
    **dict.fromkeys(("inf", "nan", "both", "none"), _Side.spoil),
}


def drive(history: History, spec: str, folder: str) -> tuple[int, str] | None:
    """Make the calls on this rank, next to all others, until one of them departs.

    Returns:
        Place of the call at which any rank departed and what this rank saw, which is
        empty where it saw nothing wrong; None when all calls were made.
    """
    side, world = _Side(load_scaler(spec, folder)), current_world()
    for place, call in enumerate(history):
        wrong = side.make(call)
        # told through the store: the process group may be what is broken
        world.store.set(f"call/{place}/{world.rank}", "wrong" if wrong else "right")
        keys = [f"call/{place}/{rank}" for rank in range(world.size)]
        world.store.wait(keys, PATIENCE)
        if any(world.store.get(key) == b"wrong" for key in keys):
            return place, wrong
    return None


# - In the parent


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """One search."""

    scaler: str
    folder: str
    world: int = 2
    budget_s: float = 60.0
    """Seconds to draw histories; shrinking may take as long again."""
    history: History = ()
    """Run this one instead of searching."""
    database: str = ".hypothesis/gradparity-machine"
    """Folder in which failures are kept; they are tried first next time."""
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise UsageError(f"the budget must be positive, got {self.budget_s}")
        if self.scaler == NO_SCALER:
            raise UsageError("call histories are those of a scaler: name one")
        if self.world < 1:
            raise UsageError(f"a world has at least 1 rank, got {self.world}")


@dataclass(kw_only=True)
class Found:
    """What a search came to."""

    tried: int = 0
    calls: int = 0
    history: History = ()
    """The last, and after shrinking the shortest, history that departs."""
    departure: str = ""
    broken: list[str] = field(default_factory=list)
    """Histories in which the harness broke; they prove nothing."""


def histories(world: int) -> st.SearchStrategy[History]:
    """Calls and events in any order."""
    call = st.one_of(
        st.builds(
            Call,
            st.sampled_from([k for k in KINDS if k != "set"]),
            st.integers(0, OPTIMIZERS - 1),
            st.integers(0, world - 1),
        ),
        # whole iterations, or growth would hardly ever be reached
        st.sampled_from([Call("step"), Call("update"), Call("step", 1)]),
        st.builds(Call, st.just("set"), st.sampled_from(SCALES)),
    )
    return st.lists(call, min_size=1, max_size=MOST_CALLS).map(tuple)


class Departure(Exception):
    """What a search raises before hypothesis where it has found what it looks for.

    A type of its own: an ``AssertionError`` may be a fault of the judge, which ends
    the search as such.
    """


def machine(settings_: MachineSettings, console: Console) -> int:
    """Search until the budget is spent or a departure is shrunk.

    Returns:
        0 nothing found, 1 a departure, 3 nothing could be judged.
    """
    found = Found()
    with Cluster(settings_.world, timeout_s=settings_.timeout_s) as cluster:
        refuse_unfit(cluster, settings_.scaler, settings_.folder)
        if settings_.history:
            _try(settings_, cluster, settings_.history, found)
        else:
            search = _search(settings_, cluster, found)
            end = time.monotonic() + settings_.budget_s
            try:
                while time.monotonic() < end:
                    search()  # one round; hypothesis itself knows no budget
            except Departure:
                pass  # the departure is in ``found``, shrunk
    return _tell(settings_, found, console)


def _search(
    settings_: MachineSettings, cluster: Cluster, found: Found
) -> Callable[[], None]:
    end = time.monotonic() + 2 * settings_.budget_s
    known: dict[History, str] = {}

    @settings(
        max_examples=ROUND,
        deadline=None,
        database=DirectoryBasedExampleDatabase(settings_.database),
        derandomize=False,  # its default on CI: every round would draw the same
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.reuse, Phase.generate, Phase.shrink),
    )
    @given(histories(settings_.world))
    def search(history: History) -> None:
        if history not in known:
            if time.monotonic() > end:
                return  # shrink no further: what is not known to depart does not
            right = _try(settings_, cluster, history, found)
            known[history] = "" if right else found.departure
        if known[history]:  # the shortest is looked at last, and is known by then
            found.history, found.departure = history, known[history]
        if known[history]:
            raise Departure

    return search


def _try(
    settings_: MachineSettings, cluster: Cluster, history: History, found: Found
) -> bool:
    """Whether every rank follows the oracle through ``history``."""
    found.tried += 1
    found.calls += len(history)
    try:
        seen = cluster.run(drive, history, settings_.scaler, settings_.folder)
    except WorldFailure as failure:
        return _failed(failure, history, found)
    wrong = [(rank, text) for rank, at in enumerate(seen) if at and (text := at[1])]
    if wrong:
        place = next(at[0] for at in seen if at)
        text = "; ".join(f"rank {rank}: {text}" for rank, text in wrong)
        found.history = history
        found.departure = f"call {place}, {history[place]}: {text}"
    return not wrong


def _failed(failure: WorldFailure, history: History, found: Found) -> bool:
    """A hang is the scaler's; a rank that was killed or raised is the harness's."""
    text = " ".join(failure.root.headline.split())[:300]
    if failure.root.state is RankState.HUNG or "wait timeout" in text.lower():
        found.history, found.departure = history, f"a call does not return: {text}"
        return False
    found.broken.append(f"{history_text(history)}: {text}")
    return True


def _tell(settings_: MachineSettings, found: Found, console: Console) -> int:
    lines = [f"{found.tried} histories tried, {found.calls} calls on each rank"]
    lines += [f"harness failure: {text}" for text in found.broken[:3]]
    if found.history:
        again = ["gradparity", "machine", "--scaler", settings_.scaler]
        again += ["--world-size", str(settings_.world)]
        again += ["--history", history_text(found.history)]
        lines += [f"departure from the oracle: {found.departure}", shlex.join(again)]
    for line in lines:
        console.print(Text(plain(line)), soft_wrap=True)
    if found.history:
        return 1
    return 3 if found.broken or not found.tried else 0
