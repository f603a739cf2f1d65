"""One marked test in the parent: run it on the ranks, and report its phases.

pytest's own protocol still runs the test in the parent. So reruns, ``-x``, expected
failures and timeouts work as usual; only the item's setup, call and teardown run on the
ranks.
"""

from __future__ import annotations

import os
import random
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ..environment import unsupported
from ..errors import WorldError
from ..outcomes import Left, RankOutcome, RankState
from ..parent.forkserver_client import want_preloaded
from ..rank.endings import SKIP, XFAIL, early_end, unrunnable
from ..report import render_failure, render_output
from ..spec import CallOptions, WorldSpec
from . import internals
from .rank_session import (
    FAIL,
    ItemId,
    ItemOrder,
    ItemResult,
    Phase,
    SessionOrder,
    run_item,
)
from .runner import Runner, UnsuitableWorld
from .travelling import is_plain

_RUN: pytest.StashKey[ItemRun] = pytest.StashKey()
_SESSION = pytest.StashKey[SessionOrder]()
_REFUSED = pytest.StashKey[BaseException]()
"""Error of a test that no rank can run."""

_NO_TERMINAL = "no debugger: the standard input of pytest is not a terminal"

_PHASES = ("setup", "call", "teardown")

_FOLLOWED = (RankState.OK, RankState.VICTIM)
"""States of ranks without a failure of their own."""

_CONFIGURE_NODE = "pytest_configure_node"
"""Hook of pytest-xdist in which plugins configure a worker."""

_OWN_OF_A_RANK: Mapping[str, Any] = {
    "basetemp": None,
    "cacheclear": False,
    "capture": "no",  # output goes through the rank's pipe, even if the rank is killed
    "cov_source": [],  # coverage.py measures ranks by itself
    "dist": "no",
    "gradparity_adopt": False,
    "lf": False,
    "log_file": os.devnull,  # a rank would empty the session's file
    "maxfail": 0,
    "numprocesses": None,
    "pyargs": False,
    "setupshow": False,
    "stepwise": False,
    "stepwise_skip": False,
    "trace": False,
    "usepdb": False,
}
"""Options with fixed values on ranks, because only the parent selects and reports.

Other options are passed on, and do no harm: plugins treat a rank like a worker of
pytest-xdist, and a rank keeps even the tests that plugins deselect."""


def refuse(item: pytest.Item, wrong_marker: str) -> None:
    """Fail a marked test that no rank can run, also if its failure is expected.

    Args:
        item: The test.
        wrong_marker: Why its marker is wrong; empty if the marker is right.
    """
    __tracebackhide__ = True
    refusal = unsupported() or unrunnable(item.nodeid, getattr(item, "obj", None))
    if wrong_marker and not refusal:
        refusal = f"{item.nodeid}: {wrong_marker}"
    if refusal:
        error = item.stash[_REFUSED] = pytest.fail.Exception(refusal, pytrace=False)
        raise error from None  # nothing that happened before is the cause


def preload_session(config: pytest.Config) -> None:
    """Make the forkserver import pytest and its plugins."""
    plugins = [plugin for plugin, _ in config.pluginmanager.list_plugin_distinfo()]
    names = {getattr(plugin, "__name__", "") for plugin in plugins}
    names |= {name for name in sys.modules if name.startswith("_pytest.")}
    want_preloaded(sorted({*names, run_item.__module__} - {""}))


def take_over(
    item: pytest.Item,
    spec: WorldSpec,
    runner: Runner,
    following: pytest.Item | None,
) -> None:
    """Make pytest's protocol run a test on ranks.

    Args:
        item: The test.
        spec: Settings of its world.
        runner: Runner of worlds.
        following: Next test on the same ranks.
    """
    test = getattr(item, "obj", None)
    if hasattr(test, "hypothesis"):
        _allow_fixtures(test)
    run = ItemRun(item, spec, runner, following)
    item.stash[_RUN] = run
    if hasattr(item, "fixturenames"):
        item.fixturenames = []  # hooks look for their values, which are on the ranks
    # On the instance, since plugins that look at the item expect the test's own class.
    for name in ("setup", "runtest", "teardown"):
        setattr(item, name, getattr(run, name))


def _allow_fixtures(test: Any) -> None:
    """Switch off hypothesis's check for fixtures, which do not exist in the parent."""
    import hypothesis

    owner, name = getattr(test, "__func__", test), internals.SETTINGS
    settings = getattr(owner, name, None) or hypothesis.settings()
    checks = hypothesis.HealthCheck
    allowed = {checks.function_scoped_fixture, checks.differing_executors}
    allowed.update(settings.suppress_health_check)
    changed = hypothesis.settings(settings, suppress_health_check=list(allowed))
    setattr(owner, name, changed)


class ItemRun:
    """Setup, call and teardown of a test that runs on ranks."""

    def __init__(
        self,
        item: pytest.Item,
        spec: WorldSpec,
        runner: Runner,
        following: pytest.Item | None,
    ) -> None:
        self._item = item
        self._spec = spec
        self._runner = runner
        self._following = following
        self._ended: dict[str, BaseException] = {}
        self._expected: set[str] = set()
        """Phases that failed as the test's ``xfail`` mark expects."""

        self._outcomes: tuple[RankOutcome, ...] = ()
        self.failure: WorldError | None = None
        self.failed_in = "call"
        self._reports: dict[str, list[tuple[int, pytest.TestReport]]] = {}

    def setup(self) -> None:
        """Run the whole test on the ranks; raise what its setup raised there."""
        __tracebackhide__ = True
        self._ended, self._outcomes, self.failure = {}, (), None
        self._expected, self._reports = set(), {}
        options = self._item.config.option
        if getattr(options, "setuponly", False) or getattr(options, "setupplan", False):
            return
        try:
            self._outcomes = self._run()
        except UnsuitableWorld as reason:
            internals.skip_at_item(str(reason))
        except WorldError as failure:
            self.failure = failure
            self._outcomes = failure.outcomes
        # pytest-timeout raises such an error
        except (Exception, pytest.fail.Exception) as error:
            self._ended["call"] = error
            return
        self._merge()
        self._enter("setup")

    def runtest(self) -> None:
        """Raise what the call raised on the ranks, if anything."""
        __tracebackhide__ = True
        if self.failure is None and not self._runner.live:
            # Printed into pytest's capture, like the output of a test in one process.
            print(render_output(self._outcomes), end="")
        self._enter("call")

    def teardown(self) -> None:
        """Raise what the teardown raised on the ranks, if anything."""
        __tracebackhide__ = True
        self._enter("teardown")

    def _enter(self, when: str) -> None:
        error = self._ended.get(when)
        # An error without a traceback: pytest would report that all of it is hidden.
        __tracebackhide__ = getattr(error, "pytrace", True)
        if error is not None:
            raise error

    def _run(self) -> tuple[RankOutcome, ...]:
        following = self._following
        order = ItemOrder(
            session=_session_order(self._item.config),
            test=ItemId.of(self._item),
            following=None if following is None else ItemId.of(following),
            # Not the test's seed: new examples in each session find more.
            draw_seed=random.Random(os.urandom(8)).getrandbits(64),
            is_last=self._spec.isolation == "process",
        )
        options = CallOptions(
            timeout_s=self._spec.timeout_s,
            isolation=self._spec.isolation,
            is_test=True,
            live=self._runner.live,
        )
        return self._runner.run_item(self._spec, options, order, self._item, following)

    # -- N ranks, one result

    def _merge(self) -> None:
        results = [
            (o, o.value) for o in self._outcomes if isinstance(o.value, ItemResult)
        ]
        self._take_reports(results)
        late = [(o, o.late) for o in self._outcomes if isinstance(o.late, ItemResult)]
        self._take_subtests([(o.rank, r) for o, r in (*results, *late)])
        self._take_warnings([result for _, result in results])
        # A rank without a result has died or hangs, so ranks ended differently.
        all_ended = all(map(_is_torn_down, self._outcomes))
        if all_ended:
            self._take_expectation([result.expected for _, result in results])
        for _, result in results:
            properties = self._item.user_properties
            properties.extend(
                each for each in result.properties if each not in properties
            )
            for name, reason in result.stops:
                setattr(self._item.session, name, reason)
        if self.failure is not None:
            own = [o.value for o in self._outcomes if o.state not in _FOLLOWED]
            self.failed_in = min(map(_place_of_failure, own), key=_PHASES.index)
        for when in _PHASES:
            phases = [(o, p) for o, r in results if (p := r.phase(when)) is not None]
            kinds = {phase.kind for _, phase in phases}
            failed = [
                (o, p) for o, p in phases if p.kind == FAIL and o.state not in _FOLLOWED
            ]
            if when == "teardown":
                failed += _own_teardowns_of_victims(self._outcomes)
            if self._is_expected(p for _, p in failed):
                self._expected.add(when)
            if self.failure is not None and when == self.failed_in:
                self._ended[when] = _for_pytest(self.failure)
            elif failed:
                reports = dict(self._reports.get(when, ()))
                for o, p in failed:
                    if o.rank not in reports:  # of a rank that was ended
                        report = _deserialised(self._item.config, p.report)
                        reports[o.rank] = report
                text = "\n".join(
                    f"rank {o.rank}: {_cause(reports[o.rank])}"
                    f"{reports[o.rank].longreprtext}"
                    for o, _ in failed
                )
                self._ended[when] = pytest.fail.Exception(text, pytrace=False)
            elif all_ended and FAIL not in kinds and len(kinds) > 1:
                text = _disagreement(self._outcomes) or _different_ends(when, phases)
                self._ended[when] = pytest.fail.Exception(text, pytrace=False)
            elif all_ended and kinds & {SKIP, XFAIL}:
                phase = phases[0][1]
                # Raised here, because --runxfail disables pytest.xfail().
                kind = pytest.skip if phase.kind == SKIP else pytest.xfail
                self._ended[when] = kind.Exception(phase.reason)

    def _is_expected(self, failed: Iterable[Phase]) -> bool:
        """Return True if the ``xfail`` mark explains all failures of a phase.

        False if a rank died, hung in its teardown, or skipped the test.
        """
        own = [o for o in self._outcomes if o.state not in _FOLLOWED]
        if any(_left(o) == SKIP for o in self._outcomes) or any(map(_is_fault, own)):
            return False
        # Once a rank has ended its teardown, the others have the grace time. A rank
        # that nobody ended hangs in its teardown.
        if not any(_is_torn_down(o) or o.place.waits for o in own):
            return False
        expected = [phase.is_expected for phase in failed]
        return bool(expected) and all(expected)

    def _take_reports(self, results: Sequence[tuple[RankOutcome, ItemResult]]) -> None:
        config = self._item.config
        for outcome, result in results:
            for phase in result.phases:
                report = _deserialised(config, phase.report)
                self._reports.setdefault(phase.when, []).append((outcome.rank, report))

    def _take_subtests(self, results: Sequence[tuple[int, ItemResult]]) -> None:
        """Report each subtest once; the report of a rank on which it failed wins.

        The test fails if a subtest is passed on some ranks and skipped on others. A
        rank may leave a subtest out: rank 0 alone may check a file, say.
        """
        item, config = self._item, self._item.config
        by_rank: dict[tuple[str, int], dict[int, Any]] = {}
        for rank, result in results:
            seen: dict[str, int] = {}
            for data in result.subtests:
                report = _deserialised(config, data)
                internals.restore_subtest(report, data)
                report.nodeid, report.location = item.nodeid, item.location
                report.sections.append(("Rank", str(rank)))
                name = repr(getattr(report, "context", None))
                seen[name] = seen.get(name, 0) + 1
                by_rank.setdefault((name, seen[name]), {})[rank] = report
        failed, texts, shown = 0, list[str](), list[Any]()
        for (name, _), reports in by_rank.items():
            # an expected failure counts as a failure; of equals the first rank wins
            worst = max(reports.values(), key=lambda r: (r.failed, _has_xfailed(r)))
            shown.append(worst)
            failed += worst.failed
            differ = len({report.outcome for report in reports.values()}) > 1
            if differ and not worst.failed and not _has_xfailed(worst):
                each = (f"{r.outcome} on rank {rank}" for rank, r in reports.items())
                texts.append(f"subtest {name}: {', '.join(each)}")
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        # the terminal shows them while the test runs, as in one process
        with (
            nullcontext() if capture is None else capture.global_and_fixture_disabled()
        ):
            for report in shown:
                item.ihook.pytest_runtest_logreport(report=report)
        if failed:
            texts = [f"contains {failed} failed subtest{'s' * (failed > 1)}"]
        if texts:
            self._ended["call"] = pytest.fail.Exception(texts[0], pytrace=False)

    def _take_warnings(self, results: Sequence[ItemResult]) -> None:
        seen = set()
        for result in results:
            for warning in result.warnings:
                message = warning["warning_message"]
                key = str(message.message), message.filename, message.lineno
                if key not in seen:
                    seen.add(key)
                    self._item.ihook.pytest_warning_recorded.call_historic(
                        kwargs={**warning, "nodeid": self._item.nodeid}
                    )

    def _take_expectation(self, expected: Sequence[Mapping[str, Any] | None]) -> None:
        """Expect a failure if all ranks mark the test xfail; fail if only some do."""
        if len({each is None for each in expected}) > 1:
            text = "only some ranks have marked the test xfail"
            self._ended["call"] = pytest.fail.Exception(text, pytrace=False)
        elif expected and expected[0] is not None:
            internals.expect_failure(self._item, expected[0])

    def complete(self, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        """Add the ranks' own reports to the report of one phase."""
        ranks = self._reports.get(call.when, [])
        for each in ("duration", "start", "stop"):
            values = [getattr(r, each) for _, r in ranks if hasattr(r, each)]
            if values:
                setattr(report, each, (min if each == "start" else max)(values))
        titles = dict.fromkeys(title for _, r in ranks for title, _ in r.sections)
        for title in titles:
            parts = [
                f"--- rank {rank} ---\n{text}"
                for rank, r in ranks
                for t, text in r.sections
                if t == title
            ]
            report.sections.append((title, "\n".join(parts)))
        if report.skipped and not hasattr(report, "wasxfail") and ranks:
            report.longrepr = ranks[0][1].longrepr or report.longrepr
        raised = self._ended.get(call.when)
        if call.excinfo is None or call.excinfo.value is not raised:
            return  # a subtest of another plugin
        if early_end(call.excinfo.value) is None:
            is_expected = call.when in self._expected
            internals.apply_expectation(self._item, report, is_expected)
        if report.failed and self.failure is not None and call.when == self.failed_in:
            # the rank's traceback has its own notes; a hook here may have added others
            shown = self.failure.root.traceback or ""
            own = getattr(raised, "__notes__", [])
            notes = [note for note in own if note not in shown]
            notes += [
                f"rank {outcome.rank} died in its teardown: {death}"
                for outcome in self.failure.outcomes
                if (death := _death(outcome))
            ]
            title = _disagreement(self.failure.outcomes)
            show(self._item, self.failure, report, title, notes)


def complete(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Complete the report of a test that ran on ranks."""
    if call.excinfo is not None and call.excinfo.value is item.stash.get(
        _REFUSED, None
    ):
        internals.apply_expectation(item, report, is_expected=False)
        return
    run = item.stash.get(_RUN, None)
    if run is None:
        return
    run.complete(call, report)
    if report.failed and item.config.getoption("usepdb", False):
        if _session_order(item.config).terminal is None:
            report.sections.append(("--pdb", _NO_TERMINAL))


def shows_live(config: pytest.Config) -> bool:
    """Return True if output of ranks is shown while they run, and not in reports."""
    return config.getoption("capture", "fd") in ("no", "tee-sys")


def report_unended(item: pytest.Item, failure: WorldError) -> None:
    """Report errors of fixtures that outlived their tests on ranks.

    Args:
        item: Last test; the error counts as one of its teardown.
        failure: Outcomes of the ranks.
    """
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=None,
        when="teardown",
    )
    title = "fixtures that outlived this test on its ranks failed:\n"
    show(item, failure, report, title)
    with internals.reporting(item):
        item.ihook.pytest_runtest_logreport(report=report)


def show(
    item: pytest.Item,
    failure: WorldError,
    report: pytest.TestReport,
    title: str = "",
    notes: Sequence[str] = (),
) -> None:
    """Write a failed world into a report, between ``title`` and ``notes``."""
    outcomes, root = failure.outcomes, failure.root
    hides = item.config.getoption("showcapture", "all") == "no"
    if hides or shows_live(item.config):
        outcomes = tuple(replace(outcome, output="") for outcome in outcomes)
        root = outcomes[root.rank]
    text = "\n".join([title + render_failure(outcomes, root), *notes])
    report.longrepr = internals.chain_of(text, item, root.headline)


def _cause(report: Any) -> str:
    """Return the first line of a report's error, if there is one, and a line break."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"{crash.message.partition(chr(10))[0]}\n" if crash is not None else "\n"


def _has_xfailed(report: Any) -> bool:
    """Return True for a failure that a mark xfail expects."""
    return hasattr(report, "wasxfail") and report.skipped


def _deserialised(config: pytest.Config, data: Mapping[str, Any]) -> Any:
    return config.hook.pytest_report_from_serializable(config=config, data=dict(data))


def _for_pytest(failure: WorldError) -> BaseException:
    """Return the exception by which pytest and its plugins see a failed world."""
    disagreement = _disagreement(failure.outcomes)
    if disagreement:
        return pytest.fail.Exception(disagreement, pytrace=False)
    error = failure.root.exception
    # pytest.exit on one rank would hide what the other ranks did.
    exits = [isinstance(o.exception, pytest.exit.Exception) for o in failure.outcomes]
    if not isinstance(error, Exception | pytest.fail.Exception) or (
        early_end(error) is not None or (any(exits) and not all(exits))
    ):
        return failure
    return error


def _place_of_failure(result: object) -> str:
    """Return the phase in which a rank failed, by its result."""
    if not isinstance(result, ItemResult):
        return "call"
    ended = [phase.when for phase in result.phases if phase.kind]
    return result.failed or next(iter(ended), "call")


def _is_fault(outcome: RankOutcome) -> bool:
    """Return True if a rank failed in another way than by an exception of its test.

    For example the process died, perhaps in the teardown after such an exception.
    """
    result = outcome.value
    failed = isinstance(result, ItemResult) and result.failed is not None
    return not failed or bool(_death(outcome))


def _is_torn_down(outcome: RankOutcome) -> bool:
    result = outcome.value
    return isinstance(result, ItemResult) and result.phase("teardown") is not None


def _own_teardowns_of_victims(
    outcomes: Iterable[RankOutcome],
) -> Iterator[tuple[RankOutcome, Phase]]:
    """Yield teardowns that failed by themselves after another rank's failure."""
    for outcome in outcomes:
        for result in (outcome.value, outcome.late):
            if outcome.state is RankState.VICTIM and isinstance(result, ItemResult):
                phase = result.phase("teardown")
                if phase is not None and phase.kind == FAIL and not phase.followed:
                    yield outcome, phase


def _death(outcome: RankOutcome) -> str:
    """Return how a rank died in the teardown of a failed test; "" if it did not die."""
    if outcome.state is not RankState.RAISED:
        return ""
    code = outcome.exit_code
    return outcome.signal or ("" if code is None else f"exit code {code}")


def _left(outcome: RankOutcome) -> str:
    """Return the kind of an early end, such as a skip; "" if there was none."""
    return outcome.value.kind if isinstance(outcome.value, Left) else ""


def _disagreement(outcomes: tuple[RankOutcome, ...]) -> str:
    if not any(map(_left, outcomes)):
        return ""
    lines = [
        f"  rank {outcome.rank}: {_left(outcome)} {outcome.value.reason}"
        if outcome.ok and _left(outcome)
        else f"  {outcome.headline}"
        for outcome in outcomes
    ]
    return "\n".join(["the ranks do not agree on the outcome:", *lines, ""])


def _different_ends(when: str, phases: Sequence[tuple[RankOutcome, Phase]]) -> str:
    """Return a text that shows how each rank ended a phase; for ranks that disagree."""
    lines = [
        f"  rank {outcome.rank}: {phase.kind or 'passed'} {phase.reason}".rstrip()
        for outcome, phase in phases
    ]
    return "\n".join([f"the ranks do not agree on the {when}:", *lines])


def _session_order(config: pytest.Config) -> SessionOrder:
    if _SESSION not in config.stash:
        config.stash[_SESSION] = SessionOrder(
            options=(options := dict(_options(config))),
            args=(*_loaded(config), *config.args),
            # what a rank must parse itself: options that are not sent, or must be given
            written=internals.as_written(
                config, lambda o: o.required or o.dest not in options
            ),
            folder=str(config.invocation_params.dir),
            terminal=_terminal(config),
            temporary=internals.temporary_folder(config),
            captures=config.getoption("capture", "fd") != "no",
            worker=getattr(config, "workerinput", None) or _as_only_worker(config),
        )
    return config.stash[_SESSION]


def _terminal(config: pytest.Config) -> str | None:
    if not config.getoption("usepdb", False):
        return None
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    try:
        return os.ttyname(0)
    except OSError:
        return None  # the failure is reported as without --pdb
    finally:
        if capture is not None:
            capture.resume_global_capture()


def _as_only_worker(config: pytest.Config) -> Mapping[str, Any]:
    worker = {
        "workerid": "master",
        "workercount": 1,
        "testrunuid": uuid.uuid4().hex,
        "mainargv": list(sys.argv),
    }
    # Plugins that know workers of pytest-xdist add what they need there. pytest-cov
    # would add something only for workers: coverage.py measures ranks by itself.
    plugins = config.pluginmanager
    if hasattr(config.hook, _CONFIGURE_NODE):
        configure = plugins.subset_hook_caller(
            _CONFIGURE_NODE, [plugins.get_plugin("_cov")]
        )
        configure(node=SimpleNamespace(config=config, workerinput=worker))
    return worker


def _options(config: pytest.Config) -> Iterator[tuple[str, Any]]:
    for name, value in vars(config.option).items():
        if name == "file_or_dir":
            continue  # arguments are sent apart
        if name in _OWN_OF_A_RANK:
            yield name, _OWN_OF_A_RANK[name]
        elif is_plain(value):
            yield name, value  # ranks parse other options again
    yield "rootdir", str(config.rootpath)
    yield "inifilename", config.inipath and str(config.inipath)
    # The forkserver has imported the plugins before any session.
    ignored = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    yield "pythonwarnings", [*(config.option.pythonwarnings or ()), ignored]
    # Other ranks may still read a folder that a rank made for all of them.
    overrides = config.option.override_ini or ()
    yield "override_ini", [*overrides, "tmp_path_retention_policy=all"]
    yield "plugins", ["no:terminal"]
    yield "gradparity_rank", True


def _loaded(config: pytest.Config) -> Iterator[str]:
    # ranks get plugins as arguments, since plugins declare options that ranks parse
    for plugin in config.option.plugins:
        yield from ("-p", plugin)
