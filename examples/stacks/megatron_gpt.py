r"""Megatron-Core's GPT as a workload: tensor parallel, with a sharded vocabulary.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.megatron_gpt:Stack

Needs megatron-core. Ends with PASS in under half a minute on two cores.
"""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from .megatron_on_cpu import Alone, device_of, replace_cuda
from .shared import VOCABULARY, Tokens

replace_cuda()


class GPT(GPTModel):  # type: ignore[misc]  # its types are not followed
    """Megatron's GPT, called with tokens; returns logits."""

    def __init__(self, group: Any) -> None:
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=4,
            tensor_model_parallel_size=group.size(),
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        groups = ProcessGroupCollection(tp=group, cp=Alone(), pp=Alone(), embd=None)
        super().__init__(
            config,
            gpt_layer_specs.get_gpt_layer_local_spec(),
            VOCABULARY,
            16,
            position_embedding_type="rope",
            pg_collection=groups,
            parallel_output=False,
        )

    def forward(self, tokens: torch.Tensor) -> Any:
        length = tokens.shape[1]
        future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        places = torch.arange(length).expand_as(tokens)
        with device_of(tokens):
            return super().forward(tokens, places, future)


class Stack(Tokens):
    """Tensor-parallel GPT; the model on one process is Megatron's own."""

    meshes = ({"tp": 2},)

    def model(self) -> Any:
        return GPT(Alone())

    def parallelize(self, model: Any, mesh: Any) -> Any:
        sharded, rank = GPT(mesh.get_group("tp")), mesh.get_local_rank("tp")
        # Each rank gets its part of the weights, as Megatron marks it.
        for name, p in sharded.named_parameters():
            whole, split = model.get_parameter(name), getattr(p, "partition_dim", -1)
            part = whole.chunk(mesh.size(), split)[rank] if split >= 0 else whole
            p.data.copy_(part)
        return sharded
