r"""torchtitan's debug Llama, laid out by its own ``parallelize_llama``, as a workload.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torchtitan_debug:Stack

Needs torchtitan, as docs/stacks.md says. Ends with PASS after a minute or two.
"""

from typing import Any

from .on_cpu import torchtitan_on_cpu, torchtitan_sums
from .shared import Pair, Tokens

# isort: split
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, utils
from torchtitan.models.llama3 import model_registry, parallelize_llama, sharding


class Stack(Tokens):
    """Workload whose loss is a sum over all ranks, divided by all ranks' targets."""

    meshes = ({"dp_shard": 2, "tp": 1}, {"dp_shard": 1, "tp": 2})

    def model(self) -> Any:
        utils.set_spmd_backend("partial_dtensor")
        config = model_registry("debugmodel").model
        config.layers = config.layers[:2]
        torchtitan_on_cpu(config)
        sharding.set_llama3_sharding_config(config, enable_sp=True)
        model = config.build()
        model.init_states()
        return model

    def parallelize(self, model: Any, mesh: Any) -> Any:
        chosen = ParallelismConfig(spmd_backend="partial_dtensor")
        chosen.tensor_parallel_degree = mesh["tp"].size()
        dims = ParallelDims.from_config(chosen, mesh.size())
        stack = parallelize_llama(
            model,
            parallel_dims=dims,
            parallelism=chosen,
            ac_config=None,
            training=TrainingConfig(mixed_precision_param="float32"),
            compile_config=CompileConfig(enable=False),
            dump_folder="",
        )
        torchtitan_sums(stack)
        stack.own = self.optimizer([*stack.named_parameters()])
        stack.batch_mesh = dims.get_optional_mesh("batch")
        return stack

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.own.zero_grad()
        count = sum((y != -100).sum() for _, y in micro_batches)
        count = utils.dist_sum_tensor(count, stack.batch_mesh)
        losses = []
        for tokens, targets in micro_batches:
            losses.append(cross_entropy_loss(stack(tokens), targets) / count)
            losses[-1].backward()
        stack.own.step()
        return utils.dist_sum_tensor(sum(losses).detach(), stack.batch_mesh)
