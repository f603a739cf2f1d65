r"""DeepSpeed's ZeRO 2 and 3 as workloads, and the cure for what 1 and 2 drop.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.deepspeed_stages:Zero3

Needs deepspeed. Zero3, Owned1 and Owned2 end with PASS, Zero2 with FAIL in the runs
that accumulate; each takes under half a minute on two cores.

Each backward ends an accumulation where ``gradient_accumulation_steps`` is 1. Stages 1
and 2 then train on the last backward of a step, and stage 3 on the sum of all.
``managed_gradient_accumulation: false`` lets ``step()`` end an accumulation instead.
"""

from typing import Any

import deepspeed

from .deepspeed_zero import Zero1


class Zero2(Zero1):
    """ZeRO 2: gradients are sharded as well."""

    stage = 2


class Owned1(Zero1):
    """ZeRO 1 in which ``step()``, and not each backward, ends an accumulation."""

    managed = False


class Owned2(Zero2):
    """ZeRO 2 in which ``step()`` ends an accumulation."""

    managed = False


class Zero3(Zero1):
    """ZeRO 3: each rank also holds a slice of each parameter; the last is padded."""

    stage = 3

    def part(self, p: Any, values: Any) -> Any:
        start = deepspeed.comm.get_rank() * p.partition_numel()
        count = max(min(p.partition_numel(), p.ds_numel - start), 0)
        return values[:count], slice(start, start + count)

    def weights(self, stack: Any) -> dict[str, Any]:
        named = stack.module.named_parameters()
        return {n: self.part(p, p.ds_tensor) for n, p in named}

    def keep_gradients(self, stack: Any) -> None:
        for name, p in stack.module.named_parameters():
            group, start, count = stack.optimizer.grad_position[p.ds_id]
            flat = stack.optimizer.fp32_partitioned_groups_flat[group].grad
            stack.seen[name] = self.part(p, flat.narrow(0, start, count).clone())
