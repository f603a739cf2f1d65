r"""Accelerate's FSDP2 loop as a workload: prepare, backward, clip_grad_norm_ and step.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.accelerate_fsdp2:Stack

Needs accelerate. Ends with PASS in under half a minute on two cores.

Accelerate gives CPU ranks DDP even where FSDP is asked for. Here they are declared to
be GPU ranks, while tensors stay on the CPU; on GPUs leave ``fsdp_on_cpu`` out.
"""

from typing import Any

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .shared import Pair, Regression, weighted


def fsdp_on_cpu() -> None:
    """Forget the last run's singletons; let the next Accelerator choose FSDP."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU


class Stack(Regression):
    """Layers with more than 100 elements are units of FSDP2."""

    clip_norm = 0.1

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        fsdp_on_cpu()
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
