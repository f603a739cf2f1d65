r"""torchao's float8 training as a workload: layers that round what they multiply.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torchao_float8:Tensorwise

Needs torchao. ``emulate`` computes the products in fp32, on any device.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import Float8LinearRecipeName as Recipe

from .shared import Regression


def config(recipe: Recipe, **settings: Any) -> Float8LinearConfig:
    """Return the settings of a torchao recipe, emulated."""
    return replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=True, **settings
    )


class Tensorwise(Regression):
    """One scale for each tensor; weights are gathered in their own dtype."""

    rounds_to = torch.float8_e4m3fn  # a scale comes from all rows of a rank
    config = config(Recipe.TENSORWISE)

    def model(self) -> nn.Module:
        model: nn.Module = convert_to_float8_training(
            super().model(), config=self.config
        )
        return model

    def parallelize(
        self, model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy
    ) -> nn.Module:
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model


class Float8AllGather(Tensorwise):
    """Weights are rounded before they are gathered, by the scale of all shards."""

    config = config(Recipe.TENSORWISE, enable_fsdp_float8_all_gather=True)


class Rowwise(Tensorwise):
    """One scale for each row of a multiplied matrix."""

    config = config(Recipe.ROWWISE)
