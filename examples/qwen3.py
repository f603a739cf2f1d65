r"""A model and its tensor-parallel plan from a package: transformers' Qwen3.

    gradparity run --workload examples.qwen3:Stack --scaler none --quick \
        --precision fp32

Needs transformers, and downloads nothing: the model is tiny and its weights are random.
The run takes about a minute on two cores and ends with FAIL: with several backwards a
step transformers 5.23 sums the gradients of q_norm and k_norm once too often
(docs/stacks.md). With one backward a step the plan is right.

To check another model, change CONFIG and the class: ``parallelize`` works for every
model that transformers has a plan for.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

# Small, but with all that the plan splits: 4 heads, 2 heads of keys and values, the
# feed-forward layer. 2 divides each.
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
    """Next-token prediction; ranks along ``tp`` have the same tokens."""

    # All ranks of "tp" see the same tokens: gradparity knows the axis by its name.
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
        # transformers applies its plan while it loads. So rank 0 saves the weights that
        # gradparity has set, and every rank loads its part of them.
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
