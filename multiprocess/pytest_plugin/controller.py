"""One marked test: the call on the ranks, and their outcomes as pytest's result."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntryNative,
    ReprFileLocation,
    ReprTraceback,
)
from _pytest.fixtures import resolve_fixture_function

from ..environment import unsupported
from ..errors import NotSimulatedError, WorldError
from ..messages import pickled
from ..outcomes import Left, RankOutcome
from ..rank.endings import ALTERNATIVE, SKIP, XFAIL, early_end, never_runs
from ..report import render_output
from ..spec import CallOptions, WorldSpec
from .remote import (
    MONKEYPATCH,
    Body,
    RankFixture,
    RankRequest,
    WorldArgument,
    run_body,
)
from .runner import Runner, UnsuitableWorld

_FAILURE = pytest.StashKey[WorldError]()
_RANK_FIXTURES: pytest.StashKey[list[RankFixture]] = pytest.StashKey()

_PARENT_ONLY = frozenset(
    {"request", "pytestconfig", "caplog", "recwarn", "capfd", "capsys"}
)
"""Fixtures of pytest's that mean nothing on a rank."""

_OF_RANKS = (RankFixture, WorldArgument)


def prepare(item: pytest.Item) -> None:
    """Fail a marked test that pytest would run in the parent; ready the others."""
    if reason := unsupported():
        pytest.fail(reason, pytrace=False)
    test = getattr(item, "obj", None)
    if refusal := unrunnable(item.name, test):
        pytest.fail(refusal, pytrace=False)
    if type(item) is not pytest.Function:
        pytest.fail(
            f"@pytest.mark.world is for plain test functions and methods, and "
            f"{item.name} is a {type(item).__name__}: make it a function, or a method "
            "of a class without a base (setUp is setup_method there)",
            pytrace=False,
        )
    if hasattr(test, "hypothesis"):
        from .hypothesis import adapt_settings

        adapt_settings(test)


def unrunnable(name: str, test: object) -> str:
    """Return why a call of ``test`` would not run it; empty if one would."""
    what = never_runs(test)
    return what and (
        f"@pytest.mark.world is for plain functions, and {name} is {what}: "
        f"{ALTERNATIVE}"
    )


def rank_fixture(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> RankFixture | None:
    """Return a fixture's plan if it asks for ``world``; None leaves it to pytest."""
    values = {name: request.getfixturevalue(name) for name in fixturedef.argnames}
    if not any(isinstance(v, WorldArgument | RankFixture) for v in values.values()):
        return None
    if fixturedef.scope != "function":
        pytest.fail(
            f"the fixture `{fixturedef.argname}` asks for `world` and is "
            f"{fixturedef.scope}-scoped; on ranks only function scope exists: give it "
            "that scope",
            pytrace=False,
        )
    values = {name: _sendable(name, value) for name, value in values.items()}
    if "request" in values:
        values["request"] = RankRequest(getattr(request, "param", None))
    fn = resolve_fixture_function(fixturedef, request)
    plan = RankFixture(fixturedef.argname, fn, values)
    # As pytest does with a value: another fixture that asks for it finds the plan.
    fixturedef.cached_result = (plan, fixturedef.cache_key(request), None)  # type: ignore[arg-type]
    item = request._pyfuncitem
    # Also where the body does not take it, as with autouse: `run_body` evaluates all of
    # them.
    item.stash.setdefault(_RANK_FIXTURES, []).append(plan)
    return plan


def call_on_ranks(item: pytest.Function, spec: WorldSpec, runner: Runner) -> None:
    """Run a marked test's body; raise what pytest should see."""
    __tracebackhide__ = True
    names = item._fixtureinfo.argnames
    arguments = {name: _sendable(name, item.funcargs[name]) for name in names}

    fixtures = item.stash.setdefault(_RANK_FIXTURES, [])

    def call(fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
        __tracebackhide__ = True
        body = Body(
            fn=fn,
            args=args,
            arguments=kwargs,
            autouse=fixtures,
            filters=list(warnings.filters),
            compared=spec.backend == "both",
        )
        _check_travels(body)
        _call(item, spec, runner, body)

    if hasattr(item.obj, "hypothesis"):
        from .hypothesis import draw_and_call

        draw_and_call(item.obj, arguments, call)
    else:
        call(item.obj, (), arguments)


def explain(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Replace the parent's traceback by the failed world in words."""
    failure = item.stash.get(_FAILURE, None)
    if failure is None or call.excinfo is None or call.when != "call":
        return
    notes = list(getattr(call.excinfo.value, "__notes__", []))
    text = "\n".join([_disagreement(failure.outcomes) + str(failure), *notes])
    show(item, failure, text, report)


def show(
    item: pytest.Item, failure: WorldError, text: str, report: pytest.TestReport
) -> None:
    """Show ``text`` in the report of a failed world."""
    path, line, _ = item.location
    where = ReprFileLocation(path, (line or 0) + 1, failure.root.headline)
    entries = [ReprEntryNative([text + "\n"])]
    traceback = ReprTraceback(entries, None, style="native")
    report.longrepr = ExceptionChainRepr([(traceback, where, None)])


def _call(item: pytest.Function, spec: WorldSpec, runner: Runner, body: Body) -> None:
    __tracebackhide__ = True
    options = CallOptions(
        timeout_s=spec.timeout_s,
        isolation=spec.isolation,
        leaves_nothing=True,
        # Shrinking makes many failing calls: new ranks for each would take longer than
        # all the calls.
        keep_answered=hasattr(item.obj, "hypothesis"),
    )
    if _FAILURE in item.stash:  # of an earlier example
        del item.stash[_FAILURE]
    try:
        outcomes = runner.run(spec, options, run_body, body)
    except UnsuitableWorld as reason:
        pytest.skip(str(reason))
    except NotSimulatedError as refusal:
        pytest.fail(str(refusal), pytrace=False)
    except WorldError as failure:
        item.stash[_FAILURE] = failure
        raise _for_pytest(failure) from None
    # Into pytest's own capture, as the output of a test in one process.
    sys.stdout.write(render_output(outcomes))
    if isinstance(outcomes[0].value, Left):  # alike on all ranks
        _raise_agreed(outcomes[0].value)


def _raise_agreed(agreed: Left) -> NoReturn:
    __tracebackhide__ = True
    if agreed.kind == SKIP:
        raise pytest.skip.Exception(agreed.reason)
    if agreed.kind == XFAIL:  # not by pytest.xfail(), which --runxfail makes do nothing
        raise pytest.xfail.Exception(agreed.reason)
    from .hypothesis import reject

    reject()


def _for_pytest(failure: WorldError) -> BaseException:
    disagreement = _disagreement(failure.outcomes)
    if disagreement:
        return pytest.fail.Exception(disagreement, pytrace=False)
    error = failure.root.exception
    # pytest.exit on one rank would hide what the others did.
    exits = [isinstance(o.exception, pytest.exit.Exception) for o in failure.outcomes]
    if not isinstance(error, Exception | pytest.fail.Exception) or (
        early_end(error) is not None or (any(exits) and not all(exits))
    ):
        return failure
    # The rank's own exception, so that xfail(raises=...) and hypothesis know it.
    return error


def _disagreement(outcomes: tuple[RankOutcome, ...]) -> str:
    if not any(isinstance(outcome.value, Left) for outcome in outcomes):
        return ""
    lines = [f"  {outcome.headline}" for outcome in outcomes]
    return "\n".join(["the ranks do not agree on the outcome:", *lines, ""])


def _sendable(name: str, value: Any) -> Any:
    if isinstance(value, RankFixture | WorldArgument):
        return value
    return MONKEYPATCH if name == "monkeypatch" else value


def _check_travels(body: Body) -> None:
    for name, value in body.arguments.items():
        if name in _PARENT_ONLY:
            _refuse_fixture(name, "belongs to the parent")
        if not isinstance(value, _OF_RANKS):
            try:
                pickled(value)
            except Exception as error:
                _refuse_fixture(name, f"cannot be pickled: {error}")


def _refuse_fixture(name: str, why: str) -> None:
    pytest.fail(
        f"the fixture or argument `{name}` {why}. Fixtures run once, in the parent, "
        "and their values travel to the ranks; one that asks for `world` runs on each "
        "rank instead.",
        pytrace=False,
    )
