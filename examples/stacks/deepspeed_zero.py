r"""DeepSpeed's ZeRO 1, 2 and 3 as workloads, also with several backwards a step.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.deepspeed_zero:Zero3

Needs deepspeed. Zero3 ends with PASS, Zero1 and Zero2 with FAIL in the runs that
accumulate, Owned1 and Owned2 with PASS; each takes under half a minute on two cores.

DeepSpeed takes every backward for a boundary of accumulation where
``gradient_accumulation_steps`` is 1. With several backwards before one step, stages 1
and 2 then train on the last micro-batch alone, without a word; stage 3 adds them up.
``managed_gradient_accumulation: false`` makes ``step()`` the boundary.
"""

from typing import Any

import deepspeed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .shared import Pair, Regression, weighted

# An operation that DeepSpeed would compile at the first start; gloo does without it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Zero1(Regression):
    """Optimizer states are sharded."""

    stage, managed, clip_norm = 1, True, 0.1

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": self.managed,
            "gradient_clipping": self.clip_norm,  # 1.0 where it is left out
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 10**4},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = self.optimizer(list(model.named_parameters()))
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config
        )
        # Gradients are gone after step(): a hook keeps what the optimizer was given.
        engine.seen = {}
        optimizer.register_step_pre_hook(lambda *_: self.keep_gradients(engine))
        return engine

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        losses = []
        # DeepSpeed's own loop: backward and step of the engine. The share weighs each
        # part by its rows, so that the sum of losses is the mean over all rows.
        for inputs, targets, share in weighted(micro_batches):
            loss = self.loss(stack(inputs), targets) * share
            stack.backward(loss)
            losses.append(loss.detach())
        stack.step()
        return sum(losses), stack.get_global_grad_norm()

    def weights(self, stack: Any) -> dict[str, Any]:
        return dict(stack.module.named_parameters())

    # (values, slice): this rank's part of the flattened parameter. gradparity puts the
    # parts of all ranks together, and compares them with the whole.
    def keep_gradients(self, stack: Any) -> None:
        for name, p in stack.module.named_parameters():
            if (part := p._hp_mapping) is not None:  # None: no element on this rank
                flat = stack.optimizer.single_partition_of_fp32_groups
                of, to = part.hp_fragment_address, part.lp_fragment_address
                grad = flat[part.param_group_index].grad.narrow(0, of.start, of.numel)
                whole = slice(to.start, to.start + to.numel)
                stack.seen[name] = grad.clone(), whole

    def gradients(self, stack: Any) -> dict[str, Any]:
        return dict(stack.seen)


class Zero2(Zero1):
    """Gradients are sharded, too."""

    stage = 2


class Zero3(Zero1):
    """Parameters are sharded, too."""

    stage = 3

    def weights(self, stack: Any) -> dict[str, Any]:
        named = stack.module.named_parameters()
        return {n: self.part(p, p.ds_tensor) for n, p in named}

    def keep_gradients(self, stack: Any) -> None:
        for name, p in stack.module.named_parameters():
            group, start, count = stack.optimizer.grad_position[p.ds_id]
            flat = stack.optimizer.fp32_partitioned_groups_flat[group].grad
            stack.seen[name] = self.part(p, flat.narrow(0, start, count).clone())

    def part(self, p: Any, part: Any) -> Any:
        start = deepspeed.comm.get_rank() * p.partition_numel()
        count = min(p.partition_numel(), p.ds_numel - start)  # the last one is padded
        return part[: max(count, 0)], slice(start, start + max(count, 0))


class Owned1(Zero1):
    """The caller's step is the boundary."""

    managed = False


class Owned2(Zero2):
    """The same with sharded gradients."""

    managed = False
