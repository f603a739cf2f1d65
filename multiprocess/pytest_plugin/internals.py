"""Private names of pytest that the plugin uses, and of hypothesis and pytest-xdist.

pytest-xdist's workers use the same names of pytest, which have no public counterpart.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import pytest
from _pytest import main
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntryNative,
    ReprFileLocation,
    ReprTraceback,
)
from _pytest._io import TerminalWriter
from _pytest._io.saferepr import saferepr as saferepr  # the plugin uses it from here
from _pytest.capture import DontReadFromInput
from _pytest.config import get_config
from _pytest.runner import runtestprotocol
from _pytest.skipping import Xfail, xfailed_key

SETTINGS = "_hypothesis_internal_use_settings"
"""Attribute of a test that holds its hypothesis settings; there is no public name."""


def drawn_choices() -> object:
    """Return the choices that hypothesis made so far for the running example."""
    from hypothesis.control import current_build_context

    data: Any = current_build_context().data
    # an `@example` has neither; older versions have a buffer of bytes only
    return getattr(data, "choices", None) or bytes(getattr(data, "buffer", b""))


def configure(config: pytest.Config) -> None:
    """Configure the plugins of a session."""
    config._do_configure()


class Written(NamedTuple):
    """A command-line option as the user wrote it."""

    dest: str
    flag: str
    words: tuple[str, ...]


class _Record(Action):
    """Action of argparse that records an option's words, and stores no value."""

    def __call__(
        self, parser: object, namespace: Namespace, values: Any, flag: str | None = None
    ) -> None:
        assert flag is not None
        joined = isinstance(values, str)
        words = (f"{flag}={values}",) if joined else (flag, *(values or ()))
        namespace.written.append(Written(self.dest, flag, words))


def as_written(
    config: pytest.Config, is_wanted: Callable[[Action], bool]
) -> list[Written]:
    """Return options as the user wrote them, in the order in which pytest reads them.

    Args:
        config: Configuration of the session.
        is_wanted: Receives an action of argparse; true if its option is wanted.
    """
    own = _parser_of(config._parser)
    records = ArgumentParser(
        prefix_chars=own.prefix_chars,
        fromfile_prefix_chars=own.fromfile_prefix_chars,
        add_help=False,
        allow_abbrev=False,
    )
    wanted = set[str]()
    for each in own._actions:
        if flags := each.option_strings:
            records.add_argument(
                *flags, dest=each.dest, nargs=each.nargs, action=_Record
            )
            if is_wanted(each):
                wanted.update(flags)
    words = [*config.getini("addopts")]
    words += shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    words += map(str, config.invocation_params.args)
    parsed, _ = records.parse_known_args(words, Namespace(written=[]))
    return [each for each in parsed.written if each.flag in wanted]


def configured(
    options: Mapping[str, Any], args: Sequence[str], written: Sequence[Written]
) -> pytest.Config:
    """Return the configuration of a session inside of another one.

    Args:
        options: Values of options.
        args: Arguments to parse.
        written: Options to parse in place of their values, if this session has them.
    """
    words = [*args, *(word for each in written for word in each.words)]
    config = get_config(words)
    vars(config.option).update(options)
    config.pluginmanager.register(_Unread(written))
    config.parse(words, addopts=False)
    for each in config.option.plugins:
        config.pluginmanager.consider_pluginarg(each)
    return config


class _Unread:
    """Plugin that removes options which no plugin or conftest of a session has."""

    def __init__(self, written: Sequence[Written]) -> None:
        self._written = written

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(
        self, early_config: pytest.Config, parser: pytest.Parser, args: list[str]
    ) -> Generator[None, object, object]:
        """Remove unknown options from the arguments, once conftests are imported."""
        result = yield
        actions = _parser_of(parser)._actions
        flags = {flag for action in actions for flag in action.option_strings}
        for each in self._written:
            if each.flag in flags:
                vars(early_config.option).pop(each.dest, None)
            else:
                place = args.index(each.words[0])
                del args[place : place + len(each.words)]
        return result


def _parser_of(parser: Any) -> ArgumentParser:
    # pytest before 9.1 makes argparse's parser when it parses
    own: ArgumentParser = getattr(parser, "optparser", None) or parser._getparser()
    return own


def write_nowhere(config: pytest.Config) -> None:
    """Give a session a terminal writer whose output is dropped.

    Some of pytest's code needs a writer, also in a session without a reporter.
    """
    writer = TerminalWriter(io.StringIO())
    setattr(config, "get_terminal_writer", lambda: writer)  # noqa: B010  # of this object only


def refuse_input() -> None:
    """Let tests of this process fail if they read from stdin, as with capturing."""
    sys.stdin = DontReadFromInput()


def unconfigure(config: pytest.Config) -> None:
    """Unconfigure the plugins of a session."""
    config._ensure_unconfigure()


def protocol(item: pytest.Item, following: pytest.Item | None) -> list[Any]:
    """Run setup, call and teardown of a test; return their reports."""
    return list(runtestprotocol(item, log=False, nextitem=following))


def collect_file(session: pytest.Session, file: str) -> None:
    """Collect the tests of a file, whatever characters its path has.

    In an argument of pytest, `[` and `::` begin the name of a test.
    """
    resolve = main.resolve_collection_argument

    def resolved(folder: Path, _: str, *args: Any, **kwargs: Any) -> Any:
        return replace(resolve(folder, os.sep, *args, **kwargs), path=Path(file))

    with mock.patch.object(main, resolve.__name__, resolved):
        session.perform_collect([file])


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

    The report shows an expected failure if ``is_expected``, else a failure.
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


def restore_subtest(report: Any, data: Mapping[str, Any]) -> None:
    """Give a subtest the values that its rank sent: pytest 9 would quote them twice.

    Args:
        report: Report made of ``data``; of a subtest or of a test.
        data: Report as a rank serialised it.
    """
    if (context := data.get("_subtest.context")) is not None:
        object.__setattr__(report.context, "kwargs", context["kwargs"])


def chain_of(text: str, item: pytest.Item, headline: str) -> ExceptionChainRepr:
    """Return a failure that is shown as ``text``; ``headline`` is for the summary."""
    path, line, _ = item.location
    where = ReprFileLocation(path, (line or 0) + 1, headline)
    trace = ReprTraceback([ReprEntryNative([text + "\n"])], None, style="native")
    return ExceptionChainRepr([(trace, where, None)])
