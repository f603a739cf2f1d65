"""Tensor and data parallel workloads written by hand, each wrong in one known place.

The layers are plain modules; over a group they hold their part of the parameters, as
Megatron's do. The docstring of a workload names its fault.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradparity.examples.gan import Gan
from gradparity.tests.workloads.stacks import Batch, Named

Group = Any


class _Copy(torch.autograd.Function):
    """Forward: identity. Backward: sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """Forward: sums over ranks. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """Forward: gathers the tokens. Backward: sums, and keeps the rank's own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class _Scatter(torch.autograd.Function):
    """Forward: sums, and keeps the rank's own tokens. Backward: gathers the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        mine: Tensor = x.chunk(group.size(), 1)[group.rank()].contiguous()
        return mine

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = [torch.empty_like(gradient) for _ in range(ctx.group.size())]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None


class Column(nn.Linear):
    """Holds a part of the output features."""

    group: Group = None
    adds_up = True
    gathers = False

    def forward(self, x: Tensor) -> Tensor:
        if self.group is not None and self.gathers:
            x = _Gather.apply(x, self.group)  # type: ignore[no-untyped-call]  # untyped in torch
        elif self.group is not None and self.adds_up:
            x = _Copy.apply(x, self.group)  # type: ignore[no-untyped-call]  # as above
        return super().forward(x)


class Row(nn.Linear):
    """Holds a part of the input features."""

    group: Group = None
    adds_up = True
    scatters = False
    early_bias = False

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return super().forward(x)
        x = F.linear(x, self.weight, self.bias if self.early_bias else None)
        if self.scatters:
            x = _Scatter.apply(x, self.group)  # type: ignore[no-untyped-call]  # as above
        elif self.adds_up:
            x = _Sum.apply(x, self.group)  # type: ignore[no-untyped-call]  # as above
        return x if self.early_bias else x + self.bias


class Attention(nn.Module):
    """Causal attention with two heads."""

    mask_off = False
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleDict({n: Column(8, 8) for n in ("query", "key", "value")})
        self.out = Row(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer in self.qkv.values()
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=not self.mask_off)
        if self.factor != 1.0 and mixed.requires_grad:
            mixed.register_hook(lambda gradient: gradient * self.factor)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Column(8, 16), Row(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(F.gelu(self.up(x)))
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(8), Attention()
        self.norm_2, self.feed = nn.LayerNorm(8), Feed()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        found: Tensor = x + self.feed(self.norm_2(x))
        return found


class Model(nn.Module):
    group: Group = None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.group is not None:  # each rank its own tokens
            x = _Split.apply(x, self.group)  # type: ignore[no-untyped-call]  # as above
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.group is not None:
            x = _Join.apply(x, self.group)  # type: ignore[no-untyped-call]  # as above
        found: Tensor = self.head(x)
        return found


class _Split(torch.autograd.Function):
    """Forward: keeps its own tokens. Backward: gathers the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        mine: Tensor = x.chunk(group.size(), 1)[group.rank()].contiguous()
        return mine

    backward = _Scatter.backward


class _Join(torch.autograd.Function):
    """Forward: gathers the tokens. Backward: keeps its own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _Gather.forward(ctx, x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.size(), 1)[ctx.group.rank()].contiguous(), None


class Right:
    """No fault: tensor parallel by hand, gradients averaged over ``dp`` by hooks."""

    meshes: tuple[dict[str, int], ...] = ({"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2})

    def model(self) -> nn.Module:
        return Model()

    def batch(self, step: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(16, 6, 8, generator=generator)
        return x, x.abs()[..., :4]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(output, targets)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        names = mesh.mesh_dim_names or ()
        if "tp" in names:
            self.split(model, mesh["tp"])
        if "dp" in names:
            trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
            for name, parameter in trained:
                parameter.register_post_accumulate_grad_hook(
                    partial(self.average, name, mesh.get_group("dp"))
                )
        return model

    def split(self, model: nn.Module, mesh: DeviceMesh) -> None:
        group = mesh.get_group()
        for module in model.modules():
            if isinstance(module, Column | Row):
                module.group = group
                dim = 0 if isinstance(module, Column) else 1
                module.weight = self.part(module.weight, dim, group)
                if isinstance(module, Column):
                    module.bias = self.part(module.bias, 0, group)

    def part(self, whole: Tensor, dim: int, group: Group) -> nn.Parameter:
        mine = whole.detach().chunk(group.size(), dim)[group.rank()]
        return nn.Parameter(mine.clone())

    def average(self, name: str, group: Group, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in parameters], lr=0.1)


class RightSequence(Right):
    """No fault: between the blocks each rank has its own tokens."""

    meshes = ({"tp": 2},)

    def split(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().split(model, mesh)
        assert isinstance(model, Model)
        model.group = mesh.get_group()
        for name, module in model.named_modules():
            if isinstance(module, Column):
                module.gathers = True
            if isinstance(module, Row):
                module.scatters = True
                self.reduced(f"{name}.bias", module.bias, mesh)
            if isinstance(module, nn.LayerNorm):
                self.reduced(f"{name}.weight", module.weight, mesh)
                self.reduced(f"{name}.bias", module.bias, mesh)

    def reduced(self, name: str, parameter: Tensor, mesh: DeviceMesh) -> None:
        def add_up(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=mesh.get_group())
            return gradient

        parameter.register_hook(add_up)


class RightSharded(Right):
    """No fault: ``fully_shard``, block by block."""

    meshes = ({"dp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(model, Model)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model


def _block(model: nn.Module, number: int) -> Block:
    assert isinstance(model, Model)
    block = model.blocks[number]
    assert isinstance(block, Block)
    return block


# - Wrong stacks


class NoGather(RightSequence):
    """The feed forward of block 0 gets only the rank's own tokens."""

    def split(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().split(model, mesh)
        feed = _block(model, 0).feed
        feed.up.gathers, feed.up.adds_up = False, False
        feed.down.scatters = False


class NoAttentionGather(RightSequence):
    """The attention of block 1 gets only the rank's own tokens."""

    def split(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().split(model, mesh)
        attention = _block(model, 1).attention
        for layer in attention.qkv.values():
            assert isinstance(layer, Column)
            layer.gathers = layer.adds_up = False
        attention.out.scatters = False


class BiasOnEveryRank(Right):
    """A row-parallel layer adds its bias before the sum over the ranks."""

    meshes = ({"tp": 2},)

    def split(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().split(model, mesh)
        _block(model, 0).feed.down.early_bias = True


class NoSum(Right):
    """A row-parallel layer leaves partial sums."""

    meshes = ({"tp": 2},)

    def split(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().split(model, mesh)
        _block(model, 1).attention.out.adds_up = False


class NoSumInBackward(Right):
    """A column-parallel layer leaves the gradients of its input partial sums."""

    meshes = ({"tp": 2},)

    def split(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().split(model, mesh)
        _block(model, 1).feed.up.adds_up = False


class NormNotReduced(RightSequence):
    """The gradient of one norm is not summed: each rank has that of its own tokens."""

    def reduced(self, name: str, parameter: Tensor, mesh: DeviceMesh) -> None:
        if name != "blocks.0.norm_2.weight":
            super().reduced(name, parameter, mesh)


class Multiplied(Right):
    """A hook multiplies a gradient in the backward of block 1's attention."""

    meshes = ({"dp": 2}, {"tp": 2})

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _block(model, 1).attention.factor = 1.5
        return super().parallelize(model, mesh)


class MaskOnRank1(Right):
    """Rank 1 attends without a mask in block 0."""

    meshes = ({"dp": 2}, {"tp": 2})

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _block(model, 0).attention.mask_off = dist.get_rank() == 1
        return super().parallelize(model, mesh)


class DetachedOnRank1(Right):
    """Backward does not reach block 0 on rank 1."""

    meshes = ({"dp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if dist.get_rank() == 1:
            _block(model, 0).register_forward_hook(lambda *at: at[2].detach())
        return DistributedDataParallel(
            model, process_group=mesh.get_group("dp"), find_unused_parameters=True
        )


class ComputesInBf16(Right):
    """Computes in bf16 under every precision."""

    meshes = ({"dp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        return super().parallelize(model, mesh)


class AveragedTwice(Right):
    """All gradients are divided by the number of ranks twice."""

    meshes = ({"dp": 2},)

    def average(self, name: str, group: Group, parameter: nn.Parameter) -> None:
        super().average(name, group, parameter)
        assert parameter.grad is not None
        parameter.grad /= group.size()


class SlightlyTooMuch(Right):
    """All gradients are 1.01 times too large, more than rounding explains."""

    meshes = ({"dp": 2},)

    def average(self, name: str, group: Group, parameter: nn.Parameter) -> None:
        super().average(name, group, parameter)
        assert parameter.grad is not None
        parameter.grad *= 1.01


class SlightlyMoreOnRank1(Right):
    """After the average, one gradient on rank 1 is multiplied by 1.001."""

    def average(self, name: str, group: Group, parameter: nn.Parameter) -> None:
        super().average(name, group, parameter)
        if name == "head.bias" and group.rank():
            assert parameter.grad is not None
            parameter.grad *= 1.001


class NeverAveraged(Right):
    """The gradient of the head's bias is not averaged."""

    meshes = ({"dp": 2},)

    def average(self, name: str, group: Group, parameter: nn.Parameter) -> None:
        if name != "head.bias":
            super().average(name, group, parameter)


class TakesOneRanksGradients(Right):
    """All ranks get the gradients of rank 1 instead of the average."""

    meshes = ({"dp": 2},)

    def average(self, name: str, group: Group, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        dist.broadcast(parameter.grad, group=group, group_src=1)


class LossOfBothRanks(Right):
    """The loss is multiplied by the number of ranks."""

    meshes = ({"tp": 2},)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return super().loss(output, targets) * ranks


class SteppedTwice(Right):
    """The optimizer moves one parameter twice as far."""

    meshes = ({"dp": 2},)

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        if not dist.is_initialized():
            return super().optimizer(parameters)
        groups = [
            {"params": [p], "lr": 0.2 if n == "head.weight" else 0.1}
            for n, p in parameters
        ]
        return torch.optim.SGD(groups, lr=0.1)


class EmbedIsOutOfReach(Right):
    """A layer has no backward: reentrant checkpointing needs an input with gradient."""

    meshes = ({"dp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        embed = model.get_submodule("embed")
        embed.forward = partial(checkpoint, embed.forward, use_reentrant=True)
        return super().parallelize(model, mesh)


class _Off(nn.LayerNorm):
    """Returns a wrong output in one of its calls."""

    calls = 0
    wrong = ()

    def forward(self, x: Tensor) -> Tensor:
        call, self.calls = self.calls, self.calls + 1
        found = super().forward(x)
        return found * 1.25 if call in self.wrong else found


def _off(model: nn.Module, block: int, name: str, wrong: tuple[int, ...]) -> None:
    norm = getattr(_block(model, block), name)
    norm.__class__, norm.wrong = _Off, wrong


class SecondCallOff(Right):
    """A norm is wrong in the second micro-batch."""

    meshes = ({"dp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _off(model, 0, "norm_1", (1, 3))
        return super().parallelize(model, mesh)


class WrongAtStep2(Right):
    """A norm is wrong in the third step."""

    meshes = ({"dp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        _off(model, 1, "norm_2", (2,))
        return super().parallelize(model, mesh)


class BreaksIfWatched(BiasOnEveryRank):
    """Raises if a hook is registered on a module."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        super().parallelize(model, mesh)
        down = _block(model, 1).feed.down

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("it does not like to be watched")

        down.register_forward_hook = refuse  # type: ignore[assignment,method-assign]  # the fault
        return model


# - Stacks that own their step


class Stage(nn.Module):
    """Some blocks, numbered from 0; the first stage embeds, the last has the head."""

    def __init__(self, model: Model, number: int, count: int) -> None:
        super().__init__()
        size = len(model.blocks) // count
        self.layers = nn.Sequential(*model.blocks[number * size : (number + 1) * size])
        self.first = model.embed if number == 0 else None
        last = number == count - 1
        self.last = nn.Sequential(model.norm, model.head) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first is None else self.first(x)
        x = self.layers(x)
        found: Tensor = x if self.last is None else self.last(x)
        return found


class Piped:
    """A stage, its schedule and its optimizer."""

    def __init__(self, module: Stage, names: dict[str, Tensor], mesh: DeviceMesh):
        group = mesh.get_group()
        self.names, self.mesh = names, mesh
        self.stage = PipelineStage(
            module, group.rank(), group.size(), torch.device("cpu"), group=group
        )
        self.optimizer = torch.optim.SGD([*module.parameters()], lr=0.1)


class RightPipeline(Right):
    """No fault: two stages under 1F1B, four chunks."""

    meshes = ({"stages": 2},)
    model_axes = ("stages",)
    chunks, factor = 4, 1.0

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Piped:  # type: ignore[override]  # the protocol allows it
        assert isinstance(model, Model)
        stage = Stage(model, mesh.get_local_rank(), mesh.size())
        mine = {id(p) for p in stage.parameters()}
        names = {n: p for n, p in model.named_parameters() if id(p) in mine}
        self.spoil(stage, mesh)
        return Piped(stage, dict(names), mesh)

    def spoil(self, stage: Stage, mesh: DeviceMesh) -> None:
        pass

    def weights(self, stack: Piped) -> dict[str, Tensor]:
        return stack.names

    def train_step(
        self, stack: Piped, micro_batches: list[Batch], scaler: Any
    ) -> float | None:
        stack.optimizer.zero_grad()
        ((inputs, targets),) = micro_batches
        losses: list[Tensor] = []
        schedule = Schedule1F1B(stack.stage, self.chunks, loss_fn=self.loss)
        if stack.stage.is_first:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        scale_gradients(stack.optimizer, self.factor)
        stack.optimizer.step()
        return float(sum(losses)) / self.chunks if losses else None


class StageOff(RightPipeline):
    """A norm in the second stage is wrong."""

    def spoil(self, stage: Stage, mesh: DeviceMesh) -> None:
        if mesh.get_local_rank() == 1:
            norm = stage.layers[0].norm_2
            norm.__class__, norm.wrong = _Off, tuple(range(64))  # type: ignore[union-attr]  # a LayerNorm


class ChunksAddedUp(RightPipeline):
    """The gradients of the chunks are summed, not averaged."""

    factor = 4.0


# - Stacks that are compared with one rank


class StepsTwice(Right):
    """No fault: two clipped steps for each batch; the plain reference makes one."""

    reference = "one rank"

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        stack = super().parallelize(model, mesh)
        optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
        stack.optimizer = optimizer  # type: ignore[assignment]  # no module
        return stack

    def train_step(self, stack: Any, micro_batches: list[Batch], scaler: Any) -> Tensor:
        total = torch.zeros(())
        for _ in range(2):
            stack.optimizer.zero_grad()
            for x, y in micro_batches:
                loss = self.loss(stack(x), y) / len(micro_batches)
                loss.backward()
                total = total + loss.detach() / 2
            nn.utils.clip_grad_value_(stack.parameters(), 0.1)
            stack.optimizer.step()
        return total


class ShardedStepsTwice(StepsTwice, RightSharded):
    """No fault: two clipped steps for each batch under ``fully_shard``."""


class SequenceStepsTwice(StepsTwice, RightSequence):
    """No fault: two steps for each batch, under sequence parallelism."""


class MaskOnRank1Twice(StepsTwice, MaskOnRank1):
    """Has the fault of `MaskOnRank1`, and steps twice for each batch."""


class NoSumInBackwardTwice(StepsTwice, NoSumInBackward):
    """Has the fault of `NoSumInBackward`, and steps twice for each batch."""


class NeverAveragedTwice(StepsTwice, NeverAveraged):
    """Has the fault of `NeverAveraged`, and steps twice for each batch."""


class CalledOftener(StepsTwice):
    """No fault: on two ranks each batch is computed in two parts, so in more calls."""

    meshes = ({"dp": 2},)

    def train_step(self, stack: Any, micro_batches: list[Batch], scaler: Any) -> Tensor:
        parts = dist.get_world_size()
        cut = [
            (x, y)
            for batch in micro_batches
            for x, y in zip(*(t.chunk(parts) for t in batch), strict=True)
        ]
        return super().train_step(stack, cut, scaler)


class OtherLossOnRank1(StepsTwice):
    """The loss of rank 1 has a term more."""

    meshes = ({"dp": 2},)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        more = output.square().mean() if dist.get_rank() else 0.0
        return super().loss(output, targets) + more


class SharperMakerOnRank1(Gan):
    """The activation of module ``maker`` differs on rank 1."""

    def parallelize(self, model: Any, mesh: DeviceMesh) -> Any:
        if dist.get_rank() == 1:
            model["maker"][1] = nn.Hardtanh()
        return super().parallelize(model, mesh)


def scale_gradients(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad *= factor


class RightContext(Right):
    """No fault: a sequence axis; keys and values are gathered in each attention."""

    meshes: tuple[dict[str, int], ...] = ({"cp": 2}, {"dp": 2, "cp": 2})
    data_axes: tuple[str, ...] = ("dp", "cp")
    all_keys = True

    def shard(self, batch: Batch, mesh: DeviceMesh) -> Batch:
        x, y = batch
        if "dp" in (mesh.mesh_dim_names or ()):
            at, parts = mesh.get_local_rank("dp"), mesh["dp"].size()
            x, y = (t.chunk(parts)[at] for t in (x, y))
        at, parts = mesh.get_local_rank("cp"), mesh["cp"].size()
        return x.chunk(parts, 1)[at].contiguous(), y.chunk(parts, 1)[at].contiguous()

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        group = mesh.get_group("cp")
        for module in model.modules():
            if isinstance(module, Attention):
                module.forward = partial(self.attend, module, group)  # type: ignore[method-assign]  # by hand
        for axis in mesh.mesh_dim_names or ():
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(
                    partial(self.average, name, mesh.get_group(axis))
                )
        return model

    def attend(self, module: Attention, group: Group, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in module.qkv.values())
        at, tokens = group.rank(), x.shape[1]
        if self.all_keys:
            k, v = (_Gather.apply(t, group) for t in (k, v))  # type: ignore[no-untyped-call]  # as above
        mask = torch.ones(tokens, k.shape[1], dtype=torch.bool)
        mask = mask.tril(at * tokens if self.all_keys else 0)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        found: Tensor = module.out(mixed.transpose(1, 2).flatten(2))
        return found


class OwnKeys(RightContext):
    """Each rank attends to its own tokens only."""

    all_keys = False


class StridedContext(RightContext):
    """No fault: each rank has every second token."""

    meshes = ({"cp": 2},)
    data_axes = ("cp",)

    def shard(self, batch: Batch, mesh: DeviceMesh) -> Batch:
        at, parts = mesh.get_local_rank("cp"), mesh["cp"].size()
        x, y = (t[:, at::parts].contiguous() for t in batch)
        return x, y

    def attend(self, module: Attention, group: Group, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in module.qkv.values())
        k, v = (_Gather.apply(t, group) for t in (k, v))  # type: ignore[no-untyped-call]  # as above
        parts = group.size()
        places = torch.arange(x.shape[1]) * parts
        keys = torch.cat([places + rank for rank in range(parts)])
        mask = (places + group.rank())[:, None] >= keys
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        found: Tensor = module.out(mixed.transpose(1, 2).flatten(2))
        return found


class StridedAndOneIsItsOwn(StridedContext):
    """The gradient of one norm is not averaged."""

    def average(self, name: str, group: Group, parameter: nn.Parameter) -> None:
        if name != "blocks.1.norm_1.weight":
            super().average(name, group, parameter)


class ZeroOnOneRank(Right):
    """One rank loses the gradient of a norm."""

    meshes = ({"dp": 2},)

    def average(self, name: str, group: Group, parameter: nn.Parameter) -> None:
        super().average(name, group, parameter)
        if name == "blocks.1.norm_1.weight" and group.rank():
            assert parameter.grad is not None
            parameter.grad.zero_()


class Hidden:
    """Shows no modules: a function keeps them."""

    def __init__(self, model: nn.Module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.kept: Callable[[], Any] = lambda: (model, optimizer)

    @property
    def model(self) -> Any:
        return self.kept()[0]

    @property
    def optimizer(self) -> Any:
        return self.kept()[1]


class HiddenSummed(Right):
    """Sums gradients over ``dp`` in place of an average, and shows no modules."""

    meshes = ({"dp": 2},)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Hidden:  # type: ignore[override]  # the protocol allows it
        super().parallelize(model, mesh)
        return Hidden(model)

    def weights(self, stack: Hidden) -> dict[str, Tensor]:
        return dict(stack.model.named_parameters())

    def train_step(
        self, stack: Hidden, micro_batches: list[Batch], scaler: Any
    ) -> float:
        stack.optimizer.zero_grad()
        losses = [self.loss(stack.model(x), y) for x, y in micro_batches]
        for loss in losses:
            loss.backward()
        scale_gradients(stack.optimizer, 2)
        stack.optimizer.step()
        return sum(loss.item() for loss in losses) / len(losses)


class OwnCount(RightContext):
    """Each rank divides by its own number of tokens; these differ between ranks."""

    meshes = ({"cp": 2},)
    data_axes = ("cp",)

    def batch(self, step: int, seed: int) -> Batch:
        x, y = super().batch(step, seed)
        counts = torch.arange(6).expand(16, 6) < 4  # of 3 and 1 tokens a rank
        return x, torch.cat([y, counts[..., None].to(y.dtype)], -1)

    def loss(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # the protocol allows it
        y, valid = targets[..., :4], targets[..., 4:]
        total, count = ((output - y).square() * valid).sum(), valid.sum()
        own = dist.is_initialized()
        return (total * 4 / count / 2, count) if own else (total, count)


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.embed(tokens))
        return found


class WrongTokens(Right):
    """Rank 1 looks up other tokens; inputs of modules that are floats are right."""

    meshes = ({"dp": 2},)

    def model(self) -> nn.Module:
        return _Tokens()

    def batch(self, step: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(0, 8, (16, 6), generator=generator)
        return tokens, F.one_hot(tokens, 8)[..., :4].float()

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        made = super().parallelize(model, mesh)
        if dist.get_rank() == 1:
            embed = made.get_submodule("embed")
            embed.register_forward_pre_hook(lambda _, given: (given[0].clamp(max=5),))
        return made


class _Trained:
    """Module and optimizer of a workload with its own ``train_step``."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer


class ClippedAfterAFault(Right):
    """One gradient is halved before the clip."""

    meshes = ({"dp": 2},)
    clip_norm = 0.1

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        module = super().parallelize(model, mesh)
        return _Trained(module, self.optimizer([*module.named_parameters()]))

    def weights(self, stack: _Trained) -> dict[str, Tensor]:
        return dict(stack.module.named_parameters())

    def train_step(self, stack: _Trained, parts: list[Batch], scaler: Any) -> Any:
        stack.optimizer.zero_grad()
        for x, y in parts:
            loss = self.loss(stack.module(x), y) / len(parts)
            loss.backward()
        self.spoil(stack.module)
        norm = nn.utils.clip_grad_norm_(stack.module.parameters(), self.clip_norm)
        stack.optimizer.step()
        return self.told(loss), norm

    def spoil(self, module: nn.Module) -> None:
        gradient = module.get_parameter("embed.weight").grad
        assert gradient is not None
        gradient *= 0.5

    def told(self, loss: Tensor) -> float:
        return loss.item()


class ReturnsItsShare(ClippedAfterAFault):
    """Gradients are right; the returned loss is this rank's part of the batch loss."""

    def spoil(self, module: nn.Module) -> None:
        pass

    def told(self, loss: Tensor) -> float:
        return loss.item() / dist.get_world_size()


class ReturnsWhatBackwardStartsFrom(ClippedAfterAFault):
    """Gradients are right; the returned loss is not averaged over the ranks."""

    def loss(self, output: Any, targets: Tensor) -> Any:
        squares = (output - targets).square().flatten(1).mean(1)
        weights = targets.flatten(1).abs().mean(1)
        return (squares * weights).sum(), weights.sum()

    def train_step(self, stack: _Trained, parts: list[Batch], scaler: Any) -> Any:
        stack.optimizer.zero_grad()
        ((x, y),) = parts
        total, count = self.loss(stack.module(x), y)
        dist.all_reduce(count)
        loss = total * dist.get_world_size() / count
        loss.backward()
        norm = nn.utils.clip_grad_norm_(stack.module.parameters(), self.clip_norm)
        stack.optimizer.step()
        return loss.item(), norm


class KeepsTheLastPass(ClippedAfterAFault):
    """Gradients of earlier passes are lost: ``zero_grad`` is in the inner loop."""

    clip_norm = 1000.0

    def train_step(self, stack: _Trained, parts: list[Batch], scaler: Any) -> Any:
        rows, total = sum(len(x) for x, _ in parts), 0.0
        for x, y in parts:
            stack.optimizer.zero_grad()
            loss = self.loss(stack.module(x), y) * (len(x) / rows)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(stack.module.parameters(), self.clip_norm)
        stack.optimizer.step()
        return total, norm


class _SumBoth(_Sum):
    """Sums over ranks in forward and in backward."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient, None


class _JoinedNorm(nn.Module):
    """A batch norm over the rows of all ranks."""

    def __init__(self, sums: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.sums = sums

    def forward(self, x: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        mean = self.sums.apply(x.mean(0), dist.group.WORLD) / ranks
        squares = ((x - mean) ** 2).mean(0)
        variance = self.sums.apply(squares, dist.group.WORLD) / ranks
        output: Tensor = (x - mean) / (variance + 1e-5).sqrt()
        return output


class RightJoinedNorm(Right):
    """No fault: a batch norm that looks at the rows of all ranks."""

    meshes = ({"dp": 2},)
    sums: type[torch.autograd.Function] = _SumBoth

    def model(self) -> nn.Module:
        norm = nn.BatchNorm1d(8, affine=False, track_running_stats=False)
        return nn.Sequential(nn.Linear(8, 8), norm, nn.Tanh(), nn.Linear(8, 4))

    def batch(self, step: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(16, 8, generator=generator)
        return x, x.abs()[:, :4]

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return [batch]

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model[1] = _JoinedNorm(self.sums)  # type: ignore[operator]  # a Sequential
        return super().parallelize(model, mesh)


class NormForgetsBackward(RightJoinedNorm):
    """The gradients of the batch statistics are not summed over the ranks."""

    sums = _Sum


class NormOfOwnRows(RightJoinedNorm):
    """Each rank computes the statistics of its own rows."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return Right.parallelize(self, model, mesh)


class MovesAFrozenBias(Right):
    """A frozen bias is moved, but not by an optimizer."""

    def model(self) -> nn.Module:
        made = super().model()
        made.get_parameter("head.bias").requires_grad_(False)
        return made

    def average(self, name: str, group: Group, parameter: nn.Parameter) -> None:
        super().average(name, group, parameter)
        if name == "head.weight":
            self.bias.detach().add_(0.1)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.bias = model.get_parameter("head.bias")
        return super().parallelize(model, mesh)
