r"""A layer of ring attention under DDP as a workload; see docs/stacks.md.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.ring_attention:NoRing

Needs ring-attention-pytorch. NoRing ends with PASS, ByHand and Automatic with FAIL.
"""

from typing import Any

import torch
from ring_attention_pytorch import RingAttention
from ring_attention_pytorch.distributed import get_rank, get_world_size, is_distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .shared import Pair, Regression

LENGTH = 8


class Automatic(Regression):
    """Faulty: each rank has its own sequences, which the package shards.

    See docs/wild/ring-attention-pytorch-gather-gradient.md.
    """

    ring, automatic = True, True

    def model(self) -> Any:
        # without the ring, plain attention: the ring computes in fp32
        return RingAttention(16, heads=2, causal=True, force_regular_attn=True)

    def batch(self, step: int, seed: int) -> Pair:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(12, LENGTH, 16, generator=generator)
        return x, x.abs()

    def parallelize(self, model: Any, mesh: DeviceMesh) -> Any:
        for asked in (is_distributed, get_rank, get_world_size):
            asked.cache_clear()  # one process asked before
        part = LENGTH // mesh.size()
        model.ring_attn, model.force_regular_attn = self.ring, not self.ring
        model.auto_shard_seq = self.automatic
        model.ring_seq_size = model.bucket_size = part
        return DistributedDataParallel(model, device_mesh=mesh)


class NoRing(Automatic):
    """Plain attention, without a ring."""

    ring, automatic = False, False


class ByHand(Automatic):
    """Faulty: each rank has its part of all sequences.

    See docs/wild/ring-attention-pytorch-key-gradient.md.
    """

    automatic = False

    def shard(self, batch: Pair, mesh: DeviceMesh) -> Pair:
        x, y = (t.chunk(mesh.size(), 1)[mesh.get_local_rank()] for t in batch)
        return x, y
