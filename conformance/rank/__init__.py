"""The code that runs on a rank: engine, observers, trace."""

PRELOAD = (f"{__name__}.worker", "torch._dynamo")
"""What each rank would import before its first step: imported once, before the fork."""
