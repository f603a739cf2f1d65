"""The pytest plugin: ``@pytest.mark.world`` runs a test's body on every rank.

It is loaded in every pytest session of the environment, so it imports nothing heavy:
what runs worlds is imported when the first test asks for one.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
from _pytest.config import create_terminal_writer

from ..environment import is_reporter, on_torchrun, opened
from .marks import MARKER_HELP, sizes_of, spec_of
from .session_fork import TorchWatch, mode

if TYPE_CHECKING:
    from ..spec import WorldSpec
    from .runner import Runner

_MARK = "world"
_RUNNER = pytest.StashKey["Runner"]()
_NOWHERE = pytest.StashKey[IO[str]]()
_SPEC = pytest.StashKey["WorldSpec"]()
_WATCH = pytest.StashKey[TorchWatch]()
_OPENED = opened()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; under torchrun let rank 0 alone report."""
    config.addinivalue_line("markers", MARKER_HELP)
    try:
        mode()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_WATCH] = TorchWatch(_OPENED)
    if not is_reporter():
        config.option.xmlpath = None  # one JUnit file


def pytest_sessionstart(session: pytest.Session) -> None:
    """Silence the ranks that do not report."""
    if not is_reporter():
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            nowhere = session.config.stash[_NOWHERE] = open(os.devnull, "w")
            reporter._tw = create_terminal_writer(session.config, nowhere)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Largest worlds first under xdist; under torchrun, ordinary tests on one rank."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_size, reverse=True)
    if not is_reporter():
        ordinary = [item for item in items if not item.get_closest_marker(_MARK)]
        items[:] = [item for item in items if item.get_closest_marker(_MARK)]
        config.hook.pytest_deselected(items=ordinary)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A rank that was left without tests has not failed."""
    if not is_reporter() and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each size."""
    marker = metafunc.definition.get_closest_marker(_MARK)
    if marker is None:
        return
    try:
        sizes = sizes_of(marker.args, marker.kwargs)
        for size in sizes:
            spec_of(size, marker.kwargs)
    except (TypeError, ValueError) as error:
        pytest.fail(f"{metafunc.definition.nodeid}: {error}", pytrace=False)
    if "world" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world")
    ids = (
        [f"world{size}" for size in sizes] if len(sizes) > 1 else [pytest.HIDDEN_PARAM]
    )
    metafunc.parametrize("world", sizes, indirect=True, ids=ids)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Have the import of torch, by this module or a later one, serve the ranks too."""
    if not (parent.config.option.collectonly or on_torchrun()):
        parent.config.stash[_WATCH].look_at(module_path)
    return None  # pytest makes it


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """Return this rank's world, in a test marked with ``@pytest.mark.world``."""
    from .remote import WorldArgument

    if request.node.get_closest_marker(_MARK) is None:
        pytest.fail(
            "the fixture `world` needs @pytest.mark.world(size=...)", pytrace=False
        )
    return WorldArgument(request.param)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare for the worlds to come, while pytest goes on."""
    worlds = any(item.get_closest_marker(_MARK) for item in session.items)
    if session.config.option.collectonly or not worlds:
        session.config.stash[_WATCH].stop()
    else:
        session.config.stash[_WATCH].stop(expected=not on_torchrun())
        _runner(session.config).expect()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse what cannot run on ranks, rather than run it here."""
    if item.get_closest_marker(_MARK) is not None:
        from .controller import prepare

        prepare(item)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Any:
    """Leave a fixture that asks for ``world`` to the ranks."""
    if fixturedef.argname == "world" or not fixturedef.argnames:
        return None
    if request.node.get_closest_marker(_MARK) is None:
        return None
    from .controller import rank_fixture

    return rank_fixture(fixturedef, request)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body on the ranks."""
    if pyfuncitem.get_closest_marker(_MARK) is None:
        return None
    from .controller import call_on_ranks

    call_on_ranks(pyfuncitem, _spec(pyfuncitem), _runner(pyfuncitem.config))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show a failed world by root cause and victims, not by the parent's traceback."""
    report = yield
    if item.get_closest_marker(_MARK) is not None and report.failed:
        from .controller import explain

        explain(item, call, report)
    return report


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """End all ranks when the tests have ended: their coverage is then combined."""
    try:
        return (yield)
    finally:
        _close_runner(session.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End all ranks, also when no test was run."""
    _close_runner(config)
    if _WATCH in config.stash:
        config.stash[_WATCH].stop()  # a later session here may have other modules
    if _NOWHERE in config.stash:
        config.stash[_NOWHERE].close()


def _close_runner(config: pytest.Config) -> None:
    if _RUNNER in config.stash:
        config.stash[_RUNNER].close()
        del config.stash[_RUNNER]


def _runner(config: pytest.Config) -> Runner:
    if _RUNNER not in config.stash:
        from .runner import default_runner

        config.stash[_RUNNER] = default_runner()
    return config.stash[_RUNNER]


def _size(item: pytest.Item) -> int:
    marker = item.get_closest_marker(_MARK)
    if marker is None:
        return 0
    callspec = getattr(item, "callspec", None)
    if callspec is not None:
        return int(callspec.params["world"])
    return sizes_of(marker.args, marker.kwargs)[0]


def _spec(item: pytest.Item) -> WorldSpec:
    if _SPEC not in item.stash:
        marker = item.get_closest_marker(_MARK)
        assert marker is not None
        item.stash[_SPEC] = spec_of(_size(item), marker.kwargs)
    return item.stash[_SPEC]
