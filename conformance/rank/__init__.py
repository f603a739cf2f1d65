"""The code that runs on a rank: engine, observers, trace."""

PRELOAD = (f"{__name__}.worker", "torch._dynamo")
"""Modules that each rank would import for its first step: imported before the fork."""
