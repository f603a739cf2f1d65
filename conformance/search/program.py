"""Programs: calls that a user's training loop makes, as one short line.

A program is a set-up (words such as ``shared+fused``), a number of ranks and a list of
calls. Two optimizers train three parameters with linear losses: optimizer 0 has ``e``
and ``a``, optimizer 1 has ``b``, and ``e`` too if the set-up says ``shared``. All
gradients are powers of two, so that right results are exact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import strategies as st

from ..status import UsageError
from .oracle import Call, history_text

__all__ = [
    "ACTS",
    "FAMILIES",
    "WORDS",
    "Family",
    "Program",
    "parse_program",
    "programs",
]

WORDS = {
    "shared": "both optimizers hold parameter e",
    "fused": "optimizer 0 is fused",
    "fused-second": "optimizer 1 is fused",
    "fp64": "parameters of fp64, with gradients around 1e160",
    "sparse": "parameters of optimizer 0 get sparse gradients, not coalesced",
    "complex": "parameters of optimizer 0 are complex",
    "many": "optimizer 0 holds 20,000 parameters more",
    "scale-20": "the first scale is 2^20",
    "scale-120": "the first scale is 2^120",
    "buckets": "the new gradients of a backward are views of one buffer, as with FSDP2",
    "duck": "optimizer 0 is no torch optimizer: unhashable, with slots",
    "wrapped": "optimizer 0 is stepped through a wrapper that shares its param_groups",
    "dtensor": "parameters are DTensors: sharded, replicated, sharded",
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
}
"""Words of a set-up."""

ACTS = {
    "back": "backward of a loss of the parameters of optimizer 0 or 1; 2: of both",
    "cback": "the same, with scale() in a compiled function",
    "gback": "the same, with create_graph=True",
    "seed": "the same, with a scaled first gradient in place of a scaled loss",
    "autograd": "the same, under compiled autograd",
    "zero": "zero_grad(set_to_none=True) of an optimizer",
    "clear": "zero_grad(set_to_none=False) of an optimizer",
    "inf": "an infinity in the gradient of a or b, on one rank",
    "data": "new scaled gradients for an optimizer, written through .data",
    "unscale": "unscale_(optimizer)",
    "look": "read an optimizer's gradients, after unscale_ or a clip",
    "handclip": "torch.nn.utils.clip_grad_norm_ of an optimizer's parameters",
    "replace": "other gradients for an optimizer, unscaled; the old ones stay alive",
    "clip": "clip_grad_norm_(optimizer, 1/8)",
    "clip-loose": "clip_grad_norm_(optimizer, 2^600)",
    "clip-tiny": "clip_grad_norm_(optimizer, 1e-7)",
    "clip-order": "clip_grad_norm_(optimizer, 1/8, norm_type=64)",
    "clip-inner": "clip_grad_norm_(the optimizer in the wrapper, 1/8)",
    "clip-and-step": "clip_and_step(optimizer, 1/8)",
    "user-scale": "optimizer.grad_scale = 4, if it is fused",
    "step": "step(optimizer)",
    "retry": "step(optimizer), whose first hook raises, and again",
    "fail": "step(optimizer), which one rank cannot read; caught, batch dropped",
    "closure": "step(optimizer, closure=...)",
    "together": "step_together(both)",
    "cross": "step both, in the other order on one rank",
    "lone-clip": "step(optimizer), and clip_grad_norm_ before it on one rank",
    "two-scalers": "step with both scalers",
    "scalers-cross": "the same, in the other order on one rank",
    "skipped": "step_was_skipped(optimizer), if it has been stepped",
    "scheduler": "step_scheduler(scheduler of optimizer), if it has been stepped",
    "update": "update()",
    "set": "update(2^n)",
    "reload": "go on with a new scaler, loaded from state_dict()",
    "regroup": "destroy the process group and make it again",
    "elder": "regroup; one rank trains alone in between, then all load one state",
}
"""Calls of a program; those that a scaler does not offer are left out."""

SCALES = (-4, 0, 6, 12)
"""log2 of the scales that a user sets."""
MAX_CALLS = 24
_CALL = re.compile(r"(?P<kind>[a-z-]+)(:(?P<which>-?\d+))?(@(?P<rank>\d+))?")
_PROGRAM = re.compile(r"(?P<words>[a-z0-9+-]*)@(?P<world_size>\d+)/(?P<calls>.*)")


@dataclass(frozen=True)
class Program:
    """A set-up and the calls that are made on it."""

    words: frozenset[str]
    """Keys of :data:`WORDS`."""
    world_size: int
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        words = "+".join(sorted(self.words))
        return f"{words}@{self.world_size}/{history_text(self.calls)}"


def parse_program(text: str) -> Program:
    """Read what ``str(program)`` wrote.

    Raises:
        UsageError: ``text`` has another form; says what was got and expected.
    """
    match = _PROGRAM.fullmatch(text)
    words = frozenset(filter(None, match["words"].split("+"))) if match else frozenset()
    if (
        match is None
        or not words <= WORDS.keys()
        or not 1 <= int(match["world_size"]) <= 8
    ):
        raise UsageError(
            f"unknown program {text!r}: expected WORD+WORD@RANKS/CALL,CALL with words "
            f"of {', '.join(WORDS)}, for example shared@1/back:2,step"
        )
    world_size = int(match["world_size"])
    calls = tuple(_parse_call(part, world_size) for part in match["calls"].split(","))
    return Program(words, world_size, calls)


def _parse_call(text: str, world_size: int) -> Call:
    match = _CALL.fullmatch(text)
    if match is None or match["kind"] not in ACTS:
        raise UsageError(
            f"unknown call {text!r}: expected KIND:NUMBER@RANK with KIND one of "
            f"{', '.join(ACTS)}, for example step:1"
        )
    call = Call(match["kind"], int(match["which"] or 0), int(match["rank"] or 0))
    if call.rank >= world_size or call.which not in _numbers(call.kind):
        raise UsageError(
            f"call {text!r}: the number must be one of {_numbers(call.kind)} and the "
            f"rank below {world_size}"
        )
    return call


def _numbers(kind: str) -> tuple[int, ...]:
    """Numbers permitted after the colon."""
    # the first number is what a drawn call shrinks to
    if kind in ("back", "cback", "gback", "seed", "autograd"):
        return (2, 0, 1)
    if kind == "set":
        return SCALES
    if kind in (
        *("update", "reload", "regroup", "elder", "together", "cross"),
        *("two-scalers", "scalers-cross"),
    ):
        return (0,)
    return (0, 1)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Programs with common features; each family is searched for a departure."""

    kinds: str
    """Kinds of calls, the first is what calls shrink to."""
    always: str = ""
    """Words of each set-up."""
    maybe: str = ""
    """Words of some set-ups."""
    world_size: int = 1
    start: str = ""
    """How each begins."""
    shapes: tuple[str, ...] = ()
    """Runs of calls that are drawn as one: whole iterations of known algorithms."""


_ITERATION = "back:2,step,step:1,update"
_GAN = "back:2,step:1,zero:1,back:2,step,update"
_ACTOR_CRITIC = "back:2,step,zero:1,back:2,step:1,update"
_CLIPPED = "back:2,clip,step,update"
_CORE = "step back zero update"

FAMILIES: Mapping[str, Family] = {
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
        kinds=f"{_CORE} unscale clip clip-inner inf retry",
        always="wrapped",
        maybe="fused",
    ),
    "together": Family(
        start="back:2", kinds="together unscale inf update", always="shared"
    ),
    "experts": Family(kinds="together back zero update inf unscale"),
    "answers": Family(
        kinds=f"{_CORE} skipped scheduler inf", maybe="fused", shapes=(_ITERATION,)
    ),
    "many": Family(kinds=f"{_CORE} unscale clip inf", always="many", maybe="fused"),
    "ranks": Family(
        kinds=f"{_CORE} unscale clip inf reload set retry",
        maybe="fused",
        world_size=2,
        shapes=(_GAN, _ITERATION, _CLIPPED),
    ),
    "failures": Family(
        start="back:2",
        kinds="step back fail:0@1 update zero inf",
        maybe="fused",
        world_size=2,
        shapes=("zero,back:2,fail@1,back:2,step,update", "fail:1@1,back:2,step,step:1"),
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
"""By name; the search gives each an equal share of its time."""


def programs(name: str) -> st.SearchStrategy[Program]:
    """Programs of one family."""
    family = FAMILIES[name]
    calls = [_calls_of(kind, family.world_size) for kind in family.kinds.split()]
    part = st.one_of(*calls).map(lambda call: (call,))
    if family.shapes:
        shape = st.sampled_from(
            [
                tuple(_parse_call(c, family.world_size) for c in shape.split(","))
                for shape in family.shapes
            ]
        )
        # mostly single calls, which break the known order of the shapes
        part = st.one_of(part, part, shape)
    words = [st.sampled_from(("", word)) for word in family.maybe.split()]
    always = frozenset(family.always.split())
    start = tuple(
        _parse_call(c, family.world_size)
        for c in family.start.split(",")
        if family.start
    )
    return st.builds(
        lambda drawn, parts: Program(
            always.union(filter(None, drawn)),
            family.world_size,
            (*start, *(call for each in parts for call in each))[:MAX_CALLS],
        ),
        st.tuples(*words),
        st.lists(part, min_size=1, max_size=MAX_CALLS),
    )


def _calls_of(text: str, world_size: int) -> st.SearchStrategy[Call]:
    if ":" in text or "@" in text:
        return st.just(_parse_call(text, world_size))
    kind = text
    on_one_rank = ("inf", "cross", "elder", "fail", "lone-clip", "scalers-cross")
    ranks = world_size if kind in on_one_rank else 1
    return st.builds(
        Call,
        st.just(kind),
        st.sampled_from(_numbers(kind)),
        st.integers(0, ranks - 1),
    )
