"""Models, losses and optimizers of unusual form: right ones pass, faults are found."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call, grad_and_value
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.conformance.judge.law import Evidence
from gradparity.conformance.judge.reference import Schedule, Variant, train_reference
from gradparity.conformance.rank.elementwise import not_elementwise
from gradparity.conformance.rank.trace import Decision, RankTrace, StepTrace
from gradparity.conformance.script.standalone import standalone_script
from gradparity.conformance.space.workload_checks import check_workload, counts_equal
from gradparity.conformance.status import UsageError
from gradparity.fixtures import WorkloadError, resolve_workload
from gradparity.fixtures.faulty.stacks import Base, Named

VOCABULARY = 12


def spec(stack: type) -> str:
    return f"{__name__}:{stack.__name__}"


def judged(runner: Runner, stack: type, recipe: str = "plain") -> Case:
    check_workload(spec(stack))
    text = f"dp2/2/fp32/own/none/model={spec(stack)},recipe={recipe},steps=3"
    case = runner.run("none", Scenario.parse(text))
    assert not case.problem
    return case


class Replicated(Base):
    meshes = ({"dp": 2},)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4))

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().batch(step, seed)
        return inputs[:, 0], targets[:, 0, :4]

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))

    def optimizer(self, parameters: Named) -> optim.Optimizer:
        return optim.AdamW([p for _, p in parameters], lr=1e-2)


# - Losses and forwards


class Recurrent(nn.Module):
    """A forward that makes its own state, in the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 4)
        self.cell = nn.GRUCell(4, 4)
        self.head = nn.Linear(4, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        state, states = torch.zeros(len(tokens), 4), []
        for token in tokens.unbind(1):
            state = self.cell(self.tokens(token), state)
            states.append(state)
        logits: Tensor = self.head(torch.stack(states, 1))
        return logits


class Weighted(Replicated):
    """Weights of classes: the count is no integer. The loss is in fp32."""

    def model(self) -> nn.Module:
        return Recurrent()

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(VOCABULARY, (8, 2, 5), generator=generator)
        return tokens[:, 0], tokens[:, 1]

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        logits, due = output.float().flatten(0, 1), targets.flatten()
        weights = torch.linspace(0.1, 1.3, VOCABULARY, dtype=logits.dtype)
        value = cross_entropy(logits, due, weight=weights, reduction="sum")
        return value, weights[due].sum()


class HalfWeights(Weighted):
    """The weights, and so the counts, are in the dtype of the output."""

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        weights = torch.linspace(0.1, 1.3, VOCABULARY).to(output.dtype)
        value, _ = super().loss(output, targets)
        return value, weights[targets.flatten()].sum()


def test_counts_that_are_rounded_to_half_precision_leave_no_hole(
    runner: Runner,
) -> None:
    where = f"dp2/2/bf16-autocast/own/none/model={spec(HalfWeights)},steps=1"
    case = runner.run("none", Scenario.parse(where))
    assert not case.problem


class BatchNormInParts(Replicated):
    """Batch statistics of four rows, which are the same on one process."""

    factor = 1.0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def micro_batches(self, batch: Any) -> list[Any]:
        inputs, targets = batch
        return list(zip(inputs.split(4), targets.split(4), strict=True))

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return super().loss(output, targets) * self.factor


class PartsWeighedTwice(BatchNormInParts):
    """The loss of a rank is multiplied by the number of ranks."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return super().loss(output, targets) * ranks


@pytest.mark.parametrize("stack", [Weighted, BatchNormInParts])
def test_the_objective_may_be_weighted_or_couple_rows(
    runner: Runner, stack: type
) -> None:
    case = judged(runner, stack)
    assert case.status is Status.PASS, [v for v in case.verdicts if v.status != "pass"]


def test_a_script_is_refused_where_fp64_needs_the_judges_context() -> None:
    text = f"dp2/2/fp32/own/none/model={spec(Weighted)},steps=1"
    with pytest.raises(UsageError, match="forward makes new tensors without a dtype"):
        standalone_script(Scenario.parse(text), "none")


def test_a_wrong_factor_on_parts_that_couple_rows_is_caught(runner: Runner) -> None:
    failed = judged(runner, PartsWeighedTwice).verdicts
    assert "parity.gradient" in {v.law for v in failed if v.status is Status.FAIL}


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (40.0, 40.0, True),
        (40.0, 41.0, False),
        (1e9, 1e9 + 1, False),
        (31.27, 31.270001, True),
        (31.27, 31.37, False),
    ],
)
def test_counts_are_exact_where_they_are_integers(
    one: float, other: float, equal: bool
) -> None:
    assert counts_equal(one, other) is equal


# - The page's own example


PAGE = (Path(__file__).parents[2] / "docs" / "workload.md").read_text(encoding="utf-8")
(ENGINE,) = re.findall(r"```python\n(class Engine:.*?)```", PAGE, re.DOTALL)


class Holder:
    def __init__(self, module: nn.Module, optimizer: optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer


exec(ENGINE)  # of this repository's own page


class OnThePage(globals()["Engine"], Replicated):  # type: ignore[misc]  # made by exec
    pass


def test_the_engine_on_the_page_is_right_with_unequal_micro_batches(
    runner: Runner,
) -> None:
    case = judged(runner, OnThePage, recipe="accumulate-uneven")
    assert case.status is Status.PASS, [v for v in case.verdicts if v.status != "pass"]


# - Steps that move nothing


class PreparesFirst(optim.SGD):
    """As SOAP: whole matrices, and the first step only fills the preconditioner."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as SGD
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad
                if p.ndim == 2 and "left" in self.state[p]:
                    gradient = self.state[p]["left"] @ gradient
                elif p.ndim == 2:
                    self.state[p]["left"] = p.grad @ p.grad.T
                    continue
                p.sub_(gradient, alpha=group["lr"])


class Prepares(Replicated):
    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, n, bias=False) for n in (8, 4)))

    def optimizer(self, parameters: Named) -> optim.Optimizer:
        return PreparesFirst([p for _, p in parameters], lr=1e-2)


class Halves:
    """Two optimizers over a table that is split by rows."""

    def __init__(self, table: nn.Parameter, head: nn.Linear, rank: int) -> None:
        self.table, self.head, self.rank = table, head, rank
        self.optimizers: list[optim.Optimizer] = []


class TableWithItsOwnOptimizer(Weighted):
    """No token has its row on rank 1, where SGD then moves nothing of the table."""

    skips = False

    def model(self) -> nn.Module:
        table = nn.Embedding(VOCABULARY, 4)
        return nn.Sequential(table, nn.Linear(4, VOCABULARY))

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        tokens, targets = super().batch(step, seed)
        return tokens % (VOCABULARY // 2), targets

    def parallelize(self, model: Any, mesh: DeviceMesh) -> Halves:
        rank, size = mesh.get_local_rank("dp"), mesh["dp"].size()
        part = nn.Parameter(model[0].weight.detach().chunk(size)[rank].clone())
        stack = Halves(part, model[1], rank)
        stack.optimizers = [
            optim.SGD([part], lr=0.1),
            optim.SGD(model[1].parameters(), lr=0.1),
        ]
        return stack

    def optimizer(self, parameters: Named) -> optim.Optimizer:
        return optim.SGD([p for _, p in parameters], lr=0.1)

    def weights(self, stack: Halves) -> dict[str, Any]:
        first = stack.rank * len(stack.table)
        rows = slice(first, first + len(stack.table))
        head = stack.head
        return {
            "0.weight": (stack.table, (rows,)),
            "1.weight": head.weight,
            "1.bias": head.bias,
        }

    def train_step(self, stack: Halves, micro_batches: Any, scaler: Any) -> Tensor:
        ((tokens, targets),) = micro_batches
        ranks = dist.get_world_size()
        parts = [torch.empty_like(stack.table) for _ in range(ranks)]
        dist.all_gather(parts, stack.table.detach())
        whole = torch.cat(parts).requires_grad_()
        value, count = self.loss(stack.head(whole[tokens]), targets)
        total = count.clone()
        dist.all_reduce(total)
        grads = torch.autograd.grad(value / total, [whole, *stack.head.parameters()])
        for gradient in grads:
            dist.all_reduce(gradient)
        stack.table.grad = grads[0].chunk(ranks)[stack.rank].clone()
        stack.head.weight.grad, stack.head.bias.grad = grads[1:]
        for optimizer in stack.optimizers[: 1 if self.skips else 2]:
            optimizer.step()
        mean: Tensor = value.detach() / count
        return mean


class HeadNeverSteps(TableWithItsOwnOptimizer):
    """The optimizer of the head is forgotten."""

    skips = True


class WarmsUp(TableWithItsOwnOptimizer):
    """A schedule without torch's classes: rates 0, 0.05, 0.1."""

    def train_step(self, stack: Halves, micro_batches: Any, scaler: Any) -> Tensor:
        groups = [g for o in stack.optimizers for g in o.param_groups]
        rate = stack.__dict__.setdefault("rate", [0.0, 0.05, 0.1]).pop(0)
        for group in groups:
            group["lr"] = rate
        return super().train_step(stack, micro_batches, scaler)


@pytest.mark.parametrize("stack", [Prepares, TableWithItsOwnOptimizer])
def test_a_step_that_rightly_moves_nothing_is_no_skip(
    runner: Runner, stack: type
) -> None:
    case = judged(runner, stack)
    assert case.status is Status.PASS, [v for v in case.verdicts if v.status != "pass"]


def test_an_optimizer_that_is_forgotten_did_not_step(runner: Runner) -> None:
    found = {v.law: v for v in judged(runner, HeadNeverSteps).verdicts}
    assert found["parity.update"].status is Status.FAIL


def test_a_schedule_of_the_stack_is_followed_and_told(runner: Runner) -> None:
    case = judged(runner, WarmsUp)
    assert case.status is Status.PASS, [v for v in case.verdicts if v.status != "pass"]
    update = next(v for v in case.verdicts if v.law == "parity.update")
    assert "schedule of lr (0.weight: 0 at step 0, 0.05 at step 1)" in update.message


def test_without_a_reference_gradients_say_whether_a_step_is_due() -> None:
    def decided(gradient: list[float]) -> bool | None:
        step = StepTrace(
            step=0,
            complete=True,
            decisions=[Decision(parameters_changed=False)],
            gradients={"w": np.array(gradient, dtype=np.float32)},
        )
        index = {"w": np.arange(2)}
        trace = RankTrace(
            rank=0,
            coordinate={},
            index=index,
            shards={"w": "all"},
            owned=[["w"]],
            start={"w": np.zeros(2, dtype=np.float32)},
            steps=[step],
        )
        scenario = Scenario.parse("single/1/fp32/sgd/none/steps=1")
        evidence = Evidence(scenario=scenario, ranks=(trace,))
        ((_, (decision,)),) = evidence.decisions()
        return decision.parameters_changed

    assert decided([0.0, 0.0]) is None
    assert decided([0.0, 1e-9]) is False


def test_an_optimizer_that_prepares_first_is_known_for_whole_matrices() -> None:
    assert not_elementwise(spec(Prepares), "own") == {"0.weight", "1.weight"}


class RaisesInBf16(Replicated):
    """As a scatter of two dtypes under autocast."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_forward_hook(lambda _, __, output: self.scattered(output))
        return model

    @staticmethod
    def scattered(output: Tensor) -> Tensor:
        if output.dtype is torch.bfloat16:
            raise RuntimeError("expected self.dtype to be equal to src.dtype")
        return output


def test_a_reference_that_raises_is_not_the_judges_fault() -> None:
    where = f"dp2/2/bf16-autocast/own/none/model={spec(RaisesInBf16)},steps=1"
    scenario = Scenario.parse(where)
    schedule = Schedule(skipped=(frozenset(),), scales=(1.0,))
    with pytest.raises(WorkloadError, match="forward: raised RuntimeError: expected"):
        train_reference(scenario, schedule, Variant())


class Functional(Replicated):
    """Gradients by torch.func, which knows no checkpointing."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        return Holder(model, self.optimizer(list(model.named_parameters())))

    def weights(self, stack: Holder) -> dict[str, Tensor]:
        return dict(stack.module.named_parameters())

    def train_step(self, stack: Holder, micro_batches: Any, scaler: Any) -> Tensor:
        ((inputs, targets),) = micro_batches
        named = dict(stack.module.named_parameters())

        def objective(weights: dict[str, Tensor]) -> Tensor:
            output = functional_call(stack.module, weights, (inputs,))
            return self.loss(output, targets)

        held = {name: p.detach() for name, p in named.items()}
        gradients, value = grad_and_value(objective)(held)
        for name, parameter in named.items():
            dist.all_reduce(gradients[name])
            parameter.grad = gradients[name] / dist.get_world_size()
        stack.optimizer.step()
        mean: Tensor = value
        return mean


@pytest.mark.parametrize(
    ("recipe", "status"), [("plain", "pass"), ("recompute", "skipped")]
)
def test_an_autograd_that_knows_no_checkpointing_is_not_tried_with_it(
    runner: Runner, recipe: str, status: str
) -> None:
    case = judged(runner, Functional, recipe)
    assert case.status == status, case.verdicts[0].message


# - What is refused, in words that say the way out


class Lazy(Replicated):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4))


class TwoArguments(Replicated):
    def model(self) -> nn.Module:
        return nn.Bilinear(8, 8, 4)

    def batch(self, step: int, seed: int) -> Any:
        inputs, targets = super().batch(step, seed)
        return (inputs, inputs), targets


class NewInFp32(Replicated):
    """Neither fp32 nor fp64 would do for both of its new tensors."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        wide = output @ torch.eye(4, dtype=torch.float32)
        return super().loss(wide, targets)


class NoisySgd(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as SGD
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn_like(parameter)
        super().step(closure)


class Noisy(Replicated):
    def optimizer(self, parameters: Named) -> optim.Optimizer:
        return NoisySgd([p for _, p in parameters], lr=0.1)


class TwoInOne(Replicated):
    def optimizer(self, parameters: Named) -> optim.Optimizer:
        biases = [p for _, p in parameters if p.ndim < 2]
        groups = optim.SGD(biases, lr=0.1).param_groups
        weights = [p for _, p in parameters if p.ndim == 2]
        return optim.SGD([*groups, {"params": weights}], lr=0.1)


@pytest.mark.parametrize(
    ("stack", "told"),
    [
        (Lazy, "model: 0.weight has no shape yet: call the lazy model once"),
        (TwoArguments, "one argument, here a tuple: let forward unpack it"),
        (NewInFp32, "in fp64, in which the reference trains, and not in fp32"),
        (Noisy, "optimizer: draws random numbers in step"),
        (TwoInOne, "alone it raised ValueError: optimizer got an empty parameter"),
    ],
)
def test_a_refusal_says_the_way_out(stack: type, told: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        check_workload(spec(stack))
    assert told in str(raised.value)
    assert resolve_workload(spec(stack)).name in str(raised.value)
