"""Programs: the oracle finds planted faults and accuses no right scaler."""

import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from gradparity.conformance.search.call_histories import (
    CallSearchSettings,
    parse_drawn,
    search_histories,
)
from gradparity.conformance.search.oracle import Call
from gradparity.conformance.search.program import (
    FAMILIES,
    Program,
    parse_program,
    programs,
)
from gradparity.conformance.search.replica import norm_of
from gradparity.conformance.search.tracks import Track, tracks_of
from gradparity.fixtures.faulty import PlainScaler

TORCH = "torch.amp:GradScaler"
OURS = "gradparity.scaler:GradScaler"
PLAIN = "gradparity.fixtures.faulty:PlainScaler"
HERE = str(Path(__file__).parent)


# - Planted scalers: right in torch's own loops, each wrong in one class of programs


class DividesEachParameterOnce(torch.amp.GradScaler):
    """Leaves a parameter that another optimizer has divided, fresh gradient or not."""

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
    """Takes a gradient that was zeroed in place for an accumulation."""

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
    """Divides by the scale of the last scaled loss that wanted a gradient."""

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
    """Clips rightly, by its own method."""

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
    """Takes the norm of sparse values as they come."""

    def norm(self, grads: list[torch.Tensor], order: float) -> torch.Tensor:
        return super().norm([g._values() if g.is_sparse else g for g in grads], order)


class TakesPowersAsTheyAre(_Clips):
    """Sums powers of gradients, which overflow."""

    def norm(self, grads: list[torch.Tensor], order: float) -> torch.Tensor:
        powers = torch.stack([(g * 2.0**20).abs().pow(order).sum() for g in grads])
        return powers.sum().pow(1 / order) / 2.0**20


class KeepsTheUsersScale(torch.amp.GradScaler):
    """Hands a user's grad_scale to the next step, too, after a skipped one."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        kept = getattr(optimizer, "grad_scale", None)
        grads = [p.grad for g in optimizer.param_groups for p in g["params"]]
        bad = any(g is not None and not bool(g.isfinite().all()) for g in grads)
        result = super().step(optimizer, *args, **kwargs)
        if bad and kept is not None:
            optimizer.grad_scale = kept
        return result


class ScalesGradientsBack(torch.amp.GradScaler):
    """Divides gradients for the step only."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().step(optimizer, *args, **kwargs)
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(self.get_scale())
        return result


class WantsToHash(torch.amp.GradScaler):
    """Keeps optimizers in a dictionary."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.last = {optimizer: True}
        return super().step(optimizer, *args, **kwargs)


class StepsTheFirstFirst(PlainScaler):
    """`step_together` steps before it has looked at all."""

    def step_together(self, *optimizers: Any) -> None:
        for optimizer in optimizers:
            self.step(optimizer)


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
    """Clips by the norm of what this rank holds."""

    def clip_grad_norm_(
        self, optimizer: Any, max_norm: float, norm_type: float = 2.0
    ) -> float:
        self.unscale_(optimizer)
        grads = list(self.gradients(optimizer))
        norm = float(torch.nn.utils.get_total_norm(grads, norm_type))
        for gradient in grads:
            gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))
        return norm


class HangsOnOneRank(PlainScaler):
    """Its first rank asks twice after an overflow of its own."""

    def agree(self, found: bool) -> bool:
        if found and torch.distributed.get_rank() == 0:
            super().agree(found)
        return super().agree(found)


class DividesByVersion(torch.amp.GradScaler):
    """Leaves a gradient that it has divided and whose version is still the same."""

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
    """Takes gradients for divided if the division has raised."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().step(optimizer, *args, **kwargs)
        except Exception:
            state = self._per_optimizer_states[id(optimizer)]
            state["stage"] = torch.amp.grad_scaler.OptState.UNSCALED
            raise


class RefusesLongIntervals(torch.amp.GradScaler):
    """Counts in 32 bits."""

    def __init__(self, **settings: Any) -> None:
        if settings["growth_interval"] >= 2**31:
            raise ValueError("more than int32 holds")
        super().__init__(**settings)


class ReadsGroupsAsDicts(torch.amp.GradScaler):
    """Asks groups for names that torch's scaler never asks for."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.names = [group.get("name") for group in optimizer.param_groups]
        return super().step(optimizer, *args, **kwargs)


class ReadsStatesAsDicts(torch.amp.GradScaler):
    """Asks the states of a fused optimizer for their momentum."""

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        states = getattr(optimizer, "state", {}).values()
        self.momenta = [state.get("momentum_buffer") for state in states]
        return super().step(optimizer, *args, **kwargs)


class FindsInTheDefaultDtype(torch.amp.GradScaler):
    """Makes found_inf without a dtype."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, *rest: Any) -> Any:
        found = super()._unscale_grads_(optimizer, inv_scale, *rest)
        return {device: torch.tensor(float(flag)) for device, flag in found.items()}


class LooksForWrappers(torch.amp.GradScaler):
    """Follows attributes that have groups, for ever."""

    def inner(self, optimizer: Any) -> Any:
        for value in vars(optimizer).values():
            if getattr(value, "param_groups", None) is optimizer.param_groups:
                return self.inner(value)
        return optimizer

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.inner(optimizer)
        return super().step(optimizer, *args, **kwargs)


PLANTED = {
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
    "StepsTheFirstFirst": "@1/back:2,inf:1,together",
    "ForgetsOnRegroup": "@2/elder@1",
    "TakesTheNormHere": "dtensor@2/back,clip",
    "HangsOnOneRank": "@2/back:2,inf,step",
}


def judged(scaler: str, database: Path, **settings: Any) -> tuple[int, str]:
    output = io.StringIO()
    spec = scaler if ":" in scaler else f"test_search:{scaler}"
    code = search_histories(
        CallSearchSettings(
            scaler=spec, folder=HERE, database=str(database), timeout_s=8.0, **settings
        ),
        Console(file=output, width=200),
    )
    return code, output.getvalue()


@pytest.mark.parametrize("scaler", sorted(PLANTED))
def test_a_planted_fault_is_found(scaler: str, tmp_path: Path) -> None:
    code, output = judged(scaler, tmp_path, history=parse_program(PLANTED[scaler]))
    assert code == 1, output


def test_ranks_in_another_order_are_found(tmp_path: Path) -> None:
    """The plain scaler has that fault: nothing says which optimizer a vote is for."""
    history = parse_program("@2/back:2,step,step:1,update,back:2,inf,cross@1")
    code, output = judged(PLAIN, tmp_path, history=history)
    assert code == 1 and "should be" in output, output


FOLLOWED = [
    # what a rank has begun ends with its own update where it trains alone
    "@2/back:2,step,elder,update",
    # divided with the other optimizer's, and never stepped with
    "shared@2/back:2,inf:1,clip:1,update,clip",
    # an infinity after the look: update does not hear of it, on the idle rank either
    "idle@2/back:2,step,inf,update",
    # an infinity on the other rank, which is still there when gradients are added
    "@2/back:2,inf,clip,set:-4,back:2,unscale",
    # one gradient as mathematics has it, the other, left over, as torch has it
    "shared@1/back:2,step:1,zero:1,step,update,back:2,step:1,unscale",
    # clipped by hand after the scaler's own clip
    "fused@1/back,clip,handclip,step",
    "fused@1/back:2,clip,zero,back:2,step",
    # a backward onto what a clip or unscale_ has divided, in more roundabout ways
    "fused@1/back:2,clip-loose,update,back:2,set:-4,clip-loose",
    "fused+shared@1/gback:2,clip,gback:1,clip:1",
    "fused@2/back:2,clip,reload,back:2,clip",
    # torch is right there only because it takes a wrapper for another optimizer
    "wrapped@1/back:2,unscale,zero,back:2,clip",
    # a norm over one gradient as mathematics and one as torch has it
    "shared@1/gback:2,handclip:1,zero,gback:2,step,clip:1",
    # a clip that overflows leaves the gradients as they are, and torch divides them
    "shared@2/back:2,inf,clip,step,update,unscale:1",
    # clipped by hand while a kernel still has to divide it: wrong in torch, too
    "fused+shared@1/gback:2,clip,handclip:1,step:1",
    # nan in all three
    "@1/back:2,clip:1,zero:1,back:2,inf:1,handclip:1,step:1",
    "fused@2/back:2,set:-4,retry",
]
# torch's kernel leaves a shared gradient as it is only if it skips
SKIPPED_KERNEL = "fused+shared@1/back:2,inf,step,step:1"
# histories in which our scaler once divided a gradient twice or never
DIVIDED_ONCE = [
    # backwards write through a DTensor, not through its local tensor
    "dtensor+shared@2/back:2,step,back:2,unscale:1",
    "dtensor+shared@2/back:2,step,clear,back:2,step:1",
    # left to a kernel
    "fused@1/back:2,clip,clear,back:2,update,step",
    "fused+wrapped@1/back:2,clip-inner,step",
    "fused@1/back:2,clip,retry",
    "fused@2/back:2,clip,clip:1,retry,update,back:2,step",
    # views of one buffer, of which one is written to
    "buckets+fused@1/back:2,clip,clip:1,step,step:1",
    "buckets+fused@1/back:2,clip,unscale:1,handclip:1,step,step:1",
    "buckets+fused-second@1/back:2,clip,update,clip:1,handclip,step:1",
    "buckets+fused@1/back,step,zero,update,back:2,clip,clip:1,step,step:1",
    "buckets+fused@1/back:2,clip,handclip:1,step",
    # left to a kernel and replaced, while the user keeps the old ones
    "fused@1/back:2,clip,replace,step",
    # left to a kernel and dropped: another optimizer may step
    "fused@1/back:2,clip-inner,zero,back:2,step:1",
]


@pytest.mark.parametrize(
    ("scaler", "text"),
    [
        *((OURS, text) for text in [*FOLLOWED, *DIVIDED_ONCE]),
        *((scaler, SKIPPED_KERNEL) for scaler in (PLAIN, TORCH, OURS)),
    ],
)
def test_a_right_scaler_follows_what_once_departed(
    scaler: str, text: str, tmp_path: Path
) -> None:
    code, output = judged(scaler, tmp_path, history=parse_program(text))
    assert code == 0, output


@pytest.mark.parametrize("text", sorted(PLANTED.values()))
def test_a_right_scaler_passes_there(text: str, tmp_path: Path) -> None:
    spec = PLAIN if "@2" in text else TORCH
    code, output = judged(spec, tmp_path, history=parse_program(text))
    assert code == 0, output


def test_a_scaler_need_not_report_its_growth_tracker(tmp_path: Path) -> None:
    spec = "gradparity.fixtures.faulty:KeepsItsTrackerToItself"
    program = parse_program("@2/back,step,inf,update,back,step,update,reload,back,step")
    code, output = judged(spec, tmp_path, history=program)
    assert code == 0, output


ALONE = [name for name, family in FAMILIES.items() if family.world_size == 1]
UNKNOWN_TO_PLAIN = {
    *("sparse", "complex", "user-scale", "many", "orders"),
    *("failures", "two-scalers"),
    "autograd",  # slow
}
"""Families in which the fixtures' plain scaler is not right."""


@pytest.mark.slow
@pytest.mark.usefixtures("counted_budget")
def test_torchs_own_class_is_never_accused_on_one_rank(tmp_path: Path) -> None:
    families = [name for name in ALONE if name not in ("many", "autograd", "compiled")]
    code, output = judged(TORCH, tmp_path, families=families, budget_s=25)
    assert code == 0, output
    assert int(output.splitlines()[-1].split()[0]) > 100, output


@pytest.mark.slow
@pytest.mark.usefixtures("counted_budget")
def test_a_plain_scaler_is_never_accused(tmp_path: Path) -> None:
    families = [name for name in FAMILIES if name not in UNKNOWN_TO_PLAIN]
    code, output = judged(PLAIN, tmp_path, families=families, budget_s=25)
    assert code == 0, output
    assert int(output.splitlines()[-1].split()[0]) > 100, output


@pytest.mark.usefixtures("counted_budget")
def test_a_fault_is_found_by_itself_and_shrunk(tmp_path: Path) -> None:
    code, output = judged(
        "DividesEachParameterOnce", tmp_path, families=["shared"], budget_s=600
    )
    assert code == 1, output
    text = output.splitlines()[1].rpartition("--history ")[2]
    program = parse_program(text)
    assert program.words == {"shared"}
    assert len(program.calls) <= 8


# - The oracle in one process


def outcomes(text: str) -> tuple[list[Any], list[Any]]:
    """What mathematics and torch come to in a program of one rank."""
    program = parse_program(text)
    tracks = tracks_of(program)[:2]
    seen: dict[int, list[Any]] = defaultdict(list)
    for call in program.calls:
        for number, each in enumerate(tracks):
            seen[number].append(each.make(call)[0])
    return seen[0], seen[1]


@pytest.mark.parametrize(
    ("text", "e", "of_torch"),
    [
        ("shared@1/back:2,step,zero:1,back:2,step:1", -1.0, -1.0),
        ("shared@1/back:2,step,step:1", -1.0, -0.5 - 0.5 / 1024),
        ("@1/back,set:6,back,step", -1.0, -(0.5 * 1024 + 0.5 * 64) / 64),
        ("fused@1/back,user-scale,step", -0.125, -0.125),
        ("@1/back,inf,step,update,zero,back,step", -0.5, -0.5),
    ],
)
def test_the_two_oracles_give_the_expected_weights(
    text: str, e: float, of_torch: float
) -> None:
    mathematics, torchs = outcomes(text)
    assert mathematics[-1].state["e"].tolist() == [e] * 3
    assert torchs[-1].state["e"].tolist() == [of_torch] * 3


def test_mathematics_moves_the_scale_as_torch_does() -> None:
    text = "@1/" + ",".join(["zero,back,step,update"] * 5 + ["back,inf,step,update"])
    mathematics, torchs = outcomes(text)
    for ours, theirs in zip(mathematics, torchs, strict=True):
        assert ours.state["the scale"] == theirs.state["the scale"]
        assert ours.state["the growth tracker"] == theirs.state["the growth tracker"]
    scales = {seen.state["the scale"] for seen in mathematics}
    assert scales == {1024.0, 2048.0, 4096.0}, "the rule was not moved"


@pytest.mark.parametrize(
    ("words", "world", "want"),
    [
        ("", 1, (3 * 0.5**2 + 3 * 0.25**2) ** 0.5),
        ("", 2, (3 * 0.5**2 + 3 * 0.25**2) ** 0.5),
        ("dtensor", 2, (3 * 0.5**2 + 3 * 0.25**2) ** 0.5),
        ("permuted", 4, (3 * 0.5**2 + 3 * 0.25**2) ** 0.5),
        ("sparse", 1, (3 * 0.5**2 + 3 * 0.25**2) ** 0.5),
        ("complex", 1, (6 * 0.5**2 + 6 * 0.25**2) ** 0.5),
    ],
)
def test_the_norm_counts_each_element_once(words: str, world: int, want: float) -> None:
    program = parse_program(f"{words}@{world}/back,clip-loose")
    sides: Track = tracks_of(program)[0]
    for call in program.calls:
        seen = sides.make(call)
    assert [each.value for each in seen] == pytest.approx([want] * world)


def test_a_norm_does_not_overflow() -> None:
    large = [torch.tensor([2.0**531, 2.0**531], dtype=torch.float64)]
    assert norm_of(large, 2.0) == pytest.approx(2.0**531.5)
    assert norm_of(large, 64.0) == pytest.approx(2.0 ** (531 + 1 / 64))
    assert norm_of([torch.tensor([0.0])], 2.0) == 0.0
    assert norm_of([torch.tensor([float("inf")])], 2.0) == float("inf")


# - Text and drawing


@settings(max_examples=200, database=None, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)).flatmap(programs))
def test_a_program_is_read_as_it_is_written(program: Program) -> None:
    assert parse_program(str(program)) == program
    assert parse_drawn(str(program), 1) == program


def test_a_line_without_a_set_up_is_a_history_of_calls() -> None:
    assert parse_drawn("step:1", 2) == (Call("step", 1),)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nothing@1/step", "unknown program"),
        ("shared/step", "unknown program"),
        ("@0/step", "unknown program"),
        ("@1/leap", "unknown call"),
        ("@1/step:2", "the number must be one of"),
        ("@2/inf:0@2", "the rank below 2"),
    ],
)
def test_a_wrong_program_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_program(text)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown family 'none'"):
        CallSearchSettings(scaler=TORCH, folder=".", families=["none"])
