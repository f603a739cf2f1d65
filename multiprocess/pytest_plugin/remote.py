"""A test's body on a rank: its fixtures, the call, and whether all ranks agree.

Runs in the ranks; the values here are also what the parent sends and gets back.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..rank.world import World, current_world

_AGREE_S = 0.7
"""How long a rank that skips waits for the others to do so too."""


@dataclass(frozen=True)
class WorldArgument:
    """Stands in the parent for the ``world`` that exists on the ranks only."""

    size: int


@dataclass(frozen=True, eq=False)
class RankFixture:
    """A fixture that asks for ``world``, and so is evaluated on each rank."""

    name: str
    fn: Callable[..., Any]
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class RankRequest:
    """What a fixture on a rank can know of pytest's ``request``."""

    param: Any = None


@dataclass(frozen=True)
class PerRankFixture:
    """A fixture of pytest's that every rank gets one of its own of."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Body:
    """A test's body with all that a rank needs to call it."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    arguments: Mapping[str, Any]
    autouse: Sequence[RankFixture]
    filters: Sequence[Any]
    """The parent's warning filters."""

    compared: bool = False
    """Whether what the body returns is wanted."""


@dataclass(frozen=True)
class AgreedOutcome:
    """All ranks left the test in the same special way: skip, xfail, unsatisfied."""

    kind: str
    """Name of the exception's type."""

    reason: str
    """Its text."""


def run_body(body: Body) -> Any:
    """Run a test's body on this rank; return its value where that is compared."""
    world = current_world()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_filters(body.filters))
        try:
            resolver = _Resolver(world, stack)
            for fixture in body.autouse:
                resolver.value(fixture)
            arguments = {n: resolver.value(v) for n, v in body.arguments.items()}
            value = body.fn(*body.args, **arguments)
            return value if body.compared else None
        except _outcome_exceptions() as special:
            # Parts of one tensor run the body once, so for all.
            if world.backend != "local" and not _all_agree(world, special):
                raise
            return AgreedOutcome(type(special).__name__, str(special))


def is_outcome_exception(error_type: str | None) -> bool:
    """Whether an exception, named by its type, is no failure by itself."""
    return (error_type or "").rpartition(".")[2] in (
        "Skipped",
        "XFailed",
        "UnsatisfiedAssumption",
    )


class _Resolver:
    """Turns what the parent sent into what the body gets."""

    def __init__(self, world: World, stack: contextlib.ExitStack) -> None:
        self._world = world
        self._stack = stack
        self._made: dict[int, Any] = {}

    def value(self, sent: Any) -> Any:
        """Return the argument for one sent value."""
        if isinstance(sent, WorldArgument):
            return self._world
        if isinstance(sent, PerRankFixture):
            return self._once(sent, lambda: _PER_RANK_FIXTURES[sent.name](self._stack))
        if isinstance(sent, RankFixture):
            return self._once(sent, lambda: self._evaluate(sent))
        return sent

    def _once(self, sent: Any, make: Callable[[], Any]) -> Any:
        key: Any = sent.name if isinstance(sent, PerRankFixture) else id(sent)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _evaluate(self, fixture: RankFixture) -> Any:
        arguments = {n: self.value(v) for n, v in fixture.arguments.items()}
        if not inspect.isgeneratorfunction(fixture.fn):
            return fixture.fn(**arguments)
        made = contextlib.contextmanager(fixture.fn)(**arguments)
        return self._stack.enter_context(made)


class RankCapture:
    """What ``capsys`` is on a rank: this rank's own stdout and stderr."""

    def __init__(self) -> None:
        self._real = sys.stdout, sys.stderr
        self._fresh()

    def readouterr(self) -> tuple[str, str]:
        """Return what was written since the last call."""
        written = self._out.getvalue(), self._err.getvalue()
        self._fresh()
        return _Captured(*written)

    def close(self) -> None:
        """Give the streams back; what nobody read goes to the rank's output."""
        out, err = self._out.getvalue(), self._err.getvalue()
        sys.stdout, sys.stderr = self._real
        sys.stdout.write(out)
        sys.stderr.write(err)

    def _fresh(self) -> None:
        self._out, self._err = io.StringIO(), io.StringIO()
        sys.stdout, sys.stderr = self._out, self._err


class _Captured(tuple[str, str]):
    """``(out, err)``, also by name."""

    def __new__(cls, out: str, err: str) -> _Captured:
        return super().__new__(cls, (out, err))

    @property
    def out(self) -> str:
        """What went to stdout."""
        return self[0]

    @property
    def err(self) -> str:
        """What went to stderr."""
        return self[1]


def _capture(stack: contextlib.ExitStack) -> RankCapture:
    return stack.enter_context(contextlib.closing(RankCapture()))


def _monkeypatch(stack: contextlib.ExitStack) -> Any:
    import pytest

    return stack.enter_context(pytest.MonkeyPatch.context())


_PER_RANK_FIXTURES: dict[str, Callable[[contextlib.ExitStack], Any]] = {
    "capsys": _capture,
    "monkeypatch": _monkeypatch,
}

PER_RANK_FIXTURES = frozenset(_PER_RANK_FIXTURES)


@contextlib.contextmanager
def _filters(filters: Sequence[Any]) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filters[:] = filters  # type: ignore[index]  # a list, whatever mypy says
        # The property is in the parent: `assume` cannot see it from here.
        warnings.filterwarnings("ignore", "Using `assume` outside")
        yield


def _outcome_exceptions() -> tuple[type[BaseException], ...]:
    pytest = sys.modules.get("pytest")
    found: list[type[BaseException]] = []
    if pytest is not None:
        found += [pytest.skip.Exception, pytest.xfail.Exception]
    hypothesis = sys.modules.get("hypothesis.errors")
    if hypothesis is not None:
        found.append(hypothesis.UnsatisfiedAssumption)
    return tuple(found)


def _all_agree(world: World, special: BaseException) -> bool:
    """Whether every rank leaves in this way; waits a little for them to say so."""
    import datetime

    kind = type(special).__name__
    # Over the store: a collective would hang where another rank has passed.
    world.store.set(f"special/{world.rank}", kind)
    deadline = time.monotonic() + _AGREE_S
    for rank in range(world.size):
        left_s = max(0.01, deadline - time.monotonic())
        try:
            world.store.wait([f"special/{rank}"], datetime.timedelta(seconds=left_s))
        except RuntimeError:  # it passed, or it waits for this rank
            return False
        if world.store.get(f"special/{rank}").decode() != kind:
            return False
    return True
