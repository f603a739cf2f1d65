r"""Megatron-FSDP's ZeRO 3 as a workload; megatron_fsdp_stages.py has other stages.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.megatron_fsdp_zero3:Zero3

Needs megatron-fsdp, as docs/stacks.md says. Ends with PASS in half a minute.
"""

import sys
from typing import Any, ClassVar

from torch import device, nn

from .shared import Pair, Regression, weighted
from .without_cuda import without_cuda

sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]  # see docs/stacks.md


class Zero3(Regression):
    """Weights, gradients and states are sharded."""

    meshes = ({"dp": 2, "tp": 1},)
    settings: ClassVar = {"zero_dp_strategy": 3}

    @without_cuda()
    def parallelize(self, model: nn.Module, mesh: Any) -> Any:
        from megatron_fsdp import fully_shard_model, fully_shard_optimizer

        given = {"device": device("cpu"), "fsdp_unit_modules": [nn.Linear]}
        given |= self.settings
        stack = fully_shard_model(model, mesh, "dp", tp_dim="tp", **given)
        stack.own = fully_shard_optimizer(self.optimizer([*stack.named_parameters()]))
        return stack

    @without_cuda()
    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        losses: list[Any] = []
        stack.own.zero_grad()
        for inputs, targets, share in weighted(micro_batches):
            stack.set_model_auto_sync(len(losses) + 1 == len(micro_batches))
            losses.append(self.loss(stack(inputs), targets) * share)
            losses[-1].backward()
        stack.own.step()
        return sum(losses).detach()

    @without_cuda()  # shards, and where they lie: DTensor would cut otherwise
    def weights(self, stack: Any, of: str = "data") -> dict[str, Any]:
        from megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

        found = {}
        for name, p in stack.module.named_parameters():
            at = gather_and_compute_chunk_metadata(p)
            if (part := getattr(p, of)) is not None:  # None: no element on this rank
                ends = [o + n for o, n in zip(at.offsets, at.sizes, strict=True)]
                found[name] = part.to_local(), tuple(map(slice, at.offsets, ends))
        return found

    def gradients(self, stack: Any) -> dict[str, Any]:
        return self.weights(stack, "grad")
