"""A separate project: one test that runs on every rank.

    pip install ../.. pytest    # gradparity, from the checkout that this folder lies in
    pytest

Two tests pass, on 2 and on 4 ranks, in some 10 s: most of it is the import of torch. No
torchrun, no port and no process to look after: ranks are made and ended for you.
"""

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import World


# One test for each size. A hang ends after 60 s, and the report says which rank hung in
# which collective.
@pytest.mark.world(world_size=[2, 4], timeout_s=60)
def test_every_rank_gets_the_sum(world: World) -> None:
    """Runs on every rank; pytest names the rank on which it fails."""
    value = torch.ones(1) * world.rank
    # The default process group is there; world.mesh(...) makes a DeviceMesh.
    dist.all_reduce(value)
    assert value.item() == sum(range(world.world_size))
