"""What one rank brings to a sync, how it travels, and what all ranks read from it.

[Note: Two formats]
A message has the same length and dtype on every rank, whatever this rank has and
whichever method it called. All ranks take the maximum of each number.

The *full* message has a number for each field. Flags go in as they are: their maximum
is "any rank". What all ranks must share goes in twice, as ``x`` and ``-x``: the maxima
are then the highest and minus the lowest, and a difference shows on every rank at once.
What this rank does not compare is minus infinity in both.

On a CPU the first message is *packed* into two integers of 63 bits, because gloo cuts a
vector into pieces that each travel around the ring: with 4 ranks 2 integers take 1.1
ms, 8 numbers 6.5 ms and an all-gather 3.4 ms (2 cores, torch 2.13.0; 32 ranks: 16, 27,
77 ms). From the highest bit down:

    first:   31 bits of a hash      32 bits of the finding
    second:  2**31 - 1 - the hash   0

The maximum of an integer is that of its highest bits first. If all hashes are equal,
the maximum of the findings is that of all ranks. A rank that raises, that has not
scaled yet, or whose scaler or optimizer is new, writes all ones. Every rank sees the
same two maxima, so all of them know at once whether they suffice, and only else
exchange full messages. The hash is of all fields that must be equal. A rank without an
optimizer writes the optimizer, call and clip that followed the last sync before: if it
expects the wrong ones, full messages follow, in which it compares none of them. Two
states that differ collide once in 2**31 syncs, and the position in the iteration gives
the next sync another hash.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .grads import Number, tensor_of

CHECK, CLIP, UPDATE, LOAD = range(4)
CALLS = (
    "unscale_() or step()",
    "clip_grad_norm_() or clip_and_step()",
    "update()",
    "load_state_dict()",
)
"""What a sync is made for, and the methods that make it."""

_HASH_BITS, _FINDING_BITS = 31, 32
_HASHES = 2**_HASH_BITS
_ALL_ONES = 2**63 - 1


class Shared(NamedTuple):
    """What all ranks must share; None is not compared.

    Attributes:
        call: CHECK, CLIP, UPDATE or LOAD; None takes part in either of the first two.
        scaler: the number that the ranks know it by; None if it is new.
        made_after: how many numbered ones were made before one that is new.
        iteration: of this scaler, counted by `update`.
        position: of the sync in the iteration, from 1.
        scale: like the next ones, of this rank.
        growth_tracker: likewise.
        growth_factor: likewise.
        backoff_factor: likewise.
        growth_interval: likewise.
        policy: a number that stands for the policy.
        hysteresis_left: 0 without hysteresis.
        failures: calls of this rank that raised after their sync.
        max_norm: that this rank clips to, if it does.
        norm_type: likewise.
        optimizer: the number that the ranks know it by; None if there is none.
    """

    call: int | None
    scaler: int | None
    made_after: int | None
    iteration: int
    position: int
    scale: Number
    growth_tracker: Number
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    policy: int
    hysteresis_left: Number = 0.0
    failures: int = 0
    max_norm: float | None = None
    norm_type: float | None = None
    optimizer: int | None = None


class Local(NamedTuple):
    """What this rank found. A `Number` is a float where the host knows it.

    Attributes:
        found_inf: 1 if a gradient of this rank is not finite; None without gradients.
        failed: this rank is about to raise.
        was_scaled: the scale came from `scale()` or a checkpoint on this rank.
        needs_rows: the norm needs the parts of every rank, not only their sum.
        first_nonfinite: 31 bits that stand for the first bad gradient; 0 for none.
        is_new: this scaler or this optimizer has no number yet.
    """

    found_inf: Number | None = None
    failed: bool = False
    was_scaled: bool = True
    needs_rows: bool = False
    first_nonfinite: int = 0
    is_new: bool = False


class Summary(NamedTuple):
    """What a sync came to, on the host.

    Attributes:
        has_gradients: any rank has; the other flags likewise.
        scaler: the number that any rank knows its scaler by; 0: none does.
        optimizer: likewise.
        call: what all ranks called.
        max_norm: of all ranks that clip.
        norm_type: likewise.
        is_full: it was read from a full message.
    """

    found_inf: bool
    failed: bool
    has_gradients: bool
    was_scaled: bool
    needs_rows: bool
    first_nonfinite: int
    scaler: int
    optimizer: int
    call: int
    max_norm: float | None
    norm_type: float | None
    is_full: bool


# - The full message


def full_message(
    shared: Shared, local: Local, device: torch.device, row: Sequence[Number] = ()
) -> torch.Tensor:
    """Return the full message, and the row behind it, as `tensor_of` does."""
    # A rank that raises skips for all of them, also where no host reads the rest.
    found_inf = 1.0 if local.failed else local.found_inf
    numbers: list[Number] = [
        0.0 if found_inf is None else found_inf,
        local.failed,
        local.found_inf is not None,
        local.was_scaled,
        local.needs_rows,
        local.first_nonfinite,
    ]
    for value in shared:
        numbers += [-math.inf] * 2 if value is None else [value, -value]
    if shared.call is None:
        numbers[_FLAGS + 1] = -CLIP  # the lowest is at most CLIP
    return tensor_of([*numbers, *row], device)


_FLAGS = 6
FULL_LENGTH = _FLAGS + 2 * len(Shared._fields)


def decode_full(numbers: Sequence[float]) -> Summary:
    """Return what a reduced full message says, if nothing differs."""
    highest = dict(zip(Shared._fields, numbers[_FLAGS::2], strict=True))
    call, max_norm, norm_type, scaler, optimizer = (
        None if highest[name] == -math.inf else highest[name]
        for name in ("call", "max_norm", "norm_type", "scaler", "optimizer")
    )
    found_inf, failed, has_gradients, was_scaled, needs_rows = map(bool, numbers[:5])
    return Summary(
        found_inf=found_inf,
        failed=failed,
        has_gradients=has_gradients,
        was_scaled=was_scaled,
        needs_rows=needs_rows,
        first_nonfinite=int(numbers[_FLAGS - 1]),
        scaler=int(scaler or 0),
        optimizer=int(optimizer or 0),
        call=int(call or CHECK),
        max_norm=max_norm,
        norm_type=norm_type,
        is_full=True,
    )


def differences(numbers: Sequence[float]) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest of what differs in a reduced full message."""
    pairs = numbers[_FLAGS:]
    # Minus infinity is what ranks write that compare nothing; all of them did here.
    return {
        name: (-minus_lowest, highest)
        for name, highest, minus_lowest in zip(
            Shared._fields, pairs[0::2], pairs[1::2], strict=True
        )
        if highest != -minus_lowest and highest != -math.inf
    }


# - The packed message


def packed_message(shared: Shared, local: Local) -> torch.Tensor:
    """Return the packed message: (2,), int64, on the CPU. See [Note: Two formats].

    What is on an accelerator is read, which synchronises.
    """
    if local.failed or local.is_new or not local.was_scaled:
        return torch.tensor([_ALL_ONES, _ALL_ONES], device="cpu")
    numbers = [-1.0 if value is None else float(value) for value in shared]
    # No linear hash (crc32): two states that differ would collide in every sync.
    digest = hashlib.blake2b(_PACKED.pack(*numbers), digest_size=4).digest()
    hashed = int.from_bytes(digest, "big") >> 32 - _HASH_BITS
    finding = 0
    if local.found_inf is not None:
        finding = 3 + local.first_nonfinite if float(local.found_inf) else 1
        finding = max(finding, 1 + local.needs_rows)
    first = hashed << _FINDING_BITS | finding
    second = (_HASHES - 1 - hashed) << _FINDING_BITS
    return torch.tensor([first, second], device="cpu")


_PACKED = struct.Struct(f"<{len(Shared._fields)}d")


def decode_packed(numbers: Sequence[int], shared: Shared) -> Summary | None:
    """Return what a reduced packed message says; None if it takes a full one.

    ``shared`` is what this rank's own message was made of.
    """
    first, second = numbers
    finding = first & (1 << _FINDING_BITS) - 1
    if (first >> _FINDING_BITS) + (second >> _FINDING_BITS) != _HASHES - 1:
        return None
    return Summary(
        found_inf=finding >= 3,
        failed=False,
        has_gradients=finding >= 1,
        was_scaled=True,
        needs_rows=finding == 2,
        first_nonfinite=max(finding - 3, 0),
        scaler=shared.scaler or 0,
        optimizer=shared.optimizer or 0,
        call=shared.call or CHECK,
        max_norm=shared.max_norm,
        norm_type=shared.norm_type,
        is_full=False,
    )
