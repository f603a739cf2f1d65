"""The probe: calls in a wrong order, made after the last step of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

from .trace import Misuse

__all__ = ["probe"]

ReadState = Callable[[], Mapping[str, str]]
Watch = Callable[[str], AbstractContextManager[None]]


def probe(
    scaler: Any, optimizers: Sequence[Optimizer], read_state: ReadState, watch: Watch
) -> list[Misuse]:
    """Make legal and illegal calls in turn and note what the illegal ones did.

    Args:
        scaler: the judged scaler, after an ``update``.
        optimizers: its optimizers; their gradients are those of a backward after it.
        read_state: what a refused call must leave as it is, part -> digest.
        watch: wraps a legal call; what that raises is the scaler's fault.
    """
    seen: list[Misuse] = []
    for misuse in _calls(scaler, optimizers, read_state, watch):
        seen.append(misuse)
        if misuse.changed or not misuse.error:
            break  # from here on it is not known what is legal
    return seen


def _calls(
    scaler: Any, optimizers: Sequence[Optimizer], read_state: ReadState, watch: Watch
) -> Iterator[Misuse]:
    first = optimizers[0]
    yield _refused("update() before any step()", scaler.update, read_state)
    for optimizer in optimizers:
        with watch("unscale_"):
            scaler.unscale_(optimizer)
    again = "a second unscale_() before update()"
    yield _refused(again, lambda: scaler.unscale_(first), read_state)
    yield _refused(
        "step() with a closure",
        lambda: scaler.step(first, closure=lambda: 0.0),
        read_state,
    )
    for optimizer in optimizers:
        with watch("step"):
            scaler.step(optimizer)
    yield _refused(
        "a second step() before update()", lambda: scaler.step(first), read_state
    )
    yield _refused(
        "unscale_() after step()", lambda: scaler.unscale_(first), read_state
    )
    with watch("update"):
        scaler.update()


def _refused(name: str, call: Callable[[], object], read_state: ReadState) -> Misuse:
    before = read_state()
    try:
        call()
        error = ""
    except Exception as raised:  # any kind: which one is for the scaler's own tests
        error = type(raised).__name__
    after = read_state()
    changed = tuple(part for part in before if before[part] != after[part])
    return Misuse(call=name, error=error, changed=changed)
