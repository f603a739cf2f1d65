"""Numbers kept of a tensor: digest, sketch, squares, largest element, non-finite.

[Note: Sums over parts]
All numbers depend on the position of an element in the whole tensor. Numbers of parts
are combined by a sum or a maximum. So each rank keeps numbers of its own elements,
nothing is sent, and every layout of a tensor gives the same result. The digest is a
sum over elements of their bits times a random odd word of the position, modulo 2^64:
exact in any order. The sketch has 4 x 4 tiles of 32 buckets: each element is added to
a bucket of its tile with a random sign. The norm of the difference of two sketches
estimates the norm of the difference of two tensors. Its error is about 5 %, or 15 % for
one row or one tile. A tensor of at most 512 elements is kept whole.
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
    "BUFFER",
    "GRID",
    "IDLE",
    "ORIGINAL",
    "RESULT",
    "SLOTS",
    "Batch",
    "Box",
    "Kept",
    "Sums",
    "Wanted",
    "digest_of",
    "keep_bits",
    "keep_values",
    "keys_of",
    "mix",
    "places_of",
]

GRID = 4
"""Number of tiles along dim 0, and along all other dims flattened into one."""
BUCKETS = 32
"""Buckets of a tile. One row crosses four tiles, so it has 128 buckets. The estimate of
its error is then off by 25 % once in 13,000 times; with 96 buckets, once in 2,000."""
SLOTS = GRID * GRID * BUCKETS
CHUNKS = {"cpu": 1 << 17}
"""Device type -> number of elements processed at once. Temporaries then fit into the
cache of a core; with chunks 32 times as large the work takes 5 to 9 times as long."""
CHUNK = 1 << 22
"""Number of elements processed at once on other devices: temporaries below 200 MB."""
SHARE = 1e-5
"""Largest relative rounding error of a division, measured on sketches."""
KEYS_BYTES = 1 << 29
"""Size of the cache of keys, in bytes; one step uses the same keys five times."""
_32 = 0xFFFFFFFF
ORIGINAL = "original"
"""Kind of the parameters of the model whose copies an optimizer steps."""
BUFFER = "buffer"
"""Kind of the buffers of a model; they have no optimizer."""
IDLE = "idle update"
"""Kind of an update of those elements whose gradient is zero."""
RESULT = "weight after the step"
"""Kind of a weight as the optimizer leaves it. The job may change it before the next
step begins."""


@dataclass(frozen=True)
class Box:
    """Position of a part in the whole tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Position of the part's first element in each dim; or one position in the
    flattened tensor, if the part is a range of that."""
    local: tuple[int, ...]
    """Shape of the part."""
    summand: tuple[int, ...] = ()
    """Coordinates of this rank on the mesh axes over which the tensor is still to be
    summed. Parts with different coordinates add up to the values."""

    @property
    def is_flat(self) -> bool:
        """True if ``offsets`` is one position, in the flattened tensor."""
        return len(self.offsets) != len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the part."""
        return math.prod(self.local)


@dataclass(frozen=True)
class Keys:
    """Random word, sign and slot of each element of a part."""

    words: Tensor
    """(n,) int64: odd random words."""
    signs: Tensor
    """(n,) float32: 1 or -1."""
    slots: Tensor
    """(n,) int64: index of the bucket in the sketch."""


@dataclass(frozen=True)
class Kept:
    """Digests and sums of a rank's part of a tensor, on its device until read."""

    digest: Tensor
    """int64: sum of bits times words, modulo 2^64; 0 if not requested."""
    rounded: Tensor
    """Digest after rounding to bf16; 0 if not requested."""
    sketch: Tensor | None
    """float64 of shape (SLOTS,); all elements if the tensor has fewer than SLOTS. None
    if only the digest was requested."""
    numbers: Tensor
    """(3,) float64: sum of squares, largest absolute value, number of non-finite
    elements; zeros without a sketch."""

    def plus(self, other: Kept) -> Kept:
        """Return the sum with the numbers of another part."""
        assert self.sketch is not None and other.sketch is not None
        (a, b, c), (x, y, z) = self.numbers, other.numbers
        return Kept(
            self.digest + other.digest,
            self.rounded + other.rounded,
            self.sketch + other.sketch,
            torch.stack([a + x, torch.maximum(b, y), c + z]),
        )

    def is_share_of(self, whole: Kept, by: float) -> bool:
        """Return True if ``self`` has the numbers of ``whole`` divided by ``by``.

        Returns False without sketches, or if ``by`` is 0.
        """
        if self.sketch is None or whole.sketch is None or not by:
            return False
        least = SHARE * float(whole.sketch.abs().max())
        return torch.allclose(self.sketch * by, whole.sketch, SHARE, least)

    def divided(self, by: float) -> Kept:
        """Return these numbers with the sketch divided by ``by``."""
        assert self.sketch is not None
        return self if by == 1.0 else replace(self, sketch=self.sketch / by)

    def update(self, before: Kept, unit: float) -> Kept:
        """Return the numbers of an update: the difference of the two sketches.

        The factor of an element is the absolute value of its gradient. For idle
        elements, the factor is 1 where the gradient is zero, and 0 elsewhere.

        The sum of squares is not that of the update. It is that of one unit in the last
        place of each weight, with the same factors: a correct step may round each
        weight to either side.

        Args:
            before: numbers of the weights before the step, with the same factors.
            unit: distance from 1 to the next number in the weights' dtype.
        """
        assert self.sketch is not None and before.sketch is not None
        units = (unit * before.sketch).square().sum().reshape(1)
        numbers = torch.cat([units, self.numbers[1:]])
        return replace(self, sketch=self.sketch - before.sketch, numbers=numbers)


class Wanted(NamedTuple):
    """Request to keep numbers of one part."""

    part: Tensor
    """Local elements; they are only read."""
    box: Box
    """Position of the part in the whole tensor."""
    weight: Tensor | None = None
    """Factor of each element; see `keep_values`."""
    idle: bool = False
    """True to keep only elements whose factor is zero; see `keep_values`."""
    only_bits: bool = False
    """True for the digest alone; see `keep_bits`."""
    rounded: bool = False
    """True to keep the digest after rounding to bf16 as well."""


def mix(x: Tensor) -> Tensor:
    """Mix 32 bits, held in int64 (the finaliser of MurmurHash3, public domain)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _32
    return x ^ (x >> 16)


def places_of(box: Box, start: int, stop: int, device: torch.device) -> Tensor:
    """Return the positions of a part's elements start..stop in the flattened whole."""
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
    """Return keys made of each row's digest and the column.

    The position of a row is not in its keys, so rows may be in any order.
    """
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
"""Number of bytes that are left in the cache of keys."""


def _chunks(size: int, device: torch.device) -> range:
    """Return the start of each chunk of elements that is processed at once."""
    return range(0, size, CHUNKS.get(device.type, CHUNK))


def keys_of(box: Box, start: int, device: torch.device) -> Keys:
    """Return the keys of one chunk of a part, from a cache of recent ones."""
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
"""Bytes of an element -> integer dtype of the same size."""


def _digest(values: Tensor, words: Tensor) -> Tensor:
    bits = values.view(BITS[values.element_size()]).to(torch.int64)
    # a dot product takes half the time; CUDA has none for integers
    return bits @ words if bits.is_cpu else (bits * words).sum(-1)


def digest_of(part: Tensor) -> Tensor:
    """Return the sum of each element's bits times an odd word of its position.

    The sum is taken modulo 2^64.
    """
    flat = part.detach().reshape(-1)
    # complex128 has no integer of its size
    words = flat.view(BITS.get(flat.element_size(), torch.int64))
    digest = torch.zeros((), dtype=torch.int64, device=flat.device)
    chunks = _chunks(words.numel(), flat.device)
    for start in chunks:
        bits = words[start : start + chunks.step].to(torch.int64)
        places = torch.arange(start, start + len(bits), device=flat.device)
        digest = digest + (bits * (places * 2 * 0x9E3779B1 + 1)).sum()
    return digest


def keep_bits(part: Tensor, box: Box, *, rounded: bool = False) -> Kept:
    """Return only the digest of a part.

    Args:
        part: local elements, of any dtype and device; it is only read.
        box: position of the part in the whole tensor.
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
    *,
    idle: bool = False,
) -> Kept:
    """Return digest, sketch and the other numbers of a part; see `Kept`.

    Args:
        part: local elements, of any dtype and device; it is only read.
        box: position of the part in the whole tensor.
        weight: tensor of the same shape, by whose absolute values the elements are
            multiplied.
        rows: (rows,) int64 digests that name the rows of the whole, in any order.
        idle: true to take elements whose ``weight`` is zero as they are, and no others.

    Returns:
        Numbers on the device of the part; `Kept.plus` merges numbers of two parts.
        With a ``weight`` there is only a sketch; all other numbers are 0. With ``idle``
        the digest is that of the elements' positions.
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
        by = None if sizes is None else sizes[start : start + chunks.step]
        # most gradients have no zero; other devices would wait to find out
        if idle and by is not None and by.is_cpu and by.abs().amin() > 0:
            continue
        if rows is None:
            keys = keys_of(box, start, device)
        else:
            keys = _keys_of_rows(box, start, start + len(values), rows)
        # in the values' own dtype: a sign of 1 or -1 changes no digit
        doubles = (values * keys.signs).to(torch.float64)
        if idle and by is not None:
            is_idle = by == 0
            doubles = torch.where(is_idle, doubles, 0.0)
            digest = digest + (keys.words * is_idle).sum()
        elif by is not None:
            doubles *= by.abs()
        else:
            digest = digest + _digest(values, keys.words)
            square = square + doubles.dot(doubles)
            low, high = torch.aminmax(values)
            top = torch.maximum(-low, high).to(torch.float64)
            largest = torch.maximum(largest, top)
            # on other devices, reading the largest value would wait for the device
            if device.type != "cpu" or not math.isfinite(top):
                bad = bad + (~torch.isfinite(values)).sum()
        sketch.scatter_add_(0, keys.slots, doubles)
    numbers = torch.stack([square, largest, bad.double()])
    return Kept(digest, torch.zeros_like(digest), sketch, numbers)


class Batch(NamedTuple):
    """Numbers kept of many parts: row n of each tensor belongs to part n."""

    digests: Tensor
    """(n, 2) int64: digest, and digest after rounding to bf16."""
    numbers: Tensor
    """(n, 3) float64: see `Kept.numbers`."""
    sketches: Tensor
    """(n, SLOTS) float64, or (n, 0) if only digests were requested. A tensor that is
    kept whole uses only the first slots."""


Key = TypeVar("Key")


class Sums(Generic[Key]):
    """Numbers kept of many parts, on their devices until they are read."""

    def __init__(self, parts: Mapping[Key, Wanted]) -> None:
        """Start to compute the numbers, without waiting for a device.

        On a GPU with Triton all parts of one dtype are read by one kernel. Scalars on
        the host, such as an optimizer's step counters, are read together as well.
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
        """Return the numbers of each part, in the order of the parts.

        Numbers of parts that were read together are on the host, others are on the
        device of their part.
        """
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
    return keep_values(each.part, each.box, weight=each.weight, idle=each.idle)


def _read_by_kernel(parts: Sequence[Wanted]) -> tuple[list[int], Batch | None]:
    """Read parts with the Triton kernel; return their indices and their numbers.

    Returns no index and None if the kernel can read none of the parts.
    """
    kernel, weight = kernel_on(parts[0].part.device), parts[0].weight
    dtypes = {parts[0].part.dtype, *(() if weight is None else (weight.dtype,))}
    if kernel is None or not dtypes <= kernel.DTYPES.keys():
        return [], None
    rows = {n: r for n, r in enumerate(map(kernel.rows_of, parts)) if r is not None}
    if not rows:
        return [], None
    return [*rows], kernel.batch_of([parts[n] for n in rows], [*rows.values()])


def _bits_of_equal(parts: Sequence[Wanted]) -> tuple[list[int], Batch]:
    """Return the indices of all these parts, and their digests.

    The parts are small, and all have the same dtype and box.
    """
    box, rounded = parts[0].box, parts[0].rounded
    values = torch.stack([each.part.detach().reshape(-1) for each in parts])
    words = keys_of(box, 0, values.device).words
    digests = torch.zeros(len(parts), 2, dtype=torch.int64, device="cpu")
    digests[:, 0] = _digest(values, words)
    if rounded:
        digests[:, 1] = _digest(values.to(torch.bfloat16), words)
    nothing = torch.zeros(len(parts), 3, dtype=torch.float64, device="cpu")
    return [*range(len(parts))], Batch(digests, nothing, nothing[:, :0])


@cache
def kernel_on(device: torch.device) -> Any:
    """Return the module of the kernel; None if Triton is missing or does not run."""
    if importlib.util.find_spec("triton") is None:
        return None
    kernel = importlib.import_module(".kernel", __package__)
    alone = Wanted(torch.zeros(1, device=device), Box((1,), (0,), (1,)))
    try:  # Triton needs a compiler for C, which a container may lack
        kernel.batch_of([alone], [kernel.rows_of(alone)])
    except Exception as error:
        text = f"Triton does not run here, so recorded steps take longer: {error}"
        print(f"gradparity: {text}"[:400], file=sys.stderr)
        return None
    return kernel
