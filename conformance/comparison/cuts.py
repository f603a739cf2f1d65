"""Parts of one dimension of a tensor that a rank may hold.

A plain tensor does not say which part of the whole it is. Mesh coordinates suggest the
part, for tensors that are cut in chunks, from both ends or strided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

__all__ = ["cuts"]


def cuts(
    size: int,
    whole: int,
    coordinate: Mapping[str, int],
    axes: Mapping[str, int],
    starts: Sequence[int] = (),
) -> Iterator[NDArray[np.int64]]:
    """Yield index ranges of ``size`` along one dim that this rank may hold.

    The mesh coordinate of the rank gives the ranges. If no mesh axes give a range of
    this size, all ranges of an equal division are yielded.

    Args:
        size: number of indices of the part.
        whole: number of indices of the whole.
        coordinate: mesh axis -> index of the rank along it.
        axes: mesh axis -> number of ranks.
        starts: further indices at which the part may begin.
    """
    places = np.arange(whole)
    if size >= whole:
        if size == whole:
            yield places
        return
    divides = False
    for count in range(1, len(axes) + 1):
        for axes_of_cut in combinations(axes, count):
            parts, at = 1, 0
            for axis in axes_of_cut:
                parts *= axes[axis]
                at = at * axes[axis] + coordinate[axis]
            step = -(-whole // parts)  # torch.chunk cuts in this way
            for cut in (
                places[at * step : (at + 1) * step],
                _zigzag(places, at, parts),
                places[at::parts] if parts > 1 else places[:0],
            ):
                if len(cut) == size:
                    divides = True
                    yield cut
    yield from (places[at : at + size] for at in starts)
    # no mesh axis has this size, so try every equal part
    if not divides and whole % size == 0:
        yield from np.split(places, whole // size)


def _zigzag(places: NDArray[np.int64], at: int, parts: int) -> NDArray[np.int64]:
    """Return the indices of one chunk from each end, as in context parallelism.

    Returns no indices if the sequence cannot be divided in this way.
    """
    if parts < 2 or len(places) % (2 * parts):
        return places[:0]
    chunks = np.split(places, 2 * parts)
    return np.concatenate([chunks[at], chunks[-1 - at]])
