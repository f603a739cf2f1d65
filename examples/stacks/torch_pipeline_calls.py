r"""torch's 1F1B as a workload: two calls of the schedule a step, clipping over stages.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_pipeline_calls:OneForwardOneBackward

Needs torch alone. Ends with PASS in about half a minute on two cores.

The schedule does not scale gradients: it would also divide the gradients that earlier
calls have left. The loss is divided instead.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .shared import Pair
from .torch_pipeline import GPipe


class OneForwardOneBackward(GPipe):
    """Runs each backward as soon as its micro-batch is ready (1F1B)."""

    kind: Any = schedules.Schedule1F1B
    clip_norm = 0.5

    def micro_batches(self, batch: Pair) -> list[Pair]:
        return list(zip(*(t.chunk(2) for t in batch), strict=True))

    def schedule(self, stage: Any) -> Any:
        return self.kind(stage, 6, scale_grads=False, loss_fn=self.share)

    def share(self, output: Tensor, targets: Tensor) -> Any:
        return self.loss(output, targets) / (6 * self.calls)

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.optimizer.zero_grad()
        self.calls, losses = len(micro_batches), []
        for x, y in micro_batches:
            found: list[Tensor] = []  # a call forgets what is in it
            known = {"target": y, "losses": found} if stack.last else {}
            stack.schedule.step(*([x] if stack.first else []), **known)
            losses += found
        grads = [p.grad for p in stack.named.values() if p.grad is not None]
        # Clipping needs the norm over all stages: each has a part of the parameters.
        norm: Any = get_total_norm(grads)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
        dist.all_reduce(norm, group=stack.group)
        clip_grads_with_norm_(stack.named.values(), self.clip_norm, norm.sqrt())
        stack.optimizer.step()
        return (torch.stack(losses).sum() if losses else None), float(norm.sqrt())
