"""Workloads with one fault each; the docstring names it."""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as tp
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[Tensor, Tensor]
Named = list[tuple[str, nn.Parameter]]


class Right:
    """No fault: gradients averaged by hooks, linear layers split over ``tp``."""

    meshes: object = ({"dp": 2}, {"dp": 2, "tp": 2})

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def batch(self, step: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(16, 8, generator=generator)
        return x, x.abs()[:, :4]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, targets)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if "tp" in (mesh.mesh_dim_names or ()):
            plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
            tp.parallelize_module(model, mesh["tp"], plan)
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, n=name: self.reduce(n, p, mesh["dp"])
            )
        return model

    def reduce(self, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        gradient = parameter.grad
        assert gradient is not None
        part = getattr(gradient, "_local_tensor", gradient)
        dist.all_reduce(part, group=mesh.get_group())
        part /= mesh.size()

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in parameters], lr=0.1)


class Nested(Right):
    """No fault: batches are nested dicts and tuples, with one integer tensor."""

    meshes = ({"dp": 2},)

    def model(self) -> nn.Module:
        return Embedding()

    def batch(self, step: int, seed: int) -> tuple[dict[str, object], list[Tensor]]:  # type: ignore[override]  # the protocol allows it
        x, y = super().batch(step, seed)
        return {"x": x, "more": (x.argmax(1),)}, [y]

    def loss(self, output: dict[str, Tensor], targets: list[Tensor]) -> Tensor:  # type: ignore[override]  # as above
        return nn.functional.mse_loss(output["y"], targets[0])

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in parameters], lr=1e-3)


class ExpertsSeeTheSameRows(Right):
    """Declares that an axis that usually splits the data does not."""

    meshes = ({"dp": 2, "ep": 2},)
    model_axes = ("ep",)


class Draws(Right):
    """No fault: ``parallelize`` draws a random number."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model.register_buffer("drawn", torch.rand(()))
        return super().parallelize(model, mesh)


class ZeroBiases(Right):
    """No fault: parts of a zero bias on ``tp`` ranks are equal, but not replicas."""

    def model(self) -> nn.Module:
        found = super().model()
        for name, parameter in found.named_parameters():
            nn.init.zeros_(parameter) if name.endswith("bias") else None
        return found


class BatchStatistics(Right):
    """No fault: each rank's layer takes the statistics of its own rows."""

    def model(self) -> nn.Module:
        norm = nn.BatchNorm1d(8, track_running_stats=False)
        return nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 4))


class Gated(nn.Module):
    """Model with two outputs: those of a layer and of a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.layer = nn.Linear(8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.gate(x)


class BalancesAGate(Right):
    """A small term of the loss, the gate's squared mean, is not a mean over rows."""

    def model(self) -> nn.Module:
        return Gated()

    def loss(self, output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:  # type: ignore[override]  # the protocol allows it
        value, gate = output
        return super().loss(value, targets) + 1e-6 * gate.mean().square()


class RowsAlike(Right):
    """No fault: all rows are equal, so their order has no effect on sums."""

    def batch(self, step: int, seed: int) -> Batch:
        return tuple(t[:1].expand(16, -1).clone() for t in super().batch(step, seed))  # type: ignore[return-value]  # two


class InTF32(Right):
    """No fault: fp32 numbers are rounded before they are multiplied, on GPUs."""

    meshes = ({"dp": 2},)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def batch(self, step: int, seed: int) -> Batch:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
        return x, x.abs()

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        torch.set_float32_matmul_precision("high")
        return super().parallelize(model, mesh)


class Exact(Right):
    """No fault: gradients are powers of two, and no run rounds anything."""

    def model(self) -> nn.Module:
        layer = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(layer.weight)
        return layer

    def batch(self, step: int, seed: int) -> Batch:
        return torch.eye(4), torch.full((4, 1), 2.0**-4)


class ScaledBlock(nn.Module):
    """Block of two linear layers, with two factors and a shift of one element each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.gain, self.shift = (nn.Parameter(torch.tensor([x])) for x in (1.0, 0.0))
        self.mix = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x * self.gain) + self.shift)
        found: Tensor = x + self.mix * self.down(hidden)
        return found


class Scalars(Right):
    """No fault: many parameters of one element."""

    meshes = ({"tp": 2},)

    def model(self) -> nn.Module:
        blocks = (ScaledBlock() for _ in range(6))
        return nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 4))

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
        for block in model.modules():
            if isinstance(block, ScaledBlock):
                tp.parallelize_module(block, mesh["tp"], plan)
                # it is added to a part of the features
                block.shift.register_hook(partial(summed, group=mesh.get_group("tp")))
        return model


class AtZero(Right):
    """No fault: one input of a ReLU is zero up to rounding."""

    meshes = ({"tp": 2},)

    def model(self) -> nn.Module:
        first = nn.Linear(64, 8)
        x, _ = self.batch(0, 0)
        with torch.no_grad():
            first.bias[0] = -(first.weight[0].double() @ x[0].double())
        return nn.Sequential(first, nn.ReLU(), nn.Linear(8, 4))

    def batch(self, step: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(128, 64, generator=generator)
        return x, x.abs()[:, :4]

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        style = tp.RowwiseParallel(input_layouts=Replicate())
        return tp.parallelize_module(model, mesh["tp"], {"0": style})


class AtZeroOnOneRank(AtZero):
    """No fault: the reference is the workload's own step on one rank."""

    reference = "one rank"

    def train_step(
        self, stack: nn.Module, micro_batches: list[Batch], scaler: object
    ) -> Tensor:
        optimizer = self.optimizer([*stack.named_parameters()])
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in micro_batches:
            loss = self.loss(stack(x), y) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total


def summed(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the gradient summed over the ranks of a group."""
    found = gradient.clone()
    dist.all_reduce(found, group=group)
    return found


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 4)

    def forward(self, inputs: dict[str, object]) -> dict[str, Tensor]:
        x, (index,) = inputs["x"], inputs["more"]  # type: ignore[misc]  # as Nested makes it
        return {"y": self.head(x * self.table(index))}  # type: ignore[has-type]  # as above


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Nondeterministic(Right):
    """No fault of a scaler: each run rounds gradients in another way."""

    def reduce(self, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        assert parameter.grad is not None
        part = getattr(parameter.grad, "_local_tensor", parameter.grad)
        part *= 1.0 + (os.urandom(1)[0] % 4) * 2.0**-23
        super().reduce(name, parameter, mesh)


# - Wrong stacks: the run shows it


class ForgetsAllReduce(Right):
    """Gradients are not averaged."""

    def reduce(self, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        pass


class NeverAverages(ForgetsAllReduce):
    """Gradients are not averaged; the data axis has one of its usual names."""

    meshes: object = (
        {"dp": 2},
        {"data": 2},
        {"dp_replicate": 2},
        {"dp_shard": 2, "tp": 1},
    )

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return model


class NeverAveragesOverRows(NeverAverages):
    """Gradients are not averaged; the data axis has a name that only it declares."""

    meshes = ({"rows": 2},)
    data_axes = ("rows",)


class ForgetsOneBias(Right):
    """The last bias is not averaged."""

    def reduce(self, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        if name != "2.bias":
            super().reduce(name, parameter, mesh)


class SumsForMean(Right):
    """Gradients are summed over the ranks, not averaged."""

    def reduce(self, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        super().reduce(name, parameter, mesh)
        assert parameter.grad is not None
        parameter.grad *= mesh.size()


class SlightlyOff(Right):
    """One weight's gradient is a thousandth too large."""

    def reduce(self, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        super().reduce(name, parameter, mesh)
        if name == "0.weight":
            assert parameter.grad is not None
            parameter.grad *= 1.001


class BiasOnOneRank(Right):
    """A bias that all ranks have is only trained on rank 0."""

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        mine = [(n, p) for n, p in parameters if n != "2.bias" or not rank()]
        return super().optimizer(mine)


class StrayCollective(Right):
    """Rank 1 sends one all-reduce more at the end of each optimizer step."""

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        made = super().optimizer(parameters)
        if rank():
            made.register_step_post_hook(
                lambda *_: dist.all_reduce(torch.ones(1), async_op=True) and None
            )
        return made


# - Stacks that break on the ranks


class OtherModelOnRank1(Right):
    """Rank 1 makes another model."""

    def model(self) -> nn.Module:
        torch.manual_seed(rank())
        return super().model()


class OtherBatchOnRank1(Right):
    """Rank 1 takes other rows."""

    def batch(self, step: int, seed: int) -> Batch:
        return super().batch(step, seed + rank())


class RaisesOnRank1(Right):
    """``parallelize`` raises on rank 1 while rank 0 goes on."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if rank():
            raise RuntimeError("no such layer")
        return super().parallelize(model, mesh)


class BackwardRaises(Right):
    """A hook raises in backward on the ranks."""

    def reduce(self, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        raise RuntimeError("out of buckets")


class CollectiveRaises(Right):
    """The backend lacks a kind of reduction, and raises in the collective."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND)
        return super().parallelize(model, mesh)


class Initialises(Right):
    """``parallelize`` draws new weights."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        nn.init.normal_(dict(model.named_parameters())["0.weight"])
        return super().parallelize(model, mesh)


class RoundsOneBias(Right):
    """``parallelize`` rounds a bias to bf16, which leaves small whole numbers alone."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        bias = model.get_parameter("0.bias").detach()
        bias.copy_(bias.bfloat16())
        return super().parallelize(model, mesh)


class LaidOutOnce(Right):
    """``parallelize`` cannot be called a second time."""

    made = 0

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.made += 1
        if self.made % 2 == 0:
            raise RuntimeError("already initialised")
        return super().parallelize(model, mesh)


class LaidOutThreeTimes(LaidOutOnce):
    """``parallelize`` cannot be called a fourth time."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.made += 1
        if self.made > 3:
            raise RuntimeError("a fourth layout")
        return Right.parallelize(self, model, mesh)


class OtherRowsEachTime(LaidOutOnce):
    """Each rank keeps half of a weight's rows, and each call the other half."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        first = model.get_submodule("0")
        assert isinstance(first, nn.Linear)
        self.made += 1
        half = (rank() + self.made) % 2
        first.weight = nn.Parameter(first.weight.detach().chunk(2)[half].clone())
        return model


class OtherSizesEachTime(LaidOutOnce):
    """A weight is split the first time, and whole the second."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        first = model.get_submodule("0")
        assert isinstance(first, nn.Linear)
        self.made += 1
        if self.made % 2:
            first.weight = nn.Parameter(first.weight.detach().chunk(2)[rank()].clone())
        return model


class Renames(Right):
    """``parallelize`` returns parameters of other names."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return nn.ModuleDict({"inner": super().parallelize(model, mesh)})


class Unties(Right):
    """``parallelize`` unties the head from the embedding table."""

    def model(self) -> nn.Module:
        return TiedHead()

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(model, TiedHead)
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return super().parallelize(model, mesh)


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(8, 4, bias=False)
        self.head = nn.Linear(8, 4)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x) + self.table(x)
        return found


class LosesHalf(Right):
    """All ranks keep the same half of a weight; no rank has the other half."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(model, nn.Sequential)
        first, last = model[0], model[2]
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        first.weight = nn.Parameter(first.weight.detach()[:4].clone())
        first.bias = nn.Parameter(first.bias.detach()[:4].clone())
        last.weight = nn.Parameter(last.weight.detach()[:, :4].clone())
        return super().parallelize(model, mesh)


class RightOnTwo(Right):
    """No fault, on two ranks only."""

    meshes: object = ({"dp": 2},)


class SumsOnTwo(SumsForMean):
    """Gradients are summed over two ranks."""

    meshes: object = ({"dp": 2},)


class NoMeshes(Right):
    """``meshes`` is a number of ranks."""

    meshes = 2


class PropertyRaises(Right):
    """An optional attribute cannot be read."""

    @property
    def reduce_dtype(self) -> torch.dtype:
        raise RuntimeError("not set yet")


class ModelExits(Right):
    """Ends the process in ``model()``."""

    def model(self) -> nn.Module:
        raise SystemExit(3)


class SaysNonsense(Right):
    """``ema`` returns a list, and ``skipped_steps`` a string."""

    def train_step(self, stack: object, micro_batches: object, scaler: object) -> None:
        raise NotImplementedError

    def ema(self, stack: object) -> list[Tensor]:
        return [torch.ones(2)]

    def skipped_steps(self, stack: object) -> str:
        return "none"


class LeavesOnRank1(Right):
    """``parallelize`` exits on rank 1, as a script does."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if rank() == 1:
            raise SystemExit("no GPU")
        return super().parallelize(model, mesh)


class Dies(Right):
    """A rank ends in forward."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        if rank():
            os._exit(9)
        return super().loss(output, targets)


# - Bad input: told before anything is started


class NoOptimizer:
    """Lacks the method ``optimizer``."""

    meshes = ({"dp": 2},)
    model = batch = loss = parallelize = Right.model


class PipelineAxis(Right):
    """The mesh has an axis for a pipeline, which needs a ``train_step``."""

    meshes = ({"pp": 2},)


class TakesNoMesh(Right):
    """``parallelize`` lacks an argument."""

    def parallelize(self, model: nn.Module) -> nn.Module:  # type: ignore[override]  # the fault
        return model


class LossIsNone(Right):
    """``loss`` is None instead of a method."""

    loss = None  # type: ignore[assignment]  # the fault


class ForwardRaises(Right):
    """The model raises."""

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), Reshapes())


class Reshapes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(3, -1)


class UnknownAxis(Right):
    """The mesh has an axis with an unknown name."""

    meshes = ({"dp": 2, "colour": 2},)


class DeclaresNoMesh(Right):
    """Declares an axis that its meshes do not have."""

    data_axes = ("rows",)


class DeclaresText(Right):
    """``data_axes`` is a string instead of a tuple of names."""

    data_axes = "dp"


class DeclaresBoth(Right):
    """Declares one axis both as a data axis and as a model axis."""

    data_axes = model_axes = ("dp",)


class RandomModel(Right):
    """Draws its weights from a private generator."""

    def model(self) -> nn.Module:
        found = super().model()
        nn.init.normal_(found[0].weight, generator=_UNSEEDED)  # type: ignore[index]  # it is a Sequential
        return found


class RandomBatch(Right):
    """``batch`` ignores its seed."""

    def batch(self, step: int, seed: int) -> Batch:
        x = torch.randn(16, 8, generator=_UNSEEDED)
        return x, x[:, :4]


_UNSEEDED = torch.Generator()


class UnevenBatch(Right):
    """Inputs and targets have different numbers of rows."""

    def batch(self, step: int, seed: int) -> Batch:
        x, y = super().batch(step, seed)
        return x, y[:8]


class SixRows(Right):
    """A batch has six rows, which micro-batches cannot share equally."""

    def batch(self, step: int, seed: int) -> Batch:
        x, y = super().batch(step, seed)
        return x[:6], y[:6]


class OneTensor(Right):
    """A batch without targets."""

    def batch(self, step: int, seed: int) -> Tensor:  # type: ignore[override]  # the fault
        return torch.zeros(16, 8)


class WrongShapes(Right):
    """The model does not accept the shape of the inputs."""

    def batch(self, step: int, seed: int) -> Batch:
        x, y = super().batch(step, seed)
        return torch.cat([x, x[:, :1]], 1), y


class LossPerRow(Right):
    """The loss is a vector."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).square().mean(1)


class SummedLoss(Right):
    """The loss is a sum over the rows."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return super().loss(output, targets) * len(output)


class BatchNorm(Right):
    """A batch norm makes the output of a row depend on other rows."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


class UsesNothing(Right):
    """The loss depends on no parameter."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return super().loss(output * 0, targets)


class HalfModel(Right):
    """The model is not in fp32."""

    def model(self) -> nn.Module:
        return super().model().half()


class LeavesOut(Right):
    """The optimizer forgets biases."""

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return super().optimizer([(n, p) for n, p in parameters if "bias" not in n])


class Ddp(Right):
    """No fault: DDP, which can defer the synchronisation of gradients."""

    meshes: object = ({"dp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))
