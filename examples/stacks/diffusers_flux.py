r"""Flux of diffusers under context parallelism as a workload; see docs/stacks.md.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.diffusers_flux:Ulysses

Needs diffusers. Ends with PASS in a minute.
"""

from typing import Any
from unittest.mock import patch

import torch
from diffusers import ContextParallelConfig, FluxTransformer2DModel
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from .shared import Pair, Regression


class Flux(nn.Module):
    """Flux with two blocks, for images of 8 tokens and texts of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.flux = FluxTransformer2DModel(
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            num_attention_heads=2,
            attention_head_dim=16,
            axes_dims_rope=(4, 4, 8),
            joint_attention_dim=8,
            pooled_projection_dim=8,
        )

    def forward(self, inputs: dict[str, Tensor]) -> Any:
        images, texts = torch.arange(24.0).view(8, 3), torch.zeros(4, 3)
        places = {"img_ids": images, "txt_ids": texts, "return_dict": False}
        return self.flux(**inputs, **places)[0]


class Ulysses(Regression):
    """Ulysses: ranks split the tokens, but within attention they split the heads."""

    meshes, model_axes = ({"ring": 1, "ulysses": 2},), ("ring", "ulysses")

    def model(self) -> nn.Module:
        return Flux()

    def batch(self, step: int, seed: int) -> Pair:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x, text = torch.randn(24, 8, 12, generator=generator).split([4, 8], 2)
        inputs = {"hidden_states": x, "encoder_hidden_states": text[:, :4]}
        inputs |= {"pooled_projections": text[:, 4], "timestep": text[:, 5, 0].abs()}
        return inputs, x.abs()

    def parallelize(self, model: Any, mesh: Any) -> Any:
        if (degree := mesh["ulysses"].size()) > 1:
            config = ContextParallelConfig(ulysses_degree=degree, mesh=mesh)
            # it asks CUDA for the number of ranks of a host
            with patch.object(torch.accelerator, "device_count", return_value=degree):
                model.flux.enable_parallelism(config=config)
            for p in model.parameters():
                p.register_hook(all_reduce)  # a rank has those of its tokens
        return model
