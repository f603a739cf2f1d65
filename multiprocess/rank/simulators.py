"""Simulated ranks, for the parent to name: torch is imported where they run."""

from __future__ import annotations

from ..messages import SimulatedRun, Simulation


def _on_threads(plan: Simulation) -> SimulatedRun:
    from .simulation import simulate  # needs torch, which the parent need not have

    return simulate(plan)


def _on_local_tensors(plan: Simulation) -> SimulatedRun:
    from .local_tensors import simulate_local

    return simulate_local(plan)


SIMULATORS = {
    "simulated": _on_threads,
    "both": _on_threads,
    "local": _on_local_tensors,
}
"""What runs a call in that process, by backend."""
