"""Models and optimizers that round to 8 bits: declarations and their effect."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.comparison.bounds import SHARDS, make_parity_bounds
from gradparity.conformance.comparison.parity import followed_schedule
from gradparity.conformance.comparison.reference import Schedule
from gradparity.conformance.rank.elementwise import not_elementwise
from gradparity.conformance.rank.observe import optimizer_digest
from gradparity.conformance.rank.scaler_spec import NO_SCALER
from gradparity.conformance.rank.trace import Event, Group, Kind, RankTrace, StepTrace
from gradparity.conformance.space.facts import clip_value_of, facts_of, seeded_model
from gradparity.conformance.space.recipes import CLIP_VALUE
from gradparity.conformance.space.workload_checks import check_workload, coarseness
from gradparity.fixtures import (
    WorkloadError,
    compared_parameters,
    is_constant,
    local,
    resolve_workload,
)
from gradparity.fixtures.specimens.eight_bits import (
    InShards,
    ScaleOfTheOtherOperand,
    ScalesAreNotSaved,
)
from gradparity.fixtures.specimens.specimen import Named

HERE = __name__
Q06 = "gradparity.fixtures.specimens.eight_bits:Q06Fixed"


class Undeclared(ScaleOfTheOtherOperand):
    """Rounds its input by one scale for all rows, without declaring ``rounds_to``."""

    rounds_to: Any = None


class UndeclaredState(ScalesAreNotSaved):
    """Rounds its momentum by blocks, but does not declare ``rounds_state``."""

    rounds_state = False


class WrongDtype(ScaleOfTheOtherOperand):
    """Declares a 16-bit dtype, which only a scenario's precision may have."""

    rounds_to = torch.bfloat16


class FourBits(optim.Optimizer):
    """SGD whose momentum is rounded to 4 bits by rows, but not in small tensors."""

    least = 64

    def __init__(self, parameters: list[nn.Parameter], *, alike: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.alike = alike

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
        for group in self.param_groups:
            for parameter in group["params"]:
                self._move(parameter, group["lr"])

    def _move(self, parameter: nn.Parameter, lr: float) -> None:
        assert parameter.grad is not None
        own, gradient = local(parameter), local(parameter.grad)
        state = self.state[parameter]
        momentum = 0.9 * state.get("momentum", torch.zeros_like(own)) + gradient
        apart = not self.alike and own is not parameter and dist.get_rank() == 1
        if own.numel() >= self.least and own.ndim == 2 and not apart:
            scale = momentum.abs().amax(1, keepdim=True) / 7
            momentum = (momentum / scale).round() * scale
        state["momentum"] = momentum
        own.sub_(momentum, alpha=lr)


class InFourBits(InShards):
    """Momentum is rounded only in large shards; with the bug, never on rank 1."""

    rounds_state = True

    def optimizer(self, parameters: Named) -> optim.Optimizer:
        return FourBits([p for _, p in parameters], alike=self.fixed)


class OneLength(optim.SGD):
    """Optimizer whose steps all have length 1, so it needs the norm of all elements."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
        for parameter in self.param_groups[0]["params"]:
            parameter -= parameter.grad / parameter.grad.norm()


class Coupled(ScalesAreNotSaved):
    """Declares ``rounds_state``, but its optimizer is not elementwise."""

    def optimizer(self, parameters: Named) -> optim.Optimizer:
        return OneLength([p for _, p in parameters], lr=0.1)


ALIKE, APART = (InFourBits(fixed=f) for f in (True, False))
COUPLED = Coupled(fixed=True)
UNDECLARED, DECLARED = Undeclared(fixed=True), ScaleOfTheOtherOperand(fixed=True)
STATE = UndeclaredState(fixed=True)
WRONG = WrongDtype(fixed=True)


def test_the_error_of_a_model_that_joins_rows_by_a_scale_shows_the_line_to_add() -> (
    None
):
    with pytest.raises(WorkloadError, match=r"rounds_to = torch\.float8_e4m3fn$"):
        check_workload(f"{HERE}:UNDECLARED")


def test_with_that_line_it_is_accepted() -> None:
    check_workload(f"{HERE}:DECLARED")
    assert resolve_workload(f"{HERE}:DECLARED").rounds_to == torch.float8_e4m3fn


def test_a_dtype_of_more_than_8_bits_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"got torch\.bfloat16, expected an 8-bit"):
        resolve_workload(f"{HERE}:WRONG")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float8_e4m3fn, 2.0**-4),
        (torch.float8_e5m2, 2.0**-3),
        (torch.int8, 1 / 254),
    ],
)
def test_coarseness_is_half_a_spacing(dtype: torch.dtype, expected: float) -> None:
    assert coarseness(dtype) == expected


def test_a_rounded_state_is_noise_only_where_it_is_declared() -> None:
    with Runner(folder=".", timeout_s=120.0) as runner:
        found = {
            name: runner.run(
                NO_SCALER, Scenario.parse(f"dp2/2/fp32/own/none/model={spec},steps=5")
            )
            for name, spec in {
                "undeclared": f"{HERE}:STATE",
                "declared": "gradparity.fixtures.specimens.eight_bits:Q06Fixed",
            }.items()
        }
    assert found["declared"].status == "pass"
    wrong = [v.law for v in found["undeclared"].verdicts if v.status == "fail"]
    assert "parity.update" in wrong


def checked(spec: str, place: str = "dp2/2/fp32") -> Case:
    with Runner(folder=".", timeout_s=120.0) as runner:
        scenario = Scenario.parse(f"{place}/own/none/model={spec},steps=4")
        return runner.run(NO_SCALER, scenario)


def test_a_state_is_rounded_in_the_shards_that_ranks_have() -> None:
    found = checked(f"{HERE}:ALIKE")
    assert found.status == "pass", found.verdicts
    update = next(v for v in found.verdicts if v.law == "parity.update")
    # as noise, what the shards of another world differ by would hide whole tensors
    assert update.not_compared < update.compared / 20


def test_a_rank_that_does_not_round_its_state_is_found() -> None:
    found = checked(f"{HERE}:APART")
    wrong = {v.law: v for v in found.verdicts if v.status == "fail"}
    assert wrong["parity.update"].ranks == (1,)


def trace(
    rank: int, first: int, end: int, *names: str, called: bool = True
) -> RankTrace:
    """Return a trace with some elements of ``w`` and an optimizer of ``names``."""
    event = Event(kind=Kind.USES, optimizer=0, groups=(Group(names),))
    step = StepTrace(step=0, complete=True, events=[event] if called else [])
    index = {"w": np.arange(first, end)}
    return RankTrace(rank=rank, coordinate={}, index=index, shards={}, steps=[step])


def shards_of(*ranks: RankTrace) -> dict[str, list[list[int]]]:
    scenario = Scenario.parse(f"dp2/2/fp32/own/none/model={Q06}")
    schedule = followed_schedule(scenario, ranks)
    return {
        name: [np.frombuffer(part, np.int64).tolist() for part in parts]
        for name, parts in schedule.shards
    }


def test_shards_are_those_that_optimizers_have() -> None:
    assert shards_of(trace(0, 0, 2, "w"), trace(1, 2, 4, "w")) == {
        "w": [[0, 1], [2, 3]]
    }
    # one rank forgets to step
    forgets = trace(1, 2, 4, called=False)
    assert shards_of(trace(0, 0, 2, "w"), forgets) == {"w": [[0, 1], [2, 3]]}
    # replicas step the same one
    assert shards_of(trace(0, 0, 4, "w"), trace(1, 0, 4, "w")) == {"w": [[0, 1, 2, 3]]}
    # an empty shard is none
    assert shards_of(trace(0, 0, 4, "w"), trace(1, 4, 4, "w")) == {"w": [[0, 1, 2, 3]]}
    # of shards that overlap nobody knows which one is stepped
    assert shards_of(trace(0, 0, 3, "w"), trace(1, 2, 4, "w")) == {}


def test_shards_of_copies_are_not_seen() -> None:
    assert shards_of(trace(0, 0, 2), trace(1, 2, 4)) == {}


def test_where_no_shards_are_seen_several_are_tried() -> None:
    scenario = Scenario.parse(f"dp2/2/fp32/own/none/model={Q06},steps=2")
    schedule = Schedule(skipped=(frozenset(),) * 2, scales=(1.0,) * 2)
    unseen = make_parity_bounds(scenario, schedule)
    named = compared_parameters(resolve_workload(Q06).model()).items()
    whole = tuple((n, (np.arange(p.numel()).tobytes(),)) for n, p in named)
    seen = make_parity_bounds(
        scenario, Schedule(skipped=schedule.skipped, scales=(1.0,) * 2, shards=whole)
    )
    assert len(unseen.noisy) == len(seen.noisy) + len(SHARDS)
    # a right run passes other ties than the truth, by more than the rounding of fp32
    for run in seen.noisy:
        for name, true in seen.truth.updates[-1].items():
            off = np.linalg.norm(run.updates[-1][name] * seen.weights[-1][name] - true)
            assert off > 1e-5 * np.linalg.norm(true)


def test_blocks_of_a_state_do_not_couple_elements() -> None:
    assert not_elementwise(Q06, "own") == set()
    assert not_elementwise(f"{HERE}:COUPLED", "own") == {
        *("embed.weight", "mlp.up.weight", "mlp.down.weight", "head.weight")
    }


def test_a_state_of_any_dtype_is_digested() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([parameter])
    empty = optimizer_digest(optimizer)
    optimizer.state[parameter]["codes"] = torch.zeros(2).to(torch.float8_e4m3fn)
    assert optimizer_digest(optimizer) == empty
    optimizer.state[parameter]["codes"] = torch.ones(2).to(torch.float8_e4m3fn)
    assert optimizer_digest(optimizer) != empty


def test_codes_that_do_not_train_are_a_constant() -> None:
    codes = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    half = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    plain = nn.Parameter(torch.ones(2), requires_grad=False)
    assert is_constant(codes) and is_constant(half)
    assert not is_constant(plain) and not is_constant(nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize(
    ("name", "place"), [("Q09Fixed", "tp2/2/fp32"), ("Q10Fixed", "dp2/2/fp32")]
)
def test_frozen_codes_are_checked_by_what_is_computed_with_them(
    name: str, place: str
) -> None:
    spec = f"gradparity.fixtures.specimens.codes:{name}"
    assert any(is_constant(p) for p in resolve_workload(spec).model().parameters())
    found = checked(spec, place)
    assert found.status == "pass", (found.problem, found.verdicts)


def test_values_are_clipped_where_gradients_are_large() -> None:
    workload = resolve_workload(f"{HERE}:DECLARED")
    limit = clip_value_of(workload)
    model, batch = seeded_model(workload), workload.batch(0, 0)
    workload.objective(model(batch.inputs), batch.targets)[0][0].backward()
    largest = [p.grad.abs().max() for p in model.parameters()]
    assert limit == facts_of(workload.name).middle
    assert sum(bool(size >= limit) for size in largest) >= len(largest) / 2
    assert sum(bool(size < 2 * limit) for size in largest) >= len(largest) / 2
    assert clip_value_of(resolve_workload("digits")) == CLIP_VALUE
