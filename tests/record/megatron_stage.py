"""Stand-ins for a model of Megatron, with the attributes that recordings read."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LAYERS, FEATURES, HIDDEN = 2, 6, 8


@dataclass(frozen=True)
class Shard:
    """One entry of a sharded state dict; its first axis counts layers."""

    key: str
    data: Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 1


@dataclass(frozen=True)
class Halves:
    """A gated layer: each half is sharded."""

    shards: list[Shard]

    def build(self) -> list[Shard]:
        return self.shards


class Layer(nn.Module):
    def __init__(self, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(1, 1, False) for _ in range(2))
        self.up.weight.data, self.down.weight.data = up, down
        self.norm = nn.Parameter(torch.ones(HIDDEN))


class Stage(nn.Module):
    """Layers of one rank of ``tp`` x ``pp``; names count layers from 0.

    The first stage has words, and a later one a head that is tied to them.
    """

    def __init__(self, tp: int, pp: int, rank: int) -> None:
        super().__init__()
        self.tp, self.rank = tp, rank % tp
        own = LAYERS // pp
        self.first = rank // tp * own
        torch.manual_seed(LAYERS)
        words = nn.Parameter(torch.randn(5, HIDDEN))
        self.tied = "head" if self.first else "words"
        setattr(self, self.tied, words)
        self.layers = nn.ModuleList()
        for number in range(self.first, self.first + own):
            torch.manual_seed(number)
            gate, up = torch.randn(2, FEATURES, HIDDEN)
            down = torch.randn(HIDDEN, FEATURES)
            mine = torch.cat([half.chunk(tp)[self.rank] for half in (gate, up)])
            self.layers.append(Layer(mine, down.chunk(tp, 1)[self.rank].contiguous()))

    def sharded_state_dict(self) -> dict[str, Any]:
        tied = Shard("words", getattr(self, self.tied), (5, HIDDEN), (0, 0), 0)
        found: dict[str, Any] = {"layers.0.up._extra_state": None, self.tied: tied}
        layer: Any
        for local, layer in enumerate(self.layers):
            number, width = local + self.first, FEATURES // self.tp
            gate, up = (
                Shard(
                    "layers.up.weight",
                    half,
                    (LAYERS, 2 * FEATURES, HIDDEN),
                    (number, side * FEATURES + self.rank * width, 0),
                )
                for side, half in enumerate(layer.up.weight.detach().chunk(2))
            )
            found[f"layers.{local}.up.weight"] = Halves([gate, up])
            found[f"layers.{local}.down.weight"] = Shard(
                "layers.down.weight",
                layer.down.weight,
                (LAYERS, HIDDEN, FEATURES),
                (number, 0, self.rank * width),
            )
            found[f"layers.{local}.norm"] = Shard(
                "layers.norm", layer.norm, (LAYERS, HIDDEN), (number, 0)
            )
        return found
