r"""OLMo-core over several axes, with its checkpoint; see docs/stacks.md.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.olmo_core_axes:Tensor

Needs ai2-olmo-core. Ends with PASS in a minute or two, Masked with FAIL.
"""

from typing import Any

from .olmo_core_llama import Fsdp

# isort: split
from olmo_core.train import train_module as olmo
from olmo_core.train.checkpoint import Checkpointer


class Masked(Fsdp):
    """Workload whose ranks also have unequal numbers of targets."""

    most = 7


class Tensor(Fsdp):
    """Sequence and tensor parallelism with FSDP2; the vocabulary is sharded."""

    meshes: tuple[dict[str, int], ...] = ({"dp": 1, "tp": 2}, {"dp": 2, "tp": 1})

    def settings(self, mesh: Any) -> dict[str, Any]:
        tp = olmo.TransformerTensorParallelConfig(degree=mesh["tp"].size())
        return super().settings(mesh) | {"tp_config": tp}

    def save_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        Checkpointer(work_dir=folder).save(f"{folder}/step", stack, {})

    def load_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        saved = Checkpointer(work_dir=folder)
        saved.load(f"{folder}/step", stack, load_trainer_state=False)


class Hybrid(Tensor):
    """HSDP: replicas of sharded models."""

    meshes = ({"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1})

    def settings(self, mesh: Any) -> dict[str, Any]:
        replicas = mesh["dp_replicate"].size()
        data = olmo.TransformerDataParallelConfig(name="hsdp", num_replicas=replicas)
        return {"dp_config": data}


class Ulysses(Tensor):
    """Ulysses: ranks split the sequence, but within attention they split the heads."""

    meshes = ({"dp": 1, "cp": 2},)

    def settings(self, mesh: Any) -> dict[str, Any]:
        cp = olmo.TransformerContextParallelConfig.ulysses(mesh["cp"].size())
        return Fsdp.settings(self, mesh) | {"cp_config": cp}
