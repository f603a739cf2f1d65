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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call, grad_and_value
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.conformance.comparison.law import Evidence
from gradparity.conformance.comparison.measured import Parity
from gradparity.conformance.comparison.reference import Schedule, train_reference
from gradparity.conformance.comparison.variants import PLAIN
from gradparity.conformance.rank.elementwise import not_elementwise
from gradparity.conformance.rank.trace import Decision, RankTrace, StepTrace
from gradparity.conformance.script.standalone import standalone_script
from gradparity.conformance.space.workload_checks import check_workload, counts_equal
from gradparity.conformance.status import UsageError
from gradparity.fixtures import WorkloadError, resolve_workload
from gradparity.fixtures.faulty.stacks import Base, Named
from gradparity.tests.workloads.stacks import Right

VOCABULARY = 12


def spec(stack: type) -> str:
    return f"{__name__}:{stack.__name__}"


def checked(runner: Runner, stack: type, recipe: str = "plain") -> Case:
    check_workload(spec(stack))
    text = f"dp2/2/fp32/own/none/model={spec(stack)},recipe={recipe},steps=2"
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
    """Recurrent model: forward creates its initial state in the default dtype."""

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
    """Classes have weights, so the count is not an integer. The loss is in fp32."""

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
    """Class weights, and so the counts, have the dtype of the output."""

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
    """Batch norm over micro-batches of four rows; one process has the same batches."""

    factor = 1.0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def micro_batches(self, batch: Any) -> list[Any]:
        inputs, targets = batch
        return list(zip(inputs.split(4), targets.split(4), strict=True))

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return super().loss(output, targets) * self.factor


class BatchNormOfTwoRows(BatchNormInParts):
    """Two batch norms over two rows each: in bf16 the noise hides all gradients."""

    def model(self) -> nn.Module:
        parts = [(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)]
        return nn.Sequential(*(m for part in parts for m in part), nn.Linear(8, 4))

    def micro_batches(self, batch: Any) -> list[Any]:
        inputs, targets = batch
        return list(zip(inputs.split(2), targets.split(2), strict=True))


class PartsWeighedTwice(BatchNormInParts):
    """The loss of a rank is multiplied by the number of ranks."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return super().loss(output, targets) * ranks


class KeepsTensors(Replicated):
    """The workload keeps a teacher and weights of classes, both in fp32."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.teacher = nn.Linear(8, 4, bias=False).requires_grad_(False)
        self.teacher.weight.normal_(generator=generator)
        self.weights_of_classes = torch.tensor([0.5, 2.0, 1.0, 1.5])

    def batch(self, step: int, seed: int) -> tuple[Tensor, Any]:
        inputs, _ = super().batch(step, seed)
        return inputs, (inputs, inputs.argmax(1) % 4)

    def loss(self, output: Tensor, targets: Any) -> Tensor:
        inputs, classes = targets
        apart = (output - self.teacher(inputs).detach()).square().mean(1)
        weights = self.weights_of_classes
        chosen = cross_entropy(output, classes, weight=weights, reduction="none")
        value: Tensor = (apart + chosen).mean()
        return value


class Energies(nn.Module):
    """Model that returns a potential, and forces: minus its gradients by the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.potential = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        places = inputs.requires_grad_()
        energies: Tensor = self.potential(places)
        (slopes,) = torch.autograd.grad(energies.sum(), places, create_graph=True)
        return energies, -slopes


class Forces(Replicated):
    """Forward itself computes gradients by autograd, and the loss depends on them."""

    def model(self) -> nn.Module:
        return Energies()

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        energies, forces = output
        value: Tensor = energies.square().mean() + (forces - 1.0).square().mean()
        return value


class CountedForces(Forces):
    """Losses of energies and forces are sums with counts."""

    def loss(self, output: Any, targets: Tensor) -> Any:
        return super().loss(output, targets) * len(targets), len(targets)


@pytest.mark.parametrize(
    ("stack", "recipe"),
    [(KeepsTensors, "plain"), (Forces, "plain"), (CountedForces, "accumulate-uneven")],
)
def test_a_forward_may_use_autograd_and_a_loss_tensors_of_the_workload(
    runner: Runner, stack: type, recipe: str
) -> None:
    case = checked(runner, stack, recipe)
    assert case.status is Status.PASS, [v for v in case.verdicts if v.status != "pass"]


@pytest.mark.parametrize("stack", [Weighted, BatchNormInParts])
def test_the_objective_may_be_weighted_or_couple_rows(
    runner: Runner, stack: type
) -> None:
    case = checked(runner, stack)
    assert case.status is Status.PASS, [v for v in case.verdicts if v.status != "pass"]


def test_updates_that_rounding_decides_say_so(runner: Runner) -> None:
    where = f"dp2/2/bf16-autocast/own/none/model={spec(BatchNormOfTwoRows)},steps=2"
    case = runner.run("none", Scenario.parse(where))
    found = next(v for v in case.verdicts if v.law == "parity.update")
    assert (found.status, found.compared) == (Status.INCONCLUSIVE, 0)
    assert "on the gradient is below the bound of its error" in found.message


def test_a_script_is_refused_where_fp64_needs_gradparitys_context() -> None:
    text = f"dp2/2/fp32/own/none/model={spec(Weighted)},steps=1"
    with pytest.raises(UsageError, match="forward makes new tensors without a dtype"):
        standalone_script(Scenario.parse(text), "none")


def test_a_wrong_factor_on_parts_that_couple_rows_is_caught(runner: Runner) -> None:
    failed = checked(runner, PartsWeighedTwice).verdicts
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
    assert counts_equal((one,), (other,)) is equal


# - The page's own example


PAGE = (Path(__file__).parents[2] / "docs" / "workload-trainers.md").read_text()
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
    case = checked(runner, OnThePage, recipe="accumulate-uneven")
    assert case.status is Status.PASS, [v for v in case.verdicts if v.status != "pass"]


# - Steps that move nothing


class PreparesFirst(optim.SGD):
    """SGD with a matrix preconditioner, which the first step only fills (as SOAP)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as SGD
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad
                if gradient is None:
                    continue
                if p.ndim == 2 and "left" in self.state[p]:
                    gradient = self.state[p]["left"] @ gradient
                elif p.ndim == 2:
                    self.state[p]["left"] = gradient @ gradient.T
                    continue
                p.sub_(gradient, alpha=group["lr"])


class Prepares(Replicated):
    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, n, bias=False) for n in (8, 4)))

    def optimizer(self, parameters: Named) -> optim.Optimizer:
        return PreparesFirst([p for _, p in parameters], lr=1e-2)


class Halves:
    """A table that is split by rows, a head, and an optimizer for each."""

    def __init__(self, table: nn.Parameter, head: nn.Linear, rank: int) -> None:
        self.table, self.head, self.rank = table, head, rank
        self.optimizers: list[optim.Optimizer] = []


class TableWithItsOwnOptimizer(Weighted):
    """No token uses the table's rows on rank 1, so SGD does not move them."""

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
    """The optimizer of the head never steps."""

    skips = True


class WarmsUp(TableWithItsOwnOptimizer):
    """A schedule without torch's classes: rates 0, 0.05, 0.1."""

    def train_step(self, stack: Halves, micro_batches: Any, scaler: Any) -> Tensor:
        groups = [g for o in stack.optimizers for g in o.param_groups]
        rate = stack.__dict__.setdefault("rate", [0.0, 0.05, 0.1]).pop(0)
        for group in groups:
            group["lr"] = rate
        return super().train_step(stack, micro_batches, scaler)


class Adapter(nn.Module):
    """Frozen layer plus an adapter that begins at zero, like LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Buffer(torch.randn(8, 4))
        self.down = nn.Parameter(torch.randn(8, 2))
        self.up = nn.Parameter(torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layer + x @ self.down @ self.up


class Adapts(Right):
    """No fault: with ``up`` frozen at 0, no gradient reaches ``down``."""

    meshes: object = ({"dp": 2},)

    def model(self) -> nn.Module:
        return Adapter()

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def test_parameters_that_no_step_is_to_move_are_no_skip(runner: Runner) -> None:
    case = checked(runner, Adapts, "frozen")
    assert case.status is Status.PASS, (case.problem, case.verdicts)
    told = {v.law: v for v in case.verdicts}["skip.all-ranks-step"]
    assert told.status is Status.SKIPPED
    assert "no step was to move a parameter" in told.message


@pytest.mark.parametrize("stack", [Prepares, TableWithItsOwnOptimizer])
def test_a_step_that_rightly_moves_nothing_is_no_skip(
    runner: Runner, stack: type
) -> None:
    case = checked(runner, stack)
    assert case.status is Status.PASS, [v for v in case.verdicts if v.status != "pass"]


def test_an_optimizer_that_is_forgotten_did_not_step(runner: Runner) -> None:
    found = {v.law: v for v in checked(runner, HeadNeverSteps).verdicts}
    assert found["parity.update"].status is Status.FAIL


def test_a_schedule_of_the_workload_is_followed_and_reported(runner: Runner) -> None:
    case = checked(runner, WarmsUp)
    assert case.status is Status.PASS, [v for v in case.verdicts if v.status != "pass"]
    update = next(v for v in case.verdicts if v.law == "parity.update")
    assert "schedule of lr (0.weight: 0 at step 0, 0.05 at step 1)" in update.message


@pytest.mark.parametrize("parity", [None, Parity(per_step=[0.0])])
def test_gradients_of_zeros_are_no_skip(parity: Parity | None) -> None:
    """If gradients are zero, an unchanged parameter does not show a skip."""

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
        evidence = Evidence(scenario=scenario, ranks=(trace,), parity=parity)
        ((_, (decision,)),) = evidence.decisions()
        return decision.parameters_changed

    assert decided([0.0, 0.0]) is None
    assert decided([0.0, 1e-9]) is False


def test_an_optimizer_that_prepares_first_is_known_for_whole_matrices() -> None:
    assert not_elementwise(spec(Prepares), "own") == {"0.weight", "1.weight"}


class RaisesInBf16(Replicated):
    """Raises in bf16, as torch's scatter does for two different dtypes."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_forward_hook(lambda _, __, output: self.scattered(output))
        return model

    @staticmethod
    def scattered(output: Tensor) -> Tensor:
        if output.dtype is torch.bfloat16:
            raise RuntimeError("expected self.dtype to be equal to src.dtype")
        return output


def test_a_reference_that_raises_is_an_error_of_the_workload() -> None:
    where = f"dp2/2/bf16-autocast/own/none/model={spec(RaisesInBf16)},steps=1"
    scenario = Scenario.parse(where)
    schedule = Schedule(skipped=(frozenset(),), scales=(1.0,))
    with pytest.raises(WorkloadError, match="forward: raised RuntimeError: expected"):
        train_reference(scenario, schedule, PLAIN)


def test_a_precision_that_one_process_refuses_too_is_not_tried(runner: Runner) -> None:
    where = f"dp2/2/bf16-autocast/own/none/model={spec(RaisesInBf16)},steps=1"
    case = runner.run("none", Scenario.parse(where))
    assert case.status is Status.SKIPPED, case.problem
    assert "cannot run in bf16-autocast either" in case.verdicts[0].message
    assert "expected self.dtype to be equal" in case.verdicts[0].message


class StaticGraph(Replicated):
    """DDP with a static graph: backward raises in its ``no_sync()``."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        group = mesh.get_group("dp")
        return DistributedDataParallel(model, process_group=group, static_graph=True)


def test_a_no_sync_that_torch_does_not_support_is_not_tried(runner: Runner) -> None:
    case = checked(runner, StaticGraph)
    assert case.status is Status.PASS
    text = f"dp2/2/fp32/own/none/model={spec(StaticGraph)},steps=3"
    case = runner.run("none", Scenario.parse(f"{text},recipe=accumulate-no-sync"))
    assert case.status is Status.SKIPPED, case.problem
    assert "backward: raised RuntimeError" in case.verdicts[0].message


class UnequalShares(Replicated):
    """Ranks have different numbers of rows, one of them odd; the loss has counts."""

    def shard(self, batch: Any, mesh: DeviceMesh) -> Any:
        shares = [t.tensor_split([3])[mesh.get_local_rank("dp")] for t in batch]
        return shares if mesh.size() > 1 else batch

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        return (output - targets).square().mean(1).sum(), len(targets)


@pytest.mark.parametrize(
    ("recipe", "status"), [("plain", "pass"), ("accumulate", "skipped")]
)
def test_a_share_that_a_recipe_cannot_cut_is_not_tried(
    runner: Runner, recipe: str, status: str
) -> None:
    case = checked(runner, UnequalShares, recipe)
    assert case.status == status, case.verdicts[0].message


class OwnRate(optim.Optimizer):
    """Optimizer that computes its own learning rate, like Adafactor."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as SGD
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                parameter.sub_(parameter.grad, alpha=0.1 / state["steps"])


class SharesARate(Replicated):
    """No fault: all optimizers that it makes have one tensor as learning rate."""

    rate = torch.tensor(0.1)

    def optimizer(self, parameters: Named) -> optim.Optimizer:
        return optim.SGD([p for _, p in parameters], lr=self.rate)


def test_a_tensor_that_optimizers_share_as_rate_decays_once_a_step(
    runner: Runner,
) -> None:
    for _ in range(2):  # what is made later begins with the rate of the workload
        case = checked(runner, SharesARate, "scheduler")
        assert case.status == "pass", (case.problem, case.verdicts[0].message)


class FindsItsRate(Replicated):
    def optimizer(self, parameters: Named) -> optim.Optimizer:
        return OwnRate([p for _, p in parameters])


@pytest.mark.parametrize(
    ("recipe", "status"), [("plain", "pass"), ("scheduler", "skipped")]
)
def test_a_scheduler_needs_a_rate_that_it_can_change(
    runner: Runner, recipe: str, status: str
) -> None:
    case = checked(runner, FindsItsRate, recipe)
    assert case.status == status, case.verdicts[0].message


class Checkpoints(nn.Module):
    """Model with its own checkpointing: a part of forward runs again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        held = self.first(inputs)
        found: Tensor = checkpoint(self.second, held, use_reentrant=self.reentrant)
        return found


class Sharded(Replicated):
    """Model with its own checkpointing, under FSDP2 in the scenario's precision."""

    reentrant = False

    def model(self) -> nn.Module:
        return Checkpoints(self.reentrant)

    def parallelize(  # type: ignore[override]  # with a policy
        self, model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy
    ) -> Any:
        return fully_shard(model, mesh=mesh, mp_policy=policy)


class ShardedReentrant(Sharded):
    reentrant = True


@pytest.mark.parametrize("stack", [Sharded, ShardedReentrant])
def test_references_recompute_in_the_dtype_of_the_parameters(
    runner: Runner, stack: type
) -> None:
    where = f"dp2/2/bf16-params/own/none/model={spec(stack)},recipe=accumulate,steps=3"
    case = runner.run("none", Scenario.parse(where))
    assert case.status is Status.PASS, (case.problem, case.verdicts)


class Functional(Replicated):
    """Gradients are computed by torch.func, which does not support checkpointing."""

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
    case = checked(runner, Functional, recipe)
    assert case.status == status, case.verdicts[0].message


# - What is refused, in words that say the way out


class Lazy(Replicated):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(4))


class OnMeta(Replicated):
    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("table", torch.empty(2, device="meta"))
        return model


class TwoArguments(Replicated):
    def model(self) -> nn.Module:
        return nn.Bilinear(8, 8, 4)

    def batch(self, step: int, seed: int) -> Any:
        inputs, targets = super().batch(step, seed)
        return (inputs, inputs), targets


class NewInFp32(Replicated):
    """Writes the output into a new tensor that is always fp32."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        wide = torch.zeros(output.shape, dtype=torch.float32)
        wide[torch.arange(len(output))] = output
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
        (
            OnMeta,
            "model: the buffer table is on meta, expected cpu: give it its values",
        ),
        (TwoArguments, "one argument, here a tuple: let forward unpack it"),
        (NewInFp32, "This happens in fp64 alone, in which the reference trains"),
        (Noisy, "optimizer: draws random numbers in step"),
        (TwoInOne, "alone it raised ValueError: optimizer got an empty parameter"),
    ],
)
def test_a_refusal_says_the_way_out(stack: type, told: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        check_workload(spec(stack))
    assert told in str(raised.value)
    assert resolve_workload(spec(stack)).name in str(raised.value)
