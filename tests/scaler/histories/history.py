"""Call histories: the calls of a training loop on all ranks, as one short line.

A history is a set-up (words such as ``shared+fused``), a number of ranks and a list of
calls. Two optimizers train three parameters with linear losses: optimizer 0 has ``e``
and ``a``, optimizer 1 has ``b``, and ``e`` too if the set-up says ``shared``. All
gradients are powers of two, so that right results are exact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import strategies as st

__all__ = ["FAMILIES", "WORDS", "Call", "Family", "History", "histories", "parse"]

WORDS = {
    "shared": "both optimizers hold parameter e",
    "turned": "optimizer 0 holds a before e",
    "fused": "optimizer 0 is fused",
    "fused-second": "optimizer 1 is fused",
    "fp64": "parameters of fp64, with gradients around 1e160",
    "sparse": "parameters of optimizer 0 get sparse gradients, not coalesced",
    "complex": "parameters of optimizer 0 are complex",
    "scale-20": "the first scale is 2^20",
    "scale-120": "the first scale is 2^120",
    "buckets": "the new gradients of a backward are views of one buffer, as with FSDP2",
    "duck": "optimizer 0 is no torch optimizer: unhashable, with slots",
    "wrapped": "optimizer 0 is stepped through a wrapper that shares its param_groups",
    "dtensor": "parameters are DTensors: e sharded, a replicated, b sharded",
    "permuted": "one replica lies on ranks 0, 1 and one on ranks 3, 2",
    "idle": "the last rank has no parameters",
    "lacks": "the last rank has no optimizer 0",
    "ring": "optimizer 0 and a wrapper around it know each other",
    "bare-groups": "the groups of optimizer 0 have [] and nothing else",
    "own-kernel": "optimizer 0 divides by itself, with an int in its state",
    "default-fp64": "torch.set_default_dtype(torch.float64)",
    "default-bf16": "torch.set_default_dtype(torch.bfloat16)",
    "inference": "unscale_ is called in inference mode",
    "interval": "growth_interval is 10^10",
    "second-scaler": "a second scaler, with a parameter of its own",
    "subclass": "gradients are of a subclass of torch.Tensor",
    "lone": "the scaler syncs with no other rank, if it can be told so",
}
"""Words of a set-up."""

SCALES = (-4, 0, 6, 30, 126)
"""log2 of the scales that a user sets; from the last one growth would overflow."""
BACKWARDS = ("back", "cback", "gback", "seed", "autograd")
FUSED = ("fused", "fused-second")
"""Words for a fused optimizer 0 and 1."""
SPOILS = ("inf", "nan", "both", "none")
NUMBERS = {
    # the first is what a drawn call shrinks to
    **dict.fromkeys(BACKWARDS, (2, 0, 1)),
    "set": SCALES,
    **dict.fromkeys(("scale", "update", "reload", "regroup", "elder"), (0,)),
    **dict.fromkeys(("cross", "two-scalers", "scalers-cross"), (0,)),
    **dict.fromkeys(("zero", "clear", "data", "replace", "look", *SPOILS), (0, 1)),
    **dict.fromkeys(("unscale", "handclip", "clip", "clip-loose", "clip-tiny"), (0, 1)),
    **dict.fromkeys(("clip-order", "clip-inner", "clip-and-step"), (0, 1)),
    **dict.fromkeys(("step", "retry", "fail", "closure", "lone-clip"), (0, 1)),
    **dict.fromkeys(("user-scale", "skipped", "scheduler", "load"), (0, 1)),
}
"""Kind of call -> its possible numbers: of an optimizer (2: both), or log2 of a scale.

A call is made by the method of `replica` with the same name.
"""
ON_ONE_RANK = (
    *("inf", "nan", "none", "cross", "elder", "fail", "lone-clip", "scalers-cross"),
)
MAX_CALLS = 24
_CALL = re.compile(r"(?P<kind>[a-z-]+)(:(?P<which>-?\d+))?(@(?P<rank>\d+))?")
_HISTORY = re.compile(r"(?P<words>[a-z0-9+-]*)@(?P<world_size>[1-8])/(?P<calls>.*)")


@dataclass(frozen=True)
class Call:
    """One call on all ranks, or an event between calls, such as a backward."""

    kind: str
    """Name of the call: a key of :data:`NUMBERS`."""
    which: int = 0
    """Number of the optimizer, or another value that :data:`NUMBERS` allows."""
    rank: int = 0
    """Rank on which the call differs."""

    def __str__(self) -> str:
        which, rank = self.which, self.rank
        return self.kind + f":{which}" * (which != 0) + f"@{rank}" * (rank != 0)


@dataclass(frozen=True)
class History:
    """A set-up and the calls that are made on it."""

    words: frozenset[str]
    """Keys of :data:`WORDS`."""
    world_size: int
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        words, calls = "+".join(sorted(self.words)), ",".join(map(str, self.calls))
        return f"{words}@{self.world_size}/{calls}"


def parse(text: str) -> History:
    """Parse the text of a history, as ``str(history)`` writes it.

    Raises:
        ValueError: ``text`` has another form; says what was got and expected.
    """
    match = _HISTORY.fullmatch(text)
    words = frozenset(filter(None, match["words"].split("+"))) if match else frozenset()
    if match is None or not words <= WORDS.keys():
        raise ValueError(
            f"unknown history {text!r}: expected WORD+WORD@RANKS/CALL,CALL with words "
            f"of {', '.join(WORDS)}, for example shared@1/back:2,step"
        )
    world_size = int(match["world_size"])
    return History(words, world_size, _parse_calls(match["calls"], world_size))


def _parse_calls(text: str, world_size: int) -> tuple[Call, ...]:
    return tuple(_parse_call(each, world_size) for each in text.split(",") if text)


def _parse_call(text: str, world_size: int) -> Call:
    match = _CALL.fullmatch(text)
    if match is None or match["kind"] not in NUMBERS:
        raise ValueError(
            f"unknown call {text!r}: expected KIND:NUMBER@RANK with KIND one of "
            f"{', '.join(NUMBERS)}, for example step:1"
        )
    call = Call(match["kind"], int(match["which"] or 0), int(match["rank"] or 0))
    if call.rank >= world_size or call.which not in NUMBERS[call.kind]:
        raise ValueError(
            f"call {text!r}: the number must be one of {NUMBERS[call.kind]} and the "
            f"rank below {world_size}"
        )
    return call


@dataclass(frozen=True, kw_only=True)
class Family:
    """Histories with common features; each family is searched for failures."""

    kinds: str
    """Calls, or kinds of calls, to draw from; failing histories shrink to the first."""
    always: str = ""
    """Words that every set-up has."""
    maybe: str = ""
    """Words that a set-up may have."""
    world_size: int = 1
    start: str = ""
    """Calls with which each history begins."""
    shapes: tuple[str, ...] = ()
    """Sequences of calls, such as usual iterations; some calls may be left out."""


_ITERATION = "back:2,step,step:1,update"
_GAN = "back:2,step:1,zero:1,back:2,step,update"
_ACTOR_CRITIC = "back:2,step,zero:1,back:2,step:1,update"
_CLIPPED = "back:2,clip,step,update"
_CORE = "step back zero update"

FAMILIES: Mapping[str, Family] = {
    "calls": Family(  # legal and illegal ones as they come
        start="back:2",
        kinds="step unscale update inf nan both none:0@1 none:1@1 scale closure set "
        "reload",
        always="dtensor",
        maybe="turned",
        world_size=2,
        shapes=("step,step:1,update,zero,zero:1,back:2",) * 2,
    ),
    "shared": Family(
        kinds=f"{_CORE} unscale inf clear",
        always="shared",
        maybe="fused fused-second",
        shapes=(_GAN, _ACTOR_CRITIC),
    ),
    "written": Family(
        kinds=f"{_CORE} data unscale",
        always="shared",
        maybe="fused fused-second",
        shapes=(_GAN,),
    ),
    "shared-clip": Family(
        start="back:2",
        kinds="step clip inf unscale retry",
        always="shared",
        maybe="fused fused-second",
    ),
    "several": Family(
        kinds=f"{_CORE} unscale handclip replace inf clear set reload closure",
        maybe="fused fused-second",
        shapes=(_GAN, _ITERATION),
    ),
    "accumulate": Family(
        kinds="step back set update clip-loose unscale", maybe="fused"
    ),
    "dropped": Family(
        kinds="step step:1 update set",
        shapes=("clear,clear:1,back:2", "zero,zero:1,back:2"),
    ),
    "compiled": Family(kinds="step update set", shapes=("zero,back", "zero,cback")),
    "seeded": Family(
        kinds="step:0 update set:6 set:0", shapes=("zero,back", "zero,seed")
    ),
    "autograd": Family(kinds="step back autograd unscale update"),
    "clipping": Family(
        kinds=f"{_CORE} clip clip-loose clip-order clip-tiny inf retry replace",
        maybe="fused scale-20",
        shapes=(_CLIPPED,),
    ),
    "buckets": Family(
        kinds=f"{_CORE} unscale clip clip-loose handclip inf clear retry",
        always="buckets",
        maybe="fused fused-second shared",
        shapes=(_GAN, _CLIPPED, "back:2,clip,clip:1,step,step:1,update"),
    ),
    "graph": Family(
        kinds="step gback clip unscale handclip update zero", maybe="fused shared"
    ),
    "complex": Family(
        kinds=f"{_CORE} clip unscale inf", always="complex", shapes=(_CLIPPED,)
    ),
    "fp64": Family(
        kinds=f"{_CORE} clip-loose clip unscale inf",
        always="fp64",
        maybe="fused",
        shapes=(_CLIPPED,),
    ),
    "large-scale": Family(
        kinds="step back clip-tiny unscale update zero inf", always="scale-120"
    ),
    "high-order": Family(
        start="back:2", kinds="step clip-order update", always="scale-20"
    ),
    "looks": Family(
        kinds=f"{_CORE} clip clip-loose unscale look handclip inf",
        maybe="fused buckets",
        shapes=("back:2,clip,look,step,update",),
    ),
    "clip-and-step": Family(
        kinds=f"{_CORE} clip-and-step clip-loose inf fail",
        maybe="fused buckets scale-20",
        shapes=("zero,back:2,clip-and-step,update",),
    ),
    "default-dtype": Family(
        kinds=f"{_CORE} clip-loose unscale inf",
        always="default-fp64",
        maybe="fused default-bf16",
        shapes=("zero,back:2,clip-loose,step,update",),
    ),
    "interval": Family(kinds="step back update", always="interval"),
    "duck": Family(kinds=f"{_CORE} unscale clip inf", always="duck"),
    "ring": Family(kinds=f"{_CORE} unscale inf", always="ring"),
    "bare-groups": Family(
        kinds=f"{_CORE} unscale inf",
        always="bare-groups",
        shapes=("zero,back,inf,step,update",),
    ),
    "own-kernel": Family(
        kinds=f"{_CORE} inf", always="own-kernel", shapes=("zero,back,step,update",)
    ),
    "wrapped": Family(
        kinds=f"{_CORE} unscale clip clip-inner inf retry load",
        always="wrapped",
        maybe="fused",
    ),
    "answers": Family(
        kinds=f"{_CORE} skipped scheduler inf", maybe="fused", shapes=(_ITERATION,)
    ),
    "ranks": Family(
        kinds=f"{_CORE} unscale clip inf reload set retry",
        maybe="fused",
        world_size=2,
        shapes=(_GAN, _ITERATION, _CLIPPED),
    ),
    "failures": Family(
        start="back:2",
        kinds="step back fail:0@1 update zero inf set",
        maybe="fused",
        world_size=2,
        shapes=(
            "zero,back:2,fail@1,back:2,step,update",
            "fail:1@1,back:2,step,step:1",
            "back:2,step,fail:1@1,set:6,back:2,step,step:1",
        ),
    ),
    "other-calls": Family(
        start="back:2",
        kinds="lone-clip@1 step update",
        world_size=2,
        shapes=("zero,back:2,step,update",),
    ),
    "two-scalers": Family(
        start="back:2",
        kinds="two-scalers inf:0@0 update",
        always="second-scaler",
        world_size=2,
        shapes=(
            "zero,back:2,two-scalers,update",
            "two-scalers,update,zero,back:2,inf,scalers-cross@1",
        ),
    ),
    "lacks": Family(
        kinds=f"{_CORE} inf",
        always="lacks",
        world_size=2,
        shapes=("zero,back:2,step,step:1,update",),
    ),
    "inference": Family(
        start="back:2",
        kinds="step unscale inf update",
        always="inference",
        maybe="fused",
        world_size=2,
    ),
    "meshes": Family(  # torch has no fused SGD for DTensors
        kinds=f"{_CORE} unscale clip inf set clear",
        always="dtensor",
        maybe="shared",
        world_size=2,
        shapes=(_ACTOR_CRITIC, _ITERATION, _CLIPPED),
    ),
    "lone": Family(  # no infinities: the ranks are told to skip alone
        kinds=f"{_CORE} clip clip-loose clip-and-step",
        always="dtensor lone",
        world_size=2,
        shapes=(_ITERATION, _CLIPPED),
    ),
    "subclass": Family(
        kinds=f"{_CORE} clip clip-and-step unscale inf set",
        always="subclass",
        maybe="fused shared",
        shapes=(_ITERATION, _CLIPPED),
    ),
    "idle": Family(
        kinds="step clip update inf:0@0",
        always="idle",
        world_size=2,
        shapes=(
            "zero,zero:1,back:2",
            "zero,zero:1,back:2,clip,clip:1,step,step:1,update",
        ),
    ),
    "replicas": Family(
        kinds="step back clip clip-loose update", always="permuted", world_size=4
    ),
    "groups": Family(
        kinds="step back update zero regroup elder inf reload", world_size=2
    ),
    # last: features that plain scalers do not claim to support
    "sparse": Family(
        kinds=f"{_CORE} clip handclip unscale inf", always="sparse", shapes=(_CLIPPED,)
    ),
    "user-scale": Family(
        kinds="step user-scale clip-loose inf unscale update",
        always="fused",
        maybe="fused-second",
        shapes=("zero,zero:1,back:2", "zero,zero:1,back:2,user-scale"),
    ),
    "orders": Family(
        start="back:2,step,step:1,update,back:2",
        kinds="cross inf back update zero",
        maybe="dtensor",
        world_size=2,
    ),
}
"""Families by name; the search gives each an equal share of its time."""


def histories(family: Family) -> st.SearchStrategy[History]:
    """Return hypothesis's strategy for the histories of one family."""
    size = family.world_size
    call = st.one_of(*(_drawn(kind, size) for kind in family.kinds.split()))
    part = call.map(lambda call: (call,))
    if family.shapes:
        # mostly single calls, which break the known order of the shapes
        shapes = [_shape(_parse_calls(each, size)) for each in family.shapes]
        part = st.one_of(part, part, st.one_of(*shapes))
    words = [st.sampled_from(("", word)) for word in family.maybe.split()]
    always = frozenset(family.always.split())
    start = _parse_calls(family.start, size)
    return st.builds(
        lambda drawn, parts: History(
            always.union(filter(None, drawn)),
            size,
            (*start, *(call for each in parts for call in each))[:MAX_CALLS],
        ),
        st.tuples(*words),
        st.lists(part, min_size=1, max_size=MAX_CALLS),
    )


def _drawn(text: str, world_size: int) -> st.SearchStrategy[Call]:
    if ":" in text or "@" in text:
        return st.just(_parse_call(text, world_size))
    ranks = world_size if text in ON_ONE_RANK else 1
    return st.builds(
        Call, st.just(text), st.sampled_from(NUMBERS[text]), st.integers(0, ranks - 1)
    )


def _shape(calls: tuple[Call, ...]) -> st.SearchStrategy[tuple[Call, ...]]:
    # left out first: what a shape shrinks to
    kept = [st.sampled_from((None, *[call] * 9)) for call in calls]
    return st.tuples(*kept).map(lambda drawn: tuple(filter(None, drawn)))
