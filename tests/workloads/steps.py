"""Workloads that train by themselves: engines, trainers, pipelines, flat shards."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import parallel as tp
from torch.nn.parallel import DistributedDataParallel

from gradparity.tests.workloads.stacks import Named, Right, rank

MicroBatches = list[tuple[Tensor, Tensor]]


@dataclass
class Engine:
    """Object with a module and its optimizer, like an engine or a trainer."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    kept: dict[str, Any] = field(default_factory=dict)


class Trains(Right):
    """No fault: an engine over DDP clips by the norm, reports it and steps."""

    meshes: object = ({"dp": 2},)
    clip_norm = 0.5

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        made = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        return Engine(made, self.optimizer([*made.named_parameters()]))

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in parameters], lr=1e-2)

    def weights(self, stack: Engine) -> Any:
        return dict(stack.module.named_parameters())

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        stack.optimizer.zero_grad()
        loss = self.backward(stack, micro_batches, scaler)
        if scaler is not None:
            scaler.unscale_(stack.optimizer)
        norm = self.clip(stack)
        if scaler is None:
            stack.optimizer.step()
        else:
            scaler.step(stack.optimizer)
            scaler.update()
        return loss, norm

    def backward(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> float:
        total, rows = 0.0, sum(len(x) for x, _ in micro_batches)
        for x, y in micro_batches:
            loss = self.loss(stack.module(x), y) * (len(x) / rows)
            scaled = loss if scaler is None else scaler.scale(loss)
            scaled.backward()
            total += self.reported(loss, scaled, scaler)
        return total

    def reported(self, loss: Tensor, scaled: Tensor, scaler: Any) -> float:
        return loss.item()

    def clip(self, stack: Engine) -> Tensor:
        return nn.utils.clip_grad_norm_(stack.module.parameters(), self.clip_norm)


class ReportsTheScaledLoss(Trains):
    """No fault: the loss is that of the scaled losses, divided by the scale."""

    def reported(self, loss: Tensor, scaled: Tensor, scaler: Any) -> float:
        return scaled.item() / (1.0 if scaler is None else scaler.get_scale())


class TrainsSharded(Trains):
    """No fault: fully_shard, where the norm is a DTensor."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        fully_shard(model, mesh=mesh)
        return Engine(model, self.optimizer([*model.named_parameters()]))


class TrainsOnTwoAxes(TrainsSharded):
    """No fault: shards of shards; a rank holds several blocks of a parameter."""

    meshes = ({"dp": 2, "tp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
        tp.parallelize_module(model, mesh["tp"], plan)
        return super().parallelize(model, mesh["dp"])

    def clip(self, stack: Engine) -> Any:
        return None

    clip_norm = None  # type: ignore[assignment]  # as absent


class Renames(Right):
    """No fault: parameters of the laid-out module have other names."""

    meshes = ({"dp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        made = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        return nn.Sequential(made)

    def weights(self, stack: nn.Module) -> Any:
        return {n.removeprefix("0."): p for n, p in stack.named_parameters()}


class TrainsAModule(Trains):
    """No fault: ``parallelize`` returns a module, so ``weights`` is not needed."""

    weights = None  # type: ignore[assignment]  # as absent

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        made = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        made.__dict__["optimizer"] = self.optimizer([*made.named_parameters()])
        return made

    def train_step(self, stack: Any, micro_batches: MicroBatches, scaler: Any) -> Any:
        engine = Engine(stack, stack.__dict__["optimizer"])
        return super().train_step(engine, micro_batches, scaler)


class Averages(Trains):
    """No fault: ``ema`` returns the weights themselves, by the names of DDP."""

    def ema(self, stack: Engine) -> Any:
        return self.weights(stack)


class TwoOptimizers(Trains):
    """No fault: weights and biases have an optimizer each; a scaler skips one alone."""

    clip_norm = None  # type: ignore[assignment]  # as absent

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        named = [*engine.module.named_parameters()]
        engine.optimizer = self.optimizer([i for i in named if "weight" in i[0]])
        engine.kept["other"] = self.optimizer([i for i in named if "bias" in i[0]])
        return engine

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        optimizers = [stack.optimizer, stack.kept["other"]]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = self.backward(stack, micro_batches, scaler)
        for optimizer in optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        return loss


class FlatShards(Trains):
    """No fault: each rank owns a slice of every flattened parameter, as in ZeRO."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        shards = {}
        for name, parameter in model.named_parameters():
            cut = slice(*self.ends(parameter.numel()))
            shards[name] = nn.Parameter(parameter.detach().reshape(-1)[cut].clone())
        engine = Engine(model, self.optimizer([*shards.items()]))
        engine.kept = {"shards": shards, "gradients": {}}
        return engine

    def ends(self, count: int) -> tuple[int, int]:
        ranks = dist.get_world_size()
        return rank() * count // ranks, (rank() + 1) * count // ranks

    def weights(self, stack: Engine) -> Any:
        whole = dict(stack.module.named_parameters())
        return {
            name: (shard, slice(*self.ends(whole[name].numel())))
            for name, shard in stack.kept["shards"].items()
        }

    def gradients(self, stack: Engine) -> Any:
        whole = dict(stack.module.named_parameters())
        return {
            name: (gradient, (slice(*self.ends(whole[name].numel())),))
            for name, gradient in stack.kept["gradients"].items()
        }

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        stack.module.zero_grad()
        loss = self.backward(stack, micro_batches, scaler)
        shards, gradients = stack.kept["shards"], stack.kept["gradients"]
        for name, parameter in stack.module.named_parameters():
            assert parameter.grad is not None
            self.reduce_gradient(parameter.grad)
            flat = parameter.grad.reshape(-1)
            shards[name].grad = flat[slice(*self.ends(len(flat)))].clone()
        squares = torch.stack([s.grad.square().sum() for s in shards.values()]).sum()
        dist.all_reduce(squares)
        norm = squares.sqrt()
        for name, shard in shards.items():
            shard.grad *= min(1.0, self.clip_norm / (norm.item() + 1e-6))
            gradients[name] = shard.grad.clone()
        stack.optimizer.step()
        stack.optimizer.zero_grad()
        for name, parameter in stack.module.named_parameters():
            whole = torch.zeros(parameter.numel())
            whole[slice(*self.ends(len(whole)))] = shards[name].detach()
            dist.all_reduce(whole)
            parameter.data.copy_(whole.view_as(parameter))
        return loss, norm

    def reduce_gradient(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


class TakesTurns(Trains):
    """No fault: one layer steps, then the other with a pass of its own, as in a GAN."""

    clip_norm = 1e9
    factor = 1.0

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        parameters = [*engine.module.named_parameters()]
        engine.kept = {
            "turns": [self.optimizer(parameters[:2]), self.optimizer(parameters[2:])]
        }
        return engine

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        losses = []
        for optimizer in stack.kept["turns"]:
            stack.module.zero_grad()
            losses.append(self.backward(stack, micro_batches, scaler))
            for parameter in stack.module.parameters():
                assert parameter.grad is not None
                parameter.grad *= self.factor
            optimizer.step()
        return losses[0]


class LogsBetween(TwoOptimizers):
    """A sum of losses is logged between two steps; the second gradient is doubled."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        first, second = stack.optimizer, stack.kept["other"]
        for optimizer in (first, second):
            optimizer.zero_grad()
        loss = self.backward(stack, micro_batches, scaler)
        for parameter in second.param_groups[0]["params"]:
            parameter.grad *= self.factor
        first.step()
        with torch.enable_grad():
            weight = stack.module.get_parameter("module.0.weight")
            (weight.sum() + weight.sum()).item()
        second.step()
        return loss

    factor = 2.0


class LogsBetweenRight(LogsBetween):
    """No fault: a sum of losses is logged between two steps."""

    factor = 1.0


class TakesWrongTurns(TakesTurns):
    """All gradients are doubled, in both turns."""

    factor = 2.0


class ClipsInTurns(TakesTurns):
    """No fault: each turn clips its own gradient; the last turn's norm is reported."""

    clip_norm = 0.25

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        parameters = [*stack.module.parameters()]
        for optimizer in stack.kept["turns"]:
            stack.module.zero_grad()
            loss = self.backward(stack, micro_batches, scaler)
            norm = nn.utils.clip_grad_norm_(parameters, self.clip_norm)
            optimizer.step()
        return loss, norm


class EvaluatesAgain(Trains):
    """No fault: LBFGS, whose closure runs again within one step."""

    clip_norm = None  # type: ignore[assignment]  # as absent

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        # gradparity asks for one of this workload before there are ranks
        if dist.is_initialized():
            return torch.optim.LBFGS([p for _, p in parameters], max_iter=3)
        return super().optimizer(parameters)

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        def closure() -> float:
            stack.optimizer.zero_grad()
            return self.backward(stack, micro_batches, scaler)

        return stack.optimizer.step(closure)


class Owned(torch.optim.Optimizer):
    """Steps this rank's parameters by an inner optimizer, then broadcasts all."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        mine = [p for place, p in enumerate(parameters) if place % 2 == rank()]
        self.inside = torch.optim.AdamW(mine, lr=1e-2)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as here
        self.inside.step()
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            dist.broadcast(parameter.data, place % 2)


class ReducesToOwners(Trains):
    """No fault: a gradient is reduced to the rank that steps it, as in fairscale."""

    clip_norm = 1e9

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        return Engine(model, Owned([*model.parameters()]))

    def clip(self, stack: Engine) -> Tensor:
        for place, parameter in enumerate(stack.module.parameters()):
            assert parameter.grad is not None
            parameter.grad /= 2
            self.reduce_to(place % 2, parameter.grad)
        return torch.zeros(())

    def reduce_to(self, owner: int, gradient: Tensor) -> None:
        dist.reduce(gradient, owner)

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        loss, _ = super().train_step(stack, micro_batches, scaler)
        return loss


class OwnersForgetOthers(ReducesToOwners):
    """Each rank steps its parameters with the gradients of its own rows."""

    def reduce_to(self, owner: int, gradient: Tensor) -> None:
        pass


class Pipeline(Trains):
    """No fault: two unequal stages, 1F1B over two halves of each micro-batch."""

    meshes = ({"pp": 2},)
    clip_norm = None  # type: ignore[assignment]  # as absent
    scales = False
    """True if a call of the schedule also divides the gradients of earlier calls."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        assert isinstance(model, nn.Sequential)
        parts = [nn.Sequential(), nn.Sequential()]
        for name, layer in model.named_children():
            parts[int(name) > 1].add_module(name, layer)
        part, device = parts[rank()], torch.device("cpu")
        stage = PipelineStage(part, rank(), 2, device, group=mesh.get_group("pp"))
        engine = Engine(part, self.optimizer([*part.named_parameters()]))
        engine.kept["schedule"] = Schedule1F1B(
            stage, 2, loss_fn=self.loss, scale_grads=self.scales
        )
        return engine

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        stack.optimizer.zero_grad()
        total = 0.0
        for x, y in micro_batches:
            losses: list[Tensor] = []
            if rank():
                stack.kept["schedule"].step(target=y, losses=losses)
                total += torch.stack(losses).mean().item() / len(micro_batches)
            else:
                stack.kept["schedule"].step(x)
        for parameter in stack.module.parameters():
            assert parameter.grad is not None
            parameter.grad /= self.divisor(len(micro_batches))
        stack.optimizer.step()
        return total if rank() else None

    def divisor(self, count: int) -> int:
        return 2 * count


# - Wrong stacks: the run shows it


class NeverClips(Trains):
    """The norm is reported, but gradients are not clipped."""

    def clip(self, stack: Engine) -> Tensor:
        return nn.utils.clip_grad_norm_(stack.module.parameters(), 1e9)


class ShardsUnreduced(FlatShards):
    """Each rank keeps its own rows' gradient."""

    def reduce_gradient(self, gradient: Tensor) -> None:
        pass


class SumsMicroBatches(Pipeline):
    """Gradients of calls of the schedule are added up and not averaged."""

    def divisor(self, count: int) -> int:
        return 2


class DividesAgain(Pipeline):
    """The schedule's division also divides the gradients of earlier calls."""

    scales = True

    def divisor(self, count: int) -> int:
        return count


class ReturnsNoGradients(FlatShards):
    """``gradients`` returns an empty dict."""

    def gradients(self, stack: Engine) -> Any:
        return {}


class ScalesLate(Trains):
    """Clips before it unscales."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        stack.optimizer.zero_grad()
        loss = self.backward(stack, micro_batches, scaler)
        norm = self.clip(stack)
        if scaler is None:
            stack.optimizer.step()
        else:
            scaler.step(stack.optimizer)
            scaler.update()
        return loss, norm


# - Stacks that break the protocol on the ranks


class StepsTwice(Trains):
    """Steps once more with the same gradients."""

    def clip(self, stack: Engine) -> Tensor:
        norm = super().clip(stack)
        stack.optimizer.step()
        return norm


class StepsNever(Trains):
    """Leaves the step out."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        return self.backward(stack, micro_batches, scaler)


class UnknownWeights(Trains):
    """``weights`` has other names than the model."""

    def weights(self, stack: Engine) -> Any:
        named = stack.module.named_parameters()
        return {f"inner.{n.removeprefix('module.')}": p for n, p in named}


class UnknownGradients(FlatShards):
    """``gradients`` has other names than the model."""

    def gradients(self, stack: Engine) -> Any:
        return {f"inner.{n}": g for n, g in super().gradients(stack).items()}


class UnknownAverages(Trains):
    """``ema`` has other names than the model."""

    def ema(self, stack: Engine) -> Any:
        return {f"inner.{n}": w for n, w in self.weights(stack).items()}


class AveragesTwice(Trains):
    """``ema`` returns each average under two names."""

    def ema(self, stack: Engine) -> Any:
        found = self.weights(stack)
        return found | {n.removeprefix("module."): w for n, w in found.items()}


class WrongSlices(FlatShards):
    """``weights`` declares a larger slice than the rank has."""

    def weights(self, stack: Engine) -> Any:
        found = super().weights(stack)
        return found | {"0.bias": (found["0.bias"][0], slice(0, 7))}


class OtherSlices(FlatShards):
    """Each rank declares the slice of the other rank."""

    def weights(self, stack: Engine) -> Any:
        found = super().weights(stack)
        shard = found["0.bias"][0]
        return found | {"0.bias": (shard, slice(4 - 4 * rank(), 8 - 4 * rank()))}


class RoundedCopies(FlatShards):
    """Copies of the weights are made after rounding them to bf16."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        return super().parallelize(model, mesh)


class LosesShards(FlatShards):
    """``weights`` leaves out one parameter."""

    def weights(self, stack: Engine) -> Any:
        return {n: w for n, w in super().weights(stack).items() if n != "2.weight"}


class LosesShardsBesideOthers(LosesShards):
    """``weights`` leaves out one parameter, and rank 1 holds none."""

    def weights(self, stack: Engine) -> Any:
        return {} if rank() else super().weights(stack)


class StepsCopies(FlatShards):
    """Its optimizer steps hidden copies, and it has no ``gradients``."""

    gradients = None  # type: ignore[assignment]  # as absent

    def weights(self, stack: Engine) -> Any:
        found = super().weights(stack)
        return {n: (shard.detach().clone(), at) for n, (shard, at) in found.items()}


class WeightsNotParameters(Renames):
    """Has no train_step, and ``weights`` returns copies."""

    def weights(self, stack: nn.Module) -> Any:
        return {n: p.detach().clone() for n, p in super().weights(stack).items()}


class WeightsAreAList(Trains):
    """``weights`` returns a list."""

    def weights(self, stack: Engine) -> Any:
        return [*stack.module.parameters()]


class RunsFromItsWeights(Trains):
    """The engine draws new weights."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        nn.init.ones_(model.get_parameter("2.bias"))
        return super().parallelize(model, mesh)


class HidesItsParameters(Trains):
    """``parallelize`` returns an engine, and there is no method ``weights``."""

    weights = None  # type: ignore[assignment]  # as absent


class ReturnsText(Trains):
    """The loss is a string."""

    def backward(self, stack: Engine, micro_batches: MicroBatches, scaler: Any) -> Any:
        super().backward(stack, micro_batches, scaler)
        return "0.5"


class ReturnsThree(Trains):
    """``train_step`` returns three values."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        return *super().train_step(stack, micro_batches, scaler), 1.0


class TrainRaises(Trains):
    """Raises in the middle of a step."""

    def clip(self, stack: Engine) -> Tensor:
        raise RuntimeError("no norm here")


class Alone(Trains):
    """No fault: the reference is one rank, though the plain one would match as well."""

    reference = "one rank"


class GivesWeightsInAnotherOrder(Trains):
    """No fault: ``weights`` gives the same names in another order after a step."""

    def weights(self, stack: Engine) -> Any:
        weights = super().weights(stack)
        moved = bool(stack.optimizer.state)
        return dict(reversed(weights.items())) if moved else weights


class LosesAWeight(Trains):
    """``weights`` gives one name less after a step."""

    def weights(self, stack: Engine) -> Any:
        weights = super().weights(stack)
        return (
            {n: w for n, w in weights.items() if n != "module.2.bias"}
            if (stack.optimizer.state)
            else weights
        )


class ReturnsNumpyNumbers(Trains):
    """No fault: loss and norm are numbers of numpy."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        loss, norm = super().train_step(stack, micro_batches, scaler)
        return np.float32(loss), np.float32(norm)
