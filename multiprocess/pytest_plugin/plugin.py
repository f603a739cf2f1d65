"""The pytest plugin: ``@pytest.mark.world`` runs a test's body on every rank.

The plugin is loaded in every pytest session of the environment, so it imports nothing
heavy: the code that runs worlds is imported with the first test that needs a world.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from .. import linux
from ..environment import needs_agent
from ..spec import WorldSpec
from .settings import (
    MARKER_HELP,
    Wanted,
    add_options,
    defaults_of,
    settings_of,
    sizes_of,
    world_of,
)

if TYPE_CHECKING:
    from ..elastic.agent import Agent
    from .runner import Runner

_MARK = "world"
_PDB = "pdbinvoke"
"""pytest's plugin for ``--pdb``."""

_RUNNER = pytest.StashKey["Runner"]()
_WANTED = pytest.StashKey["Wanted | str"]()
_DEFAULTS = pytest.StashKey[Mapping[str, Any]]()
_AGENT: pytest.StashKey[Agent] = pytest.StashKey()
_ATTRIBUTES = pytest.StashKey[pytest.Mark]()
"""Settings that a `TestCase` class has as attributes."""

_EXIT_CODE = pytest.StashKey[int]()
_AFTER = pytest.StashKey[dict[pytest.Item, pytest.Item]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of tests on ranks."""
    group = parser.getgroup("gradparity-world", "tests on ranks (@pytest.mark.world)")
    group.addoption(
        "--gradparity-adopt",
        action="store_true",
        help="run tests of torch's multi-process classes on ranks that stay warm",
    )
    add_options(parser, group)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and read the default settings."""
    config.addinivalue_line("markers", MARKER_HELP)
    config.stash[_DEFAULTS] = defaults_of(config)
    if needs_agent() and config.getoption("dist", "no") != "no":
        raise pytest.UsageError(
            "under torchrun leave out -n: each of torchrun's processes would run all "
            "tests in workers of its own"
        )
    if config.option.gradparity_adopt:
        from .adopt import Adoption

        config.pluginmanager.register(Adoption(lambda: _runner(config)))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of ``TestCase`` classes, with the settings of their class."""
    cls: Any = getattr(item, "cls", None)
    if hasattr(cls, "_marker_settings"):
        try:
            settings = cls(item.name)._marker_settings()  # noqa: SLF001  # its own class
        except Exception as error:  # of a property; the test's setup reports it
            settings = {"world_size": error}
        item.stash[_ATTRIBUTES] = pytest.mark.world(**settings).mark
        item.add_marker(pytest.mark.world())  # for -m and other plugins


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Under xdist, run the largest worlds first."""
    # A world waits until enough slots are free. If a large one came last, the other
    # workers would have nothing left to do. The worker's config decides, since a
    # session inside a test inherits the environment.
    if hasattr(config, "workerinput") and not _on_rank(config):
        items.sort(key=_size_or_0, reverse=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save the exit code for the other processes of torchrun."""
    session.config.stash[_EXIT_CODE] = int(session.exitstatus)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create one test for each world size of a marker."""
    markers = _markers(metafunc.definition)
    if not markers:
        return
    try:
        sizes = sizes_of(settings_of(markers))
    except (TypeError, ValueError):
        return  # the test's setup reports it; other tests of the file run
    if "world" not in metafunc.fixturenames:
        # The test need not have this argument: its size is a parameter in any case.
        metafunc.fixturenames.append("world")
    ids: list[Any] = [f"world{n}" for n in sizes]
    if len(sizes) == 1 and hasattr(pytest, "HIDDEN_PARAM"):  # since pytest 8.4
        ids = [pytest.HIDDEN_PARAM]
    metafunc.parametrize("world", sizes, indirect=True, ids=ids)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Any:
    """Return this rank's world, in a test marked with ``@pytest.mark.world``."""
    if not _on_rank(request.config):
        pytest.fail(
            "the fixture `world` needs @pytest.mark.world(world_size=...)",
            pytrace=False,
        )
    from ..rank.world import current_world

    return current_world()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare the worlds while pytest continues.

    Under torchrun every process has collected tests. If none of them needs ranks, each
    process runs the session as usual. Otherwise rank 0 runs the session, and the other
    processes serve as agents.
    """
    config = session.config
    if _on_rank(config):
        return
    worlds = any(item.get_closest_marker(_MARK) for item in session.items)
    if config.option.gradparity_adopt:
        from .adopt import is_adopted

        worlds = worlds or any(map(is_adopted, session.items))
    if worlds and not config.option.collectonly:
        from .controller import preload_session

        preload_session(config)
        if needs_agent():
            _lead_or_follow(config)
        _runner(config)  # starts what runs the tests


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Make setup, call and teardown of a marked test run on ranks."""
    if not _on_ranks(item):
        return (yield)
    if isinstance(wanted := _wanted(item), Wanted):
        from .controller import take_over

        following = _following(item, wanted.spec)
        take_over(item, wanted.spec, _runner(item.config), following)
    # A failure is debugged on its rank, because frames here are only those of this
    # plugin.
    plugins = item.config.pluginmanager
    debugs = plugins.get_plugin(_PDB)
    if debugs is not None:
        plugins.unregister(debugs)
    try:
        return (yield)
    finally:
        if debugs is not None:
            plugins.register(debugs, _PDB)
        _runner(item.config).report_late()


# After pytest has evaluated `skip`, and before any fixture is set up.
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a marked test that no rank can run; skip it if there are too few ranks."""
    if _on_ranks(item):
        from .controller import refuse
        from .internals import skip_at_item

        wanted = _wanted(item)
        refuse(item, wanted if isinstance(wanted, str) else "")
        if isinstance(wanted, Wanted) and wanted.too_small:
            skip_at_item(wanted.too_small)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a failed world by its root cause, not by the parent's traceback."""
    report = yield
    if _on_ranks(item):
        from .controller import complete

        complete(item, call, report)
    return report


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """End all ranks after the tests, so that their coverage can be combined."""
    try:
        return (yield)
    finally:
        _close_runner(session.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End all ranks, even if no test was run."""
    _close_runner(config)
    if _AGENT in config.stash:
        # Last of all, because torchrun ends this process when another one has ended.
        with config.stash[_AGENT] as agent:
            agent.finish(config.stash.get(_EXIT_CODE, 0))
        del config.stash[_AGENT]


def _lead_or_follow(config: pytest.Config) -> None:
    from ..elastic.agent import Agent
    from .runner import follow

    if os.environ["RANK"] == "0":
        config.stash[_AGENT] = Agent().__enter__()  # `pytest_unconfigure` ends it
        return
    code = follow()
    linux.flush_standard_streams()
    os._exit(code)  # no hook ends this session: rank 0 reports


def _close_runner(config: pytest.Config) -> None:
    if _RUNNER in config.stash:
        runner = config.stash[_RUNNER]
        del config.stash[_RUNNER]
        runner.close()
        runner.report_late()


def _runner(config: pytest.Config) -> Runner:
    if _RUNNER not in config.stash:
        from .controller import report_unended, shows_live
        from .runner import Runner

        agent, live = config.stash.get(_AGENT, None), shows_live(config)
        config.stash[_RUNNER] = Runner(agent, live, report_unended)
    return config.stash[_RUNNER]


def _on_rank(config: pytest.Config) -> bool:
    """Return True in the session of a rank, which runs marked tests like any others."""
    return getattr(config.option, "gradparity_rank", False)


def _on_ranks(item: pytest.Item) -> bool:
    """Return True for a test that this session must run on ranks."""
    return item.get_closest_marker(_MARK) is not None and not _on_rank(item.config)


def _following(item: pytest.Item, spec: WorldSpec) -> pytest.Item | None:
    """Return the next test on the same ranks; None if no such test is known."""
    stash = item.session.stash
    if spec.isolation == "process":
        return None
    if _AFTER not in stash:
        after: dict[pytest.Item, pytest.Item] = {}
        last: dict[WorldSpec, pytest.Item] = {}
        for each in reversed(item.session.items):
            wanted = _wanted(each) if _on_ranks(each) else ""
            if isinstance(wanted, str):
                continue
            kind = wanted.spec.kind
            if kind in last:
                after[each] = last[kind]
            if wanted.spec.isolation != "process":
                last[kind] = each
        stash[_AFTER] = after
    return stash[_AFTER].get(item)


def _size(item: pytest.Item, settings: Mapping[str, Any]) -> Any:
    call: Any = getattr(item, "callspec", None)
    if _MARK in getattr(call, "params", {}):
        if any(mark.name == _MARK for mark in call.marks):
            raise ValueError(
                "a parameter has the marker `world` and its test has one: their world "
                "sizes may differ. Leave out one of the two"
            )
        return call.params[_MARK]
    # A test of unittest, or a conftest has added the marker after collection.
    sizes = sizes_of(settings)
    if len(sizes) > 1:
        raise ValueError(
            f"the world sizes {sizes} make several tests, which only a marker of a "
            "plain test function or class can: give one size here"
        )
    return sizes[0]


def _markers(item: pytest.Item) -> list[pytest.Mark]:
    """Return the markers of a test, the closest one first."""
    own, wide = list[pytest.Mark](), list[pytest.Mark]()
    of_classes: dict[pytest.Class, list[pytest.Mark]] = {}
    for node, mark in item.iter_markers_with_node(_MARK):
        if isinstance(node, pytest.Class):
            of_classes.setdefault(node, []).append(mark)
        else:
            (own if node is item else wide).append(mark)
    for marks in of_classes.values():
        own += reversed(marks)  # pytest has those of base classes first
    if (attributes := item.stash.get(_ATTRIBUTES, None)) is not None:
        own.append(attributes)
    return own + wide


def _size_or_0(item: pytest.Item) -> int:
    wanted = _wanted(item) if _on_ranks(item) else ""
    return 0 if isinstance(wanted, str) else wanted.spec.world_size


def _wanted(item: pytest.Item) -> Wanted | str:
    """Return the world of a marked test, or a text that explains a wrong marker."""
    if _WANTED not in item.stash:
        config = item.config
        agent = config.stash.get(_AGENT, None)
        try:
            settings = settings_of(_markers(item))
            item.stash[_WANTED] = world_of(
                _size(item, settings),
                settings,
                config.stash[_DEFAULTS],
                None if agent is None else agent.size,
            )
        # the marker was added after collection
        except (TypeError, ValueError) as error:
            item.stash[_WANTED] = str(error)
    return item.stash[_WANTED]
