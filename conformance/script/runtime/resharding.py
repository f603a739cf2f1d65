"""Resharding: a training goes on with other ranks, which load what the first saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....fixtures import local

__all__ = ["Resharded"]

Key = tuple[str, str, bool]  # parameter, key of a state, whether it is sharded


class Resharded:
    """Weights and the optimizer's states of this rank, element by element."""

    def __init__(
        self,
        folder: str | Path,
        params: dict[str, nn.Parameter],
        optimizer: Any,
        places: dict[str, Tensor],
    ) -> None:
        self.folder, self.params = Path(folder), params
        self.optimizer, self.places = optimizer, places

    def tensors(self) -> Iterator[tuple[Key, Tensor]]:
        """All that there are."""
        for name, p in self.params.items():
            yield (name, "", True), p
            for key, value in self.optimizer.state.get(p, {}).items():
                if torch.is_tensor(value):
                    yield (name, key, value.ndim > 0), value

    def save(self, scaler: dict[str, Any]) -> None:
        """Elements with their places in the whole tensor, and the scaler's state."""
        parts = {}
        for key, value in self.tensors():
            where = self.places[key[0]] if key[2] else torch.zeros(1, dtype=torch.long)
            parts[key] = where, local(value.detach()).flatten()
        torch.save((scaler, parts), self.folder / f"{dist.get_rank()}.pt")

    def load(self) -> dict[str, Any]:
        """Lay out anew what all ranks saved; returns the state of rank 0's scaler."""
        paths = sorted(self.folder.glob("*.pt"), key=lambda path: int(path.stem))
        files = [torch.load(path, weights_only=True) for path in paths]
        for key in dict.fromkeys(key for _, parts in files for key in parts):
            found = [parts[key] for _, parts in files if key in parts]
            where, values = (torch.cat(each) for each in zip(*found, strict=True))
            whole = values.new_empty(int(where.max()) + 1)
            whole[where] = values
            # a stage of a pipeline has some of the parameters
            if key[0] in self.params:
                self.put(whole, key)
        state: dict[str, Any] = files[0][0]
        return state

    def put(self, whole: Tensor, key: Key) -> None:
        """This rank's elements of a tensor that was saved."""
        name, state, sharded = key
        target = self.params[name].detach()
        if state:
            target = torch.zeros_like(target) if sharded else whole.new_zeros(())
            self.optimizer.state[self.params[name]][state] = target
        part = local(target)
        part.copy_((whole[self.places[name]] if sharded else whole).view_as(part))
