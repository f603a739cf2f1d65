"""transformers' Qwen3 under its own tensor-parallel plan, as a workload.

``gradparity run --workload examples.qwen3:Stack --scaler none`` needs transformers and
downloads nothing: the model is tiny, its weights are random.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
    use_cache=False,
    attn_implementation="eager",
)


class Stack:
    """Next-token prediction; ranks along ``tp`` see the same tokens."""

    meshes = ({"tp": 2},)

    def model(self) -> nn.Module:
        model: nn.Module = Qwen3ForCausalLM(CONFIG)
        return model

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(CONFIG.vocab_size, (8, 9), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        logits = output.logits.flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets.flatten())

    def parallelize(self, model: Qwen3ForCausalLM, mesh: DeviceMesh) -> nn.Module:
        # transformers shards what it loads: hand the weights over as a checkpoint
        with tempfile.TemporaryDirectory() as folder:
            shared = [folder]
            if dist.get_rank() == 0:
                model.save_pretrained(folder)
            dist.broadcast_object_list(shared)  # the folder of rank 0
            sharded: nn.Module = Qwen3ForCausalLM.from_pretrained(
                shared[0],
                dtype=torch.float32,
                attn_implementation="eager",
                distributed_config=DistributedConfig(tp_size=mesh.size()),
            )
            dist.barrier()  # rank 0 removes the folder once all have read it
        return sharded

    def optimizer(self, parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.SGD:
        return torch.optim.SGD([p for _, p in parameters], lr=0.1)
