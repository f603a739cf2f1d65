r"""DeepSpeed's pipeline as a workload: ``train_batch`` runs a step's micro-batches.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.deepspeed_pipe:Stack

Needs deepspeed. Ends with PASS in under half a minute on two cores.

Where the engine owns the loop, ``train_step`` is one call of it, and ``micro_batches``
cuts the batch as the engine's configuration says.
"""

from typing import Any

import deepspeed
from deepspeed.pipe import PipelineModule
from torch.distributed.device_mesh import DeviceMesh

from .on_cpu import deepspeed_without_kernels
from .shared import Pair, Regression


class Stack(Regression):
    """Pipeline of two stages with four micro-batches."""

    meshes = ({"pp": 2},)
    model_axes = ("pp",)

    def micro_batches(self, batch: Pair) -> list[Pair]:
        return list(zip(*(t.chunk(4) for t in batch), strict=True))

    def parallelize(self, model: Any, mesh: DeviceMesh) -> Any:
        deepspeed_without_kernels()
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        module = PipelineModule(
            list(model),
            num_stages=mesh.size(),
            loss_fn=self.loss,
            partition_method="uniform",
        )
        config = {
            # 24 rows in 4 micro-batches of 6, as micro_batches cuts them.
            "train_micro_batch_size_per_gpu": 6,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.0,  # off; 1.0 where it is left out
            "zero_allow_untested_optimizer": True,
        }
        optimizer = self.optimizer(list(module.named_parameters()))
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=config
        )
        return engine

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        return stack.train_batch(iter(micro_batches)).detach()

    def weights(self, stack: Any) -> dict[str, Any]:
        return dict(stack.module.named_parameters())
