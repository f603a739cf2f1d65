"""The distributed state machine: call histories on all ranks against the oracle.

Steps: hypothesis draws a history, legal and illegal calls as they come; every rank of a
warm cluster makes the calls on two small optimizers whose parameters are sharded and
replicated, and compares each result with the oracle; a departure is shrunk to the
shortest history and printed as a command that repeats it.

All numbers are powers of two and small sums of them, so every comparison is exact.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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

from ...fixtures import local
from ...multiprocess import Cluster, RankState, WorldError, current_world
from ..rank.scaler_spec import NO_SCALER, growth_tracker, load_scaler, refuse_unfit
from ..report.terminal import plain
from ..status import UsageError
from .follow import EITHER, follow
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
    parse_history,
)
from .program import FAMILIES, Program, parse_program, programs

__all__ = [
    "CALLS",
    "CallSearchSettings",
    "Departure",
    "drive",
    "histories",
    "parse_drawn",
    "search_histories",
]

GRADIENT, RATE, START = 0.5, 0.25, 1.0
SCALES = (-10, 0, 6, 126)
"""log2 of the scales that a user sets; from the last one growth would overflow."""
MAX_CALLS = 30
CALLS = "calls"
"""The family of calls, legal and illegal, on DTensors; the others are programs."""
ROUND = 20
"""Histories drawn in one round."""
SLICE_S = 4.0
"""Seconds of drawing before the search changes to the next family."""
SHRINK_S = 20.0
"""The least time that shrinking may take."""
QUICK_S = 4.0
"""Seconds that ranks wait for each other; a hang is tried again with a longer limit."""
HANGS = "does not return"
TORCH = "torch.amp:GradScaler"
PATIENCE = timedelta(seconds=20)
"""How long a rank waits at the store for the others, after a call that all make."""
History = tuple[Call, ...]


# - On a rank


class _Side:
    """The judged scaler on this rank, with its optimizers and the oracle."""

    def __init__(self, factory: Any) -> None:
        world = current_world()
        self.device, self.rank = torch.device(world.device), world.rank
        self.mesh = world.mesh((world.world_size,), ("dp",))
        # both orders: a scaler must not generalise from the first gradient
        self.sharded = [self._parameter(Shard(0)) for _ in range(OPTIMIZERS)]
        self.replicated = [self._parameter(Replicate()) for _ in range(OPTIMIZERS)]
        pairs = list(zip(self.replicated, self.sharded, strict=True))
        self.optimizers = [
            torch.optim.SGD(p[::-1] if i % 2 else p, lr=RATE, foreach=False)
            for i, p in enumerate(pairs)
        ]
        self.factory = factory
        self.scaler = self._construct()
        self.oracle = Oracle(rank=self.rank, world_size=world.world_size)
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
        """Make one call; return its departure from the oracle, or the empty string."""
        happens, before = self.oracle.can_happen(call), self._gradients()
        legal = self.oracle.after(call)
        try:
            wrong = _ACTS[call.kind](self, call, happens) or ""
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

    def _gradients_depart(self, call: Call, after: str) -> str:
        held = [p.grad for p in self._held(call.which)]
        got: list[Any] = [local(g).tolist() for g in held if g is not None]
        if call.which in self.oracle.bad or got == [[GRADIENT] * 2] * len(got):
            return ""
        return f"gradients after {after} are {got} and not {GRADIENT} everywhere"

    # - The calls, each with the check of its result

    def scale(self, call: Call, happens: bool) -> str:
        """Scale a list of losses and check every product."""
        loss = torch.tensor(3.0, device=self.device)
        one, (two,) = self.scaler.scale([loss, (loss,)])
        want = loss * self.oracle.scale
        right = float(one) == float(two) == float(want)
        return "" if right else f"3 was scaled to {float(one):g}, {float(two):g}"

    def spoil(self, call: Call, happens: bool) -> None:
        """Make a gradient bad or remove it."""
        here = self.rank == call.rank
        if not happens or not (here or call.kind == "both"):
            return
        if call.kind == "none":
            for parameter in self._held(call.which):
                parameter.grad = None
            return
        spoilt = self.replicated if call.kind == "both" else self.sharded
        gradient = spoilt[call.which].grad
        assert gradient is not None
        # the first element for one kind, the last for the other
        local(gradient)[-1 if call.kind == "nan" else 0] = float(
            "nan" if call.kind == "nan" else "inf"
        )

    def unscale(self, call: Call, happens: bool) -> str:
        """Unscale and check the gradients."""
        self.scaler.unscale_(self.optimizers[call.which])
        return self._gradients_depart(call, "unscale_")

    def step(self, call: Call, happens: bool) -> str:
        """Step; a log may want the gradients afterwards."""
        self.scaler.step(self.optimizers[call.which])
        return self._gradients_depart(call, "step")

    def closure(self, call: Call, happens: bool) -> None:
        """Step with a closure, which must be refused: a skip could not undo it."""
        self.scaler.step(self.optimizers[call.which], closure=lambda: 1.0)

    def update(self, call: Call, happens: bool) -> str:
        """End the iteration and begin the next one."""
        self.scaler.update()
        return self._begin()

    def set(self, call: Call, happens: bool) -> str:
        """End the iteration with a scale of the user's own."""
        self.scaler.update(2.0**call.which)
        return self._begin()

    def reload(self, call: Call, happens: bool) -> str:
        """Save, and load into a new scaler."""
        state = self.scaler.state_dict()
        self.scaler = self._construct()
        self.scaler.load_state_dict(state)
        return self._begin()

    def _begin(self) -> str:
        self._refresh()
        value = torch.tensor([self.rank + 1.0], device=self.device)
        dist.all_reduce(value)
        want = sum(range(1, self.oracle.world_size + 1))
        got = value.item()
        return "" if got == want else f"the next all-reduce gave {got:g}, not {want}"


_ACTS: dict[str, Callable[[_Side, Call, bool], str | None]] = {
    **{kind: getattr(_Side, kind) for kind in KINDS if hasattr(_Side, kind)},
    **dict.fromkeys(("inf", "nan", "both", "none"), _Side.spoil),
}


def drive(history: History, spec: str, folder: str) -> tuple[int, str] | None:
    """Make the calls on this rank, next to all others, until one of them departs.

    Returns:
        Index of the call at which any rank departed, with this rank's departure (empty
        if it has none); None if no rank departed.
    """
    side, world = _Side(load_scaler(spec, folder)), current_world()
    for place, call in enumerate(history):
        wrong = side.make(call)
        # sent through the store, because the process group may be broken
        world.store.set(f"call/{place}/{world.rank}", "wrong" if wrong else "right")
        keys = [f"call/{place}/{rank}" for rank in range(world.world_size)]
        world.store.wait(keys, PATIENCE)
        if any(world.store.get(key) == b"wrong" for key in keys):
            return place, wrong
    return None


# - In the parent


@dataclass(frozen=True, kw_only=True)
class CallSearchSettings:
    """One search."""

    scaler: str
    folder: str
    world_size: int = 2
    """Ranks of the family ``calls``; the others have numbers of their own."""
    budget_s: float = 60.0
    """Seconds to draw, for all families together."""
    history: History | Program = ()
    """Run this history instead of searching."""
    families: Sequence[str] = ()
    """Search only these; all by default."""
    database: str = ".hypothesis/gradparity-machine"
    """Folder in which failures are kept; they are tried first next time."""
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise UsageError(f"the budget must be positive, got {self.budget_s}")
        if self.scaler == NO_SCALER:
            raise UsageError("call histories are those of a scaler: name one")
        if self.world_size < 1:
            raise UsageError(f"a world has at least 1 rank, got {self.world_size}")
        known = [CALLS, *FAMILIES]
        if unknown := [name for name in self.families if name not in known]:
            raise UsageError(
                f"unknown family {unknown[0]!r}: expected one of {', '.join(known)}"
            )


class Departure(Exception):
    """Raised to hypothesis when a search has found a departure.

    A separate type, because an ``AssertionError`` may be a fault of the judge, which
    must end the search.
    """


@dataclass(kw_only=True)
class _Search:
    """The search of one family."""

    family: str
    settings_: CallSearchSettings
    clusters: _Clusters
    tried: int = 0
    calls: int = 0
    spent_s: float = 0.0
    found_s: float = 0.0
    """When the first departure was found, in this family's own time."""
    smallest: History | Program = ()
    """The last departing history; after shrinking, the shortest."""
    departure: str = ""
    broken: list[str] = field(default_factory=list)
    """Histories in which the harness broke; they prove nothing."""

    def __post_init__(self) -> None:
        self.known: dict[History | Program, str] = {}
        self.stop_at = 0.0
        self._round = self._make_round()

    def round(self) -> None:
        """Draw for a while; a departure is shrunk."""
        world_size = (
            FAMILIES[self.family].world_size if self.family in FAMILIES else None
        )
        # started before the clock of a history
        self.clusters[world_size or self.settings_.world_size]
        start = time.monotonic()
        self.stop_at = start + SLICE_S
        try:
            self._round()
        except Departure:
            self._trim()
        self.spent_s += time.monotonic() - start

    def _make_round(self) -> Callable[[], None]:
        chosen = self.family
        drawn = (
            histories(self.settings_.world_size)
            if chosen == CALLS
            else programs(chosen)
        )

        @settings(
            max_examples=ROUND,
            deadline=None,
            database=DirectoryBasedExampleDatabase(
                f"{self.settings_.database}/{self.family}"
            ),
            # hypothesis derandomizes on CI by default: every round would draw the same
            derandomize=False,
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
            # a history takes seconds: hypothesis would call the strategy too slow
            suppress_health_check=list(HealthCheck),
            phases=(Phase.reuse, Phase.generate, Phase.shrink),
        )
        @given(drawn)
        def search(drawn: History | Program) -> None:
            if drawn not in self.known:
                if time.monotonic() > self.stop_at:
                    # out of time: unknown histories count as not departing, which ends
                    # shrinking
                    return
                self.known[drawn] = self.departure_of(drawn)
            # hypothesis runs the shortest history once more: answer from memory
            if self._is_same(drawn):
                self._keep(drawn)
                raise Departure

        return search

    def _is_same(self, drawn: History | Program) -> bool:
        """Whether it departs in the same way as the first: no fault hides another."""
        departure = self.known[drawn]
        return bool(departure) and _sort(departure) == _sort(
            self.departure or departure
        )

    def _keep(self, drawn: History | Program) -> None:
        if not self.departure:
            now = time.monotonic()
            self.found_s = self.spent_s + now - (self.stop_at - SLICE_S)
            # a hang costs its time limit: only the faster way of shrinking is used
            hangs = HANGS in self.known[drawn]
            self.stop_at = now + (0 if hangs else self._shrink_s())
        self.smallest, self.departure = drawn, self.known[drawn]

    def _shrink_s(self) -> float:
        return max(SHRINK_S, self.settings_.budget_s / 15)

    def _trim(self) -> None:
        """Drop calls and words, many at once first: iterations are drawn as one."""
        self.stop_at = max(self.stop_at, time.monotonic() + self._shrink_s())
        smaller = True
        while smaller and time.monotonic() < self.stop_at:
            smaller = False
            for each in _smaller(self.smallest, self.departure):
                if time.monotonic() > self.stop_at:
                    break
                if each not in self.known:
                    self.known[each] = self.departure_of(each)
                if self._is_same(each):
                    self.smallest, self.departure = each, self.known[each]
                    smaller = True
                    break

    def departure_of(self, drawn: History | Program) -> str:
        """Run one history; return its departure, or the empty string."""
        self.tried += 1
        self.calls += len(_calls_of(drawn))
        found = self._run(drawn, QUICK_S)
        if HANGS in found and HANGS not in self.departure:
            # a timeout under load is no departure: try again with a longer limit
            found = self._run(drawn, self.settings_.timeout_s / 2)
        return found

    def _run(self, drawn: History | Program, patience_s: float) -> str:
        spec, folder = self.settings_.scaler, self.settings_.folder
        calls = _calls_of(drawn)
        if not calls:
            return ""
        try:
            if isinstance(drawn, Program):
                cluster = self.clusters[drawn.world_size]
                limit_s = 2 * patience_s + 8  # also where all of them hang
                seen = cluster.with_options(timeout_s=limit_s).run(
                    follow, drawn, spec, folder, patience_s
                )
            else:
                seen = self.clusters[self.settings_.world_size].run(
                    drive, drawn, spec, folder
                )
        except WorldError as failure:
            return self._failed(failure, drawn)
        wrong = [(rank, text) for rank, at in enumerate(seen) if at and (text := at[1])]
        if not wrong:
            return ""
        place = next(at[0] for at in seen if at)
        text = "; ".join(f"rank {rank}: {text}" for rank, text in wrong)
        if HANGS in text:  # these ranks may be blocked: start new ones
            self.clusters.pop(_world_size_of(drawn, self.settings_)).close()
        return f"call {place}, {calls[place]}: {text}"

    def _failed(self, failure: WorldError, drawn: History | Program) -> str:
        """A hang is a departure; a rank that was killed is a harness failure."""
        text = " ".join(failure.root.headline.split())[:300]
        if failure.root.state is RankState.HUNG or "wait timeout" in text.lower():
            return f"a call {HANGS}: {text}"
        self.broken.append(f"{_text_of(drawn)}: {text}")
        return ""

    def report_lines(self) -> list[str]:
        """The departure and the command that shows it again."""
        settings_ = self.settings_
        again = ["gradparity", "hunt", "--calls", "--scaler", settings_.scaler]
        if not isinstance(self.smallest, Program):
            again += ["--world-size", str(settings_.world_size)]
        again += ["--history", _text_of(self.smallest)]
        lines = [f"departure from the oracle: {self.departure}", shlex.join(again)]
        if not settings_.history:
            lines[0] += (
                f" (family {self.family}: {len(_calls_of(self.smallest))} calls, found "
                f"after {self.found_s:.1f} s, "
                f"shrunk in {self.spent_s - self.found_s:.1f} s)"
            )
        return lines


class _Clusters(dict[int, Cluster]):
    """Warm clusters by world size, made on first use."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def __missing__(self, world_size: int) -> Cluster:
        self[world_size] = Cluster(world_size, timeout_s=self.timeout_s)
        # import before the clock of a history starts
        self[world_size].run(
            follow, Program(frozenset(), world_size, ()), TORCH, ".", 1.0
        )
        return self[world_size]

    def close(self) -> None:
        """End all ranks."""
        for cluster in self.values():
            cluster.close()


def _sort(departure: str) -> tuple[bool, ...]:
    """The kind of a departure."""
    if HANGS in departure:
        return (True,)
    words = ("raised", "refused", "accepted", "returned", EITHER)
    return tuple(word in departure for word in words)


def _world_size_of(drawn: History | Program, settings_: CallSearchSettings) -> int:
    return drawn.world_size if isinstance(drawn, Program) else settings_.world_size


def _calls_of(drawn: History | Program) -> History:
    return drawn.calls if isinstance(drawn, Program) else drawn


def _smaller(drawn: History | Program, departure: str) -> Iterator[History | Program]:
    """Shorter histories, the most promising first: fewer calls, or one word less."""
    calls = _calls_of(drawn)
    at = re.match(r"call (\d+)", departure)
    # first everything after the call that departed
    cuts = [slice(int(at[1]) + 1, len(calls))] if at else []
    size = len(calls) // 2
    while size:
        cuts += [slice(i, i + size) for i in reversed(range(0, len(calls), size))]
        size //= 2
    for cut in cuts:
        fewer = calls[: cut.start] + calls[cut.stop :]
        if fewer and len(fewer) < len(calls):
            yield replace(drawn, calls=fewer) if isinstance(drawn, Program) else fewer
    if isinstance(drawn, Program):
        for word in sorted(drawn.words):
            yield replace(drawn, words=drawn.words - {word})


def _text_of(drawn: History | Program) -> str:
    return str(drawn) if isinstance(drawn, Program) else history_text(drawn)


def parse_drawn(text: str, world_size: int) -> History | Program:
    """Read a history that a search has printed.

    Raises:
        UsageError: if ``text`` has another form; says what was got and expected.
    """
    return parse_program(text) if "/" in text else parse_history(text, world_size)


def histories(world_size: int) -> st.SearchStrategy[History]:
    """Calls and events in any order."""
    call = st.one_of(
        st.builds(
            Call,
            st.sampled_from([k for k in KINDS if k != "set"]),
            st.integers(0, OPTIMIZERS - 1),
            st.integers(0, world_size - 1),
        ),
        # whole iterations: single random calls would rarely reach a growth
        st.sampled_from([Call("step"), Call("update"), Call("step", 1)]),
        st.builds(Call, st.just("set"), st.sampled_from(SCALES)),
    )
    return st.lists(call, min_size=1, max_size=MAX_CALLS).map(tuple)


def search_histories(settings_: CallSearchSettings, console: Console) -> int:
    """Search every family until the budget is spent.

    A family with a shrunk departure is closed; the others get equal shares of the time.

    Returns:
        0 nothing found, 1 departures, 3 nothing could be judged.
    """
    clusters = _Clusters(settings_.timeout_s)
    names = settings_.families or [CALLS, *FAMILIES]
    try:
        ranks = clusters[_world_size_of(settings_.history, settings_)]
        refuse_unfit(ranks, settings_.scaler, settings_.folder)
        if settings_.history:
            search = _Search(family=CALLS, settings_=settings_, clusters=clusters)
            search.smallest = settings_.history
            search.departure = search.departure_of(settings_.history)
            _print(console, search.report_lines() if search.departure else [])
            return _conclude([search], console)
        searches = [
            _Search(family=name, settings_=settings_, clusters=clusters)
            for name in names
        ]
        end = time.monotonic() + settings_.budget_s
        open_ = list(searches)
        while open_ and time.monotonic() < end:
            # the family with the least time so far: equal shares, whatever a history
            # costs
            search = min(open_, key=lambda each: each.spent_s)
            search.round()
            if search.departure:
                open_.remove(search)
                _print(console, search.report_lines())
        return _conclude(searches, console)
    finally:
        clusters.close()


def _conclude(searches: list[_Search], console: Console) -> int:
    tried = sum(search.tried for search in searches)
    calls = sum(search.calls for search in searches)
    broken = [text for search in searches for text in search.broken]
    departed = [search for search in searches if search.departure]
    lines = [f"harness failure: {text}" for text in broken[:3]]
    lines += [
        f"{tried} histories tried, {calls} calls on each rank, {len(departed)} of "
        f"{len(searches)} families depart from the oracle"
    ]
    _print(console, lines)
    if departed:
        return 1
    return 3 if broken or not tried else 0


def _print(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(Text(plain(line)), soft_wrap=True)
