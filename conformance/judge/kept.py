"""Results that are used again are kept, up to a number of bytes.

References of a small model are kept by the dozen, those of a large one by the few: a
number of them says nothing about memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple

from numpy.typing import NDArray

__all__ = ["LIMIT", "Kept", "bytes_of"]


def bytes_of(steps: Iterable[Mapping[str, NDArray[Any]]]) -> int:
    """Bytes of the arrays of all steps, by name in each."""
    return sum(values.nbytes for step in steps for values in step.values())


class Sized(Protocol):
    """A value that can be kept."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""


Args = TypeVarTuple("Args")
Result = TypeVar("Result", bound=Sized)
LIMIT = 2**28
"""Bytes that are kept. The topologies of the parity preset share 76 references of 4 MB
or less; with a third of them kept it trains 275. Four times as many would save the
default preset 5 % of its trainings."""


class Kept(Generic[*Args, Result]):
    """A function of hashable arguments with its last results.

    Args:
        function: is called where there is no result with the same arguments.
        least: how many results are kept however large they are.
    """

    def __init__(self, function: Callable[[*Args], Result], least: int) -> None:
        self._function = function
        self._least = least
        self._found: OrderedDict[tuple[*Args], Result] = OrderedDict()
        self._bytes = 0

    def __call__(self, *args: *Args) -> Result:
        """Return the kept result, or compute it; the result used longest ago goes."""
        result = self._found.get(args)
        if result is None:
            result = self._found[args] = self._function(*args)
            self._bytes += result.nbytes
        self._found.move_to_end(args)
        while len(self._found) > self._least and self._bytes > LIMIT:
            self._bytes -= self._found.popitem(last=False)[1].nbytes
        return result

    def cache_clear(self) -> None:
        """Keep nothing."""
        self._found.clear()
        self._bytes = 0
