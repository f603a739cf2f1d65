r"""Megatron-Core 0.16.1 in fp16 as a workload: ``ChainedOptimizer`` of two parts.

    M=examples.integrations.megatron_chained
    gradparity replay --scaler ${M}:Own \
        "dp2/2/fp16-autocast/own/inf@r1s1:first/model=${M}:Chain,steps=5,interval=2"

Needs megatron-core; takes about half a minute on two cores. Own is Megatron's way, a
scaler for each part, and ends with FAIL: after an overflow in one part the other
divides by a scale that the loss did not have. With --scaler ${M}:Shared, our way, it
ends with PASS. A chain supports neither ``unscale_`` nor a scale set by hand, so it
cannot run scenarios of such recipes.

core/optimizer/optimizer.py: ``prepare_grads`` of the chain (line 1233) and of its parts
(524), ``DynamicGradScaler``. Its fp16 parameters must lie on CUDA, so the parts here
train fp32 parameters of their own; its data parallel wrapper is not run: gradients are
averaged by hand.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradparity.scaler import GradScaler

from .shared import Pair, Stepped, weighted
from .use_in_megatron import share_scaler

# Megatron makes its tensors on CUDA: patched to the CPU where it does.
make_tensor = torch.tensor


def on_cpu(*args: Any, device: Any = None, **settings: Any) -> Any:
    """Make a tensor on the CPU, whatever device is asked for."""
    return make_tensor(*args, **settings)


class Part(MixedPrecisionOptimizer):  # type: ignore[misc]  # its types are not followed
    """Optimizer of the chain; its parameters are fp32, so they need no main copies."""

    is_stub_optimizer = False

    def _collect_main_grad_data_for_unscaling(self) -> list[Any]:
        return [p.grad.data for p in self.get_parameters() if p.grad is not None]

    def _copy_model_grads_to_main_grads(self) -> None:
        pass

    def _copy_main_params_to_model_params(self) -> None:
        pass

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def get_grad_norm(self) -> float:
        parts = [p.grad.norm() for p in self.get_parameters() if p.grad is not None]
        return float(torch.stack(parts).norm())

    def state_dict(self) -> dict[str, Any]:
        state = {"optimizer": self.optimizer.state_dict()}
        if self.grad_scaler:  # as Float16OptimizerWithFloat16Params, line 795
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["optimizer"])
        if self.grad_scaler:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return self.state_dict()


class ChainScaler:
    """Scaling of a chain, behind the methods that gradparity calls."""

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self.settings = dict(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
        )
        self.chain: Any = None

    def scale(self, loss: Any) -> Any:
        return self.chain.scale_loss(loss).reshape(())

    def step(self, chain: Any) -> Any:
        return chain.step()

    def update(self, new_scale: Any = None) -> None:
        """Do nothing: the chain has updated its scale in ``step``."""

    def unscale_(self, chain: Any) -> None:
        raise NotImplementedError("a chain unscales in step()")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("the chain loads what it has saved")

    def is_enabled(self) -> bool:
        return True


class Own(ChainScaler):
    """Megatron's way: one ``DynamicGradScaler`` for each part."""

    def join(self, chain: Any) -> None:
        self.chain = chain
        s = self.settings
        with patch("torch.tensor", on_cpu):
            for part in chain.chained_optimizers:
                part.grad_scaler = DynamicGradScaler(
                    s["init_scale"],
                    1e-6,
                    s["growth_factor"],
                    s["backoff_factor"],
                    int(s["growth_interval"]),
                    1,
                )

    def get_scale(self) -> float:
        if self.chain is None:
            return self.settings["init_scale"]
        return float(self.chain.get_loss_scale())

    def state_dict(self) -> dict[str, Any]:
        scaler = self.chain and self.chain.chained_optimizers[0].grad_scaler
        return {"_growth_tracker": scaler._growth_tracker if scaler else 0}


class Shared(ChainScaler):
    """Our way: one scaler for all parts, by ``share_scaler``."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        made: Any = GradScaler
        self.scaler = made("cpu", **self.settings)

    def join(self, chain: Any) -> None:
        self.chain = chain
        share_scaler(chain, self.scaler)

    def get_scale(self) -> float:
        scale: float = self.scaler.get_scale()
        return scale

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scaler.state_dict()
        return state


class Chain(Stepped):
    """Two layers in one optimizer, the last layer in another; replicated over ranks."""

    checkpoint = "scaler"
    meshes = ({"dp": 2},)
    clip_norm = None  # type: ignore[assignment]  # its kernels for that need CUDA
    lr_schedule = None  # type: ignore[assignment]  # Megatron's trainer moves it, not its core

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        named = [*model.named_parameters()]
        config = OptimizerConfig(fp16=True, clip_grad=0.0)
        groups = [
            [p for n, p in named if n[0] in "02"],
            [p for n, p in named if n[0] == "4"],
        ]
        parts = []
        with patch("torch.tensor", on_cpu):
            for number, mine in enumerate(groups):
                scaler = DynamicGradScaler(65536.0, 1.0, 2.0, 0.5, 1000, 1)
                sgd = torch.optim.SGD(mine, lr=0.1)
                part = Part(sgd, config, scaler, lambda *_: None)
                part.grad_stats_parallel_group = dist.new_group(
                    group_desc=f"part {number}"
                )
                parts.append(part)
        return SimpleNamespace(module=model, chain=ChainedOptimizer(parts), joined=None)

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        chain, total = stack.chain, torch.zeros(())
        if scaler is not None and stack.joined is not scaler._scaler:
            scaler.join(chain)
            stack.joined = scaler._scaler
        chain.zero_grad()
        for inputs, targets, share in weighted(micro_batches):
            loss = self.loss(stack.module(inputs), targets) * share
            (scaler.scale(loss) if scaler else loss).backward()
            total += loss.detach()
        for parameter in stack.module.parameters():  # Megatron's DDP would do it
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        if scaler is None:
            chain.step_with_ready_grads()
            return total
        _, norm, _ = scaler.step(chain)
        scaler.update()
        return total, norm

    def save_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        torch.save(stack.chain.state_dict(), f"{folder}/{dist.get_rank()}.pt")

    def load_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        scaler.join(stack.chain)
        state = torch.load(f"{folder}/{dist.get_rank()}.pt", weights_only=True)
        with (
            patch("torch.Tensor.cuda", lambda self, *_: self),
            patch("torch.cuda.current_device", lambda: "cpu"),
        ):
            stack.chain.load_state_dict(state)
