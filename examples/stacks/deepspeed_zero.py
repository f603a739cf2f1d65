r"""DeepSpeed's ZeRO 1 as a workload; deepspeed_stages.py has the other stages.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.deepspeed_zero:Zero1

Needs deepspeed. Ends with FAIL in half a minute: stage 1 drops earlier micro-batches.
"""

from typing import Any

import deepspeed

from .on_cpu import deepspeed_without_kernels
from .shared import Pair, Regression, weighted


class Zero1(Regression):
    """ZeRO 1: optimizer states are sharded."""

    stage, managed, clip_norm = 1, True, 0.1

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": self.managed,
            "gradient_clipping": self.clip_norm,  # 1.0 where it is left out
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 10**4},
            "zero_allow_untested_optimizer": True,
        }

    def parallelize(self, model: Any, mesh: Any) -> Any:
        deepspeed_without_kernels()
        made, config = self.optimizer([*model.named_parameters()]), self.config()
        engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=config)
        made.register_step_pre_hook(lambda *_: self.keep_gradients(engine))
        return engine

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.seen, losses = {}, []
        for inputs, targets, share in weighted(micro_batches):
            loss = self.loss(stack(inputs), targets) * share
            stack.backward(loss)
            losses.append(loss.detach())
        stack.step()
        return sum(losses), stack.get_global_grad_norm()

    def weights(self, stack: Any) -> dict[str, Any]:
        return dict(stack.module.named_parameters())

    def gradients(self, stack: Any) -> dict[str, Any]:
        return dict(stack.seen)

    # They are gone after step(). gradparity puts the slices of all ranks together.
    def keep_gradients(self, stack: Any) -> None:
        groups = stack.optimizer.single_partition_of_fp32_groups
        for name, p in stack.module.named_parameters():
            if (part := p._hp_mapping) is not None:  # None: no element on this rank
                of, to = part.hp_fragment_address, part.lp_fragment_address
                flat = groups[part.param_group_index].grad.narrow(0, of.start, of.numel)
                stack.seen[name] = flat.clone(), slice(to.start, to.start + to.numel)
