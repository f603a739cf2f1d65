r"""verl 0.9.1 in fp16 as a workload: ``FSDPEngine.optimizer_step``, as it is.

    gradparity run --quick --precision fp16-autocast \
        --workload examples.integrations.verl_fsdp:Fsdp2Ours

Fsdp2 is the package's own step, which moves the schedule on skipped steps. Fsdp2Ours
uses our scaler, and a schedule that waits. Needs transformers, and verl installed with
--no-deps.

workers/engine/fsdp/transformer_impl.py, lines 764 (backward), 788 (step) and 836 (the
schedule, which engine_workers.py, line 376, calls after each batch). The engine's own
constructor loads a language model; here the methods run on a small stand-in.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .absent import stand_in
from .shared import Pair, Sharded

stand_in("verl")

from verl.utils import fsdp_utils  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine  # noqa: E402

fsdp_utils.get_device_id = lambda: "cpu"  # it says "cuda" everywhere


class Fsdp2(Sharded):
    """FSDP2 and HSDP."""

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.place.use(scaler)  # the schedule asks it
        engine = SimpleNamespace(
            module=stack.module,
            optimizer=stack.optimizer,
            scaler=scaler,
            lr_scheduler=stack.scheduler,
            _qat_enabled=False,
            optimizer_config=SimpleNamespace(clip_grad=self.clip_norm),
        )
        FSDPEngine.optimizer_zero_grad(engine)
        loss = self.passes(
            stack, micro_batches, scaler.scale if scaler else lambda x: x
        )
        norm = FSDPEngine.optimizer_step(engine)
        FSDPEngine.lr_scheduler_step(engine)
        return loss, norm


class Fsdp2Fused(Fsdp2):
    """FSDP2 and HSDP with a fused AdamW."""

    fused = True


class Fsdp2Ours(Fsdp2):
    """FSDP2 and HSDP with our scaler, and a schedule that waits on skipped steps."""

    waits = True


class Fsdp2FusedOurs(Fsdp2Fused):
    """Fsdp2Ours with a fused AdamW."""

    waits = True
