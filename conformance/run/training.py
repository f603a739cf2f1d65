"""Train one scenario once, without a reference: a job for ``gradparity record``."""

from __future__ import annotations

import os

from ...multiprocess import WorldError
from ..rank.scaler_spec import load_scaler
from ..rank.worker import observe_rank
from ..record import recorder
from ..space.scenario import Scenario
from ..status import UsageError
from .launcher import Place, root_cause

__all__ = ["TrainingError", "train"]


class TrainingError(Exception):
    """A rank failed; the message says which and where."""


def train(id: str, spec: str, place: Place) -> int:
    """Train a scenario on its ranks.

    Args:
        id: scenario id; ``model=file.py:Class`` in it names a workload.
        spec: the scaler to train with, or ``none``.
        place: where the ranks come from.

    Returns:
        The number of steps.

    Raises:
        UsageError: if the scenario does not exist or needs a second world.
        TrainingError: if a rank failed.
    """
    scenario = Scenario.parse(id)
    if scenario.saved_by is not None:
        raise UsageError(f"{id}: is two jobs, which a checkpoint joins: train each")
    load_scaler(spec, os.getcwd())
    place.check([scenario.world_size])
    try:
        place.ranks(scenario.world_size).run(_on_rank, scenario, spec, os.getcwd())
    except WorldError as failure:
        raise TrainingError(root_cause(failure)) from failure
    return scenario.steps


def _on_rank(scenario: Scenario, spec: str, folder: str) -> None:
    observe_rank(scenario, spec, folder)
    if recorder.recorder is not None:  # ranks do not exit as a program does
        recorder.recorder.write()
