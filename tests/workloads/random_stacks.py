"""Workloads with random layers; the docstring names the fault, if there is one."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradparity.tests.workloads.stacks import Batch, Right

WIDTH = 32


class Dropout(Right):
    """No fault: ranks that see different rows have seeds of their own."""

    meshes: object = ({"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2})

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.4),
            nn.Linear(WIDTH, 4),
        )

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        axes = mesh.mesh_dim_names or ()
        if "tp" in axes:
            self.split(model, mesh["tp"])
        for name, parameter in model.named_parameters() if "dp" in axes else ():
            parameter.register_post_accumulate_grad_hook(
                lambda p, n=name: self.reduce(n, p, mesh["dp"])
            )
        self.seed(mesh)
        return model

    def split(self, model: nn.Module, mesh: DeviceMesh) -> None:
        plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
        tp.parallelize_module(model, mesh, plan)

    def seed(self, mesh: DeviceMesh) -> None:
        axes = mesh.mesh_dim_names or ()
        torch.manual_seed(100 + (mesh.get_local_rank("dp") if "dp" in axes else 0))


class ReplicasDrawApart(Dropout):
    """Every rank has a different seed, even ranks with replicas of one activation."""

    def seed(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(100 + dist.get_rank())


class SeedsAlike(Dropout):
    """All ranks have one seed."""

    def seed(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(100)


class SeedsEachForward(Dropout):
    """The generator begins anew in every forward."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        found = super().parallelize(model, mesh)
        found.register_forward_pre_hook(lambda *_: self.seed(mesh))
        return found


class SeedsInBatch(Dropout):
    """No fault: ``batch`` draws from torch's own generator, seeded."""

    def batch(self, step: int, seed: int) -> Batch:
        torch.manual_seed(1000 * seed + step)
        x = torch.randn(16, 8)
        return x, x.abs()[:, :4]


class OwnStep(Dropout):
    """No fault: ``train_step`` trains a new module with the given one's weights."""

    meshes: object = ({"dp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> "Engine":  # type: ignore[override]  # with train_step any object
        fresh = Dropout.model(self)
        fresh.load_state_dict(model.state_dict())
        super().parallelize(fresh, mesh)
        return Engine(fresh, self.optimizer(list(fresh.named_parameters())))

    def weights(self, stack: "Engine") -> dict[str, Tensor]:
        return dict(stack.module.named_parameters())

    def train_step(
        self, stack: "Engine", micro_batches: list[Batch], scaler: object
    ) -> float:
        stack.optimizer.zero_grad()
        rows = sum(len(x) for x, _ in micro_batches)
        losses = [
            self.loss(stack.module(x), y) * len(x) / rows for x, y in micro_batches
        ]
        sum(losses, torch.zeros(())).backward()
        stack.optimizer.step()
        return float(sum(losses))


class SeedsEachStep(OwnStep):
    """The engine's generator begins anew in every step."""

    def train_step(
        self, stack: "Engine", micro_batches: list[Batch], scaler: object
    ) -> float:
        torch.manual_seed(dist.get_rank())
        return super().train_step(stack, micro_batches, scaler)


class SeedsEachPass(OwnStep):
    """The engine's generator begins anew in every pass of a step."""

    passed = 0

    def train_step(
        self, stack: "Engine", micro_batches: list[Batch], scaler: object
    ) -> float:
        type(self).passed += 1
        seed = 1000 * dist.get_rank() + self.passed
        hook = stack.module.register_forward_pre_hook(
            lambda *_: torch.manual_seed(seed) and None
        )
        returned = super().train_step(stack, micro_batches, scaler)
        hook.remove()
        return returned


@dataclass
class Engine:
    module: nn.Module
    optimizer: torch.optim.Optimizer


class SequenceParallel(Dropout):
    """No fault: rows of the hidden layer are split, each rank drops some of its own."""

    layout: Placement = Shard(0)

    def split(self, model: nn.Module, mesh: DeviceMesh) -> None:
        gathered = tp.PrepareModuleInput(
            input_layouts=self.layout,
            desired_input_layouts=Replicate(),
            use_local_output=True,
        )
        plan = {
            "0": tp.ColwiseParallel(),
            "2": tp.RowwiseParallel(output_layouts=self.layout),
            "4": gathered,
        }
        tp.parallelize_module(model, mesh, plan)


class DropsDTensors(SequenceParallel):
    """No fault: the dropout's input is a replicated DTensor."""

    layout = Replicate()

    def split(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().split(model, mesh)
        plan: dict[str, tp.ParallelStyle] = {
            "3": tp.PrepareModuleInputOutput(
                input_layouts=Replicate(),
                desired_input_layouts=Replicate(),
                use_local_input=False,
                output_layouts=Replicate(),
                desired_output_layouts=Replicate(),
            )
        }
        tp.parallelize_module(model, mesh, plan)


class Recomputes(Dropout):
    """No fault: recomputation draws from the restored state of the generator."""

    meshes: object = ({"dp": 2},)
    reentrant, preserves = False, True

    def model(self) -> nn.Module:
        return Checkpointed(super().model(), self.reentrant, self.preserves)


class RecomputesReentrant(Recomputes):
    """No fault: as `Recomputes`, by reentrant checkpointing."""

    reentrant = True


class ForgetsTheGenerator(Recomputes):
    """The second forward drops other elements."""

    preserves = False


class ForgetsTheGeneratorReentrant(Recomputes):
    """Has the fault of `ForgetsTheGenerator`, with reentrant checkpointing."""

    reentrant, preserves = True, False


class RestoresItsOwnGenerator(Dropout):
    """No fault: noise is drawn from a generator of the model, torch's is not used."""

    meshes: object = ({"dp": 2},)
    restores = True

    def model(self) -> nn.Module:
        return nn.Sequential(OwnNoise(self.restores), nn.Linear(WIDTH, 4))

    def seed(self, mesh: DeviceMesh) -> None:
        self.noise.generator.manual_seed(100 + mesh.get_local_rank("dp"))

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(model, nn.Sequential) and isinstance(model[0], OwnNoise)
        self.noise = model[0]
        return super().parallelize(model, mesh)


class ForgetsItsOwnGenerator(RestoresItsOwnGenerator):
    """The second forward continues with the generator's state after the first."""

    restores = False


class OwnNoise(nn.Module):
    def __init__(self, restores: bool) -> None:
        super().__init__()
        self.linear, self.dropout, self.restores = nn.Linear(8, WIDTH), 0.4, restores
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        state = self.generator.get_state() if self.restores else None
        found: Tensor = checkpoint(self.dropped, x, state, use_reentrant=False)
        return found

    def dropped(self, x: Tensor, state: Tensor | None) -> Tensor:
        found: Tensor = self.linear(x)
        if self.dropout:
            if state is not None:
                self.generator.set_state(state)
            drawn = torch.rand(found.shape, generator=self.generator)
            found = found * (drawn > self.dropout) / (1.0 - self.dropout)
        return found


class Checkpointed(nn.Module):
    def __init__(self, layers: nn.Module, reentrant: bool, preserves: bool) -> None:
        super().__init__()
        assert isinstance(layers, nn.Sequential)
        self.first, self.rest = layers[:1], layers[1:]
        self.reentrant, self.preserves = reentrant, preserves

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(
            self.rest,
            self.first(x),
            use_reentrant=self.reentrant,
            preserve_rng_state=self.preserves,
        )
        return found


class NoisyAttention(Dropout):
    """No fault: dropouts as functions, and noise on the inputs."""

    meshes: object = ({"dp": 2},)

    def model(self) -> nn.Module:
        return Attention()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.router_jitter_noise = 0.1

    def forward(self, x: Tensor) -> Tensor:
        rows = self.up(x).view(len(x), 4, 8)
        if self.router_jitter_noise:
            rows = rows + self.router_jitter_noise * torch.randn_like(rows)
        mixed, _ = self.attention(rows, rows, rows)
        found: Tensor = self.head(mixed.flatten(1))
        return found


class DropsInAHook(Dropout):
    """Random layers on the ranks only, which gradparity cannot turn off."""

    meshes: object = ({"dp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        found = super().parallelize(model, mesh)
        found.register_forward_hook(
            lambda _, __, output: nn.functional.dropout(output, 0.5)
        )
        return found


class AlwaysRandom(Right):
    """Forward is random, from a source that gradparity cannot find."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Noise(), nn.Linear(8, 4))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)


class Blocks(nn.Module):
    layerdrop = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def probability(self) -> float:
        return self.layerdrop

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if not self.training or torch.rand(()) >= self.probability():
                x = x + block(x)
        found: Tensor = self.head(x)
        return found


class ConfiguredBlocks(Blocks):
    config = {"layerdrop": 0.5}  # noqa: RUF012  # as people write it

    def probability(self) -> float:
        return self.config["layerdrop"]


class DropsLayers(Dropout):
    """No fault: each rank leaves out blocks of the model at random."""

    meshes: object = ({"dp": 2},)

    def model(self) -> nn.Module:
        return Blocks()

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.seed(mesh)
        # ranks leave out different blocks
        return DistributedDataParallel(
            model, process_group=mesh.get_group("dp"), find_unused_parameters=True
        )


class DropsByConfig(Dropout):
    """Blocks are dropped at random, with a probability that gradparity cannot find."""

    def model(self) -> nn.Module:
        return ConfiguredBlocks()


class _LeavesOut(nn.Module):
    """A dropout that is written by hand."""

    def __init__(self, p: float, *, scales: bool) -> None:
        super().__init__()
        self.dropped, self.scales = p, scales

    def forward(self, x: Tensor) -> Tensor:
        if self.dropped == 0:
            return x
        kept = x * (torch.rand(x.shape, device=x.device) >= self.dropped)
        return kept / (1 - self.dropped) if self.scales else kept


class ReplacesItsDropout(Dropout):
    """No fault: the layout replaces the model's dropout by another one."""

    p, scales = 0.4, True

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module = super().parallelize(model, mesh)
        module.set_submodule("3", _LeavesOut(self.p, scales=self.scales))
        return module


class ForgetsTheFactor(ReplacesItsDropout):
    """Kept elements are not multiplied by 1 / (1 - p)."""

    scales = False


class DropsMore(ReplacesItsDropout):
    """The layout's dropout has another probability than the model's."""

    p = 0.5


class ChangesTheProbability(Dropout):
    """The layout sets another probability."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module = super().parallelize(model, mesh)
        module.get_submodule("3").p = 0.1  # type: ignore[assignment]  # a dropout's
        return module


class SavesItsGenerator(OwnStep):
    """No fault: each rank saves the state of its generator, and loads it."""

    def save_checkpoint(self, stack: Engine, scaler: object, folder: str) -> None:
        states = stack.module.state_dict(), stack.optimizer.state_dict()
        torch.save((*states, self.generator()), self.file(folder))

    def load_checkpoint(self, stack: Engine, scaler: object, folder: str) -> None:
        module, optimizer, generator = torch.load(self.file(folder))
        stack.module.load_state_dict(module)
        stack.optimizer.load_state_dict(optimizer)
        if generator is not None:
            torch.set_rng_state(generator)

    def generator(self) -> Tensor | None:
        return torch.get_rng_state()

    def file(self, folder: str) -> str:
        return f"{folder}/{dist.get_rank()}.pt"


class ForgetsItsGenerator(SavesItsGenerator):
    """A checkpoint has the weights alone: each rank draws its first numbers again."""

    def generator(self) -> Tensor | None:
        return None


class SavesOneGenerator(SavesItsGenerator):
    """All ranks load the generator's state of rank 0."""

    def file(self, folder: str) -> str:
        return f"{folder}/0.pt"

    def save_checkpoint(self, stack: Engine, scaler: object, folder: str) -> None:
        if dist.get_rank() == 0:
            super().save_checkpoint(stack, scaler, folder)


class EvaluatesOnOneRank(OwnStep):
    """Rank 0 evaluates after each step, and goes on in eval mode."""

    def train_step(
        self, stack: "Engine", micro_batches: list[Batch], scaler: object
    ) -> float:
        loss = super().train_step(stack, micro_batches, scaler)
        if dist.get_rank() == 0:
            self.evaluate(stack, micro_batches)
        return loss

    def evaluate(self, stack: "Engine", micro_batches: list[Batch]) -> None:
        stack.module.eval()
        with torch.no_grad():
            stack.module(micro_batches[0][0])


class EvaluatesAndGoesOn(EvaluatesOnOneRank):
    """No fault: rank 0 evaluates, and then trains in train mode."""

    def evaluate(self, stack: "Engine", micro_batches: list[Batch]) -> None:
        super().evaluate(stack, micro_batches)
        stack.module.train()


class Stages(Dropout):
    """No fault: two stages, each of which numbers its layers from 0."""

    meshes = ({"pp": 2},)
    second = 0.2

    def model(self) -> nn.Module:
        first = nn.Linear(8, WIDTH), nn.Dropout(0.4), nn.Tanh()
        return nn.Sequential(
            *first, nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 4)
        )

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> "Engine":  # type: ignore[override]  # with train_step any object
        assert isinstance(model, nn.Sequential)
        self.seed(mesh)
        first = mesh.get_local_rank() == 0
        layers = [*model]
        stage = nn.Sequential(*(layers[:3] if first else layers[3:]))
        if not first:
            dropout = stage[1]
            assert isinstance(dropout, nn.Dropout)
            dropout.p = self.second
        return Engine(stage, self.optimizer(list(stage.named_parameters())))

    def weights(self, stack: "Engine") -> dict[str, Tensor]:
        named = stack.module.named_parameters()
        start = 3 * dist.get_rank()
        return {f"{int(name[0]) + start}{name[1:]}": p for name, p in named}

    def train_step(
        self, stack: "Engine", micro_batches: list[Batch], scaler: object
    ) -> float | None:
        stack.optimizer.zero_grad()
        rows, total = sum(len(x) for x, _ in micro_batches), 0.0
        for x, y in micro_batches:
            if dist.get_rank() == 0:
                hidden = stack.module(x)
                dist.send(hidden.detach(), 1)
                dist.recv(gradient := torch.empty_like(hidden), 1)
                hidden.backward(gradient)
                continue
            dist.recv(received := torch.empty(len(x), WIDTH), 0)
            loss = self.loss(stack.module(received.requires_grad_()), y) * len(x) / rows
            loss.backward()
            assert received.grad is not None
            dist.send(received.grad, 0)
            total += float(loss)
        stack.optimizer.step()
        return total if dist.get_rank() else None


class SecondStageDropsMore(Stages):
    """The dropout of the second stage has the probability of the first stage's."""

    second = 0.4
