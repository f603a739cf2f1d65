r"""RLinf 0.3.0 in fp16 as a workload: its own step and FSDP2's clipping.

    gradparity run --quick --precision fp16-autocast \
        --workload examples.integrations.rlinf_fsdp:Fsdp2Ours

Fsdp2 is the package's own step, which moves the schedule on skipped steps. Fsdp2Ours
uses our scaler, and a schedule that waits. Needs transformers, and RLinf installed with
--no-deps.

``FSDPModelManager.optimizer_step``: hybrid_engines/fsdp/fsdp_model_manager.py, line
417; clipping: strategy/fsdp2.py, line 156. The workers step the schedule after each
batch (workers/actor/fsdp_actor_worker.py, line 836) and scale the loss (line 821).
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import transformers
from torch.distributed.tensor import DTensor

from .absent import stand_in
from .shared import Pair, Sharded

stand_in("rlinf")

if not hasattr(transformers, "AutoModelForVision2Seq"):  # gone since transformers 5
    transformers.AutoModelForVision2Seq = object

from rlinf.hybrid_engines.fsdp.fsdp_model_manager import FSDPModelManager  # noqa: E402
from rlinf.hybrid_engines.fsdp.strategy.fsdp2 import FSDP2Strategy  # noqa: E402


class Fsdp2(Sharded):
    """FSDP2 and HSDP."""

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.place.use(scaler)
        config = SimpleNamespace(optim=SimpleNamespace(clip_grad=self.clip_norm))
        strategy = SimpleNamespace(cfg=config, _dp_group=stack.mesh["fsdp"].get_group())
        strategy.clip_grad_norm_ = lambda **args: FSDP2Strategy.clip_grad_norm_(
            strategy, **args
        )
        manager = SimpleNamespace(
            model=stack.module,
            optimizer=stack.optimizer,
            grad_scaler=stack.place,
            optimizer_steps=0,
            critic_warmup_steps=0,
            _strategy=strategy,
            _logger=logging.getLogger(__name__),
        )
        stack.optimizer.zero_grad()
        loss = self.passes(stack, micro_batches, stack.place.scale)
        norm, _ = FSDPModelManager.optimizer_step(manager)
        stack.scheduler.step()
        full = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return loss, float(full)


class Fsdp2Fused(Fsdp2):
    """FSDP2 and HSDP with a fused AdamW."""

    fused = True


class Fsdp2Ours(Fsdp2):
    """FSDP2 and HSDP with our scaler, and a schedule that waits on skipped steps."""

    waits = True


class Fsdp2FusedOurs(Fsdp2Fused):
    """Fsdp2Ours with a fused AdamW."""

    waits = True
