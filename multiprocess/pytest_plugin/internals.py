"""Private names of pytest that the plugin uses, and of hypothesis and pytest-xdist.

pytest-xdist's workers use the same names of pytest, which have no public counterpart.
"""

from __future__ import annotations

import io
import os
import shlex
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntryNative,
    ReprFileLocation,
    ReprTraceback,
)
from _pytest._io import TerminalWriter
from _pytest._io.saferepr import saferepr as saferepr  # the plugin uses it from here
from _pytest.runner import runtestprotocol
from _pytest.skipping import Xfail, xfailed_key

SETTINGS = "_hypothesis_internal_use_settings"
"""Attribute of a test that holds its hypothesis settings; there is no public name."""


def configure(config: pytest.Config) -> None:
    """Configure the plugins of a session."""
    config._do_configure()


def as_text(config: pytest.Config, is_wanted: Callable[[Any], bool]) -> dict[str, Any]:
    """Return options as they were written, to be parsed by another session.

    Args:
        config: Configuration of this session.
        is_wanted: Receives an action of argparse; true if the option is wanted.

    Returns:
        For each wanted option that was given: its destination and its arguments.
    """
    parser: Any = config._parser
    # pytest before 9.1 makes argparse's parser when it parses
    parser = getattr(parser, "optparser", None) or parser._getparser()
    actions = [each for each in parser._actions if each.dest != "file_or_dir"]
    wanted = [each for each in actions if each.option_strings and is_wanted(each)]
    plain = {"type": None, "choices": None, "required": False, "default": SUPPRESS}
    before = [{name: getattr(each, name) for name in plain} for each in actions]
    for each in actions:
        # the defaults of the others are not asked for
        vars(each).update(plain if each in wanted else {"required": False})
    words = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    words += [*config.getini("addopts"), *map(str, config.invocation_params.args)]
    try:
        values = vars(parser.parse_known_args(words, Namespace())[0])
    finally:
        for each, values_before in zip(actions, before, strict=True):
            vars(each).update(values_before)
    texts = {}
    for each in wanted:
        if each.dest in values:
            flag, value = each.option_strings[-1], values[each.dest]
            texts[each.dest] = _written(flag, each.nargs, value)
    return texts


def _written(flag: str, nargs: object, value: Any) -> list[str]:
    if nargs == 0 or (nargs == "?" and not isinstance(value, str)):
        return [flag]
    several = value if isinstance(value, list) else [value]
    if nargs in {None, "?"}:
        joint = "=" if flag.startswith("--") else ""
        return [f"{flag}{joint}{each}" for each in several]
    groups = several if several and isinstance(several[0], list) else [several]
    return [word for group in groups for word in (flag, *group)]


def write_nowhere(config: pytest.Config) -> None:
    """Give a session a terminal writer whose output is dropped.

    Some of pytest's code needs one, also in a session without a reporter.
    """
    writer = TerminalWriter(io.StringIO())
    setattr(config, "get_terminal_writer", lambda: writer)  # noqa: B010  # of this object only


def unconfigure(config: pytest.Config) -> None:
    """Unconfigure the plugins of a session."""
    config._ensure_unconfigure()


def protocol(item: pytest.Item, following: pytest.Item | None) -> list[Any]:
    """Run setup, call and teardown of a test; return their reports."""
    return list(runtestprotocol(item, log=False, nextitem=following))


@contextmanager
def kept_conftests(session: pytest.Session) -> Iterator[None]:
    """Keep conftests whose folder has not been collected yet (since pytest 9.1).

    pytest drops them at the end of each collection, and with them their fixtures.
    """
    waiting = getattr(session._fixturemanager, "_pending_conftests", {})
    before = dict(waiting)
    try:
        yield
    finally:
        waiting.update(before)


def tear_down_to(session: pytest.Session, following: pytest.Item | None) -> None:
    """Tear down the fixtures of all nodes that the next test does not need."""
    session._setupstate.teardown_exact(following)


def expected_failure(item: pytest.Item) -> Mapping[str, Any] | None:
    """Return the failure that the ``xfail`` marks of a test expect, or None."""
    mark = item.stash.get(xfailed_key, None)
    names = ("reason", "run", "strict", "raises")
    return {name: getattr(mark, name) for name in names} if mark else None


def expect_failure(item: pytest.Item, expected: Mapping[str, Any]) -> None:
    """Make a test expect a failure, unless a mark of its own expects one."""
    if item.stash.get(xfailed_key, None) is None:
        item.stash[xfailed_key] = Xfail(**expected)


def expects(item: pytest.Item, error: BaseException) -> bool:
    """Return True if an ``xfail`` mark of a test accepts an exception."""
    mark = item.stash.get(xfailed_key, None)
    if mark is None:
        return False
    raises: Any = mark.raises
    if raises is None:
        return True
    if isinstance(raises, type | tuple):
        return isinstance(error, raises)
    # pytest.RaisesExc exists since pytest 8.4
    return hasattr(raises, "matches") and bool(raises.matches(error))


def apply_expectation(
    item: pytest.Item, report: pytest.TestReport, is_expected: bool
) -> None:
    """Report a failure of a test with an ``xfail`` mark.

    If ``is_expected``, it is reported as an expected failure, else as a failure.
    """
    mark = item.stash.get(xfailed_key, None)
    if mark is None or item.config.option.runxfail:
        return
    if is_expected:
        report.outcome, report.wasxfail = "skipped", mark.reason
    else:
        report.outcome = "failed"
        vars(report).pop("wasxfail", None)


@contextmanager
def reporting(item: pytest.Item) -> Iterator[None]:
    """Let a worker of pytest-xdist send a report of a test that has already ended."""
    plugins: set[Any] = item.config.pluginmanager.get_plugins()
    workers = [p for p in plugins if type(p).__name__ == "WorkerInteractor"]
    before = [worker.item_index for worker in workers]
    try:
        for worker in workers:
            worker.item_index = item.session.items.index(item)
        yield
    finally:
        for worker, index in zip(workers, before, strict=True):
            worker.item_index = index


def skip_at_item(reason: str) -> NoReturn:
    """Skip the running test; the report names the test's line, not the caller's."""
    raise pytest.skip.Exception(reason, _use_item_location=True)


def temporary_folder(config: pytest.Config) -> str | None:
    """Return the parent folder of all ``tmp_path`` of a session, or None."""
    factory = getattr(config, "_tmp_path_factory", None)
    try:
        return None if factory is None else str(factory.getbasetemp())
    except OSError:  # a full disk matters only to tests that use it, and they say so
        return None


def chain_of(text: str, item: pytest.Item, headline: str) -> ExceptionChainRepr:
    """Return a failure that is shown as ``text``; ``headline`` is for the summary."""
    path, line, _ = item.location
    where = ReprFileLocation(path, (line or 0) + 1, headline)
    trace = ReprTraceback([ReprEntryNative([text + "\n"])], None, style="native")
    return ExceptionChainRepr([(trace, where, None)])
