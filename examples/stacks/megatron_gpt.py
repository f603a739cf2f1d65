r"""Megatron-Core's GPT as a workload: tensor parallel, with a sharded vocabulary.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.megatron_gpt:Stack

Needs megatron-core. Ends with PASS in under half a minute on two cores.

On a CPU some of Megatron stands in the way and is replaced: CUDA's random states in
``fork`` (dropout is off), CUDA's current device, a causal mask made on CUDA. Groups
that it drops where torch.distributed is not there stay, for the one process of the
reference. On GPUs leave the replacements out.
"""

import sys
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .shared import VOCABULARY, Tokens

parallel_state._set_global_memory_buffer()
NAME = "get_tensor_model_parallel_group_if_none"
for module in [m for n, m in sys.modules.items() if n.startswith("megatron.core")]:
    if hasattr(module, NAME):  # it drops a group where nothing is distributed
        setattr(module, NAME, lambda group, *_, **__: group)
CudaRNGStatesTracker.fork = lambda *_: nullcontext()


class Alone:
    """Stands for the group of one process, where there is no torch.distributed."""

    size, rank = (lambda _: 1), (lambda _: 0)


class GPT(GPTModel):  # type: ignore[misc]  # its types are not followed
    """Called with tokens; returns logits."""

    def __init__(self, group: Any) -> None:
        config = TransformerConfig(
            num_layers=2, hidden_size=16, num_attention_heads=4,
            tensor_model_parallel_size=group.size(), use_cpu_initialization=True,
            hidden_dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
        groups = ProcessGroupCollection(tp=group, cp=Alone(), pp=Alone(), embd=None)
        super().__init__(
            config, get_gpt_layer_local_spec(), VOCABULARY, 16,
            position_embedding_type="rope", pg_collection=groups, parallel_output=False,
        )  # fmt: skip

    def forward(self, tokens: Tensor) -> Any:
        length = tokens.shape[1]
        future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        places = torch.arange(length).expand_as(tokens)
        with patch.object(torch.cuda, "current_device", lambda: tokens.device):
            return super().forward(tokens, places, future)


class Stack(Tokens):
    """The model of one process is Megatron's own."""

    meshes = ({"tp": 2},)

    def model(self) -> nn.Module:
        return GPT(Alone())

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        sharded, rank = GPT(mesh.get_group("tp")), mesh.get_local_rank("tp")
        # gradparity has set the weights of the whole model: copy each rank's part, as
        # Megatron marks it by partition_dim.
        whole = dict(model.named_parameters())
        with torch.no_grad():
            for name, p in sharded.named_parameters():
                split = getattr(p, "partition_dim", -1)
                p.copy_(
                    whole[name].chunk(mesh.size(), split)[rank]
                    if split >= 0
                    else whole[name]
                )
        return sharded
