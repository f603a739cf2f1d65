r"""torchtitan's debug Llama, laid out by its own ``parallelize_llama``, as a workload.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torchtitan_debug:Stack

Needs torchtitan, installed as docs/stacks.md says. Ends with PASS after one to two
minutes on two cores: the model has half a million parameters.

Its kernels for experts need triton, and FlexAttention has no backward on a CPU: the
first are left out, and torchtitan's plain attention takes the place of the second. On
GPUs leave both replacements out.
"""

import sys
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from .shared import Pair, Tokens

KERNELS = "torchtitan.distributed.minimal_async_ep"
NAMES = ("combine_op dispatch_op init_buffer maybe_update_minimal_async_ep_config "
         "MinimalAsyncEPDispatchMetadata").split()  # fmt: skip
sys.modules[KERNELS] = absent = ModuleType(KERNELS)
vars(absent).update(dict.fromkeys(NAMES, object))

from torchtitan.components.loss import cross_entropy_loss  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import parallel_dims, utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry, parallelize_llama  # noqa: E402
from torchtitan.models.llama3.sharding import set_llama3_sharding_config  # noqa: E402

parallel_dims.device_type = "cpu"  # "cuda" where there is no accelerator
utils.set_spmd_backend("partial_dtensor")


class Stack(Tokens):
    """The sum of losses by the number of targets of all ranks, as in its trainer."""

    meshes = ({"dp_shard": 2}, {"tp": 2})

    def model(self) -> nn.Module:
        config = model_registry("debugmodel").model
        config.layers = config.layers[:2]
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        set_llama3_sharding_config(config, enable_sp=True)
        model: nn.Module = config.build()
        model.init_states()  # type: ignore[operator]  # torchtitan's own
        return model

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        dims = parallel_dims.ParallelDims(
            dp_replicate=1, dp_shard=sizes.get("dp_shard", 1), cp=1, pp=1, ep=1,
            tp=sizes.get("tp", 1), world_size=mesh.size(),
            spmd_backend="partial_dtensor",
        )  # fmt: skip
        dims.build_mesh()
        stack: Any = parallelize_llama(
            model, parallel_dims=dims, ac_config=None, dump_folder="",
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
            compile_config=CompileConfig(enable=False),
        )  # fmt: skip
        for module in stack.modules():
            if isinstance(module, FSDPModule):  # gloo has no scaled sum
                module.set_force_sum_reduction_for_comms(True)
        stack.own = self.optimizer([*stack.named_parameters()])
        stack.batch_mesh = dims.get_optional_mesh("batch")
        return stack

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.own.zero_grad()
        # As its trainer: the loss is divided by the targets of all ranks, before
        # backward.
        count = sum((y != -100).sum() for _, y in micro_batches)
        if stack.batch_mesh is not None:
            count = utils.dist_sum_tensor(count, stack.batch_mesh)
        losses = []
        for tokens, targets in micro_batches:
            loss = cross_entropy_loss(stack(tokens), targets) / count
            loss.backward()
            losses.append(loss.detach())
        loss = sum(losses)
        if stack.batch_mesh is not None:
            loss = utils.dist_sum_tensor(loss, stack.batch_mesh)
        stack.own.step()
        return loss
