"""Numbers kept of a tensor: digest, sketch, squares, largest element, non-finite.

[Note: Sums over parts]
Everything is keyed by the place of an element in the whole tensor, and adds up (or
takes the larger one) over parts. So each rank keeps numbers of its own elements,
nothing is sent, and any layout of one tensor gives the same whole. The digest is a sum
of products of the bits of each element with a random odd word of its place, modulo
2^64: exact in any order. The sketch has 4 x 4 tiles of 32 buckets: each element goes
into a bucket of its tile with a random sign. The norm of the difference of two sketches
estimates the norm of the difference of two tensors, to about 5 %, or 15 % of one row or
one tile; a tensor of at most 512 elements is kept whole.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = [
    "BITS",
    "BUCKETS",
    "GRID",
    "SLOTS",
    "Batch",
    "Box",
    "Kept",
    "Sums",
    "Wanted",
    "keep_bits",
    "keep_values",
    "keys_of",
    "mix",
    "places_of",
]

GRID = 4
"""Tiles along dim 0, and along all other dims together."""
BUCKETS = 32
"""Buckets of a tile. One row crosses four tiles, so 128 buckets: the estimate of its
error is then off by 25 % once in 13,000 times; with 96 buckets, once in 2,000."""
SLOTS = GRID * GRID * BUCKETS
CHUNKS = {"cpu": 1 << 17}
"""Type of device -> elements that are worked on at once. Temporaries fit into the cache
of a core: with 32 times as many all takes 5 to 9 times as long."""
CHUNK = 1 << 22
"""The same of other devices: temporaries stay below 200 MB."""
KEYS_BYTES = 1 << 29
"""Keys that are kept from one tensor to the next: a step asks for them five times."""
_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Box:
    """Where a part lies in the whole tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Place of the first element of the part, in each dim; or one place in the flat
    tensor, of which the part is a range."""
    local: tuple[int, ...]
    """Shape of the part."""
    summand: tuple[int, ...] = ()
    """Coordinates of this rank on the axes over which the tensor is still to be
    summed: parts with other coordinates add up to the values."""

    @property
    def is_flat(self) -> bool:
        """True if the part is a range of the flattened tensor."""
        return len(self.offsets) != len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the part."""
        return math.prod(self.local)


@dataclass(frozen=True)
class Keys:
    """Random word, sign and slot of each element of a part."""

    words: Tensor
    """(n,) int64, odd."""
    signs: Tensor
    """(n,) float32, 1 or -1."""
    slots: Tensor
    """(n,) int64."""


@dataclass(frozen=True)
class Kept:
    """Numbers kept of one part, on its device until they are read."""

    digest: Tensor
    """int64: sum of bits times words, modulo 2^64; 0 where it is not asked for."""
    rounded: Tensor
    """The same after rounding to bf16."""
    sketch: Tensor | None
    """(SLOTS,) float64, or as many as the whole tensor has elements."""
    numbers: Tensor
    """(3,) float64: sum of squares, largest size, number of non-finite elements; zeros
    without a sketch."""

    def plus(self, other: Kept) -> Kept:
        """The sum with the numbers of another part."""
        assert self.sketch is not None and other.sketch is not None
        (a, b, c), (x, y, z) = self.numbers, other.numbers
        return Kept(
            self.digest + other.digest,
            self.rounded + other.rounded,
            self.sketch + other.sketch,
            torch.stack([a + x, torch.maximum(b, y), c + z]),
        )

    def update(self, before: Kept, unit: float) -> Kept:
        """The sketch of an update, weighted as this product and the one before are.

        In place of the sum of squares is that of one unit in the last place of each
        weight, weighted alike: a correct step may round each weight to either side.

        Args:
            before: the product of weights and sizes of gradients before the step.
            unit: distance of 1 to the next number of the weights' dtype.
        """
        assert self.sketch is not None and before.sketch is not None
        units = (unit * before.sketch).square().sum().reshape(1)
        numbers = torch.cat([units, self.numbers[1:]])
        return replace(self, sketch=self.sketch - before.sketch, numbers=numbers)


class Wanted(NamedTuple):
    """A part of which numbers are to be kept, and which."""

    part: Tensor
    """Local elements; they are only read."""
    box: Box
    """Where they lie in the whole."""
    weight: Tensor | None = None
    """See `keep_values`."""
    only_bits: bool = False
    """See `keep_bits`."""
    rounded: bool = False
    """The same."""


def mix(x: Tensor) -> Tensor:
    """Mix 32 bits, held in int64 (the finaliser of MurmurHash3, public domain)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _32
    return x ^ (x >> 16)


def places_of(box: Box, start: int, stop: int, device: torch.device) -> Tensor:
    """Places of the elements start..stop of a part in the flattened whole."""
    at = torch.arange(start, stop, dtype=torch.int64, device=device)
    if box.is_flat:
        return at + box.offsets[0]
    places = torch.zeros_like(at)
    inner, stride = 1, 1
    for local, whole, offset in zip(
        reversed(box.local), reversed(box.shape), reversed(box.offsets), strict=True
    ):
        places += ((at // inner) % local + offset) * stride
        inner, stride = inner * local, stride * whole
    return places


def _keys_of_rows(box: Box, start: int, stop: int, rows: Tensor) -> Keys:
    """Keys of elements whose rows come in any order: a row is known by its digest."""
    places = places_of(box, start, stop, rows.device)
    columns = max(1, math.prod(box.shape) // len(rows))
    row, column = mix(rows & _32)[places // columns], places % columns
    words = mix((column * 0x9E3779B1 + row) & _32)
    signs = 1.0 - 2.0 * ((words >> 7) & 1).to(torch.float32)
    tile = column * (GRID * GRID) // columns
    return Keys(words | 1, signs, tile * BUCKETS + (words >> 20) % BUCKETS)


def _keys(box: Box, start: int, stop: int, device: torch.device) -> Keys:
    places = places_of(box, start, stop, device)
    rows = box.shape[0] if box.shape else 1
    columns = max(1, math.prod(box.shape[1:]))
    row, column = places // columns, places % columns
    words = mix((column * 0x9E3779B1 + mix((row * 0x9E3779B1 + 1) & _32)) & _32)
    if math.prod(box.shape) <= SLOTS:  # kept whole
        return Keys(words | 1, torch.ones_like(places, dtype=torch.float32), places)
    if columns == 1:
        tile = row * (GRID * GRID) // rows
    else:
        tile = (row * GRID // rows) * GRID + column * GRID // columns
    signs = 1.0 - 2.0 * ((words >> 7) & 1).to(torch.float32)
    return Keys(words | 1, signs, tile * BUCKETS + (words >> 20) % BUCKETS)


_known: OrderedDict[tuple[Box, int, str], Keys] = OrderedDict()
_room = [KEYS_BYTES]
"""Bytes that are left for keys."""


def _chunks(size: int, device: torch.device) -> range:
    """First elements of the blocks that are processed at once."""
    return range(0, size, CHUNKS.get(device.type, CHUNK))


def keys_of(box: Box, start: int, device: torch.device) -> Keys:
    """Keys of one chunk of a part; those used last are kept."""
    stop = min(start + CHUNKS.get(device.type, CHUNK), box.size)
    which = (box, start, str(device))
    keys = _known.pop(which, None)
    if keys is None:
        keys = _keys(box, start, stop, device)
        _room[0] -= 20 * (stop - start)
        while _known and _room[0] < 0:
            _, oldest = _known.popitem(last=False)
            _room[0] += 20 * len(oldest.words)
    _known[which] = keys
    return keys


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Size of an element in bytes -> the integers that have its bits."""


def _digest(values: Tensor, words: Tensor) -> Tensor:
    bits = values.view(BITS[values.element_size()]).to(torch.int64)
    # at half the time: no product is written to memory; CUDA has none of integers
    return bits @ words if bits.is_cpu else (bits * words).sum(-1)


def keep_bits(part: Tensor, box: Box, *, rounded: bool = False) -> Kept:
    """Keep the digest of a part alone.

    Args:
        part: local elements, of any dtype and device; it is only read.
        box: where they lie in the whole.
        rounded: also keep the digest after rounding to bf16.
    """
    flat = part.detach().reshape(-1)
    digest = torch.zeros((), dtype=torch.int64, device=part.device)
    after = torch.zeros_like(digest)
    chunks = _chunks(flat.numel(), part.device)
    for start in chunks:
        values = flat[start : start + chunks.step]
        words = keys_of(box, start, part.device).words
        digest = digest + _digest(values, words)
        if rounded:
            after = after + _digest(values.to(torch.bfloat16), words)
    nothing = torch.zeros(3, dtype=torch.float64, device=part.device)
    return Kept(digest, after, None, nothing)


def keep_values(
    part: Tensor,
    box: Box,
    weight: Tensor | None = None,
    rows: Tensor | None = None,
) -> Kept:
    """Keep the sketch, norm, largest and non-finite elements of a part.

    Args:
        part: local elements, of any dtype and device; it is only read.
        box: where they lie in the whole.
        weight: each element is multiplied by the size of this one's, of the same shape.
        rows: (rows,) int64 digests that name the rows of the whole, in any order.

    Returns:
        Numbers that add up over parts, on the device of the part; with the digest,
        unless there is a ``weight``.
    """
    device = part.device
    flat = part.detach().reshape(-1)
    sizes = None if weight is None else weight.detach().reshape(-1)
    digest = torch.zeros((), dtype=torch.int64, device=device)
    slots = SLOTS if rows is not None else min(SLOTS, math.prod(box.shape))
    sketch = torch.zeros(slots, dtype=torch.float64, device=device)
    square, largest, bad = torch.zeros(3, dtype=torch.float64, device=device).unbind()
    chunks = _chunks(flat.numel(), device)
    for start in chunks:
        values = flat[start : start + chunks.step]
        if rows is None:
            keys = keys_of(box, start, device)
        else:
            keys = _keys_of_rows(box, start, start + len(values), rows)
        # in their own dtype, which changes no digit, as signs are 1 and -1
        doubles = (values * keys.signs).to(torch.float64)
        if sizes is not None:
            doubles *= sizes[start : start + chunks.step].abs()
        else:
            digest = digest + _digest(values, keys.words)
            square = square + doubles.dot(doubles)
            low, high = torch.aminmax(values)
            top = torch.maximum(-low, high).to(torch.float64)
            largest = torch.maximum(largest, top)
            # elsewhere a look at the largest would wait for the device
            if device.type != "cpu" or not math.isfinite(top):
                bad = bad + (~torch.isfinite(values)).sum()
        sketch.scatter_add_(0, keys.slots, doubles)
    numbers = torch.stack([square, largest, bad.double()])
    return Kept(digest, torch.zeros_like(digest), sketch, numbers)


class Batch(NamedTuple):
    """Numbers kept of many parts: row n of each tensor has those of part n."""

    digests: Tensor
    """(n, 2) int64: the digest, and the one after rounding."""
    numbers: Tensor
    """(n, 3) float64."""
    sketches: Tensor
    """(n, SLOTS) float64; of a tensor that is kept whole only the first are used."""


Key = TypeVar("Key")


class Sums(Generic[Key]):
    """Numbers kept of many parts, on their devices until they are read."""

    def __init__(self, parts: Mapping[Key, Wanted]) -> None:
        """Keep the numbers; nobody waits for a device.

        On a GPU with Triton all parts of one dtype are read at once, and so are single
        numbers on the host, such as an optimizer's counters of steps.
        """
        self.boxes = {key: each.box for key, each in parts.items()}
        self._alone: dict[Key, Kept] = {}
        self._together: list[tuple[Batch, list[tuple[Key, bool]]]] = []
        groups: dict[tuple[Any, ...], list[tuple[Key, Wanted]]] = {}
        for key, each in parts.items():
            part, weight = each.part, each.weight
            if part.is_cuda:
                dtypes = part.dtype, None if weight is None else weight.dtype
                alike: tuple[Any, ...] = (_read_by_kernel, part.device, dtypes)
            elif each.only_bits and part.numel() == 1 and part.device.type == "cpu":
                alike = _bits_of_equal, part.dtype, each.box, each.rounded
            else:
                self._alone[key] = _kept_alone(each)
                continue
            groups.setdefault(alike, []).append((key, each))
        for (read, *_), group in groups.items():
            places, batch = read([each for _, each in group])
            if batch is not None:
                keys = [
                    (key, each.only_bits)
                    for key, each in map(group.__getitem__, places)
                ]
                self._together.append((batch, keys))
            for place in {*range(len(group))}.difference(places):
                key, each = group[place]
                self._alone[key] = _kept_alone(each)

    def read(self) -> dict[Key, Kept]:
        """Read the numbers, in the order of the parts."""
        kept_by_key = {**self._alone}
        for batch, keys in self._together:
            digests, numbers, sketches = (each.cpu() for each in batch)
            for row, (key, only_bits) in enumerate(keys):
                size = min(SLOTS, math.prod(self.boxes[key].shape))
                sketch = None if only_bits else sketches[row, :size]
                digest, rounded = digests[row]
                kept_by_key[key] = Kept(digest, rounded, sketch, numbers[row])
        return {key: kept_by_key[key] for key in self.boxes}


def _kept_alone(each: Wanted) -> Kept:
    if each.only_bits:
        return keep_bits(each.part, each.box, rounded=each.rounded)
    return keep_values(each.part, each.box, weight=each.weight)


def _read_by_kernel(parts: Sequence[Wanted]) -> tuple[list[int], Batch | None]:
    """Return which parts the kernel reads, by their places in the list; their batch."""
    kernel, weight = kernel_on(parts[0].part.device), parts[0].weight
    dtypes = {parts[0].part.dtype, *(() if weight is None else (weight.dtype,))}
    if kernel is None or not dtypes <= kernel.DTYPES.keys():
        return [], None
    rows = {n: r for n, r in enumerate(map(kernel.rows_of, parts)) if r is not None}
    if not rows:
        return [], None
    return [*rows], kernel.batch_of([parts[n] for n in rows], [*rows.values()])


def _bits_of_equal(parts: Sequence[Wanted]) -> tuple[list[int], Batch]:
    """Keep the digests of small parts of one dtype that lie at the same place."""
    box, rounded = parts[0].box, parts[0].rounded
    values = torch.stack([each.part.detach().reshape(-1) for each in parts])
    words = keys_of(box, 0, values.device).words
    digests = torch.zeros(len(parts), 2, dtype=torch.int64)
    digests[:, 0] = _digest(values, words)
    if rounded:
        digests[:, 1] = _digest(values.to(torch.bfloat16), words)
    nothing = torch.zeros(len(parts), 3, dtype=torch.float64)
    return [*range(len(parts))], Batch(digests, nothing, nothing[:, :0])


@cache
def kernel_on(device: torch.device) -> Any:
    """The module of the kernel; None where there is no Triton, or none that runs."""
    if importlib.util.find_spec("triton") is None:
        return None
    kernel = importlib.import_module(".kernel", __package__)
    alone = Wanted(torch.zeros(1, device=device), Box((1,), (0,), (1,)))
    try:  # it needs a compiler for C, which a container may lack
        kernel.batch_of([alone], [kernel.rows_of(alone)])
    except Exception as error:
        text = f"Triton does not run here, so recorded steps take longer: {error}"
        print(f"gradparity: {text}"[:400], file=sys.stderr)
        return None
    return kernel
