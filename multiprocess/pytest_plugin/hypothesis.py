"""Hypothesis on a world: the parent draws, the ranks get the example.

So every rank sees the same values, and shrinking works as in one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import hypothesis


def adapt_settings(test: Any) -> None:
    """Adapt a test's settings to a world."""
    owner = getattr(test, "__func__", test)
    own = getattr(owner, "_hypothesis_internal_use_settings", None)
    settings = own or hypothesis.settings()
    fixtures = hypothesis.HealthCheck.function_scoped_fixture
    owner._hypothesis_internal_use_settings = hypothesis.settings(  # noqa: SLF001  # has no public name
        settings,
        # A world that is rebuilt after a failure would count as a slow example.
        deadline=None,
        # Fixtures that ask for `world` are evaluated for each example.
        suppress_health_check=[*settings.suppress_health_check, fixtures],
        # It would explain which lines of the harness ran.
        phases=[p for p in settings.phases if p is not hypothesis.Phase.explain],
    )


def draw_and_call(
    test: Any,
    arguments: Mapping[str, Any],
    call: Callable[[Callable[..., Any], Any, Mapping[str, Any]], None],
) -> None:
    """Run a test made by ``@given``; each example goes to the ranks by ``call``."""
    handle = test.hypothesis
    body = handle.inner_test

    @functools.wraps(body)
    def on_ranks(*args: Any, **kwargs: Any) -> None:
        call(body, args, kwargs)

    # Hypothesis's own hook for other test runners: it draws here, and calls this.
    handle.inner_test = on_ranks
    try:
        test(**arguments)
    finally:
        handle.inner_test = body


def reject() -> NoReturn:
    """Make hypothesis discard this example, which the ranks did not accept."""
    hypothesis.reject()
