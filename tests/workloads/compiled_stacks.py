"""Workloads whose parts are compiled; those of ``Wrong`` compile with a wrong backend.

``one_percent`` makes every output of what it compiles 1 % too large: a run that does
compile differs from the reference, and one that quietly runs eager code does not.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradparity.tests.workloads.stacks import Batch, Right
from gradparity.tests.workloads.stacks import Named as NamedParameters

WIDTH = 32
Backend = str | Callable[..., Any]


def one_percent(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
    """A compiler that makes every output 1 % too large."""

    def run(*arguments: Any) -> tuple[Any, ...]:
        return tuple(
            o * 1.01 if isinstance(o, Tensor) and o.is_floating_point() else o
            for o in graph.forward(*arguments)
        )

    return run


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).tanh())
        return y


class Compiled(Right):
    """No fault: the module is compiled, then its gradients are averaged."""

    meshes: object = ({"dp": 2},)
    backend: Backend = "aot_eager"
    fullgraph = False
    reduce_dtype = torch.float32

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, WIDTH), Block(), Block(), nn.Linear(WIDTH, 4))

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        self.compile(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p, n=name: self.reduce(n, p, mesh["dp"])
                )
        return model

    def compile(self, model: nn.Module) -> None:
        for module in self.compiled(model):
            module.compile(backend=self.backend, fullgraph=self.fullgraph)

    def compiled(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules to compile, each by itself."""
        yield model


class Blocks(Compiled):
    """No fault: each block is compiled, into one graph."""

    fullgraph = True

    def compiled(self, model: nn.Module) -> Iterator[nn.Module]:
        yield from (m for m in model.modules() if isinstance(m, Block))


class FullyShard(Blocks):
    """No fault: blocks are compiled, then sharded, as torchtitan does."""

    def parallelize(  # type: ignore[override]  # the protocol allows a policy
        self, model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy
    ) -> nn.Module:
        self.compile(model)
        for block in self.compiled(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model


class Ddp(Compiled):
    """No fault: DDP, compiled as a whole."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        found = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        self.compile(found)
        return found


class OwnStep(Blocks):
    """No fault: blocks are compiled, and the workload has a ``train_step``."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        made = super().parallelize(model, mesh)
        made.optimizer = self.optimizer([*made.named_parameters()])  # type: ignore[assignment]  # no module
        return made

    def train_step(
        self, stack: Any, micro_batches: list[Batch], scaler: object
    ) -> float:
        stack.optimizer.zero_grad()
        losses = [self.loss(stack(x), y) / len(micro_batches) for x, y in micro_batches]
        sum(losses, torch.zeros(())).backward()
        stack.optimizer.step()
        return float(sum(losses))


class Coded(Tensor):
    """Tensor subclass like torchao's: holds two tensors and supports few operators."""

    mantissa: Tensor
    exponent: Tensor

    @staticmethod
    def __new__(cls, mantissa: Tensor, exponent: Tensor) -> "Coded":
        shape, dtype = mantissa.shape, mantissa.dtype
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.mantissa, made.exponent = mantissa, exponent
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["mantissa", "exponent"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # untyped in torch
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return Coded(
                *(getattr(args[0], n).clone() for n in ("mantissa", "exponent"))
            )
        raise NotImplementedError(f"{func} of a coded tensor")


class EightBit(torch.optim.Optimizer):
    """Compiles its work on each parameter in ``step``, like torchao's."""

    def __init__(self, parameters: Any, backend: Backend) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.backend = backend

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as torchao's
        # without dynamic shapes each shape is a graph of its own
        with torch._dynamo.utils.disable_cache_limit():
            update = torch.compile(
                plain_update, backend=self.backend, fullgraph=True, dynamic=False
            )
            for parameter in (p for g in self.param_groups for p in g["params"]):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                known = state.get("exp_avg")
                before = torch.zeros_like(parameter)
                if known is not None:
                    before = torch.ldexp(known.mantissa, known.exponent)
                after, moved = update(before, parameter.grad)
                state["exp_avg"] = Coded(*torch.frexp(after))
                parameter.add_(moved)


def plain_update(exp_avg: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the new momentum, and the update."""
    new = 0.9 * exp_avg + gradient
    return new, -0.1 * new


class CompiledOptimizer(Compiled):
    """No fault: only the optimizer's arithmetic is compiled."""

    def compile(self, model: nn.Module) -> None:
        pass

    def optimizer(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        return EightBit([p for _, p in parameters], self.backend)


class WrongCompiled(Compiled):
    backend = staticmethod(one_percent)


class WrongBlocks(Blocks):
    backend = staticmethod(one_percent)


class WrongFullyShard(FullyShard):
    backend = staticmethod(one_percent)


class WrongDdp(Ddp):
    backend = staticmethod(one_percent)


class WrongOwnStep(OwnStep):
    backend = staticmethod(one_percent)


class WrongCompiledOptimizer(CompiledOptimizer):
    backend = staticmethod(one_percent)


def _named_tanh(x: Tensor, name: str) -> Tensor:
    return x.tanh() if name else x


named_tanh = torch.compile(_named_tanh, backend=one_percent)


class Named(nn.Module):
    """Calls a function that is compiled again for each name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = named_tanh(x, self.name)
        return found


class WrongByName(Right):
    """A compiled function of the module, with a name that differs from run to run."""

    meshes: object = ({"dp": 2},)

    def model(self) -> nn.Module:
        named = Named(f"made at {time.monotonic_ns()}")
        return nn.Sequential(nn.Linear(8, 8), named, nn.Linear(8, 4))


class Inductor(FullyShard):
    """No fault: blocks are compiled to machine code."""

    backend: Backend = "inductor"


class Dropping(Blocks):
    """No fault: a compiled block has a dropout, and so has an eager block."""

    def model(self) -> nn.Module:
        block = Block()
        block.down = nn.Sequential(block.down, nn.Dropout(0.4))  # type: ignore[assignment]
        return nn.Sequential(
            nn.Linear(8, WIDTH), block, nn.Dropout(0.4), nn.Linear(WIDTH, 4)
        )

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        made = super().parallelize(model, mesh)
        torch.manual_seed(100 + mesh.get_local_rank("dp"))
        return made
