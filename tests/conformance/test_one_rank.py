"""``reference = "one rank"``: training is compared with the same code on one rank."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.rank import variation
from gradparity.conformance.rank.same_skips import SameSkips
from gradparity.conformance.rank.variation import Variation
from gradparity.conformance.space.workload_checks import check_workload
from gradparity.fixtures import (
    PRECISIONS,
    REFERENCE_LINE,
    Batch,
    WorkloadError,
    local,
    resolve_workload,
)
from gradparity.fixtures.specimens import ONE_RANK
from gradparity.multiprocess import current_world
from gradparity.tests.verdicts import failed
from gradparity.tests.workloads.stacks import Named, Right
from gradparity.tests.workloads.steps import (
    Alone,
    Engine,
    MicroBatches,
    StepsTwice,
    Trains,
    TrainsOnTwoAxes,
    TrainsSharded,
)

MODULE = "gradparity.tests.conformance.test_one_rank"
PLAIN = "gradparity.fixtures.faulty:PlainScaler"


def case(runner: Runner, spec: str, scaler: str = "none", **more: str) -> Case:
    place = more.pop("place", "dp2/2")
    faults, precision = more.pop("faults", "none"), more.pop("precision", "fp32")
    settings = ",".join(f"{k}={v}" for k, v in {"steps": "2", **more}.items())
    text = f"{place}/{precision}/own/{faults}/model={spec},{settings}"
    return runner.run(scaler, Scenario.parse(text))


def own(stack: type) -> str:
    return f"{MODULE}:{stack.__name__}"


def message(found: Case, law: str) -> str:
    return next(v.message for v in found.verdicts if v.law == law)


# - Pairs


ALIKE = ("R05", "R09", "R10")
"""Specimens whose fault resembles another one's: R03 (norms of a rank's shards) or R08
(owners that send too early). They run only among the slow tests."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in ALIKE)) for n in ONE_RANK],
)
@pytest.mark.few(1)
def test_the_fault_is_caught_and_the_fixed_version_passes(
    runner: Runner, name: str
) -> None:
    pair = ONE_RANK[name]
    right = case(runner, pair.fixed)
    assert right.status == "pass", (right.problem, failed(right))
    wrong = case(runner, pair.broken)
    assert {*failed(wrong)} & {*pair.laws}, (wrong.problem, failed(wrong))
    told = message(right, "parity.loss")
    assert "(reference: one rank, in fp64; noise of" in told
    # a step, or an iteration of a state, in each micro-batch is another training
    assert ("micro-batches cut again" in told) == (name not in ("R01", "R07"))


@pytest.mark.parametrize("name", ["R01", "R04", "R09"])
@pytest.mark.slow
def test_in_bf16_and_in_parts_the_fixed_version_passes(
    runner: Runner, name: str
) -> None:
    for more in ({"precision": "bf16-autocast"}, {"recipe": "accumulate"}):
        found = case(runner, ONE_RANK[name].fixed, **more)
        assert found.status == "pass", (more, found.problem, failed(found))


def test_the_example_of_a_gan_passes_and_is_short(runner: Runner) -> None:
    text = Path(__file__).parents[2] / "examples" / "gan.py"
    assert len(text.read_text().splitlines()) <= 60
    found = case(runner, "gradparity.examples.gan:Gan")
    assert found.status == "pass", (found.problem, failed(found))


@pytest.mark.slow
def test_one_rank_gets_as_many_micro_batches_where_ranks_recompute(
    runner: Runner,
) -> None:
    """A GAN steps in each of them, so their number matters."""
    found = case(runner, "gradparity.examples.gan:Gan", recipe="recompute")
    assert found.status == "pass", (found.problem, failed(found))


# - With a scaler


@pytest.mark.parametrize(
    "more",
    [
        {"faults": "inf@r1s1:0.bias", "steps": "3"},
        {"faults": "nan@r0s1:loss", "precision": "bf16-autocast"},
        {"recipe": "clip-norm"},
    ],
)
@pytest.mark.slow
def test_one_rank_skips_and_clips_as_the_ranks(
    runner: Runner, more: dict[str, str]
) -> None:
    found = case(runner, own(Alone), PLAIN, **more)
    assert found.status == "pass", (found.problem, failed(found))
    assert "train_step on one rank" in message(found, "norm.factor")


class ReducesInBf16(Alone):
    """No fault: gradients are reduced in bf16, as is promised."""

    reduce_dtype = torch.bfloat16

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        policy = MixedPrecisionPolicy(reduce_dtype=self.reduce_dtype)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        return Engine(model, self.optimizer([*model.named_parameters()]))


class ReducesAPartInBf16(ReducesInBf16):
    """Some elements of a gradient are 20 % too small, more than bf16 explains."""

    def clip(self, stack: Engine) -> Tensor:
        first = next(stack.module.parameters())
        assert first.grad is not None
        local(first.grad)[0] *= 0.8
        return super().clip(stack)


class Shifted(nn.Module):
    """Adds to its input a tensor created in each forward, in the default dtype."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.linspace(0, 1, 8)
        assert shift.dtype == x.dtype
        found: Tensor = self.layers(x + shift)
        return found


class MakesTensors(Alone):
    """No fault: ``model`` and forward make tensors without a dtype."""

    def model(self) -> nn.Module:
        first = nn.Linear(8, 8)
        first.weight.data = torch.randn(8, 8) * 0.3
        return Shifted(first, nn.Tanh(), nn.Linear(8, 4))


def test_a_model_that_makes_tensors_has_its_own_weights_in_fp64(
    runner: Runner,
) -> None:
    found = case(runner, own(MakesTensors))
    assert found.status == "pass", (found.problem, failed(found))
    assert "(reference: one rank, in fp64" in message(found, "parity.loss")


@pytest.mark.slow
def test_a_promised_reduction_in_half_precision_is_in_the_bounds_of_one_rank(
    runner: Runner,
) -> None:
    found = case(runner, own(ReducesInBf16))
    assert found.status == "pass", (found.problem, failed(found))
    assert "parity.gradient" in failed(case(runner, own(ReducesAPartInBf16)))


def test_norms_and_schedules_are_those_of_one_rank(runner: Runner) -> None:
    found = case(runner, own(CountsRanks))
    assert found.status == "fail"
    assert (
        "lr of 0.weight is 0.02 on rank 0 at step 0, and 0.01 on one rank"
        in (failed(found)["parity.update"])
    )
    assert "norm.reported" in failed(case(runner, own(ReportsTwice)))


class CountsRanks(Alone):
    """The learning rate grows with the number of ranks; gradients are averaged."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.optimizer.param_groups[0]["lr"] *= mesh.size()
        return engine


class ReportsTwice(Alone):
    """Reports the norm times the number of ranks."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.kept["ranks"] = mesh.size()
        return engine

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        loss, norm = super().train_step(stack, micro_batches, scaler)
        return loss, norm * stack.kept["ranks"]


class AloneOnTwoAxes(TrainsOnTwoAxes):
    """No fault: shards over two axes; on one rank both axes have size 1."""

    reference = "one rank"


class AddsUp(AloneOnTwoAxes):
    """Gradients are multiplied by the number of ranks of a mesh axis."""

    def clip(self, stack: Engine) -> Any:
        for p in stack.module.parameters():
            if p.grad is not None:
                p.grad *= p.device_mesh.size()  # type: ignore[attr-defined]  # a DTensor
        return None


class Lacks(Alone):
    """``weights`` returns only one of two layers if there is a single rank."""

    def weights(self, stack: Engine) -> Any:
        kept = super().weights(stack)
        alone = torch.distributed.get_world_size() == 1
        return {n: p for n, p in kept.items() if not (alone and ".0." in n)}


@pytest.mark.slow
def test_meshes_of_several_axes_are_narrowed_to_one_rank(runner: Runner) -> None:
    right = case(runner, own(AloneOnTwoAxes), place="dp2-tp2/4")
    assert right.status == "pass", (right.problem, failed(right))
    wrong = case(runner, own(AddsUp), place="dp2-tp2/4")
    assert "parity.gradient" in failed(wrong), wrong.problem
    lacks = case(runner, own(Lacks))
    assert lacks.status == "error"
    assert "parallelize: on one rank it leaves out 64 of 64 elements of 0.weight" in (
        lacks.problem
    )


class StepsTwiceAlone(StepsTwice):
    """No fault: steps twice in each step, which only ``"one rank"`` can reproduce."""

    reference = "one rank"


def test_an_optimizer_may_step_several_times(runner: Runner) -> None:
    found = case(runner, own(StepsTwiceAlone))
    assert found.status == "pass", (found.problem, failed(found))


# - What such a reference can and cannot see


class HalvesTheLoss(Alone):
    """Halves the loss, also on one rank."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return super().loss(output, targets) / 2


def test_what_is_wrong_on_one_rank_is_not_seen(runner: Runner) -> None:
    found = case(runner, own(HalvesTheLoss))
    assert found.status == "pass"


class InFp32(Alone):
    """Weights are always fp32, also in the fp64 reference."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        return super().parallelize(model.float(), mesh)


class InFp32Local(InFp32):
    """Has fp32 weights and gradients that are not averaged."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.module = engine.module.module
        return engine


def test_a_stack_without_fp64_is_compared_in_its_precision(runner: Runner) -> None:
    found = case(runner, own(InFp32))
    assert found.status == "pass", (found.problem, failed(found))
    assert "one rank, in fp32 (no fp64)" in message(found, "parity.loss")
    assert "parity.gradient" in failed(case(runner, own(InFp32Local)))


class Remembers(Alone):
    """Each call of ``parallelize`` in a process sets another learning rate."""

    made = itertools.count()

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.optimizer.param_groups[0]["lr"] *= 1 + next(Remembers.made)
        return engine


class Draws(Alone):
    """Each rank draws noise for its own rows."""

    def backward(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> float:
        noisy = [(x + torch.randn_like(x), y) for x, y in micro_batches]
        return super().backward(stack, noisy, scaler)


class DrawsFromNumpy(Alone):
    """The noise comes from numpy's generator."""

    def backward(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> float:
        noisy = [
            (x + torch.from_numpy(np.random.randn(*x.shape)).to(x), y)
            for x, y in micro_batches
        ]
        return super().backward(stack, noisy, scaler)


class Noise(nn.Module):
    """Layer that always adds noise; it has no probability that could be set to 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class DrawsInALayer(Alone):
    """Noise is drawn by a layer of the model."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Noise(), nn.Linear(8, 4))


class TakesItsOwnRows(Alone):
    """Each rank trains on rows that it draws itself, and reduces no gradient."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        stack.optimizer.zero_grad()
        x, y = self.batch(0, 7)
        loss = self.loss(stack.module(x), y)
        loss.backward()
        stack.optimizer.step()
        return loss.detach()


def test_training_on_other_rows_than_those_of_the_ranks_is_inconclusive(
    runner: Runner,
) -> None:
    found = case(runner, own(TakesItsOwnRows))
    assert (found.status, failed(found)) == ("inconclusive", {})
    assert "it does not train on the micro_batches that it gets" in (
        message(found, "parity.gradient")
    )


@pytest.mark.slow
def test_training_that_is_not_deterministic_is_inconclusive(runner: Runner) -> None:
    found = case(runner, own(Remembers))
    assert failed(found) == {}
    assert message(found, "parity.gradient").startswith(
        "two runs of train_step on one rank with the same seed differ in the "
    )
    for stack, words in (
        (Draws, "on one rank train_step itself drew random numbers in the passes"),
        (DrawsFromNumpy, "on one rank train_step itself drew random numbers in the"),
        (DrawsInALayer, "on one rank Noise 1 drew random numbers in the passes"),
    ):
        found = case(runner, own(stack))
        assert failed(found) == {}
        assert message(found, "parity.gradient").startswith(words)


class Shuffles(Alone):
    """No fault: a trainer shuffles rows, which does not change their sum."""

    def backward(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> float:
        orders = [torch.randperm(len(x)) for x, _ in micro_batches]
        pairs = zip(micro_batches, orders, strict=True)
        shuffled = [(x[order], y[order]) for (x, y), order in pairs]
        return super().backward(stack, shuffled, scaler)


class ShufflesAndAddsUp(Shuffles):
    """Shuffles rows, and multiplies gradients by the number of ranks."""

    def clip(self, stack: Engine) -> Any:
        for p in stack.module.parameters():
            if p.grad is not None:
                p.grad *= torch.distributed.get_world_size()
        return None


class DrawsTheSame(Alone):
    """Seeds the generator itself, so another seed of gradparity has no effect."""

    def backward(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> float:
        torch.manual_seed(7)
        noisy = [(x + torch.randn(x.shape), y) for x, y in micro_batches]
        return super().backward(stack, noisy, scaler)


@pytest.mark.slow
def test_draws_without_effect_do_not_hinder_a_verdict(runner: Runner) -> None:
    right = case(runner, own(Shuffles), recipe="accumulate")
    assert right.status == "pass", (right.problem, failed(right))
    assert "random numbers drawn anew" in message(right, "parity.gradient")
    wrong = case(runner, own(ShufflesAndAddsUp))
    assert "parity.gradient" in failed(wrong), wrong.problem
    unclear = case(runner, own(DrawsTheSame))
    assert failed(unclear) == {}
    assert unclear.status == "inconclusive"


# - What is refused, and the line to add


class Wrong(Alone):
    reference = "two ranks"


class WithoutSteps(Right):
    reference = "one rank"


class Scheduled(Alone):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ConstantLR(optimizer)


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (Wrong, "reference: got 'two ranks', expected 'one rank'"),
        (WithoutSteps, "reference: 'one rank' needs train_step"),
        (Scheduled, "scheduler: it is for the plain reference"),
    ],
)
def test_a_wrong_declaration_is_refused(stack: type, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        resolve_workload(own(stack))


class TakesOneNorm(torch.optim.SGD):
    """SGD that divides all gradients by their common norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure
        held = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / float(norm))


class Coupled(Trains):
    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return TakesOneNorm([p for _, p in parameters], lr=0.1)


class NeedsClosure(Trains):
    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([p for _, p in parameters])


class Counts(nn.Module):
    """Layer that computes with a state which each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class Iterates(Right):
    def model(self) -> nn.Module:
        return nn.Sequential(Counts(), nn.Linear(8, 4))


@pytest.mark.parametrize("stack", [Coupled, NeedsClosure, Iterates])
def test_what_the_plain_reference_refuses_ends_in_the_line_to_add(stack: type) -> None:
    with pytest.raises(WorkloadError) as refused:
        check_workload(own(stack))
    assert str(refused.value).endswith(REFERENCE_LINE)


class AveragesPasses(Trains):
    """No fault: its micro-batches have equal rows, and it averages their losses."""

    reference = "one rank"
    clip_norm = None  # type: ignore[assignment]  # as absent

    def batch(self, step: int, seed: int) -> Any:
        x, y = super().batch(step, seed)
        return x[:10], y[:10]

    def backward(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> float:
        losses = [self.loss(stack.module(x), y) for x, y in micro_batches]
        mean = torch.stack(losses).mean()
        mean.backward()
        return mean.item()

    def clip(self, stack: Engine) -> None:  # type: ignore[override]  # clips nothing
        return None


class OffByTwoPercent(AveragesPasses):
    """Gradients of the ranks are too large."""

    def clip(self, stack: Engine) -> None:  # type: ignore[override]  # clips nothing
        for p in stack.module.parameters():
            if p.grad is not None and current_world().world_size > 1:
                p.grad *= 1.02


@pytest.mark.parametrize(
    ("stack", "status"), [(AveragesPasses, "pass"), (OffByTwoPercent, "fail")]
)
def test_a_number_of_parts_that_changes_gradients_is_no_noise(
    runner: Runner, stack: type, status: str
) -> None:
    """Ten rows have two equal parts, and no four."""
    found = case(runner, own(stack))
    assert found.status == status, (found.problem, found.verdicts)


class ClipsByItsShard(TrainsSharded):
    """Each rank clips by the norm of its own shards; no gradient reaches the limit."""

    reference = "one rank"
    clip_norm = 1.0

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return super().loss(output, targets) / 16

    def clip(self, stack: Engine) -> None:  # type: ignore[override]  # reports no norm
        shards = [
            local(p.grad) for p in stack.module.parameters() if p.grad is not None
        ]
        norm = float(nn.utils.get_total_norm(shards))
        for shard in shards:
            shard *= min(1.0, self.clip_norm / (norm + 1e-6))


class ClipsByTheWhole(ClipsByItsShard):
    """No fault: all ranks clip by the norm of the whole gradient."""

    def clip(self, stack: Engine) -> None:  # type: ignore[override]  # reports no norm
        nn.utils.clip_grad_norm_(stack.module.parameters(), self.clip_norm)


@pytest.mark.parametrize(
    ("stack", "caught"), [(ClipsByItsShard, True), (ClipsByTheWhole, False)]
)
def test_the_recipe_clips_with_a_reference_on_one_rank(
    runner: Runner, stack: type, caught: bool
) -> None:
    assert failed(case(runner, own(stack))) == {}
    found = failed(case(runner, own(stack), recipe="clip-norm"))
    assert ("parity.gradient" in found) is caught, found


class Sharp(Trains):
    """SAM without ``reference = "one rank"``: the plain reference does not match."""

    clip_norm = None  # type: ignore[assignment]  # as absent

    def clip(self, stack: Engine) -> Any:
        held = [p for p in stack.module.parameters() if p.grad is not None]
        before = [p.detach().clone() for p in held]
        with torch.no_grad():
            for p in held:
                p.add_(p.grad, alpha=0.5)  # type: ignore[arg-type]  # held have one
        stack.optimizer.zero_grad()
        self.backward(stack, self.parts, None)
        with torch.no_grad():
            for p, old in zip(held, before, strict=True):
                p.copy_(old)
        return None

    def backward(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> float:
        self.parts = micro_batches
        return super().backward(stack, micro_batches, scaler)


class SharpAlone(Sharp):
    reference = "one rank"


def test_what_departs_from_the_plain_reference_names_the_line(runner: Runner) -> None:
    found = case(runner, own(Sharp))
    where = runner.localise(found)
    assert where is not None and where.text.endswith(f"PowerSGD), {REFERENCE_LINE}")
    assert not any(REFERENCE_LINE in text for text in failed(found).values())
    assert failed(case(runner, own(SharpAlone))) == {}


# regression: N25
class HalvesGradients(Trains):
    """All gradients are halved, so the diagnosis can name an exact ratio."""

    def clip(self, stack: Engine) -> Any:
        norm = super().clip(stack)
        for p in stack.module.parameters():
            assert p.grad is not None
            p.grad /= 2
        return norm


class WrongOnOneRank(Trains):
    """Gradients on rank 1 are wrong."""

    def clip(self, stack: Engine) -> Any:
        for p in stack.module.parameters():
            if current_world().rank == 1 and p.grad is not None:
                p.grad += torch.arange(p.numel()).reshape(p.shape) / 100
        return super().clip(stack)


class RateOfRanks(Trains):
    """The learning rate is twice the declared one, which is reported as the cause."""

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.optimizer.param_groups[0]["lr"] *= 2
        return engine


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (HalvesGradients, "all 4 gradients are 0.500 x the truth"),
        (WrongOnOneRank, "differs on rank 1"),
        (RateOfRanks, ": lr of 0.weight is 0.02 on rank 0 at step 0, and 0.01 by the"),
    ],
)
def test_the_line_stands_only_where_nothing_else_explains_it(
    runner: Runner, stack: type, words: str
) -> None:
    found = case(runner, own(stack))
    where = runner.localise(found)
    assert where is not None and words in where.text, where
    told = [where.text, *failed(found).values()]
    assert not any("reference =" in text for text in told)
    assert "look at the optimizer" not in where.text


# - Variations


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_weights_move_by_a_unit_and_no_more(precision: str) -> None:
    unit = PRECISIONS[precision].roundoff
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    before = model.weight.detach().clone()
    changed = Variation(moved=1).change_weights(model, unit)
    moved = changed.get_parameter("weight").detach()
    off = ((moved.double() - before.double()) / before.double()).abs()
    assert 0 < float(off.max()) <= 2 * unit
    assert float((off > 0).double().mean()) > 0.9


def test_micro_batches_of_one_rank_have_the_rows_of_all_ranks() -> None:
    spec = own(Alone)
    text = f"dp2/2/fp32/own/none/model={spec},recipe=accumulate"
    rows = torch.arange(16.0).unsqueeze(1)
    batch = Batch(inputs=rows, targets=rows)
    scenario = Scenario.parse(text)
    first, second = Variation().micro_batches(batch, scenario)
    assert first.inputs.flatten().tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert second.inputs.flatten().tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    for varied in (Variation(permuted=True), Variation(parts=2)):
        parts = varied.micro_batches(batch, scenario)
        found = torch.cat([part.inputs for part in parts]).flatten()
        assert sorted(found.tolist()) == list(range(16))
        assert not torch.equal(parts[0].inputs, first.inputs)


def test_the_scaler_of_one_rank_skips_where_it_must() -> None:
    weight, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in (weight, other)]
    names = {id(optimizers[0]): {"weight"}, id(optimizers[1]): {"other"}}
    skipped = frozenset({"weight"}), frozenset[str]()
    alone = variation.Alone(variation=Variation(), skipped=skipped, scales=(4.0, 2.0))
    scenario = Scenario.parse("single/1/fp32/sgd/none")
    scaler = SameSkips(alone, scenario, lambda optimizer: names[id(optimizer)])
    assert scaler.scale((torch.ones(()), [torch.ones(())])) == (4.0, [4.0])
    for _ in range(2):
        for p, optimizer in zip((weight, other), optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(p.sum()).backward()
            scaler.step(optimizer)
        scaler.update()
    assert (weight.item(), other.item()) == (0.0, -1.0)
