"""Without gradparity: verl 0.9.1 in fp16 on two ranks, by its own methods.

    torchrun --nproc-per-node 2 examples/integrations/confirm_verl.py

What runs is verl's: ``FSDPEngine.optimizer_step`` and ``lr_scheduler_step``
(workers/engine/fsdp/transformer_impl.py, lines 788 and 836) with the scaler of line
409, ``build_optimizer`` (workers/config/optimizer.py, line 298), and
``FSDPCheckpointManager.save_checkpoint``. The engine's constructor, which loads a
language model onto a GPU, does not run. verl is installed with ``--no-deps``.

1. An overflow on one rank: the step is skipped, and the schedule moves.
2. With ``override_optimizer_config={"fused": True}`` the step raises.
3. What a checkpoint holds: no scaler.
"""

import tempfile
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from absent import stand_in  # type: ignore[import-not-found]  # beside this script
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from transformers import LlamaConfig, LlamaForCausalLM

stand_in("verl")

from verl.utils import fsdp_utils  # noqa: E402
from verl.utils.checkpoint.fsdp_checkpoint_manager import (  # noqa: E402
    FSDPCheckpointManager,
)
from verl.workers.config.optimizer import (  # noqa: E402
    FSDPOptimizerConfig,
    build_optimizer,
)
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine  # noqa: E402

fsdp_utils.get_device_id = lambda: "cpu"  # it says "cuda" everywhere


def engine(override: dict[str, Any] | None) -> Any:
    """Return a stand-in for an engine, with the attributes that its methods read."""
    torch.manual_seed(0)
    module: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            use_cache=False,
        )
    )
    fully_shard(module)
    config = FSDPOptimizerConfig(lr=0.1, override_optimizer_config=override)
    optimizer = build_optimizer(module.parameters(), config)
    return SimpleNamespace(
        module=module,
        optimizer=optimizer,
        optimizer_config=config,
        _qat_enabled=False,
        scaler=ShardedGradScaler("cpu", 1024.0, growth_interval=400),
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )


def step(parts: Any, bad: bool) -> None:
    """Train on one batch, in the order of verl's ``engine_workers.py``."""
    FSDPEngine.optimizer_zero_grad(parts)
    tokens = torch.arange(8).reshape(1, 8)
    loss = parts.module(input_ids=tokens, labels=tokens).loss
    if bad and dist.get_rank() == 1:
        loss = loss * float("inf")
    parts.scaler.scale(loss).backward()  # transformer_impl.py, line 764
    FSDPEngine.optimizer_step(parts)
    FSDPEngine.lr_scheduler_step(parts)


def local(parts: Any) -> torch.Tensor:
    """Return a copy of this rank's part of all parameters."""
    found = [p.to_local().flatten() for p in parts.module.parameters()]
    return torch.cat(found).detach().clone()


def tell(line: str) -> None:
    """Print on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """Print a line for each case."""
    dist.init_process_group("gloo")
    parts = engine(None)
    step(parts, bad=False)
    before, moved = local(parts), parts.lr_scheduler.last_epoch
    step(parts, bad=True)
    same = torch.equal(local(parts), before)
    moved = parts.lr_scheduler.last_epoch - moved
    tell(
        f"overflow: parameters unchanged {same}, scale {parts.scaler.get_scale():g}, "
        f"schedule moved by {moved}"
    )
    try:
        step(engine({"fused": True}), bad=False)
        tell("fused: steps")
    except Exception as error:
        tell(f"fused: raises {type(error).__name__}: {str(error).splitlines()[0]}")
    saved: list[str] = []

    def spy(state: Any, path: Any) -> None:
        saved.append(", ".join(sorted(state)) if "extra" in str(path) else "")

    manager = FSDPCheckpointManager(parts.module, parts.optimizer, parts.lr_scheduler)
    with tempfile.TemporaryDirectory() as mine, patch("torch.save", spy):
        of_first = [mine]
        dist.broadcast_object_list(of_first)
        manager.save_checkpoint(of_first[0])
        dist.barrier()  # others may still write
    tell(f"checkpoint: model, optimizer, and in the extra state {''.join(saved)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
