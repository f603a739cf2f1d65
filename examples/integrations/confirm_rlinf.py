"""Without gradparity: RLinf 0.3.0 in fp16 on two ranks, by its own methods.

    torchrun --nproc-per-node 2 examples/integrations/confirm_rlinf.py

What runs is RLinf's: ``FSDPModelManager.optimizer_step``, ``build_optimizer`` and
``build_grad_scaler`` (hybrid_engines/fsdp/fsdp_model_manager.py, lines 417, 489 and
643), ``FSDP2Strategy.clip_grad_norm_`` (strategy/fsdp2.py, line 156) and ``Checkpoint``
(strategy/checkpoint.py). Its workers, which need ray and GPUs, do not run: the loss is
scaled and the schedule stepped as in workers/actor/fsdp_actor_worker.py, lines 821 and
836. RLinf is installed with ``--no-deps``.

1. An overflow on one rank: the step is skipped, and the schedule moves.
2. What a checkpoint holds: no scaler.
"""

import logging
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from absent import stand_in  # type: ignore[import-not-found]  # beside this script
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

stand_in("rlinf")

if not hasattr(transformers, "AutoModelForVision2Seq"):  # gone since transformers 5
    transformers.AutoModelForVision2Seq = object

from rlinf.hybrid_engines.fsdp.fsdp_model_manager import FSDPModelManager  # noqa: E402
from rlinf.hybrid_engines.fsdp.strategy.checkpoint import Checkpoint  # noqa: E402
from rlinf.hybrid_engines.fsdp.strategy.fsdp2 import FSDP2Strategy  # noqa: E402
from rlinf.hybrid_engines.fsdp.utils import FSDPVersion  # noqa: E402


class Settings(dict[str, Any]):
    """Stand-in for omegaconf's settings: keys are attributes."""

    __getattr__ = dict.__getitem__


def manager() -> Any:
    """Return a stand-in for a manager, with the attributes that its methods read."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=mesh)
    config = Settings(
        optim=Settings(lr=0.1, adam_beta1=0.9, adam_beta2=0.999, clip_grad=1.0)
    )
    strategy = SimpleNamespace(cfg=config, _dp_group=mesh.get_group())
    strategy.clip_grad_norm_ = lambda model: FSDP2Strategy.clip_grad_norm_(
        strategy, model
    )
    made: Any = SimpleNamespace(
        model=model,
        _cfg=config,
        _strategy=strategy,
        optimizer_steps=0,
        critic_warmup_steps=0,
        _logger=logging.getLogger(__name__),
        store_requires_grad_param_name=[],
    )
    made.optimizer = FSDPModelManager.build_optimizer(made, model)
    made.lr_scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1)
    made.grad_scaler = FSDPModelManager.build_grad_scaler(
        made, True, device="cpu", init_scale=1024.0
    )
    return made


def step(parts: Any, bad: bool) -> None:
    """Train on one batch, in the order of RLinf's actor worker."""
    parts.optimizer.zero_grad()
    loss = parts.model(torch.ones(2, 8)).square().mean()
    if bad and dist.get_rank() == 1:
        loss = loss * float("inf")
    parts.grad_scaler.scale(loss).backward()
    FSDPModelManager.optimizer_step(parts)
    parts.lr_scheduler.step()


def local(parts: Any) -> torch.Tensor:
    """Return a copy of this rank's part of all parameters."""
    found = [p.to_local().flatten() for p in parts.model.parameters()]
    return torch.cat(found).detach().clone()


def tell(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """Print a line for each case."""
    dist.init_process_group("gloo")
    parts = manager()
    tell(f"build_optimizer: fused {parts.optimizer.defaults['fused']}")
    step(parts, bad=False)
    before, moved = local(parts), parts.lr_scheduler.last_epoch
    step(parts, bad=True)
    same = torch.equal(local(parts), before)
    moved = parts.lr_scheduler.last_epoch - moved
    scale = parts.grad_scaler.get_scale()
    tell(
        f"overflow: parameters unchanged {same}, scale {scale:g}, schedule moved by "
        f"{moved}"
    )
    state = Checkpoint(
        parts.model,
        parts.optimizer,
        parts.lr_scheduler,
        StateDictOptions(),
        FSDPVersion.FSDP2,
    ).state_dict()
    tell(f"checkpoint: {', '.join(sorted(state))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
