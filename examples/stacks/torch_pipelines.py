r"""torch's zero-bubble schedules, which do backward in two parts.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_pipelines:ZeroBubbleV

Needs torch alone. Each class takes about half a minute on two cores. They end with PASS
but for FrozenStage, which ends with FAIL.
"""

from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules

from .torch_interleaved import LoopedBfs


class InterleavedZeroBubble(LoopedBfs):
    """Zero bubble: backward in two parts, for inputs and for weights."""

    kind: Any = schedules.ScheduleInterleavedZeroBubble


class ZeroBubbleV(LoopedBfs):
    """Zero bubble in which the first rank also has the last stage."""

    kind: Any = schedules.ScheduleZBVZeroBubble
    placed: tuple[tuple[int, ...], ...] = ((0, 3), (1, 2))


class DualPipeV(ZeroBubbleV):
    """DualPipe in which forward and backward overlap."""

    kind: Any = schedules.ScheduleDualPipeV


class FrozenStage(InterleavedZeroBubble):
    """Faulty: the first stage is frozen, **and the second is not trained either**."""

    def model(self) -> nn.Module:
        model = super().model()
        model.get_submodule("0").requires_grad_(False)
        return model
