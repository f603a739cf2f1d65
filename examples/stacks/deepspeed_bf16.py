r"""DeepSpeed's bf16 weights over sharded fp32 copies as a workload, with a checkpoint.

    gradparity run --quick --precision fp32,bf16-params --scaler none \
        --workload examples.stacks.deepspeed_bf16:Zero2

Needs deepspeed. Ends with PASS in under half a minute on two cores. gradparity asks for
bf16 by the policy, and compares the fp32 copies.
"""

from typing import Any

import torch

from .deepspeed_stages import Owned2
from .shared import Pair


class Zero2(Owned2):
    """ZeRO 2: optimizer states, fp32 copies and gradients are sharded."""

    dtype = torch.float32

    def model(self) -> Any:
        model = super().model()
        with torch.no_grad():  # DeepSpeed copies the weights from bf16: the same values
            for p in model.parameters():
                p.copy_(p.bfloat16())
        return model

    def config(self) -> dict[str, Any]:
        return super().config() | {"bf16": {"enabled": self.dtype is torch.bfloat16}}

    def parallelize(self, model: Any, mesh: Any, policy: Any = None) -> Any:
        self.dtype = (policy and policy.param_dtype) or torch.float32
        return super().parallelize(model, mesh)

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        halves = [(inputs.to(self.dtype), targets) for inputs, targets in micro_batches]
        return super().train_step(stack, halves, scaler)

    def weights(self, stack: Any) -> dict[str, Any]:
        groups = stack.optimizer.single_partition_of_fp32_groups
        return {n: self.copied(p, groups) for n, p in stack.module.named_parameters()}

    def copied(self, p: Any, groups: Any) -> Any:
        if not p.requires_grad:
            return p.float()
        if (part := p._hp_mapping) is None:  # no element on this rank
            return groups[0][:0], slice(0)
        of, to = part.hp_fragment_address, part.lp_fragment_address
        flat = groups[part.param_group_index].narrow(0, of.start, of.numel)
        return flat, slice(to.start, to.start + to.numel)

    def save_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        stack.save_checkpoint(folder, tag="step")

    def load_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        stack.load_checkpoint(folder, tag="step")
