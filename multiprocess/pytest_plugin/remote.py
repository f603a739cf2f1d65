"""A test's body on a rank: its fixtures, the call, and whether all ranks agree.

Runs in the ranks; the values here are also what the parent sends and gets back.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..rank.endings import conclude, refuse_unrun
from ..rank.world import World, current_world


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
    addfinalizer: Callable[[Callable[[], object]], object] | None = None
    """Of the rank that evaluates the fixture; the parent has none to send."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle asks for some
            raise AttributeError(name)
        raise AttributeError(
            f"on a rank, request has `param` and `addfinalizer` only, and no {name!r}"
        )


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
    """True if what the body returns is wanted."""


def run_body(body: Body) -> Any:
    """Run a test's body on this rank; return its value where that is compared."""
    teardown: list[tuple[str, Callable[[], object]]] = []
    raised: list[tuple[str, BaseException]] = []
    value = None
    with _filters(body.filters):
        try:
            resolver = _Resolver(current_world(), teardown)
            for fixture in body.autouse:
                resolver.value(fixture)
            arguments = {n: resolver.value(v) for n, v in body.arguments.items()}
            value = body.fn(*body.args, **arguments)
            refuse_unrun("the test", value)
        except BaseException as error:
            raised.append(("the test", error))
        # As in pytest, a fixture goes on after its yield whatever the test raised, and
        # each one is torn down whatever another's teardown raised.
        while teardown:
            name, tear_down = teardown.pop()
            try:
                tear_down()
            except BaseException as error:
                raised.append((f"the teardown of {name}", error))
    ended = conclude(raised)
    return ended or (value if body.compared else None)


class _Resolver:
    """Turns what the parent sent into what the body gets."""

    def __init__(
        self, world: World, teardown: list[tuple[str, Callable[[], object]]]
    ) -> None:
        self._world = world
        self._teardown = teardown
        self._made: dict[int, Any] = {}

    def value(self, sent: Any) -> Any:
        """Return the argument for one sent value."""
        if isinstance(sent, WorldArgument):
            return self._world
        if not isinstance(sent, RankFixture):
            return sent
        # By identity, which survives the pickling of one Body: a fixture may override,
        # and ask for, another one of its name.
        if id(sent) not in self._made:
            self._made[id(sent)] = self._evaluate(sent)
        return self._made[id(sent)]

    def _evaluate(self, fixture: RankFixture) -> Any:
        arguments = {n: self.value(v) for n, v in fixture.arguments.items()}
        if isinstance(asked := arguments.get("request"), RankRequest):

            def later(finalizer: Callable[[], object]) -> None:
                self._teardown.append((fixture.name, finalizer))

            arguments["request"] = replace(asked, addfinalizer=later)
        made = fixture.fn(**arguments)
        if not inspect.isgeneratorfunction(fixture.fn):
            if not isinstance(made, Iterator):  # as in pytest, it may be the value
                refuse_unrun(f"the fixture `{fixture.name}`", made)
            return made
        value = next(made)
        self._teardown.append((fixture.name, partial(_finish, fixture.name, made)))
        return value


def _finish(name: str, fixture: Iterator[object]) -> None:
    for _ in fixture:
        raise RuntimeError(f"the fixture `{name}` has more than one yield")


def _monkeypatch() -> Iterator[Any]:
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        yield patch


MONKEYPATCH = RankFixture("monkeypatch", _monkeypatch, {})
"""pytest's fixture: what it patches is the rank's."""


@contextlib.contextmanager
def _filters(filters: Sequence[Any]) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filters[:] = filters  # type: ignore[index]  # a list, whatever mypy says
        # The property is in the parent: `assume` cannot see it from here.
        warnings.filterwarnings("ignore", "Using `assume` outside")
        yield
