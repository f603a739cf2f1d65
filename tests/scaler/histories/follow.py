"""Follow a history on a rank: the tested scaler beside the tracks of the oracle."""

from __future__ import annotations

import inspect
import math
import time
from dataclasses import replace
from datetime import timedelta
from itertools import repeat
from typing import Any, NamedTuple

import torch

from gradparity.conformance.rank.scaler_spec import load_scaler
from gradparity.conformance.rank.torch_internals import set_timeout
from gradparity.conformance.status import rank_list
from gradparity.multiprocess import World, current_world

from .history import Call, History
from .oracle import BACKOFF, GROWTH, Seen, first_scale, interval_of, seen, tracks_of
from .replica import CLIPS, OFFERED, Replica, norm_of

__all__ = ["EITHER", "HANGS", "Departure", "follow"]

TOLERANCE = 1e-4
"""Relative tolerance of a norm and of a clipped update: both are sums in fp32."""
EITHER = ", or as torch has it "
"""Text between the right value and torch's in a message, if torch is wrong."""
HANGS = "does not return"
UNLIMITED = timedelta(minutes=30)
"""Timeout of a process group: longer than any deadline of the parent."""
LARGEST = float(torch.finfo(torch.float32).max)
CROSSED = ("cross", "lone-clip", "scalers-cross")
"""Calls in which ranks differ: results must be right, or all ranks must raise."""


def follow(
    history: History, spec: str, folder: str, patience_s: float
) -> Departure | None:
    """Make the calls on this rank, together with all others, until a rank differs.

    Args:
        history: history to follow.
        spec: the tested scaler.
        folder: where to import it from.
        patience_s: how long ranks wait for one that does not return.

    Returns:
        The difference on this rank at the first call where any rank differs, or None.
    """
    try:
        follower = _Follower(history, load_scaler(spec, folder), patience_s)
    except _Refused as refused:
        return Departure(str(refused), ())
    return follower.run()


class Departure(NamedTuple):
    """Difference from the oracle on one rank."""

    text: str
    """Description of the difference; empty if this rank has none."""
    made: tuple[Call, ...]
    """Calls that were made; calls without a right result are left out."""


class _Refused(Exception):
    """The tested scaler refuses settings that torch's accepts."""


class _Follower:
    def __init__(self, history: History, factory: Any, patience_s: float) -> None:
        self.history, self.world = history, current_world()
        self.patience = timedelta(seconds=patience_s)
        self.replica = Replica(
            history,
            self.world.rank,
            lambda _: self._construct(factory),
            world=self.world,
        )
        self.tracks = tracks_of(history)
        self.loose = False  # whether values are rounded from here on
        # whether the scaler clipped: it may add its norm in another order than torch
        self.own_clip = False
        self.late = ""  # the ranks that do not return, in words
        # whether ranks made calls in different orders, or a scaler knows of no others
        self.crossed = "lone" in history.words
        # largest element that each parameter has had: tolerances are relative to it
        self.moved: dict[str, float] = {}

    def _construct(self, factory: Any) -> Any:
        lone: dict[str, Any] = {}
        if "lone" in self.history.words:
            if "sync_over" in inspect.signature(factory).parameters:
                lone["sync_over"] = "local"
        try:
            return factory(
                **lone,
                device="cpu",
                init_scale=first_scale(self.history),
                growth_factor=GROWTH,
                backoff_factor=BACKOFF,
                growth_interval=interval_of(self.history),
                enabled=True,
            )
        except Exception as error:
            raise _Refused(f"the constructor raised {error!r:.300}") from error

    def run(self) -> Departure | None:
        """Make all calls; return the first difference on any rank, or None."""
        if self.world.world_size == 1:
            return self._run()
        # a finite timeout: a rank must return even if its peer raised before a
        # collective. It is longer than the others wait at the store, so that they have
        # given up when this rank comes there and reads it.
        set_timeout(1.5 * self.patience)
        try:
            return self._run()
        finally:
            set_timeout(UNLIMITED)

    def _run(self) -> Departure | None:
        made: list[Call] = []
        for place, call in enumerate(self.history.calls):
            if not self._is_made(call):
                continue
            made.append(call)
            before, held = self.replica.state(), self._gradients()
            if call.kind in CLIPS or call.kind == "handclip":
                self.loose, self.own_clip = True, self.own_clip or call.kind in CLIPS
            self.crossed |= call.kind in CROSSED
            wanted = [each.make(call) for each in self.tracks]
            begun = time.monotonic()
            got = seen(self.replica, call)
            # ranks that waited for each other in vain have refused nothing
            waited = time.monotonic() - begun > self.patience.total_seconds()
            if waited and got.raised and self.world.world_size > 1:
                self.late = "any rank in time"
                self.world.store.set(f"given up/{place}", "1")
                raised = None
            else:
                raised = self._raised(place, got)
            if raised is None:
                here = f"; here it raised {got.raised}" if got.raised else ""
                text = f"{call} {HANGS} on {self.late}{here}"
                return Departure(text, tuple(made))
            wrong, end = self._check(place, before, got, raised, wanted)
            if not (wrong or end) and got.raised:  # as it should
                same = _is_wanted(self._gradients(), [held], False)
                wrong = "" if same else f"refused ({got.raised}), yet gradients changed"
            if any(self._exchange(place, "checked", wrong)):
                return Departure(f"{call}: {wrong}" if wrong else "", tuple(made))
            if end:
                return None
        return None

    def _is_made(self, call: Call) -> bool:
        needed = [OFFERED[call.kind]] if call.kind in OFFERED else []
        if self.history.words & {"idle", "lacks"}:
            needed.append("clip_and_step")  # who offers it takes None as well
        offered = all(hasattr(self.replica.scaler, name) for name in needed)
        return offered and self.tracks[0].replicas[0].allows(call)

    def _gradients(self) -> list[torch.Tensor]:
        return [g for which in (0, 1) for g in self.replica.gradients(which)]

    # - The other ranks

    def _raised(self, place: int, got: Seen) -> list[bool] | None:
        """Return for each rank if it raised; None if a rank does not return."""
        world = self.world
        if world.world_size == 1:
            return [bool(got.raised)]
        try:
            raised = self._exchange(place, "made", got.raised)
        except RuntimeError:  # raised by the store: no answer in time
            ranks = range(world.world_size)
            late = [r for r in ranks if not world.store.check([f"made/{place}/{r}"])]
            self.late = rank_list(late) if late else "some rank"
            world.store.set(f"given up/{place}", "1")
            return None
        if world.store.check([f"given up/{place}"]):
            self.late = f"rank {world.rank}"  # the others have given it up
            return None
        return raised

    def _exchange(self, place: int, what: str, text: str) -> list[bool]:
        """Exchange a flag through the store: the process group may be broken."""
        world: World = self.world
        if world.world_size == 1:
            return [bool(text)]
        world.store.set(f"{what}/{place}/{world.rank}", "yes" if text else "no")
        keys = [f"{what}/{place}/{rank}" for rank in range(world.world_size)]
        world.store.wait(keys, self.patience)
        return [world.store.get(key) == b"yes" for key in keys]

    # - Checks

    def _check(
        self,
        place: int,
        before: dict[str, Any],
        got: Seen,
        raised: list[bool],
        wanted: list[list[Seen]],
    ) -> tuple[str, bool]:
        """Return the difference or "", and True if the history ends here."""
        mathematics, *torchs = wanted
        rank = self.world.rank
        self._note_sizes(mathematics)
        if any(raised) and not all(raised):
            return self._raised_partly(got, raised), True
        is_right = self._divides_once() and all(
            bool(m.raised) == bool(t.raised) and not self._differ(t, [m], self.loose)
            for each in torchs
            for m, t in zip(mathematics, each, strict=True)
        )
        want = torchs[0][rank]
        # torch is wrong, or right by chance: this call is checked by what either does,
        # and then its state has nothing to say about later calls
        if not is_right:
            if got.raised:
                return self._changed(before, got), True
            if not (_is_finite(want.state) or self._changed(before, got)):
                return "", True  # skipped, where torch steps with an infinity
            choices = [each[rank] for each in wanted]
            kind = self.history.calls[place].kind
            if kind in CLIPS and self._is_mixed_norm(got.value, CLIPS[kind][1]):
                choices = [replace(each, value=got.value) for each in choices]
            return self._differ(got, choices, True), True
        if got.raised and not want.raised:
            if self.crossed or self._torch_departs_later(place):
                return self._changed(before, got), True
            return f"a legal call raised {got.raised}", True
        if want.raised and not got.raised:
            return f"accepted, where torch raises {want.raised}", True
        return self._differ(got, [want], self.own_clip), False

    def _note_sizes(self, outcomes: list[Seen]) -> None:
        # over all ranks: they must have the same outcome
        for name, value in (item for each in outcomes for item in each.state.items()):
            if isinstance(value, torch.Tensor):
                size = float(value.abs().max())
                self.moved[name] = max(self.moved.get(name, 0.0), size)

    def _divides_once(self) -> bool:
        """Return True if torch divides the gradients of this call correctly.

        If not, torch's outcome may still be right by chance, because of an overflow.
        """
        mathematics, *torchs = (each.facts.unscaled for each in self.tracks)
        slack = TOLERANCE if self.loose else 0.0
        return all(
            len(mathematics) == len(each)
            and all(map(_same_where_finite, mathematics, each, repeat(slack)))
            for each in torchs
        )

    def _is_mixed_norm(self, norm: float, order: float) -> bool:
        """Return True if gradients that each equal those of some track fit ``norm``."""
        counted = [each.facts.counted for each in self.tracks]
        if len(set(map(len, counted))) > 1:
            return True  # not the same gradients: nothing to hold it against
        sizes = [
            torch.stack([g.abs() for g in same]) for same in zip(*counted, strict=True)
        ]
        least = norm_of([size.amin(0) for size in sizes], order)
        most = norm_of([size.amax(0) for size in sizes], order)
        if not math.isfinite(most):
            return True  # an overflow is checked by what step does
        return least * (1 - TOLERANCE) <= norm <= most * (1 + TOLERANCE)

    def _raised_partly(self, got: Seen, raised: list[bool]) -> str:
        if not got.raised:
            return ""
        where = [rank for rank, each in enumerate(raised) if each]
        return f"raised on ranks {where} only: {got.raised}"

    def _changed(self, before: dict[str, Any], got: Seen) -> str:
        """Describe the first value that a refused call changed; empty if none."""
        for name, value in before.items():
            if not _same(got.state[name], value, 0.0):
                return (
                    f"refused ({got.raised}), yet {name} became "
                    f"{_text(got.state[name])}"
                )
        return ""

    def _torch_departs_later(self, place: int) -> bool:
        """Return True if torch is wrong in a later call of the history."""
        mathematics, torchs = self.tracks[:2]
        for call in self.history.calls[place + 1 :]:
            if not self._is_made(call):
                continue
            wanted = mathematics.make(call)
            self._note_sizes(wanted)
            for m, t in zip(wanted, torchs.make(call), strict=True):
                if bool(m.raised) != bool(t.raised) or self._differ(t, [m], True):
                    return True
        return False

    def _differ(self, got: Seen, wanted: list[Seen], loose: bool) -> str:
        """Describe how an outcome differs from each permitted one."""
        for name, value in got.state.items():
            slack = TOLERANCE * self.moved.get(name, 0.0) if loose else 0.0
            if not any(_same(value, want.state[name], slack) for want in wanted):
                texts = _texts([want.state[name] for want in wanted])
                return f"{name} is {_text(value)} and should be {texts}"
        wanted = [want for want in wanted if not want.raised]
        if not wanted or got.raised:
            return ""
        if not _is_wanted(got.value, [want.value for want in wanted], loose):
            texts = _texts([want.value for want in wanted])
            if isinstance(got.value, list):
                return f"gradients are then {_text(got.value)} and should be {texts}"
            return f"returned {_text(got.value)} and should have {texts}"
        return ""


def _same_where_finite(want: torch.Tensor, got: torch.Tensor, slack: float) -> bool:
    finite = want.isfinite() & got.isfinite()
    return bool(((want - got).abs() <= slack * want.abs())[finite].all())


def _is_finite(state: dict[str, Any]) -> bool:
    values = [x for x in state.values() if isinstance(x, torch.Tensor)]
    return all(bool(value.isfinite().all()) for value in values)


def _same(got: Any, want: Any, slack: float) -> bool:
    if not isinstance(want, torch.Tensor):
        return bool(got == want)
    if got.shape != want.shape:
        return False
    same = (got == want) | (got.isnan() & want.isnan())
    return bool((same | ((got - want).abs() <= slack)).all())


def _is_wanted(got: Any, wanted: list[Any], loose: bool) -> bool:
    if not isinstance(got, list):
        return any(_same_value(got, want, loose) for want in wanted)
    # Gradients are compared one by one: torch may be wrong in some of them only.
    if any(want is None for want in wanted):
        return True
    largest = [max((float(g.abs().max()) for g in w), default=0.0) for w in wanted]
    slacks = [TOLERANCE * size if loose else 0.0 for size in largest]
    return all(len(got) == len(want) for want in wanted) and all(
        any(_same(g, w, slack) for w, slack in zip(choices, slacks, strict=True))
        for g, *choices in zip(got, *wanted, strict=True)
    )


def _same_value(got: Any, want: Any, loose: bool) -> bool:
    if isinstance(want, float):
        if not math.isfinite(want):
            return not math.isfinite(got)
        if want > LARGEST:  # a norm may be returned in fp32
            return got == math.inf or math.isclose(got, want, rel_tol=TOLERANCE)
        return math.isclose(got, want, rel_tol=TOLERANCE)
    return bool(got == want)


def _texts(values: list[Any]) -> str:
    return EITHER.join(dict.fromkeys(map(_text, values)))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, torch.Tensor):
        shown = value[:4].tolist()
        return str(shown[0] if len(set(map(str, shown))) == 1 else shown)
    return f"{value:g}" if isinstance(value, float) else str(value)
