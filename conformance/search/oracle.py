"""The oracle: which calls are legal in which state, and their result, in Python.

The rule of order and scale is that of the torch.amp documentation and, where that is
silent, of ``torch.amp.GradScaler`` on one process: ``unscale_`` once an optimizer and
iteration and before ``step``; ``step`` once and without a closure; ``update`` after at
least one of them, or with a new scale. A refused call changes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..status import UsageError

__all__ = ["KINDS", "OPTIMIZERS", "Call", "Oracle", "history_text", "parse_history"]

OPTIMIZERS = 2
GROWTH, BACKOFF, INTERVAL, INIT_SCALE = 4.0, 0.25, 2, 1024.0
LIMIT = 2.0**128
"""The first power of two that fp32 does not hold: no scale grows to it."""
KINDS = {
    "scale": "scale a loss",
    "inf": "an infinity in an optimizer's sharded gradient on one rank",
    "nan": "a nan there",
    "both": "an infinity in an optimizer's replicated gradient, on all ranks",
    "none": "an optimizer's gradients are None on one rank",
    "unscale": "unscale_(optimizer)",
    "step": "step(optimizer)",
    "closure": "step(optimizer, closure=...)",
    "update": "update()",
    "set": "update(new_scale)",
    "reload": "go on with a new scaler, loaded from state_dict()",
}
"""Calls, and events that change gradients between calls."""

_FORM = re.compile(r"(?P<kind>[a-z]+)(:(?P<which>-?\d+))?(@(?P<rank>\d+))?")


@dataclass(frozen=True)
class Call:
    """One call on all ranks, or one event."""

    kind: str
    """A key of :data:`KINDS`."""
    which: int = 0
    """Number of the optimizer; of ``set``, log2 of the new scale."""
    rank: int = 0
    """The rank on which a gradient becomes bad or is missing."""

    def __str__(self) -> str:
        which, rank = self.which, self.rank
        return self.kind + f":{which}" * (which != 0) + f"@{rank}" * (rank != 0)


def history_text(history: tuple[Call, ...]) -> str:
    """The history on one line."""
    return ",".join(map(str, history))


def parse_history(text: str, world_size: int) -> tuple[Call, ...]:
    """Read what `history_text` wrote.

    Raises:
        UsageError: if ``text`` has another form; says what was got and expected.
    """
    return tuple(_parse(part, world_size) for part in text.split(","))


def _parse(text: str, world_size: int) -> Call:
    match = _FORM.fullmatch(text)
    if match is None or match["kind"] not in KINDS:
        raise UsageError(
            f"unknown call {text!r}: expected KIND:OPTIMIZER@RANK with KIND one of "
            f"{', '.join(KINDS)}, for example inf:0@1"
        )
    call = Call(match["kind"], int(match["which"] or 0), int(match["rank"] or 0))
    if call.rank >= world_size or (
        call.kind != "set" and not 0 <= call.which < OPTIMIZERS
    ):
        raise UsageError(
            f"call {text!r} names optimizer {call.which} and rank {call.rank}: there "
            f"are {OPTIMIZERS} optimizers and {world_size} ranks"
        )
    return call


@dataclass(kw_only=True)
class Oracle:
    """The state of a correct scaler on one rank after each call."""

    rank: int
    world_size: int
    scale: float = INIT_SCALE
    tracker: int = 0
    taken: list[int] = field(default_factory=lambda: [0] * OPTIMIZERS)
    """Per optimizer: steps that moved this rank's parameters."""
    bad: set[int] = field(default_factory=set)
    """Optimizers with a bad gradient anywhere."""
    absent: dict[int, set[int]] = field(default_factory=dict)
    """Optimizer -> ranks on which it has no gradients; never all of them."""
    found: dict[int, bool] = field(default_factory=dict)
    """Optimizers checked since the last update -> whether they overflowed."""
    stepped: set[int] = field(default_factory=set)

    def can_happen(self, call: Call) -> bool:
        """Whether an event is allowed: after the check its outcome is not specified."""
        absent = self.absent.get(call.which, set())
        left = self.world_size - len(absent | {call.rank})
        # a rank without gradients cannot have a bad one, and a bad one is not removed
        allowed = {
            "none": call.which not in self.bad and left > 0,
            "both": not absent,
        }.get(call.kind, call.rank not in absent)
        return allowed and call.which not in self.found

    def after(self, call: Call) -> bool:
        """Apply ``call``; return whether it is legal. If not, nothing changes."""
        return bool(getattr(self, f"_{call.kind}")(call))

    def _scale(self, call: Call) -> bool:
        return True

    def _inf(self, call: Call) -> bool:
        if self.can_happen(call):
            self.bad.add(call.which)
        return True

    _nan = _both = _inf

    def _none(self, call: Call) -> bool:
        if self.can_happen(call):
            self.absent.setdefault(call.which, set()).add(call.rank)
        return True

    def _unscale(self, call: Call) -> bool:
        if call.which in self.found:
            return False
        self.found[call.which] = call.which in self.bad
        return True

    def _step(self, call: Call) -> bool:
        if call.which in self.stepped:
            return False
        # without unscale_ the step checks
        found = self.found.setdefault(call.which, call.which in self.bad)
        here = self.rank not in self.absent.get(call.which, ())
        self.taken[call.which] += here and not found
        self.stepped.add(call.which)
        return True

    def _closure(self, call: Call) -> bool:
        return False

    def _update(self, call: Call) -> bool:
        if not self.found:
            return False
        grown = self.scale * GROWTH
        if any(self.found.values()):
            self.scale, self.tracker = self.scale * BACKOFF, 0
        elif self.tracker + 1 < INTERVAL:
            self.tracker += 1
        else:
            self.scale = grown if grown < LIMIT else self.scale
            self.tracker = 0
        return self._begin()

    def _set(self, call: Call) -> bool:
        # the growth tracker stays as it is, as in torch
        self.scale = 2.0**call.which
        return self._begin()

    def _reload(self, call: Call) -> bool:
        return self._begin()

    def _begin(self) -> bool:
        """A new iteration: all gradients exist again and are finite."""
        self.bad, self.absent, self.found, self.stepped = set(), {}, {}, set()
        return True
