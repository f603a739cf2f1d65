r"""The first FSDP with use_orig_params=False, its default, as a workload.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_fsdp1_flat:Flat

Ends with PASS in under half a minute on two cores.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from .shared import Pair, weighted
from .torch_fsdp1 import Full

WRAPPED = "_fsdp_wrapped_module"


class Flat(Full):
    """The optimizer steps one flat parameter a layer."""

    original, clip_norm = False, 0.1

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        stack = super().parallelize(model, mesh)
        stack.own = self.optimizer([*stack.named_parameters()])
        return stack

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.own.zero_grad()
        losses = []
        for inputs, targets, share in weighted(micro_batches):
            losses.append(self.loss(stack(inputs), targets) * share)
            losses[-1].backward()
        norm = stack.clip_grad_norm_(self.clip_norm)
        stack.own.step()
        return sum(losses).detach(), norm

    def weights(self, stack: Any) -> dict[str, Any]:
        return self.parts(stack, lambda flat: flat.detach())

    def gradients(self, stack: Any) -> dict[str, Any]:
        return self.parts(stack, lambda flat: flat.grad)

    # A flat parameter knows which elements of which parameter this rank holds.
    def parts(self, stack: Any, of: Any) -> dict[str, Any]:
        found = {}
        for prefix, unit in stack.named_modules():
            flat = getattr(unit, "_flat_param", None)
            if not isinstance(unit, FullyShardedDataParallel) or flat is None:
                continue
            path = [n for n in prefix.split(".") if n not in ("", WRAPPED)]
            for name, info in zip(flat._fqns, flat._shard_param_infos, strict=True):
                if info.in_shard:
                    part = of(flat)[info.offset_in_shard :][: info.numel_in_shard]
                    first, last = info.intra_param_start_idx, info.intra_param_end_idx
                    found[".".join([*path, name])] = part, slice(first, last + 1)
        return found
