"""Workloads with their own shards, micro-batches or counts, and with idle layers."""

import time
from html import unescape
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.__main__ import main
from gradparity.conformance.report.records import read_report
from gradparity.conformance.report.terminal import not_tried_lines
from gradparity.conformance.space.catalogue import Selection, not_tried, select
from gradparity.conformance.space.facts import facts_of
from gradparity.fixtures import resolve_workload
from gradparity.tests.verdicts import failed
from gradparity.tests.workloads.stacks import Batch, Ddp, Named, Right, SixRows, rank

MODULE = "gradparity.tests.conformance.test_workload_parts"


class Counted(Ddp):
    """No fault: a mean over positive elements, whose number differs between ranks."""

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        kept = targets > 0.5
        return (output - targets)[kept].square().sum(), kept.sum()


class CountedSharded(Counted):
    """No fault: as `Counted`, with fully_shard of the layers, but not of the model."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for layer in model.children():
            fully_shard(layer, mesh=mesh["dp"])
        return model


class CountedByHooks(Counted):
    """No fault: gradients are averaged by hooks, in every backward."""

    parallelize = Right.parallelize


class TakesPreparedInputs(Counted):
    """No fault: ``shard`` returns inputs in a form that only its train_step accepts."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        made = super().parallelize(model, mesh)
        self.step = self.optimizer([*made.named_parameters()])
        return made

    def weights(self, stack: nn.Module) -> dict[str, Any]:
        return dict(stack.module.named_parameters())  # type: ignore[union-attr]  # of DDP

    def shard(self, batch: Batch, mesh: DeviceMesh) -> Any:
        x, y = (t.chunk(2)[rank()] for t in batch)
        return {"rows": x}, y

    def train_step(self, stack: nn.Module, micro_batches: Any, scaler: Any) -> Tensor:
        self.step.zero_grad()
        (inputs, targets), *_ = micro_batches
        total, count = self.loss(stack(inputs["rows"]), targets)
        everything = count.clone().float()
        dist.all_reduce(everything)
        (total * dist.get_world_size() / everything).backward()
        self.step.step()
        mean: Tensor = total.detach() / count
        return mean


class MakesAMeshOnce(Ddp):
    """Keeps its mesh in a class attribute, and raises if laid out again."""

    meshes_made: ClassVar[list[DeviceMesh]] = []

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if self.meshes_made:
            raise RuntimeError("the mesh is already initialized")
        self.meshes_made.append(mesh)
        return super().parallelize(model, mesh)

    def weights(self, stack: nn.Module) -> dict[str, Any]:
        return dict(stack.module.named_parameters())  # type: ignore[union-attr]  # of DDP


class Uneven(Ddp):
    """Shards have other sizes than the placements of their DTensors say."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.mesh = mesh
        return model

    def weights(self, stack: nn.Module) -> dict[str, Any]:
        cut = slice(0, 3) if rank() == 0 else slice(3, None)
        return {
            name: DTensor.from_local(
                *(p[cut], self.mesh, [Shard(0)]),
                run_check=False,
                shape=p.shape,
                stride=p.stride(),
            )
            for name, p in stack.named_parameters()
        }


class ShowsFirstReplica(Ddp):
    """``weights`` returns the replica of rank 0 alone."""

    def weights(self, stack: nn.Module) -> dict[str, Any]:
        own = dict(stack.module.named_parameters())  # type: ignore[union-attr]  # of DDP
        return {} if rank() else own


class OneBatch(Right):
    """No fault, but all steps have the same batch."""

    def batch(self, step: int, seed: int) -> Batch:
        return super().batch(0, seed)


class MixesTokens(Right):
    """No fault: the ranks along ``cp`` share the tokens of each row."""

    meshes = ({"cp": 2},)
    data_axes = ("cp",)

    def model(self) -> nn.Module:
        return Mixes()

    def batch(self, step: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(8, 4, 8, generator=generator)
        return x, x.abs()[:, :, :4]

    def shard(self, batch: Batch, mesh: DeviceMesh) -> Batch:
        at, parts = mesh.get_local_rank("cp"), mesh["cp"].size()
        x, y = (t.chunk(parts, 1)[at] for t in batch)
        return x, y

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(model, Mixes)
        model.group = mesh.get_group("cp")
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, n=name: self.reduce(n, p, mesh["cp"])
            )
        return model


class Mixes(nn.Module):
    """Model that adds the mean over all tokens, also those on other ranks."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.value, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        total = self.value(x).tanh().sum(1, keepdim=True)
        if self.group is not None:
            total = self.together(total)
        found: Tensor = self.head(x + total / 4)
        return found

    def together(self, total: Tensor) -> Tensor:
        found: Tensor = all_reduce(total, group=self.group)
        return found


class Cuts(Ddp):
    """No fault: ``micro_batches`` returns parts of 3, of 4 and of all other rows."""

    def micro_batches(self, batch: Batch) -> list[Batch]:
        x, y = batch
        sizes = [3, 4, len(x) - 7]
        return [*zip(x.split(sizes), y.split(sizes), strict=True)]


class Packs(Counted):
    """No fault: four rows belong together, so they cannot be cut or reversed."""

    def model(self) -> nn.Module:
        return Packed()

    def micro_batches(self, batch: Batch) -> list[Batch]:
        x, y = batch
        return [*zip(x.split(4), y.split(4), strict=True)]


class Packed(nn.Module):
    """Model in which each of four successive rows has another weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.linspace(1, 2, 4).to(x.dtype)
        found: Tensor = self.head((x.view(-1, 4, 8) * weights[:, None]).view(-1, 8))
        return found


class UsesHalf(Ddp):
    """No fault: one layer is never used, another only in step 1, under DDP."""

    def model(self) -> nn.Module:
        return HalfUsed()

    def batch(self, step: int, seed: int) -> Any:
        x, y = super().batch(step, seed)
        return (x, torch.full((16,), step)), y

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        group = mesh.get_group("dp")
        return DistributedDataParallel(
            model, process_group=group, find_unused_parameters=True
        )

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        found = [p for _, p in parameters]
        return torch.optim.AdamW(found, lr=1e-2, weight_decay=0.5)


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.later, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, inputs: Any) -> Tensor:
        x, step = inputs
        x = self.first(x).tanh()
        if int(step[0]) == 1:
            x = self.later(x)
        found: Tensor = self.head(x)
        return found


class UsesHalfSharded(UsesHalf):
    """No fault: unused parameters get zero gradients, so weight decay moves them."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for layer in model.children():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        model.register_full_backward_pre_hook(zeros_where_none)
        return model


def zeros_where_none(module: nn.Module, _: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def tiny_where_none(module: nn.Module, _: Any) -> None:
    gradient = module.get_parameter("never.bias").grad
    assert gradient is not None
    gradient.fill_(1e-9)


# - Wrong stacks: the run shows it


class KeepsTheLast(Ddp):
    """Each forward drops the gradients of earlier micro-batches."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        made = super().parallelize(model, mesh)
        made.register_forward_pre_hook(lambda m, _: m.zero_grad())
        return made


class KeepsTheLastUnsynchronised(Ddp):
    """Gradients of passes without synchronisation are lost."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        made = super().parallelize(model, mesh)
        made.register_forward_pre_hook(
            lambda m, _: m.zero_grad() if m.require_backward_grad_sync else None
        )
        return made


class KeepsTheLastOfItsOwn(KeepsTheLast):
    """Drops gradients like `KeepsTheLast`; the workload has its own micro-batches."""

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return Cuts().micro_batches(batch)


class MixesItsOwnTokens(MixesTokens):
    """Each rank takes the mean over its own tokens."""

    def model(self) -> nn.Module:
        return MixesAlone()


class MixesAlone(Mixes):
    def together(self, total: Tensor) -> Tensor:
        return 2 * total


class ForgetsHowMany(Counted):
    """Gradients of ranks get wrong weights: 1.25 on rank 0, and 0.75 on rank 1."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        made = super().parallelize(model, mesh)
        for parameter in made.parameters():
            parameter.register_hook(lambda g: g * (1.25 - 0.5 * rank()))
        return made


class TrainsTheUnused(UsesHalfSharded):
    """A layer that the loss does not use gets a tiny gradient."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        made = super().parallelize(model, mesh)
        made.register_full_backward_pre_hook(tiny_where_none)
        return made


# - Stacks that break the protocol on the ranks


class ShardsOverlap(MixesTokens):
    """Both ranks see the middle tokens."""

    def shard(self, batch: Batch, mesh: DeviceMesh) -> Batch:
        first = mesh.get_local_rank("cp")
        x, y = batch
        return x[:, first : first + 3], y[:, first : first + 3]


class ShardsLeaveAHole(MixesTokens):
    """No rank sees the last token."""

    def shard(self, batch: Batch, mesh: DeviceMesh) -> Batch:
        x, y = super().shard(batch, mesh)
        return x[:, : 2 - rank()], y[:, : 2 - rank()]


class ShardsAlike(MixesTokens):
    """Both ranks see the first half."""

    def shard(self, batch: Batch, mesh: DeviceMesh) -> Batch:
        x, y = batch
        return x[:, :2], y[:, :2]


class CountsOverlap(Counted):
    """Both ranks have all rows, so each row is counted twice."""

    def shard(self, batch: Batch, mesh: DeviceMesh) -> Batch:
        return batch


class CountsNothingLater(Counted):
    """The count is 0 at step 1."""

    def batch(self, step: int, seed: int) -> Batch:
        x, y = super().batch(step, seed)
        return x, y * (step != 1)


class ShardIsATensor(MixesTokens):
    """``shard`` forgets the targets."""

    def shard(self, batch: Batch, mesh: DeviceMesh) -> Any:
        return super().shard(batch, mesh)[0]


class RefusesOne(Ddp):
    """``parallelize`` raises for a mesh with one data rank."""

    meshes = ({"dp": 2, "tp": 1},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if mesh["dp"].size() == 1:
            raise ValueError("no parallelism asked for")
        return super().parallelize(model, mesh)


# - Bad input: told before anything is started


class CountIsText(Ddp):
    """The count is a string."""

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        return (output - targets).square().sum(), "all"


class CountIsNegative(Ddp):
    """The count is below zero."""

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        return (output - targets).square().sum(), -1


class CountsNothing(Ddp):
    """The count is zero."""

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        return (output - targets).square().sum(), torch.tensor(0)


class MeanAndCount(Ddp):
    """``loss`` returns a mean in place of the sum, with a count."""

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        return (output - targets).square().mean(), targets.numel()


class SumOfRows(Ddp):
    """``loss`` returns a sum for each row in place of one sum."""

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        return (output - targets).square().sum(1), targets.numel()


class CutsNothing(Ddp):
    """Returns an empty list of micro-batches."""

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return []


class CutsAway(Ddp):
    """Micro-batches leave out rows."""

    def micro_batches(self, batch: Batch) -> list[Batch]:
        x, y = batch
        return [(x[:4], y[:4]), (x[4:7], y[4:7])]


class CutsInSeven(Ddp):
    """``micro_batches`` raises: the rows cannot be cut into seven equal parts."""

    def micro_batches(self, batch: Batch) -> list[Batch]:
        x, y = batch
        return [*zip(x.view(7, -1, 8), y.view(7, -1, 4), strict=True)]


class EqualRows(Ddp):
    """All rows are equal, so ranks that reduce nothing have the same gradients."""

    def batch(self, step: int, seed: int) -> Batch:
        x, y = super().batch(step, seed)
        return x[:1].expand_as(x).clone(), y[:1].expand_as(y).clone()


class FiveRows(Ddp):
    """A batch has five rows, which two ranks cannot share equally."""

    def batch(self, step: int, seed: int) -> Batch:
        x, y = super().batch(step, seed)
        return x[:5], y[:5]


class ShardTakesNoMesh(MixesTokens):
    """``shard`` lacks an argument."""

    def shard(self, batch: Batch) -> Batch:  # type: ignore[override]  # the fault
        return batch


class StepTakesNoScaler(Ddp):
    """``train_step`` lacks an argument."""

    def train_step(self, stack: nn.Module, micro_batches: Any) -> float:
        return 0.0


class ClipsWithoutStep(Ddp):
    """``clip_norm`` without a ``train_step``."""

    clip_norm = 1.0


class StepIsMisspelt(Ddp):
    """No step of its own is called; only the scaler has the name that it should."""

    def training_step(self, model: Any, parts: Any, scaler: Any) -> None:
        raise AssertionError


class CountIsMisspelt(Ddp):
    """``skip_steps`` has the parameter of ``skipped_steps``."""

    def skip_steps(self, stack: Any) -> int:
        return 0


class BuffersAreMisspelt(Ddp):
    """``local_buffer`` is no method."""

    local_buffer = ("running_mean",)


class HasItsOwnNames(Ddp):
    """Names that look like optional ones, of other things."""

    schedules = nn.Identity
    preferences = ("fast",)
    checkpointing = True
    data_axes = None
    data_axis = ("dp",)
    references = torch.ones(2)

    def gradient(self, stack: Any) -> Any:
        return stack

    def schedule(self, optimizer: Any) -> Any:
        return optimizer

    def shards(self, x: Tensor) -> Tensor:
        return x

    def micro_batch(self, batch: Any) -> Any:
        return batch

    def train_steps(self, model: Any, batch: Any, step: Any) -> None:
        raise AssertionError


class IsAModule(nn.Module, Ddp):
    """The workload is a module, with a module inside that no class has."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduled = nn.Identity()


class ClipsToNothing(StepTakesNoScaler):
    """``clip_norm`` is zero."""

    clip_norm = 0.0

    def train_step(self, stack: Any, micro_batches: Any, scaler: Any) -> float:  # type: ignore[override]  # as it should be
        return 0.0


class ReducesInText(Ddp):
    """``reduce_dtype`` is a string."""

    reduce_dtype = "bf16"


def case(
    runner: Runner, stack: type, recipe: str = "plain", scaler: str = "none"
) -> Case:
    mesh = "cp2" if issubclass(stack, MixesTokens) else "dp2"
    settings = f"recipe={recipe},steps=2,model={MODULE}:{stack.__name__}"
    return runner.run(scaler, Scenario.parse(f"{mesh}/2/fp32/own/none/{settings}"))


ACCUMULATE = ("accumulate", "accumulate-no-sync", "accumulate-uneven")


@pytest.mark.parametrize(
    ("stack", "recipes"),
    [
        (Ddp, ACCUMULATE),
        (Counted, ("plain", *ACCUMULATE, "frozen", "resume")),
        (CountedSharded, ("plain", *ACCUMULATE)),
        (CountedByHooks, ("plain", "accumulate", "accumulate-uneven")),
        (MixesTokens, ("plain", "accumulate", "accumulate-uneven", "clip-norm")),
        (Cuts, ("plain", "accumulate-no-sync")),
        (Packs, ("plain",)),
        (UsesHalf, ("plain", "accumulate", "clip-norm")),
        (UsesHalfSharded, ("plain", "accumulate-uneven")),
    ],
)
@pytest.mark.few(3)
def test_right_stacks_pass(
    runner: Runner, stack: type, recipes: tuple[str, ...]
) -> None:
    for recipe in recipes:
        found = case(runner, stack, recipe)
        assert found.status == "pass", (recipe, found.problem, failed(found))
        assert found.evidence is not None and found.evidence.parity is not None
        assert found.evidence.parity.not_compared.total() == 0


def test_ranks_whose_counts_are_not_known_have_no_loss_to_compare(
    runner: Runner,
) -> None:
    found = case(runner, TakesPreparedInputs)
    told = {v.law: v for v in found.verdicts}
    assert found.status == "inconclusive", found.problem
    assert told["parity.loss"].status == "inconclusive"
    assert "their numbers of tokens are unknown" in told["parity.loss"].message
    assert told["parity.gradient"].status == told["parity.update"].status == "pass"


def test_a_scaler_is_checked_on_counted_losses(runner: Runner) -> None:
    scaler = "gradparity.fixtures.faulty:PlainScaler"
    assert case(runner, Counted, "accumulate-uneven", scaler).status == "pass"


@pytest.mark.parametrize(
    ("stack", "recipe"),
    [
        (KeepsTheLast, "accumulate"),
        (KeepsTheLast, "accumulate-uneven"),
        (KeepsTheLastUnsynchronised, "accumulate-no-sync"),
        (KeepsTheLastOfItsOwn, "plain"),
        (MixesItsOwnTokens, "plain"),
        (ForgetsHowMany, "plain"),
        (TrainsTheUnused, "plain"),
    ],
)
def test_a_wrong_stack_is_caught(runner: Runner, stack: type, recipe: str) -> None:
    found = case(runner, stack, recipe)
    assert "differs from the fp64 truth" in failed(found)["parity.gradient"]
    if recipe != "plain":
        assert case(runner, stack).status == "pass"


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (
            ShardsOverlap,
            "shard: the parts of all ranks overlap: together they have 192",
        ),
        (ShardsLeaveAHole, "shard: the parts of all ranks leave a hole: together"),
        (ShardsAlike, "shard: the parts of all ranks overlap and leave a hole"),
        (
            CountsOverlap,
            "shard: the parts of all ranks overlap: their counts add up to",
        ),
        (CountsNothingLater, "loss: the counts of a step add up to 0 over all ranks"),
        (ShowsFirstReplica, "weights: returned nothing, and this rank has "),
        (ShardIsATensor, "shard: returned Tensor, expected (inputs, targets)"),
        (
            Uneven,
            # rank 0 holds 24, rank 1 40; either may be the first
            "local elements, and 32 by its placements: for an uneven layout of your "
            "own give (its local tensor, slices of the whole)",
        ),
    ],
)
def test_parts_that_are_not_the_batch_are_an_error(
    runner: Runner, stack: type, words: str
) -> None:
    found = case(runner, stack)
    assert found.status == "error", failed(found)
    assert words in found.problem
    assert f"workload {MODULE}:{stack.__name__}: " in found.problem


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (CountIsText, "loss: the count of (sum, count) is 'all', expected a number"),
        (CountIsNegative, "loss: the count of (sum, count) is -1, expected a number"),
        (CountsNothing, "loss: the count of the whole first batch is 0"),
        (
            MeanAndCount,
            "(counts 64) and 0.0845853479 for its 4 parts together (counts 64)",
        ),
        (SumOfRows, "loss: returned a tensor of shape [16]"),
        (CutsNothing, "micro_batches: returned [], expected a list of (inputs,"),
        (
            CutsAway,
            "micro_batches: leave out rows or repeat them: together they have 28",
        ),
        (CutsInSeven, "micro_batches: raised RuntimeError: shape '[7, -1, 8]'"),
        (EqualRows, "batch: has equal rows for all 2 ranks of dp2"),
        (FiveRows, "batch: has 5 rows, which 2 does not divide"),
        (ShardTakesNoMesh, "shard: takes (batch), expected (batch, mesh)"),
        (StepTakesNoScaler, "train_step: takes (stack, micro_batches), expected"),
        (
            StepIsMisspelt,
            "training_step: has no meaning here: did you mean train_step?",
        ),
        (CountIsMisspelt, "skip_steps: has no meaning here: did you mean skipped_st"),
        (
            BuffersAreMisspelt,
            "did you mean local_buffers? If not, add: local_buffers = No",
        ),
        (ClipsWithoutStep, "clip_norm: needs train_step, which clips"),
        (ClipsToNothing, "clip_norm: got 0.0, expected a norm above 0"),
        (ReducesInText, "reduce_dtype: got 'bf16', expected a floating dtype"),
    ],
)
def test_faults_of_a_workload_known_before_the_run_are_usage_errors(
    stack: type, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"{MODULE}:{stack.__name__}"
    report = tmp_path / "report.jsonl"
    assert main(["run", "--workload", spec, f"--report={report}"]) == 2
    told = capsys.readouterr().err
    assert f"workload {spec}: " in told
    assert words in told
    assert told.count("\n") == 1
    assert not report.exists()


class HangsInModel(Ddp):
    """``model()`` never returns."""

    def model(self) -> nn.Module:
        time.sleep(600)
        return super().model()


def test_a_check_that_hangs_ends_at_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--workload", f"{MODULE}:{HangsInModel.__name__}"]
    words += ["--timeout-s=0.5", f"--report={tmp_path / 'report.jsonl'}"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "hung, still running after 2.0 s; waiting: rank 0 in model (" in told


@pytest.mark.parametrize("stack", [HasItsOwnNames, IsAModule])
def test_names_of_the_users_own_are_not_refused(stack: type) -> None:
    resolve_workload(f"{MODULE}:{stack.__name__}")


# - What is tried, and what is not


def test_quick_accumulates_on_every_mesh_and_narrows_each_axis() -> None:
    for no_scaler in (True, False):
        spec = "gradparity.tests.workloads.stacks:Right"
        quick = select("quick", Selection(workload=spec, no_scaler=no_scaler))
        tried = {(s.topology, s.recipe) for s in quick if s.faults == "none"}
        for mesh in ("dp2", "dp2-tp2"):
            assert {(mesh, recipe) for recipe in ACCUMULATE} <= tried
        narrowed = [s for s in quick if s.parsed_topology.narrowed]
        assert {(s.topology, s.recipe) for s in narrowed} == {
            (mesh, recipe)
            for mesh in ("dp1", "dp1-tp2", "dp2-tp1")
            for recipe in ("plain", "clip-norm", *ACCUMULATE)
        }
        assert {s.precision for s in narrowed} == {"fp32"}


class LastPassAtSizeOne(Right):
    """Each backward drops earlier gradients, but only on a data axis of size 1."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if mesh["dp"].size() > 1:
            return super().parallelize(model, mesh)
        model.register_full_backward_pre_hook(lambda m, _: m.zero_grad())
        return model


@pytest.mark.parametrize("preset", ["quick", "default"])
def test_accumulation_is_tried_where_an_axis_has_size_one(
    runner: Runner, preset: str
) -> None:
    chosen = Selection(workload=f"{MODULE}:LastPassAtSizeOne", no_scaler=True)
    tried = [s for s in select(preset, chosen) if s.topology == "dp1"]
    found = {s.recipe: runner.run("none", s).status for s in tried}
    assert found["plain"] == found["clip-norm"] == "pass"
    assert found["accumulate"] == found["accumulate-uneven"] == "fail"
    (told,) = (text for text in not_tried(chosen) if "axis of size 1" in text)
    assert told == (
        "dp1, dp1-tp2, dp2-tp1: an axis of size 1 is tried only in fp32 with "
        "plain, accumulate, accumulate-no-sync, accumulate-uneven, clip-norm"
    )


def test_six_rows_of_three_a_rank_cannot_be_halved() -> None:
    spec = f"{SixRows.__module__}:{SixRows.__name__}"
    chosen = Selection(workload=spec, no_scaler=True, topologies=["dp2"])
    recipes = {s.recipe for s in select("quick", chosen)}
    assert "plain" in recipes and not {*ACCUMULATE} & recipes
    told = not_tried(chosen)
    why = "3 rows of a rank cannot be cut in"
    assert f"accumulate, accumulate-no-sync: {why} 2 equal parts" in told
    assert f"accumulate-uneven: {why} 3 unequal parts" in told


class CountsAlike(Counted):
    """No fault, but each row has as many positive elements as any other."""

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        return (output - targets).square().sum(), targets.numel()


def test_counts_that_cannot_differ_are_not_tried() -> None:
    """A loss that each rank divides by its own count would pass."""
    for stack, alike in ((CountsAlike, True), (Counted, False)):
        chosen = Selection(workload=f"{MODULE}:{stack.__name__}", no_scaler=True)
        told = "\n".join(not_tried(chosen))
        assert ("unequal counts: all rows of batch() count alike" in told) is alike


def test_a_batch_that_never_changes_is_told() -> None:
    """A trainer that takes the rows of another step would pass."""
    for stack, alike in ((OneBatch, True), (Right, False)):
        of = f"{stack.__module__}:{stack.__name__}"
        told = "\n".join(not_tried(Selection(workload=of, no_scaler=True)))
        assert ("other rows in each step: batch() gives those" in told) is alike


def test_recipes_and_meshes_that_a_layout_refuses_are_skipped_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--scaler=none", f"--out={tmp_path}"]
    settings = f"steps=1,recipe=accumulate-no-sync,model={MODULE}"
    ids = [
        f"--scenario=dp2/2/fp32/own/none/{settings}:CountedByHooks",
        f"--scenario=dp2/2/fp32/own/none/{settings}:Ddp",
        f"--scenario=dp1-tp1/1/fp32/own/none/steps=1,model={MODULE}:RefusesOne",
    ]
    assert main([*words, *ids]) == 0
    report = read_report(tmp_path / "report.jsonl")
    assert [c.status for c in report.cases] == ["skipped", "pass", "skipped"]
    told = capsys.readouterr().out
    assert "\nnot tried: 2 kinds of run (reasons: on the page)\n" in told
    page = unescape((tmp_path / "index.html").read_text())
    first, second = not_tried_lines(report)
    assert "the module has neither a no_sync() as DDP's nor a part under" in first
    assert "parallelize: raised ValueError: no parallelism asked for" in second
    assert f"<li>{first}</li>" in page and f"<li>{second}</li>" in page
    assert main([*words, *ids[1:]]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"not tried: {second}" in told


def test_frozen_parts_are_the_second_half_of_the_model(runner: Runner) -> None:
    found = case(runner, Ddp, "frozen")
    assert found.status == "pass", found.problem
    assert found.evidence is not None
    last = found.evidence.ranks[0].steps[-1]
    assert {*last.gradients} == {"0.weight", "0.bias"}


def test_a_resolved_workload_has_only_the_calls_of_its_module() -> None:
    workload = resolve_workload(f"{MODULE}:Ddp")
    calls = ("shard", "micro_batches", "train_step", "weights", "gradients")
    assert not any(getattr(workload, n) for n in (*calls, "clip_norm", "reduce_dtype"))
    assert not facts_of(workload.name).counted and facts_of(f"{MODULE}:Counted").counted


def test_ranks_of_a_run_are_those_of_the_one_before_unless_they_are_isolated(
    tmp_path: Path,
) -> None:
    """Runs share ranks by default, and so the workload's globals (J19)."""
    text = f"dp2/2/fp32/own/none/model={MODULE}:MakesAMeshOnce,steps=2,seed="
    ids = [f"--scenario={text}{seed}" for seed in range(2)]

    def statuses(*options: str) -> list[str]:
        main(
            ["run", "--scaler=none", *ids, "--quiet", "--out", str(tmp_path), *options]
        )
        return [case.status for case in read_report(tmp_path / "report.jsonl").cases]

    assert statuses() == ["pass", "error"]
    assert statuses("--isolation", "process") == ["pass", "pass"]
