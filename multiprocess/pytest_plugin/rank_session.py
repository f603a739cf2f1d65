"""The pytest session of a rank: it runs the tests that the parent names.

The session is like that of a pytest-xdist worker, and lives as long as the rank. So
fixtures keep their scopes. pytest itself runs setup, call and teardown.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import unittest
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pytest

from ..errors import CallEnded, HarnessError
from ..outcomes import Failed, Left, Place
from ..rank.endings import early_end, name_of, refuse_unrun, torch_skip
from ..rank.world import current_world
from . import internals
from .travelling import Travelling, travelling

if TYPE_CHECKING:
    from ..rank.global_state import WideSettings

FAIL = "fail"
"""Kind of a phase that failed. Other kinds are those of ``Left``, and "" for passed."""

_FAILED, _PASSED = Left(FAIL, "", ""), Left("", "", "")


@dataclass(frozen=True, kw_only=True)
class SessionOrder:
    """Settings of the parent's session, for the sessions of ranks."""

    options: Mapping[str, Any]
    args: tuple[str, ...]
    written: Sequence[internals.Written]
    """Options that ranks parse, if they have them."""

    folder: str
    """Folder in which the parent was started; paths are relative to it."""

    temporary: str | None
    """Folder for the ``tmp_path`` of all ranks; None if pytest has no such folder."""

    terminal: str | None
    """Terminal in which a failed rank is debugged; None without ``--pdb``."""

    captures: bool
    """True if the parent's session captures output; its tests then have no stdin."""

    worker: Mapping[str, Any]
    """Value of ``config.workerinput``, which tells plugins that another session
    reports."""


class ItemId(NamedTuple):
    """Name of a test in the parent's session and in those of ranks.

    Node ids may differ: in a file outside of the root folder they depend on pytest's
    arguments.
    """

    file: str
    names: tuple[str, ...]
    """Names of the nodes below the file: classes, and the test."""

    @classmethod
    def of(cls, item: pytest.Item) -> Self:
        """Return the id of a test."""
        folders = pytest.Session | pytest.Directory | pytest.File
        inner = [node for node in item.listchain() if not isinstance(node, folders)]
        return cls(str(item.path), tuple(node.name for node in inner))

    def __str__(self) -> str:
        return "::".join((self.file, *self.names))


@dataclass(frozen=True, kw_only=True)
class ItemOrder:
    """Order to a rank to run a test."""

    session: SessionOrder
    test: ItemId
    following: ItemId | None
    """Next test on these ranks, whose fixtures are kept; None if unknown."""

    draw_seed: int
    """Seed of hypothesis, equal on all ranks."""

    is_last: bool
    """True if the ranks run nothing after this test: no other test, no last call."""


@dataclass(frozen=True, kw_only=True)
class Phase(Left):
    """Setup, call or teardown of a test on one rank, and how it ended."""

    when: str
    report: Mapping[str, Any]
    """Report of pytest, serialised by pytest."""

    is_expected: bool
    """True if the phase failed, and the test's ``xfail`` mark accepts the exception."""

    followed: bool
    """True if the phase failed only because another rank failed."""


@dataclass(frozen=True)
class ItemResult(Left):
    """Result of a test on one rank, in a form that can be sent to the parent.

    A teardown that has not ended yet has no phase here.
    """

    phases: tuple[Phase, ...] = ()
    subtests: tuple[Mapping[str, Any], ...] = ()
    """Reports of subtests, serialised by pytest."""

    warnings: tuple[Mapping[str, Any], ...] = ()
    """Arguments of ``pytest_warning_recorded``."""

    properties: tuple[tuple[str, object], ...] = ()
    """Value of ``item.user_properties``."""

    expected: Mapping[str, Any] | None = None
    """Failure that the test's ``xfail`` marks expect, or None."""

    stops: tuple[tuple[str, object], ...] = ()
    """Attributes of pytest's session that a test or hook set to end it, such as
    ``shouldstop``: (name, reason)."""

    def phase(self, when: str) -> Phase | None:
        """Return one phase; None if the test did not reach it."""
        return next((p for p in self.phases if p.when == when), None)

    @property
    def failed(self) -> str | None:
        """Name of the first phase that failed, or None."""
        return next((p.when for p in self.phases if p.kind == FAIL), None)


_STOPS = ("shouldstop", "shouldfail")
_EXPECTS = "__unittest_expecting_failure__"
_FOLLOWED = "_gradparity_followed"
"""Attribute of an exception that is only a consequence of another rank's failure."""

_session: RankSession | None = None


def run_item(order: ItemOrder) -> ItemResult | Failed:
    """Run a test on this rank; then end the fixtures that the next one does not use."""
    global _session
    if _session is None:
        _session = RankSession(order.session)
    session = _session
    item = session.item(order.test)
    following = session.following(order.following)
    session.plugin.draw_seed = order.draw_seed
    current_world()._begin()  # noqa: SLF001  # its own world
    result = session.run(item, following)
    if order.is_last:
        has_failed = isinstance(result, Failed)
        with suppress(Exception) if has_failed else nullcontext():
            end_session()
    return result


def end_fixtures(test: ItemId) -> None:
    """End the fixtures on this rank that a test does not use."""
    if _session is not None:
        _session.tear_down_to(_session.following(test))


def end_session() -> None:
    """End the remaining fixtures, and the session, on this rank."""
    global _session
    session, _session = _session, None
    if session is not None:
        session.end()


class RankSession:
    """A pytest session with the parent's settings, and no reporter of its own."""

    def __init__(self, order: SessionOrder) -> None:
        options = dict(order.options)
        rank = current_world().rank
        if order.temporary is not None:
            os.makedirs(order.temporary, exist_ok=True)
            folder = os.path.join(order.temporary, f"rank{rank}-{os.getpid()}")
            options["basetemp"] = folder
        here = os.getcwd()
        os.chdir(order.folder)
        try:
            self.config = internals.configured(options, order.args, order.written)
        finally:
            os.chdir(here)
        # pytest-randomly reads its option in workerinput, also without pytest-xdist.
        worker = {**options, **order.worker}
        self.config.workerinput = worker  # type: ignore[attr-defined]  # pytest-xdist's name
        self.config.workeroutput = {}  # type: ignore[attr-defined]  # as above
        self.plugin = _RankPlugin(order.terminal)
        self.config.pluginmanager.register(self.plugin, "gradparity-rank")
        internals.write_nowhere(self.config)
        if order.captures:
            internals.refuse_input()
        internals.configure(self.config)
        # Filters are in force until this call ends; `tear_down_to` runs in another one.
        self._filters = warnings.filters
        current_world()._trace_crashes()  # noqa: SLF001  # its own world; pytest's faulthandler has taken them
        self.session = pytest.Session.from_config(self.config)
        self.config.hook.pytest_sessionstart(session=self.session)
        self._items: dict[str, dict[ItemId, pytest.Item]] = {}
        """Collected tests, by file and id."""

    def item(self, test: ItemId) -> pytest.Item:
        """Return a test; its file is collected at the first request.

        Raises:
            HarnessError: This rank does not find the test.
        """
        if test.file not in self._items:
            self.plugin.collect_errors.clear()
            internals.collect_file(self.session, test.file)
            if self.plugin.collect_errors:
                raise HarnessError(
                    f"{test.file} cannot be collected on this rank, and could in the "
                    "parent:\n" + "\n".join(self.plugin.collect_errors)
                )
            collected = self.plugin.collected
            self._items[test.file] = {ItemId.of(item): item for item in collected}
            # hooks and fixtures may look at all tests of the session
            self.session.items = [i for of in self._items.values() for i in of.values()]
        items = self._items[test.file]
        if test not in items:
            raise HarnessError(
                f"{test} is not among the {len(items)} tests that this rank found "
                "there, and was in the parent: parameters must be the same in every "
                "process, so no sets, times or random values"
            )
        return items[test]

    def following(self, test: ItemId | None) -> pytest.Item | None:
        """Return the next test; None if this rank does not find it.

        The error is reported when this test is to run.
        """
        try:
            return None if test is None else self.item(test)
        except (Exception, SystemExit):  # any module may raise any error
            return None

    def run(
        self, item: pytest.Item, following: pytest.Item | None
    ) -> ItemResult | Failed:
        """Run a test and return its result, inside a ``Failed`` if it failed."""
        plugin = self.plugin
        plugin.begin()
        properties = len(item.user_properties)
        try:
            self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        finally:
            added = item.user_properties[properties:]
            del item.user_properties[properties:]
        expected = internals.expected_failure(item)
        stops = [(each, getattr(self.session, each)) for each in _STOPS]
        phases = [plugin.phase(item, report) for report in plugin.reports]
        early = next((p for p in phases if p.kind not in ("", FAIL)), None)
        failed = next((p for p in phases if p.kind == FAIL), None)
        left = _PASSED if early is None or failed is not None else early
        result = ItemResult(
            left.kind,
            left.name,
            left.reason,
            tuple(phases),
            tuple(serialised(self.config, report) for report in plugin.subtests),
            tuple(plugin.warnings),
            tuple((name, travelling(value)) for name, value in added),
            expected and {name: travelling(value) for name, value in expected.items()},
            tuple((name, reason) for name, reason in stops if reason),
        )
        if failed is None:
            return result
        report = next(r for r in plugin.reports if r.when == failed.when)
        return _failed(plugin.error(report), report, result)

    def tear_down_to(self, item: pytest.Item | None) -> None:
        """Tear down all fixtures that ``item``, a later test, does not use.

        If ``item`` is None, all fixtures are torn down. Called while no test runs.
        """
        warnings.filters = self._filters
        internals.tear_down_to(self.session, item)

    def end(self) -> None:
        """Tear down all fixtures, and end session and plugins."""
        self.tear_down_to(None)
        # plugins read the exit status there
        code = self.session.exitstatus = pytest.ExitCode.OK
        self.config.hook.pytest_sessionfinish(session=self.session, exitstatus=code)
        internals.unconfigure(self.config)


def _is_followed(error: BaseException | None) -> bool:
    from ..rank.flight_recorder import left_a_wait

    own = getattr(error, _FOLLOWED, False) or isinstance(error, CallEnded)
    return own or left_a_wait(error)


def _failed(error: BaseException, report: Any, result: ItemResult) -> Failed:
    followed = getattr(error, _FOLLOWED, False)
    # A failure of another rank has its traceback on that rank.
    text = str(error) if followed else report.longreprtext
    return Failed(error, result, traceback=text, followed=followed)


@contextmanager
def _as_of_pytest(item: Any) -> Iterator[None]:
    """Make a test of unittest fail and skip as a test function of pytest does.

    A failure is reported before tearDown, which may block. A test fails if it returns
    code that has not run, such as a coroutine. A test is skipped if it exits with a
    code by which torch's decorators skip.
    """
    if not hasattr(item, "addError"):
        yield
        return

    def report(error: BaseException) -> None:
        if not isinstance(error, CallEnded) and early_end(error) is None:
            followed = getattr(error, _FOLLOWED, False)
            failed = Failed(error, None, followed=followed)
            current_world()._fail(failed)  # noqa: SLF001  # its own world

    def reporting(own: Callable[..., None]) -> Callable[..., None]:
        def add(test: object, info: tuple[Any, BaseException, Any]) -> None:
            report(info[1])
            own(test, info)

        return add

    method = item.obj
    fails = getattr(method, _EXPECTS, False) or getattr(item.cls, _EXPECTS, False)

    @functools.wraps(method)
    def body(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            value = method(*args, **kwargs)
            refuse_unrun(item.name, value)
            return value
        except BaseException as error:
            if isinstance(error, SystemExit) and (reason := torch_skip(error)):
                raise unittest.SkipTest(reason) from None
            if fails:  # unittest adds an expected failure at the end of the test
                report(error)
            raise

    # pytest's item is the result object that unittest calls with other exceptions.
    item.addError, item.addFailure = map(reporting, (item.addError, item.addFailure))
    item.obj = body
    try:
        yield
    finally:
        del item.addError, item.addFailure
        item.obj = method


def serialised(config: pytest.Config, report: Any) -> Mapping[str, Any]:
    """Return a report as pytest serialises it, with values that can be pickled."""
    report.user_properties = []  # properties are sent apart
    data = config.hook.pytest_report_to_serializable(config=config, report=report)
    return {key: travelling(value) for key, value in data.items()}


def _debug(terminal: str, error: BaseException | None, text: str) -> None:
    """Let the user debug a failure of this rank; time limits are suspended.

    Args:
        terminal: Path of the parent's terminal.
        error: Exception of the failure.
        text: Text to show first.
    """
    import fcntl
    import pdb

    from ..rank.flight_recorder import placed

    with (
        placed(Place.DEBUGGER),
        open(terminal) as keys,
        open(terminal, "w") as screen,
    ):
        fcntl.flock(keys, fcntl.LOCK_EX)  # one rank at a time may read the keys
        world = current_world()
        title = f"pdb on rank {world.rank} of {world.world_size}"
        screen.write(f"\n{text}\n>>>>>> {title} >>>>>>\n")
        debugger = pdb.Pdb(stdin=keys, stdout=screen)
        debugger.reset()
        debugger.interaction(None, None if error is None else error.__traceback__)


class _RankPlugin:
    """Hooks of the session on a rank."""

    def __init__(self, terminal: str | None) -> None:
        self._terminal = terminal
        self.draw_seed = 0
        self.reports: list[pytest.TestReport] = []
        self.subtests: list[Any] = []
        self.warnings: list[Mapping[str, Any]] = []
        self.collect_errors: list[str] = []
        self.collected: list[pytest.Item] = []
        # Keep the reports, too, so that no new one gets the id of an old one.
        self._errors: dict[int, tuple[object, BaseException]] = {}
        self._latest: tuple[pytest.TestReport, BaseException] | None = None
        """Report and exception of the last phase; None if it passed."""
        self._wide: dict[int, WideSettings] = {}
        self._in_setup: list[WideSettings] = []
        """Fixtures in setup, of wider scope than a function; each requests the next."""
        self._folders: dict[Path, pytest.Collector] = {}

    def begin(self) -> None:
        """Clear the results of the previous test."""
        for reports in (self.reports, self.subtests, self.warnings):
            reports.clear()
        self._errors.clear()
        self._latest = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool:
        """Run the test once; reruns are made by the parent."""
        # pytest's own wrappers of this hook, as for warnings and asserts, stay.
        self.reports = internals.protocol(item, nextitem)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep the exception: the parent combines those of all ranks."""
        report = yield
        self._latest = None
        if call.excinfo is not None:
            self._latest = report, call.excinfo.value
            self._errors[id(report)] = self._latest
        if report.failed:  # pytest counts reports that are logged, and fixtures read it
            item.session.testsfailed += 1
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Report a failure to the parent before the teardown, which may block.

        The teardown blocks if it waits for a rank that has ended. A failed subtest is
        not reported here.
        """
        if self._latest is None:
            return
        report, error = self._latest
        if isinstance(error, CallEnded) or early_end(error):
            return
        result = ItemResult(**vars(_PASSED), phases=(self.phase(item, report),))
        current_world()._fail(_failed(error, report, result))  # noqa: SLF001  # its own world

    def pytest_exception_interact(
        self, call: pytest.CallInfo[None], report: Any
    ) -> None:
        """Debug a failure of this rank in the parent's terminal, with ``--pdb``."""
        error = None if call.excinfo is None else call.excinfo.value
        if self._terminal is None or isinstance(error, CallEnded):
            return
        _debug(self._terminal, error, report.longreprtext)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep a report of a subtest; other reports are not logged on ranks.

        The parent is told at once of a subtest that raised: its rank may have left out
        a collective for which other ranks wait.
        """
        _, error = self._latest or (None, None)
        if isinstance(error, CallEnded):
            return  # it is ended with the test
        self.subtests.append(report)
        if error is None:
            return
        text = report.longreprtext if report.failed else ""
        failed = Failed(error, None, traceback=text, part=report.head_line)
        current_world()._fail(failed)  # noqa: SLF001  # its own world

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: object
    ) -> None:
        """Keep a warning for the parent's summary."""
        if when != "runtest":
            return  # the parent has imported the same modules, and warned
        warning, category = warning_message.message, warning_message.category
        text = UserWarning(f"{name_of(category)}: {warning}")

        # The source of a warning, such as a file, cannot be sent.
        def plain(message: Any, category: Any) -> Any:
            file, line = warning_message.filename, warning_message.lineno
            return type(warning_message)(message, category, file, line)

        sent = Travelling(plain(warning, category), plain(text, UserWarning))
        self.warnings.append(
            {"warning_message": sent, "when": when, "location": location}
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, items: list[pytest.Item]
    ) -> Generator[None, object, object]:
        """Keep all tests of a file, even those that other plugins deselect."""
        # The parent has selected the tests, so hooks that select on this rank change
        # nothing.
        before = list(items)
        result = yield
        self.collected = [*before, *(item for item in items if item not in before)]
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collect_directory(
        self, path: Path
    ) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
        """Use one node per folder for all files, as if they were collected together.

        Fixtures of a conftest belong to the node of its folder.
        """
        node = yield
        return None if node is None else self._folders.setdefault(path, node)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_finish(
        self, session: pytest.Session
    ) -> Generator[None, object, object]:
        """Keep the conftests of folders that a later file needs."""
        with internals.kept_conftests(session):
            return (yield)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep collection errors; a module skipped only on ranks counts as an error."""
        if not report.passed:
            self.collect_errors.append(report.longreprtext)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Keep the examples of hypothesis in step on all ranks."""
        __tracebackhide__ = True
        test: Any = getattr(item, "obj", None)
        with _as_of_pytest(item):
            if "hypothesis" not in sys.modules:
                return (yield)
            from .hypothesis import Steps

            steps = Steps(self.draw_seed)
            drawn: Any = nullcontext()
            if hasattr(test, "hypothesis"):
                drawn = steps.of(test)
                if hasattr(item, "addError"):  # unittest lets no exception out
                    item.obj, drawn = drawn(item.obj), nullcontext()  # type: ignore[attr-defined]  # a function
            with steps.of_state_machines(), drawn:
                return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(
        self, pyfuncitem: pytest.Function
    ) -> Generator[None, object, object]:
        """Fail a test that returns code which has not run, such as a coroutine."""
        fn = pyfuncitem.obj
        if hasattr(fn, "hypothesis"):  # Hypothesis tests are checked example by example
            return (yield)

        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            value = fn(*args, **kwargs)
            refuse_unrun("the test", value)
            return value

        pyfuncitem.obj = checked
        try:
            return (yield)
        finally:
            pyfuncitem.obj = fn

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        """Keep settings and threads of a fixture with a wider scope than a function.

        Settings and threads stay until the fixture is torn down.
        """
        from ..rank import left_behind

        with self._setup_of(fixturedef) as wide:
            value = yield
            if inspect.iscoroutine(value) or inspect.isasyncgen(value):
                refuse_unrun(f"the fixture `{fixturedef.argname}`", value)
            if wide is not None:
                wide.keep()
                fixturedef.addfinalizer(wide.begin_to_end)
                left_behind.allow_present()
            return value

    @contextmanager
    def _setup_of(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Iterator[WideSettings | None]:
        """Yield the settings of a fixture in its setup; None for a function's scope."""
        if fixturedef.scope == "function":
            yield None
            return
        from ..rank.global_state import WideSettings

        # the changes of a requested fixture do not count for the requesting one
        outer = self._in_setup[-1:]
        for each in outer:
            each.keep()
        wide = WideSettings()
        self._in_setup.append(wide)
        wide.set_up()
        try:
            yield wide
            self._wide[id(fixturedef)] = wide
        except BaseException:
            wide.end()
            raise
        finally:
            self._in_setup.pop()
            for each in outer:
                each.set_up()

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """Undo what a fixture with a wider scope has set."""
        wide = self._wide.pop(id(fixturedef), None)
        if wide is not None:
            wide.end()

    def error(self, report: Any) -> BaseException:
        """Return the exception of a failed report."""
        if id(report) in self._errors:
            return self._errors[id(report)][1]
        return pytest.fail.Exception(report.longreprtext, pytrace=False)

    def phase(self, item: pytest.Item, report: pytest.TestReport) -> Phase:
        """Return a report's phase (setup, call or teardown) and how it ended."""
        # Not by the report's outcome: a mark that expects a failure is about all ranks
        # together, and the parent applies it.
        _, error = self._errors.get(id(report), (None, None))
        left = _PASSED
        if error is not None:
            left = early_end(error) or _FAILED
        elif report.failed and "xfail" not in report.keywords:
            left = _FAILED  # a hook of the rank has changed the report
        return Phase(
            **vars(left),
            when=report.when,
            report=serialised(item.config, report),
            is_expected=left is _FAILED and internals.expects(item, self.error(report)),
            followed=_is_followed(error),
        )
