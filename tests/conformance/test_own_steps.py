"""Unusual training steps: right ones pass, and faults in them are found."""

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.conformance.rank.buffers import saved_buffers
from gradparity.conformance.rank.local_parts import read_local_parts
from gradparity.conformance.rank.modules import INPUT, Boundary, ModuleLog, Passed
from gradparity.conformance.rank.watched_step import _as_called
from gradparity.conformance.rank.worker import observe_rank
from gradparity.conformance.run.failures import why_not_run
from gradparity.conformance.run.launcher import root_cause
from gradparity.conformance.run.recorder import case_record
from gradparity.conformance.space.facts import facts_of
from gradparity.conformance.space.workload_checks import check_workload
from gradparity.fixtures import (
    Batch,
    OfWorkload,
    WorkloadError,
    resolve_workload,
    shortened,
)
from gradparity.fixtures.faulty.own_steps import (
    FAULTY_STEPS,
    RIGHT_STEPS,
    Stepped,
    Steps,
)
from gradparity.fixtures.faulty.plain import Broken
from gradparity.fixtures.faulty.stacks import Base
from gradparity.multiprocess import Cluster, RankOutcome, RankState, WorldError
from gradparity.tests.workloads.steps import Trains


def at(workload: type, where: str) -> Scenario:
    path, _, more = where.partition(",")
    settings = f"model={__name__}:{workload.__name__},steps=2{more and ',' + more}"
    return Scenario.parse(f"{path}/own/none/{settings}")


def checked(runner: Runner, scenario: Scenario) -> Case:
    case = runner.run("none", scenario)
    assert not case.problem
    return case


RIGHT = [  # three ranks take longer
    pytest.param(at, id=stack.__name__, marks=[pytest.mark.slow] * (at[:3] == "dp3"))
    for stack, at in RIGHT_STEPS.items()
]


@pytest.mark.parametrize("where", RIGHT)
@pytest.mark.few(4)
def test_a_right_step_fails_no_check(runner: Runner, where: str) -> None:
    found = {v.law: v for v in checked(runner, Scenario.parse(where)).verdicts}
    assert {v.status for v in found.values()} <= {Status.PASS, Status.SKIPPED}
    for law in ("parity.gradient", "parity.update"):
        assert found[law].status is Status.PASS, found[law]
        assert found[law].compared > found[law].not_compared


@pytest.mark.parametrize(
    "broken", [pytest.param(b, id=s.__name__) for s, b in FAULTY_STEPS.items()]
)
def test_a_faulty_step_is_caught_by_its_check(runner: Runner, broken: Broken) -> None:
    case = checked(runner, Scenario.parse(broken.at))
    failed = [v.law for v in case.verdicts if v.status is Status.FAIL]
    assert broken.law in failed


@pytest.mark.slow
def test_rounding_that_is_zero_by_chance_is_not_exact(runner: Runner) -> None:
    """Some elements of the gradient of the keys' bias are 0 in all references."""
    where = "fsdp/2/fp16-params/adamw/none/model=text,steps=4,seed=37"
    case = checked(runner, Scenario.parse(where))
    assert not [v for v in case.verdicts if v.status is Status.FAIL]


# - What is not seen, and what is clipped by another norm


class StepsTheLastByHand(Trains):
    """No fault: the optimizer leaves out one bias, which train_step moves."""

    clip_norm = 1e9

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in parameters], lr=0.1)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        stack = super().parallelize(model, mesh)
        (group,) = stack.optimizer.param_groups
        stack.kept["last"] = group["params"].pop()
        return stack

    def train_step(self, stack: Any, micro_batches: Any, scaler: Any) -> Any:
        stack.kept["last"].grad = None
        returned = super().train_step(stack, micro_batches, scaler)
        with torch.no_grad():
            stack.kept["last"] -= 0.1 * stack.kept["last"].grad
        return returned


def test_a_gradient_that_is_never_seen_is_inconclusive(runner: Runner) -> None:
    place = "dp2/2/fp32/own/none"
    case = checked(
        runner, Scenario.parse(f"{place}/model={__name__}:StepsTheLastByHand,steps=2")
    )
    (told,) = [v for v in case.verdicts if v.status is Status.INCONCLUSIVE]
    assert (case.status, told.law) == ("inconclusive", "parity.gradient")
    assert "that an optimizer used for 2.bias in any step: it was not" in told.message


class ClipsByTheLargest(Trains):
    """No fault, but the norm is of another order than the reference's."""

    def clip(self, stack: Any) -> Tensor:
        parameters = stack.module.parameters()
        return nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=math.inf)


def test_a_norm_of_another_order_is_named(runner: Runner) -> None:
    place = "dp2/2/fp32/own/none"
    case = checked(
        runner, Scenario.parse(f"{place}/model={__name__}:ClipsByTheLargest,steps=2")
    )
    told = {v.law: v for v in case.verdicts}["norm.reported"]
    assert told.status is Status.FAIL
    assert "That is the norm of order inf, and the reference clips by order 2" in (
        told.message
    )
    assert 'reference = "one rank"' in told.message


# - What the workload cannot do


class OneProcess(Base):
    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return model

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in parameters], lr=1e-2)


class NeedsTwoRanks(Steps):
    def train_step(self, stack: Any, micro_batches: Any, scaler: Any) -> Any:
        if stack.ranks == 1:
            raise ValueError("there is no next stage")
        return super().train_step(stack, micro_batches, scaler)


def test_a_step_that_needs_two_ranks_is_not_tried_on_one(runner: Runner) -> None:
    case = checked(runner, at(NeedsTwoRanks, "dp1/1/fp32"))
    assert case.status is Status.SKIPPED
    assert "train_step: raised ValueError: there is no next stage" in (
        case.verdicts[0].message
    )


class NeverLaidOut(OneProcess):
    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        raise ValueError("no plan")


class NotOnOneRank(Steps):
    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Stepped:
        if mesh.size() == 1:
            raise ValueError("no plan")
        return super().parallelize(model, mesh)


@pytest.mark.parametrize(
    ("workload", "where", "status"),
    [
        (NeverLaidOut, "dp2/2/fp32", Status.ERROR),
        # a scenario of gradparity's own choice is skipped only if others can run
        (NeverLaidOut, "dp1/1/fp32", Status.ERROR),
        (NeverLaidOut, "dp2/2/fp32,recipe=frozen", Status.ERROR),
        (NeverLaidOut, "dp2/2/fp32,recipe=recompute", Status.ERROR),
        (NotOnOneRank, "dp1/1/fp32", Status.SKIPPED),
    ],
)
def test_a_layout_that_always_raises_is_an_error_in_every_recipe(
    runner: Runner, workload: type, where: str, status: Status
) -> None:
    case = runner.run("none", at(workload, where))
    assert case.status is status
    told = case.problem or case.verdicts[0].message
    assert "parallelize: raised ValueError: no plan" in told


@pytest.mark.parametrize(
    ("workload", "spec", "where", "tried"),
    [
        (NeedsTwoRanks, "none", "dp1/1/fp32", False),
        (NeedsTwoRanks, "none", "dp2/2/fp32", True),  # it asked for this mesh itself
        (NeedsTwoRanks, "made.up:Scaler", "dp1/1/fp32", True),
        (OneProcess, "none", "dp1/1/fp32", True),
    ],
)
def test_a_step_that_hangs_on_one_rank_is_not_tried_there(
    workload: type, spec: str, where: str, tried: bool
) -> None:
    hung = RankOutcome(rank=0, state=RankState.HUNG, message="waiting")
    scenario = at(workload, where)
    failure = WorldError((hung,), hung)
    found = why_not_run(failure, spec, scenario, lambda call, *args: call(*args))
    assert found == ("" if tried else "its train_step: rank 0: hung, waiting")


def test_a_step_that_hangs_is_the_workload_s_and_says_where_ranks_wait() -> None:
    stacks = 'Current thread 0x1 (most recent call first):\n  File "{}", line 7 in {}\n'
    waiting = [("/torch/c10d.py", "all_reduce"), ("/my/steps.py", "norm")]
    text = stacks.format(*waiting[0]) + '  File "{}", line 9 in {}'.format(*waiting[1])
    hung = RankOutcome(
        rank=0, state=RankState.HUNG, message="still running", stacks=text
    )
    text = stacks.format("/my/loop.py", "epoch")
    other = RankOutcome(rank=1, state=RankState.VICTIM, stacks=text)
    failure = WorldError((hung, other), hung)
    told = root_cause(failure)
    assert told == (
        "rank 0: hung, still running; waiting: rank 0 in norm (steps.py:9), rank 1 in "
        "epoch (loop.py:7)"
    )
    case = Case(
        scaler="none",
        scenario=at(OneProcess, "dp2/2/fp32"),
        verdicts=(),
        evidence=None,
        seconds=0.0,
        problem=told,
        error=failure,
    )
    assert case_record(case).whose == "your workload"


def test_an_error_text_ends_after_a_whole_word() -> None:
    assert shortened("no\nplan", 7) == "no plan"
    assert shortened("parallelize raised", 13) == "parallelize ..."
    assert shortened("parallelize", 8) == "parallel ..."


def test_a_rank_that_aborts_is_shown_with_its_last_words() -> None:
    said = "terminate called\n  what():  Is there a collective mismatch?\n\n"
    killed = RankOutcome(
        rank=1, state=RankState.KILLED, signal="SIGABRT", output=said, message="SIGABRT"
    )
    told = root_cause(WorldError((killed,), killed))
    assert told.startswith("rank 1: killed by SIGABRT; its last line: ")
    assert told.endswith("what(): Is there a collective mismatch?")


class MakesParametersAnew(Steps):
    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        for name, parameter in list(model.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            anew = nn.Parameter(parameter.detach().clone())
            setattr(model.get_submodule(owner), leaf, anew)
        return super().parallelize(model, mesh)

    def weights(self, stack: Any) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in stack.module.named_parameters()}

    def gradients(self, stack: Any) -> dict[str, Tensor | None]:
        return {n: p.grad for n, p in stack.module.named_parameters()}


def test_a_stack_whose_frozen_parameters_train_again_is_not_tried_frozen(
    runner: Runner,
) -> None:
    case = checked(runner, at(MakesParametersAnew, "dp1/1/fp32,recipe=frozen"))
    assert case.status is Status.SKIPPED
    assert "frozen parameters train again" in case.verdicts[0].message


# - Optimizers that step copies of the parameters


class StepsShards(Steps):
    """ZeRO-1: averages a flat gradient, and steps its half of a flat copy."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Stepped:
        stack = super().parallelize(model, mesh)
        stack.beside = []  # made of the weights at the first step, as engines do
        return stack

    def train_step(self, stack: Stepped, micro_batches: Any, scaler: Any) -> Tensor:
        parameters = list(stack.module.parameters())
        stack.module.zero_grad()
        total = self.passes(stack, micro_batches)
        mine = dist.get_rank(stack.group)
        if not stack.beside:
            whole = nn.utils.parameters_to_vector(parameters).detach()
            stack.beside = [nn.Parameter(p.clone()) for p in whole.chunk(stack.ranks)]
            stack.second = self.optimizer([("flat", stack.beside[mine])])
        gradient = torch.cat([p.grad.reshape(-1) for p in parameters])  # type: ignore[union-attr]
        stack.average(gradient)
        stack.beside[mine].grad = gradient.chunk(stack.ranks)[mine].clone()
        stack.second.step()
        for rank, part in enumerate(stack.beside):
            dist.broadcast(part.detach(), group=stack.group, group_src=rank)
        whole = torch.cat([p.detach() for p in stack.beside])
        with torch.no_grad():
            nn.utils.vector_to_parameters(whole, stack.module.parameters())
        return total


def test_gradients_that_the_optimizer_does_not_use_are_not_compared(
    runner: Runner,
) -> None:
    case = checked(runner, at(StepsShards, "dp2/2/fp32"))
    found = {v.law: v for v in case.verdicts}
    assert not [v for v in case.verdicts if v.status is Status.FAIL]
    assert found["parity.gradient"].status is Status.INCONCLUSIVE
    told = found["parity.gradient"].message
    assert told.endswith(
        "else write gradients(stack) to return the gradients that they use"
    )
    assert found["parity.update"].status is Status.PASS


class WritesMastersBack(Steps):
    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Stepped:
        stack = super().parallelize(model, mesh)
        stack.kept = {n: p.detach().clone() for n, p in model.named_parameters()}
        stack.optimizer = self.optimizer(
            [(n, nn.Parameter(p)) for n, p in stack.kept.items()]
        )
        return stack

    def optimizers(self, stack: Stepped) -> dict[str, Any]:
        return dict.fromkeys(stack.kept, stack.optimizer)

    def train_step(self, stack: Stepped, micro_batches: Any, scaler: Any) -> Tensor:
        masters = stack.optimizer.param_groups[0]["params"]
        stack.module.zero_grad()
        total = self.passes(stack, micro_batches)
        for parameter, master in zip(stack.module.parameters(), masters, strict=True):
            assert parameter.grad is not None
            stack.average(parameter.grad)
            master.grad = parameter.grad
        stack.optimizer.step()
        with torch.no_grad():
            for one, master in zip(stack.module.parameters(), masters, strict=True):
                one.copy_(master)
        return total


class LosesOneMaster(WritesMastersBack):
    """One fp32 copy starts with another value than its parameter."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Stepped:
        stack = super().parallelize(model, mesh)
        stack.optimizer.param_groups[0]["params"][0].detach()[0] += 1e-3
        return stack


@pytest.mark.parametrize("where", ["dp2/2/fp32", "dp2/2/fp32,recipe=accumulate"])
def test_masters_that_are_made_in_parallelize_need_no_weights(
    runner: Runner, where: str
) -> None:
    found = {v.law: v for v in checked(runner, at(WritesMastersBack, where)).verdicts}
    for law in ("parity.gradient", "parity.update", "parity.loss"):
        assert found[law].status is Status.PASS, found[law]
    broken = {v.law: v for v in checked(runner, at(LosesOneMaster, where)).verdicts}
    assert broken["parity.update"].status is Status.FAIL


# - On one process


class Tied(OneProcess):
    def model(self) -> nn.Module:
        made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        made[1].weight = made[0].weight
        return made


def test_a_second_name_of_a_tied_weight_is_refused_with_its_first() -> None:
    """The last stage of a pipeline has the tied weight under its second name only."""
    workload = resolve_workload(f"{__name__}:Tied")
    whole = {n: p.detach() for n, p in Tied().model().named_parameters()}
    told = "gave 'module.1.weight', which is tied to 0.weight in model()"
    with pytest.raises(WorkloadError, match=re.escape(told)):
        read_local_parts(workload, "weights", {"module.1.weight": whole}, whole)
    both = {"0.weight": whole["0.weight"], "1.weight": whole["0.weight"].clone()}
    with pytest.raises(WorkloadError, match="tie them again in parallelize"):
        read_local_parts(workload, "weights", both, whole)
    with pytest.raises(WorkloadError, match=r"'head', which is not in the model"):
        read_local_parts(workload, "weights", {"head": whole}, whole)
    odd = {"0.weight": (whole["0.weight"], (slice(None),) * 3)}
    with pytest.raises(WorkloadError, match=r"are of 3 dims: expected a tensor"):
        read_local_parts(workload, "weights", odd, whole)


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.none = nn.Linear(8, 16), nn.Linear(8, 1, bias=False)
        self.none.weight = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(x) + self.none(x).sum(-1, keepdim=True)
        return found


class HasAnEmptyParameter(OneProcess):
    def model(self) -> nn.Module:
        return Empty()


def test_a_parameter_without_elements_is_no_error(runner: Runner) -> None:
    lacks = facts_of(f"{__name__}:HasAnEmptyParameter").lacks
    assert OfWorkload.RECOMPUTED not in lacks
    assert checked(runner, at(HasAnEmptyParameter, "single/1/fp32")).status is (
        Status.PASS
    )


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 16, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rows(x.argmax(-1))
        return found


class HasASparseGradient(OneProcess):
    def model(self) -> nn.Module:
        return Table()


class Balanced(nn.Linear):
    """Layer that changes a bias in each forward, like routers that balance experts."""

    load: Tensor

    def __init__(self) -> None:
        super().__init__(8, 16)
        self.register_buffer("load", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = super().forward(x) + self.load
        self.load = 0.1 - self.load  # every second time it is what it was
        return found


class ChangesABuffer(OneProcess):
    def model(self) -> nn.Module:
        return Balanced()


class Remembers(nn.Module):
    """Linear layer that adds its last output, as recurrent layers may."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x) + self.last
        self.last = y.detach().mean()
        return y


class KeepsAState(OneProcess):
    def model(self) -> nn.Module:
        return Remembers()


class HasASparseBatch(OneProcess):
    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = super().batch(step, seed)
        return x.to_sparse(), y


class HasOddBuffers(OneProcess):
    """Workload with buffers that have no plain bits, such as a graph's Laplacian."""

    def model(self) -> nn.Module:
        model = super().model()
        whole = torch.eye(8)
        model.register_buffer("sparse", whole.to_sparse())
        model.register_buffer("pairs", whole.to(torch.cfloat).conj())
        return model


def test_buffers_without_plain_bits_are_left_out() -> None:
    """Their bits cannot be viewed: that ended the run in a traceback."""
    spec = f"{__name__}:{HasOddBuffers.__name__}"
    check_workload(spec)
    workload = resolve_workload(spec)
    assert not saved_buffers(workload, workload.model())


class OfOneLength(torch.optim.SGD):
    """SGD that divides all gradients by the norm of all together."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for p in self.param_groups[0]["params"]]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient /= norm
        return super().step(closure)


class CouplesParameters(OneProcess):
    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return OfOneLength([p for _, p in parameters], lr=1e-2)


class NeedsAClosure(OneProcess):
    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([p for _, p in parameters])


class WrapsAnOptimizer(OneProcess):
    def optimizer(self, parameters: Any) -> Any:
        return [torch.optim.SGD([p for _, p in parameters], lr=0.1)]


class ChoosesByPlace(OneProcess):
    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": [p], "lr": 0.5**place} for place, (_, p) in enumerate(parameters)
        ]
        return torch.optim.SGD(groups)


class Wrapper(torch.optim.Optimizer):
    """Shares the groups of an inner optimizer and never calls torch's ``__init__``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class HidesItsSteps(OneProcess):
    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return Wrapper(torch.optim.SGD([p for _, p in parameters], lr=0.1))


class HasDictsOfHooks(Trains):
    """Wraps an optimizer, with dicts where torch keeps its tables of hooks."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        made = Wrapper(torch.optim.SGD([p for _, p in parameters], lr=0.1))
        made._optimizer_step_pre_hooks = {}  # as Lookahead of pytorch_optimizer
        return made


@pytest.mark.parametrize(
    ("workload", "told"),
    [
        (HidesItsSteps, r"optimizer: calls no hooks in step.* super\(\).__init__"),
        (HasDictsOfHooks, r"optimizer: calls no hooks in step.* super\(\).__init__"),
        (
            CouplesParameters,
            "optimizer: moves first.weight differently when it has other.* First "
            "check that parameters share no state by mistake",
        ),
        (
            WrapsAnOptimizer,
            r"optimizer: returned list, expected .*: let the class inherit "
            r"torch.optim.Optimizer and call super\(\).__init__",
        ),
        (
            ChoosesByPlace,
            r"optimizer: gives \S+ lr 0.5 beside other parameters and 1 alone. .*: "
            "choose settings by the name",
        ),
        (NeedsAClosure, r"optimizer: LBFGS.step\(\) needs 'closure': an optimizer"),
        (HasASparseGradient, r"rows.weight gets a gradient of layout torch.sparse_coo"),
        (ChangesABuffer, r"for one batch, and changed the buffers load: "),
        (
            KeepsAState,
            r"drew no random numbers. the model .Rem.* An attribute may hold a state: ",
        ),
        (HasASparseBatch, "batch: has a tensor of type Tensor and layout torch.sparse"),
    ],
)
def test_workloads_that_cannot_be_compared_are_refused_in_one_line(
    workload: type, told: str
) -> None:
    spec = f"{__name__}:{workload.__name__}"
    facts_of(spec)  # is asked first, and must not raise
    with pytest.raises(WorkloadError, match=told) as caught:
        check_workload(spec)
    assert "\n" not in str(caught.value)


def test_calls_with_other_rows_than_were_given_are_not_compared() -> None:
    """A pipeline drops the remainder of rows: 11 rows become four calls of two rows."""
    batch = Batch(inputs=torch.zeros(11, 2), targets=torch.zeros(11))
    log = ModuleLog(rows=[[2, 2, 2, 2]])
    for call in range(4):
        log.passed[Boundary(call, "", 0, INPUT, 0)] = Passed(
            values=torch.zeros(2).numpy()
        )
    assert _as_called([batch], log) == [batch]
    assert not log.passed
    assert log.unpaired == (
        "it was called with 8 rows in 4 calls, and was given 11 rows in 1"
    )


STEPS = "gradparity.fixtures.faulty.own_steps:Steps"


def cache_after_a_step(scenario: Scenario) -> bool:
    observe_rank(scenario, "none", ".", last=0)
    return torch.is_autocast_cache_enabled()


def test_the_cache_of_autocast_is_as_it_was_after_a_step(two: Cluster) -> None:
    for precision in ("fp32", "bf16-autocast"):
        assert two.run(
            cache_after_a_step,
            Scenario.parse(f"dp2/2/{precision}/own/none/model={STEPS},steps=1"),
        ) == [True, True]
