r"""NeMo AutoModel's FSDP2, tensor and sequence parallelism; see docs/stacks.md.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.nemo_automodel_qwen3:Stack

Needs nemo-automodel. Ends with PASS in a minute.
"""

from typing import Any

import torch.distributed as dist
from nemo_automodel.components.distributed import config, mesh, tp_replicas, utils
from nemo_automodel.components.distributed import mesh_utils as meshes
from nemo_automodel.components.distributed.model_parallelizer import parallelize_model
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.training import utils as training
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Qwen3ForCausalLM

from ..qwen3 import CONFIG
from .shared import Pair, Tokens


class Stack(Tokens):
    """Qwen3 in fp32; a step is that of NeMo's fine-tuning recipe, train_ft."""

    clip_norm = 0.5
    meshes = ({"dp": 2, "tp": 1}, {"dp": 1, "tp": 2})

    def model(self) -> Any:
        return Qwen3ForCausalLM(CONFIG)

    def parallelize(self, model: Any, given: Any) -> Any:
        chosen = config.FSDP2Config(True, mp_policy=MixedPrecisionPolicy())
        sizes = mesh.ParallelismSizes(tp_size=given["tp"].size())
        made, _ = meshes._create_device_meshes(chosen, sizes, world_size=given.size())
        context = mesh.MeshContext.from_meshes(made, strategy_config=chosen)
        stack = parallelize_model(model, context)
        stack.own, stack.made = self.optimizer([*stack.named_parameters()]), made
        return stack

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        group = meshes.get_flat_mesh(stack.made, "dp").get_group()
        count = sum((y != -100).sum() for _, y in micro_batches)
        dist.all_reduce(count, group=group)
        parts, losses, ranks = [stack], [], dist.get_world_size(group)
        stack.own.zero_grad()
        training.prepare_for_grad_accumulation(parts)
        for left, (tokens, labels) in enumerate(micro_batches, 1 - len(micro_batches)):
            with utils.get_sync_ctx(stack, not left, defer_fsdp_grad_sync=True):
                logits = stack(input_ids=tokens).logits
                loss = MaskedCrossEntropy()(logits, labels, num_label_tokens=int(count))
                (loss * ranks).backward()
                losses.append(loss.detach())
        tp_replicas.synchronize_tp_replica_gradients(parts, stack.made)
        clip = training.scale_grads_and_clip_grad_norm
        norm = clip(self.clip_norm, parts, device_mesh=stack.made)
        stack.own.step()
        dist.all_reduce(total := sum(losses), group=group)
        return total, norm
