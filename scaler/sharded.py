"""ShardedGradScaler: GradScaler with the name and behaviour of torch's FSDP class."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import sharded_grad_scaler as _torch

from .grad_scaler import GradScaler
from .grad_scaler import _refresh_per_optimizer_state as _refresh_per_optimizer_state

# Callers import these two from here, where torch has them.
_is_supported_device = _torch._is_supported_device
_GeneralMultiDeviceReplicator = _torch._GeneralMultiDeviceReplicator


class ShardedGradScaler(GradScaler, _torch.ShardedGradScaler):
    """A drop-in for ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``.

    Unlike `GradScaler`, it keeps four things that callers of torch's class may rely on.
    Positional arguments have the order of torch's class. fp16 gradients are accepted.
    Scaled losses keep their dtype. A step in which no rank has a gradient is allowed.
    Unlike torch's class, it also works in a single process, without a process group.

    The arguments are those of torch's class. ``process_group`` has the ranks that sync;
    None is the default process group.

    Raises:
        InvalidSettingError: a setting is invalid.
    """

    _steps_without_gradients = True

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            sync_over="world" if process_group is None else process_group,
            fp16_gradients="in_place",
        )

    def _scaled(self, output: torch.Tensor) -> torch.Tensor:
        if not _is_supported_device(output):
            raise AssertionError(f"Expected supported device, got {output.device}")
        return super()._scaled(output).type(output.dtype)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Process group as passed to the constructor; None is the default one."""
        over = self._sync.group.over
        return None if isinstance(over, str | tuple) else over

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        self._sync.group.over = "world" if group is None else group
