r"""Megatron-FSDP's ZeRO 1 and 2 as workloads, and two settings that train wrong.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.megatron_fsdp_stages:Zero1

Needs megatron-fsdp, as docs/stacks.md says. Zero1 and Zero2 end with PASS in half a
minute, the others with FAIL.
"""

from typing import ClassVar

from .megatron_fsdp_zero3 import Zero3


class Zero2(Zero3):
    """Gradients and states are sharded."""

    settings: ClassVar = {"zero_dp_strategy": 2}


class Zero1(Zero3):
    """ZeRO 1: optimizer states are sharded, and each step reduces gradients once."""

    settings: ClassVar = {"zero_dp_strategy": 1}


class WeightsNotOverlapped(Zero3):
    """Faulty: ranks never gather new weights.

    See docs/wild/megatron-fsdp-param-gather.md.
    """

    settings: ClassVar = {"zero_dp_strategy": 1, "overlap_param_gather": False}


class GradientsNotOverlapped(Zero3):
    """Faulty: a backward reduces twice; docs/wild/megatron-fsdp-grad-reduce.md."""

    settings: ClassVar = {"zero_dp_strategy": 1, "overlap_grad_reduce": False}
