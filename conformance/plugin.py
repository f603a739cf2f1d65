"""The pytest plugin: ``--gradparity-scaler`` runs the catalogue as tests.

The plugin is loaded in every pytest session of the environment, so it imports nothing
heavy: ``suite.py`` is imported when a session has the option.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from .cli.arguments import SUITE
from .cli.converters import PATHS
from .status import EXIT_CODES, UsageError, WriteError

if TYPE_CHECKING:
    from .run.suite import Suite

_PREFIX = "gradparity_"
_SUITE = pytest.StashKey["Suite"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of ``gradparity run``, with a prefix."""
    group = parser.getgroup("gradparity", "the conformance catalogue as tests")
    for name, settings in SUITE.items():
        # xdist sends options as plain values, so a path becomes text.
        plain = {k: v for k, v in settings.items() if v not in PATHS}
        dest = plain.pop("dest", name)  # --quick is short for a --preset
        group.addoption(f"--gradparity-{name}", dest=_dest(dest), **plain)


def _dest(name: str) -> str:
    return _PREFIX + name.replace("-", "_")


def pytest_configure(config: pytest.Config) -> None:
    """Check the options and create the suite, before collection."""
    plain = {name: how for name, how in SUITE.items() if "dest" not in how}
    options = {name: config.getoption(_dest(name)) for name in plain}
    changed = [
        n for n, s in plain.items() if options[n] and options[n] != s.get("default")
    ]
    if not options["scaler"]:
        if changed:
            raise pytest.UsageError(
                f"--gradparity-{changed[0]} needs --gradparity-scaler module:attribute"
            )
        return
    from .run.suite import Suite

    try:
        suite = config.stash[_SUITE] = Suite(config, options)
    except UsageError as error:
        raise pytest.UsageError(f"gradparity: {error}") from None
    if suite.writes:
        config.pluginmanager.register(_Reading(suite), "gradparity-reading")


def pytest_report_header(config: pytest.Config) -> str | None:
    """Return the tested scalers and the number of scenarios."""
    suite = config.stash.get(_SUITE, None)
    return suite.headline() if suite else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, items: list[pytest.Item]
) -> None:
    """Add the scenarios, before ``-k`` and other options select items."""
    suite = session.config.stash.get(_SUITE, None)
    if suite:
        items += suite.items(session)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the report: the selected items are its cases."""
    suite = session.config.stash.get(_SUITE, None)
    if suite and not session.config.option.collectonly:
        suite.plan([item.nodeid for item in session.items])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: object, ids: list[str]) -> None:
    """Begin the report on xdist's controller, which does not collect."""
    config: pytest.Config = node.config  # type: ignore[attr-defined]  # xdist's WorkerController
    suite = config.stash.get(_SUITE, None)
    if suite and not config.option.collectonly:
        suite.plan(ids)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the case's record to the test's report, which xdist may send on."""
    report = yield
    suite = item.config.stash.get(_SUITE, None)
    if suite and call.when == "call":
        suite.attach(item, report)
    return report


class _Reading:
    """Takes records from test reports, in the process that writes the file.

    This is a separate plugin because pytest passes no session to the hook
    ``pytest_runtest_logreport``.
    """

    def __init__(self, suite: Suite) -> None:
        self.suite = suite

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record = getattr(report, "gradparity", None)
        if record is None:
            return
        try:
            self.suite.take(record)
        except WriteError as error:  # the disk is full: no later record would fit
            pytest.exit(f"gradparity: {error}", returncode=EXIT_CODES["error"])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End the report, also after an interrupted session."""
    suite = session.config.stash.get(_SUITE, None)
    if suite:
        suite.finish(interrupted=exitstatus == pytest.ExitCode.INTERRUPTED)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print where the report is."""
    suite = config.stash.get(_SUITE, None)
    for line in suite.summary if suite else ():
        terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks of the suite."""
    suite = config.stash.get(_SUITE, None)
    if suite:
        suite.close()
