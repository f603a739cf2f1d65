"""Stand-ins that some packages need on a CPU over gloo: leave all of it out on GPUs.

Not a stack to run. docs/stacks.md has the reasons.
"""

import sys
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

# torchtitan's kernels for experts need triton: a module of names takes their place.
KERNELS = "torchtitan.distributed.minimal_async_ep"
NAMES = (
    "combine_op dispatch_op init_buffer maybe_update_minimal_async_ep_config "
    "MinimalAsyncEPDispatchMetadata"
).split()
sys.modules[KERNELS] = ModuleType(KERNELS)
vars(sys.modules[KERNELS]).update(dict.fromkeys(NAMES, object))


def torchtitan_on_cpu(config: Any) -> None:
    """Use torchtitan's plain attention: FlexAttention has no backward on a CPU."""
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.common.attention import ScaledDotProductAttention

    parallel_dims.device_type = "cpu"  # "cuda" where there is no accelerator
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()


def torchtitan_sums(module: torch.nn.Module) -> None:
    """Sum gradients in FSDP2 without scaling them: gloo has no scaled sum."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)


def deepspeed_without_kernels() -> None:
    """Keep DeepSpeed from compiling an operation at its start; gloo needs none."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def accelerate_takes_fsdp() -> None:
    """Let Accelerate use FSDP on CPU ranks: pretend that they have GPUs."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
