"""Carry the state of a training to another world size.

The state of model and optimizers is copied element by element, through the map of
element numbers: bitwise, for any two layouts. The scaler's state takes the usual way:
the first rank saves, every rank of the new world loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...fixtures import local
from .engine import Engine
from .trace import RankTrace, Saved

__all__ = ["gathered", "optimizer_states", "restore"]

Part = tuple[NDArray[np.int64], NDArray[Any]]
"""Positions of some elements in the full tensor, and their values."""


def optimizer_states(engine: Engine) -> dict[str, dict[str, Any]]:
    """Return this rank's part of the optimizer state of each parameter."""
    names = {id(p): name for name, p in engine.parameters.items()}
    return {
        names[id(parameter)]: {key: _flat(value) for key, value in state.items()}
        for optimizer in engine.optimizers
        for parameter, state in optimizer.state.items()
    }


def _flat(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # a 0-d state, such as a step count, belongs to the whole parameter
    part = local(value.detach()).cpu().numpy().copy()
    return part.reshape(-1) if value.ndim else part


def gathered(traces: Sequence[RankTrace]) -> Saved:
    """Merge the parts of all ranks into the whole state."""
    saved = [(t, t.saved) for t in traces if t.saved is not None]
    names = dict.fromkeys(name for t in traces for name in t.index)
    states: dict[str, dict[str, Any]] = {}
    for name in names:
        mine = [
            (t.index[name], s.optimizers[name])
            for t, s in saved
            if name in s.optimizers
        ]
        keys = dict.fromkeys(key for _, state in mine for key in state)
        states[name] = {
            key: _whole([(index, state[key]) for index, state in mine]) for key in keys
        }
    return Saved(
        scaler=saved[0][1].scaler,
        optimizers={name: state for name, state in states.items() if state},
        parameters={
            name: _joined(
                (t.index[name], t.steps[-1].parameters[name])
                for t in traces
                if name in t.index
            )
            for name in names
        },
    )


def _whole(parts: list[tuple[NDArray[np.int64], Any]]) -> Any:
    value = parts[0][1]
    return _joined(parts) if isinstance(value, np.ndarray) and value.ndim else value


def _joined(parts: Iterable[Part]) -> NDArray[Any]:
    # ranks with empty shards do not know the dtype; replicas overwrite equal values
    nonempty = [(index, values) for index, values in parts if len(index)]
    size = 1 + max(int(index.max()) for index, _ in nonempty)
    full = np.empty(size, nonempty[0][1].dtype)
    for index, values in nonempty:
        full[index] = values
    return full


def restore(engine: Engine, saved: Saved) -> None:
    """Load this rank's elements and optimizer states from ``saved``."""
    names = {id(p): name for name, p in engine.parameters.items()}
    for name, parameter in engine.parameters.items():
        full = torch.from_numpy(saved.parameters[name])
        _write(parameter, full, engine.index[name])
    for optimizer in engine.optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = optimizer.state_dict()
        state["state"] = {
            number: {
                key: _laid_out(value, parameter, engine.index[names[id(parameter)]])
                for key, value in saved.optimizers[names[id(parameter)]].items()
            }
            for number, parameter in enumerate(parameters)
            if names[id(parameter)] in saved.optimizers
        }
        optimizer.load_state_dict(state)


def _laid_out(value: Any, parameter: nn.Parameter, index: NDArray[np.int64]) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    full = torch.from_numpy(value)
    if not full.ndim:
        return full
    # lay an elementwise state out as its parameter
    tensor = torch.zeros_like(parameter)
    _write(tensor, full, index)
    return tensor


def _write(tensor: Tensor, values: Tensor, index: NDArray[np.int64]) -> None:
    """Write the local elements of ``values`` into ``tensor``.

    Args:
        tensor: plain tensor or DTensor, any shape.
        values: the full tensor, in any shape.
        index: position of each local element in the flat full tensor.
    """
    part = local(tensor.detach())
    chosen = values.reshape(-1)[torch.from_numpy(index).to(values.device)]
    part.copy_(chosen.view(part.shape))
