r"""Accelerate's FSDP2 loop as a workload: prepare, backward, clip_grad_norm_ and step.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.accelerate_fsdp2:Stack

Needs accelerate. Ends with PASS in under half a minute on two cores.
"""

from typing import Any

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .on_cpu import accelerate_takes_fsdp
from .shared import Pair, Regression, weighted


class Stack(Regression):
    """Layers with more than 100 elements are units of FSDP2."""

    clip_norm = 0.1

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        accelerate_takes_fsdp()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        optimizer = self.optimizer(list(model.named_parameters()))
        model, optimizer = accelerator.prepare(model, optimizer)
        # train_step gets what this returns: the module carries what else it needs.
        model.accelerator, model.optimizer = accelerator, optimizer
        return model

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        accelerator, losses = stack.accelerator, []
        # gradparity decides how many micro-batches a step has.
        accelerator.gradient_accumulation_steps = len(micro_batches)
        for inputs, targets, share in weighted(micro_batches):
            with accelerator.accumulate(stack):
                loss = self.loss(stack(inputs), targets) * share
                # Accelerate divides by the number of micro-batches: undo it, since
                # the share has weighed this one by its rows.
                accelerator.backward(loss * len(micro_batches))
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(
                        stack.parameters(), self.clip_norm
                    )
                stack.optimizer.step()
                stack.optimizer.zero_grad()
        return sum(losses), float(norm)
