"""Code that runs on a rank: training loop, observers, trace."""

PRELOAD = (f"{__name__}.worker", "torch._dynamo", "torch.distributed.pipelining")
"""Modules that each rank needs in its first step; imported before the fork."""
