"""Endings of a test on a rank: passed, failed, skipped, or never run.

For pytest and unittest some exceptions are not failures. Such an exception must not
hide a failure of the same test, in its teardown or on another rank.
"""

from __future__ import annotations

import functools
import inspect
import sys
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import CoroutineType
from typing import Any

from ..outcomes import Left

SKIP, XFAIL = "skip", "xfail"
"""Values of ``Left.kind``."""

ALTERNATIVE = "make it a plain function, which may call asyncio.run(...)"
"""Advice for a test that never runs."""


def name_of(kind: type[BaseException]) -> str:
    """Return the name of an exception's type for reports."""
    plain = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if plain else f"{kind.__module__}.{kind.__qualname__}"


def early_end(error: BaseException) -> Left | None:
    """Return how ``error`` ends a test without a failure; None if it is a failure."""
    kind = next((kind for kind, types in _early() if isinstance(error, types)), None)
    return None if kind is None else Left(kind, name_of(type(error)), str(error))


def early_error(left: Left) -> BaseException:
    """Return an exception that ends a test as ``left`` says."""
    kind = next(types for kind, types in reversed([*_early()]) if kind == left.kind)
    return kind(left.reason)


def _early() -> Iterator[tuple[str, type[BaseException]]]:
    yield SKIP, unittest.SkipTest
    if (pytest := sys.modules.get("pytest")) is not None:
        yield SKIP, pytest.skip.Exception
        yield XFAIL, pytest.xfail.Exception


def torch_skip(error: SystemExit) -> str | None:
    """Return the reason if torch's decorators skip by this exit code, or None."""
    common = sys.modules.get("torch.testing._internal.common_distributed")
    for skip in common.TEST_SKIPS.values() if common is not None else ():
        if error.code == skip.exit_code:
            return str(skip.message)
    return None


def conclude(
    raised: Sequence[tuple[str, BaseException]],
    early: Callable[[BaseException], Left | None] = early_end,
) -> Left | None:
    """Combine all exceptions of one test on this rank, including its teardown.

    Args:
        raised: pairs in order: name of a part of the test, exception that it raised.
        early: returns how an exception ends the test early; None for a failure.

    Returns:
        The first early end, such as a skip; None if the test passed.

    Raises:
        BaseException: the first failure; the other exceptions become its notes.
    """
    failures = [(name, error) for name, error in raised if early(error) is None]
    if not failures:
        return next((early(error) for _, error in raised), None)
    name, first = failures[0]
    if len(raised) > 1 and hasattr(first, "add_note"):
        first.add_note(f"in {name}")
        for other, error in raised:
            if error is not first:
                first.add_note(f"also {other}: {type(error).__name__}: {error}")
    raise first


def never_runs(fn: Any) -> str:
    """Return "a coroutine", "a generator", ... if calling ``fn`` only creates one.

    Returns "" if the call runs the code of ``fn``. Only ``fn`` itself is checked: a
    decorator around a coroutine function may run it.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    if inspect.iscoroutinefunction(fn):
        return "a coroutine"
    if inspect.isasyncgenfunction(fn):
        return "an async generator"
    return "a generator" if inspect.isgeneratorfunction(fn) else ""


def unrunnable(name: str, test: object) -> str:
    """Return why calling a marked test would not run it; empty if it would."""
    what = never_runs(test)
    return what and (
        f"@pytest.mark.world is for plain functions, and {name} is {what}: "
        f"{ALTERNATIVE}"
    )


def refuse_unrun(name: str, value: object) -> None:
    """Raise if a test returned an object whose code has not run.

    Raises:
        TypeError: Names the object and the alternative.
    """
    __tracebackhide__ = True
    if isinstance(value, Awaitable | AsyncIterator):
        if isinstance(value, CoroutineType):
            value.close()  # avoids the warning that it was never awaited
        what = f"{_kind(value)}, which nothing awaits"
    elif isinstance(value, Iterator):
        what = f"{_kind(value)}, over which nothing iterates"
    else:
        return
    raise TypeError(f"{name} returned {what}, so its code has not run: {ALTERNATIVE}")


def _kind(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind.replace('_', ' ')}"
