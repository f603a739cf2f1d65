"""Step an optimizer on the shards of a parameter, as on the ranks.

An optimizer with a rounded state rounds by blocks of elements, and the blocks of a
shard are not those of the whole; see [Note: Rounded state] in bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["InShards", "Shards"]

Shards = tuple[tuple[str, tuple[bytes, ...]], ...]
"""(parameter, its shards). A shard is the bytes of an int64 array: the positions of its
elements in the flat parameter."""


class InShards:
    """A whole parameter that an optimizer steps in shards.

    Args:
        parameter: the whole parameter.
        seen: shards that the ranks' optimizers had, if known.
        even: number of equal parts along dim 0, if ``seen`` is empty; 1 leaves the
            parameter whole.

    Attributes:
        parts: tensors of the optimizer: the shards, or the parameter itself.
    """

    def __init__(
        self, parameter: nn.Parameter, seen: Sequence[bytes], even: int
    ) -> None:
        places: list[Tensor] = []
        if seen:
            indices = [torch.frombuffer(bytearray(p), dtype=torch.int64) for p in seen]
            places = [_in_shape(each, parameter.shape) for each in indices]
        elif even > 1:
            numbers = torch.arange(parameter.numel()).view(parameter.shape)
            places = [*numbers.chunk(even)]
        self.whole = parameter
        self.places = places if len(places) > 1 else []
        # copies, because a view of a parameter cannot be a parameter
        self.parts = [
            nn.Parameter(parameter.detach().take(each)) for each in self.places
        ] or [parameter]

    @contextmanager
    def stepped(self) -> Iterator[None]:
        """Give the shards their gradients; copy their values back after the step."""
        if not self.places:
            yield
            return
        gradient = self.whole.grad
        for part, places in zip(self.parts, self.places, strict=True):
            part.grad = None if gradient is None else gradient.take(places)
        yield
        with torch.no_grad():
            for part, places in zip(self.parts, self.places, strict=True):
                self.whole.put_(places, part)
                part.grad = None


def _in_shape(places: Tensor, whole: torch.Size) -> Tensor:
    """Reshape a shard's indices if they form a box of the whole tensor.

    Other indices are returned as they are.
    """
    axes = torch.unravel_index(places, whole)
    spans = [slice(int(a.min()), int(a.max()) + 1) for a in axes]
    box = torch.arange(whole.numel()).view(whole)[tuple(spans)]
    return box if torch.equal(box.reshape(-1), places) else places
