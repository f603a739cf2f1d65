"""A project of its own: it uses the plugin, and nothing else of gradparity."""

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import World


@pytest.mark.world(size=[2, 4], timeout_s=60)
def test_every_rank_gets_the_sum(world: World) -> None:
    """The body runs on every rank; a failing one is named."""
    value = torch.ones(1) * world.rank
    dist.all_reduce(value)
    assert value.item() == sum(range(world.size))
