"""``--gradparity-adopt``: unchanged tests of torch's test classes run on warm ranks.

torch's test classes have a few methods that start processes, send them work and wait
for them. Only these methods are replaced during the session. Tests, their decorators
and their classes are unchanged.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import types
import unittest
from collections.abc import Callable, Generator
from typing import Any

import pytest

from ..environment import hosts
from ..errors import WorldError
from ..outcomes import Left, RankOutcome, RankState
from ..rank.endings import SKIP
from ..rank.unittests import (
    CaseRef,
    run_continuous_test,
    run_process_test,
    run_threaded_test,
)
from ..report import render_output
from ..spec import CallOptions, WorldSpec
from .controller import show
from .runner import Runner, UnsuitableWorld

_COMMON = "torch.testing._internal.common_distributed"
_BASES = ("MultiProcessTestCase", "MultiProcContinuousTest", "MultiThreadedTestCase")


class Adoption:
    """Plugin object that runs tests of torch's multi-process classes on our ranks."""

    def __init__(self, runner: Callable[[], Runner]) -> None:
        """Store the arguments; methods of torch's classes are replaced later.

        Args:
            runner: Returns the runner of the session's tests on ranks.
        """
        self._runner = runner
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._patch = pytest.MonkeyPatch()
        self._is_patched = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(
        self, collector: pytest.Module | pytest.Class, name: str, obj: object
    ) -> None:
        """Patch torch's classes before a test class is instantiated."""
        # The module of the class has just been imported. Replace the methods before an
        # instance is made: an older instance would wait for no process, and so pass.
        if not self._is_patched and (bases := _torch_bases()):
            self._is_patched = True
            self._replace(*bases)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Show a failed world in a report instead of the parent's traceback."""
        report = yield
        failure = call.excinfo.value if call.excinfo else None
        if report.failed and isinstance(failure, WorldError) and is_adopted(item):
            show(item, failure, report)
        return report

    def pytest_unconfigure(self) -> None:
        """Restore the methods of torch's classes."""
        self._patch.undo()
        if self._folder is not None:
            self._folder.cleanup()

    def _replace(self, process: Any, continuous: Any, threaded: Any) -> None:
        common = sys.modules[_COMMON]
        run, new_file = self._run, self._new_file

        # -- a process for each rank and each test

        def spawn(self: Any, proc: object = None) -> None:
            self.processes = []
            self._gradparity_spawned = True

        def set_up(self: Any) -> None:
            process_set_up(self)
            if os.path.exists(self.file_name):
                os.remove(self.file_name)  # no other code removes it
            self.file_name = new_file()

        def join(self: Any, fn: Any) -> None:
            __tracebackhide__ = True
            if not getattr(self, "_gradparity_spawned", False):
                raise RuntimeError(
                    f"{self.id()} is run by no rank: setUp of its class does not call "
                    "_spawn_processes(). torch's class would say that it passed."
                )
            if int(self.world_size) == 0:
                raise unittest.SkipTest("its world_size is 0: no rank would run it")
            settings = {"fake_pg": getattr(self, "fake_pg", False)}
            limit_s = common.get_timeout(self.id())
            ended = functools.partial(_ends_as_expected, self, fn)
            run(
                self,
                int(self.world_size),
                limit_s,
                ended,
                run_process_test,
                self.file_name,
                settings,
            )

        process_set_up = process.setUp
        self._put(process, setUp=set_up, _join_processes=join)
        self._put(process, _spawn_processes=spawn, _start_processes=spawn)

        # -- processes for all tests of a class

        def spawn_for_class(cls: Any, world_size: int) -> None:
            cls.task_queues = []
            # Not an empty list, with which torch's own method would find nothing to
            # wait for.
            cls.processes, cls.completion_queues = [], None
            cls.rdvz_file = new_file()

        def run_or_call(self: Any, fn: Callable[[], None]) -> Any:
            @functools.wraps(fn)
            def wrapper(self: Any) -> None:
                __tracebackhide__ = True
                limit_s = common.get_timeout(self.id())
                if self.rank != self.MAIN_PROCESS_RANK:
                    fn()
                else:
                    run(
                        self,
                        int(type(self).world_size),
                        limit_s,
                        None,
                        run_continuous_test,
                        new_file(),
                    )

            return types.MethodType(wrapper, self)

        self._put(
            continuous,
            _spawn_processes=classmethod(spawn_for_class),
            _worker_run_main_wait=run_or_call,
        )

        # -- threads of this process

        def spawn_no_threads(self: Any) -> None:
            self.threads = None  # None, since no thread is to be waited for

        def run_on_a_rank(self: Any, fn: Callable[[], None]) -> Any:
            @functools.wraps(fn)
            def wrapper(self: Any) -> None:
                __tracebackhide__ = True
                if self.rank != self.MAIN_THREAD_RANK:
                    fn()
                else:
                    run(self, 1, common.TIMEOUT_DEFAULT, None, run_threaded_test)

            return types.MethodType(wrapper, self)

        self._put(threaded, _spawn_threads=spawn_no_threads, join_or_run=run_on_a_rank)

    def _put(self, owner: type[Any], **methods: Any) -> None:
        for name, method in methods.items():
            self._patch.setattr(owner, name, method)

    def _run(
        self,
        test: unittest.TestCase,
        size: int,
        limit_s: float,
        ended: Callable[[WorldError], bool] | None,
        fn: Callable[..., Any],
        *args: Any,
    ) -> None:
        __tracebackhide__ = True
        spec = WorldSpec(
            world_size=size,
            # A process of torch's classes begins without a group, and makes its own.
            default_group=False,
            timeout_s=float(limit_s),
        )
        runner = self._runner()
        options = CallOptions(timeout_s=spec.timeout_s, is_test=True, live=runner.live)
        try:
            outcomes = runner.run(spec, options, fn, CaseRef.of(test), *args)
            left = outcomes[0].value  # the same on all ranks
            if not runner.live:
                print(render_output(outcomes), end="")
            if isinstance(left, Left) and left.kind == SKIP:
                raise unittest.SkipTest(left.reason)
        except UnsuitableWorld as reason:
            raise unittest.SkipTest(str(reason)) from None
        except WorldError as failure:
            if ended is None or not ended(failure):
                raise

    def _new_file(self) -> str:
        if (count := hosts()) > 1:
            raise unittest.SkipTest(
                f"torch's class lets its ranks meet in a file, and they are on {count} "
                "hosts: run it on one"
            )
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(
                prefix="gradparity-adopt-", ignore_cleanup_errors=True
            )
        fd, path = tempfile.mkstemp(dir=self._folder.name)
        os.close(fd)
        return path


def _ends_as_expected(test: Any, fn: Any, failure: WorldError) -> bool:
    """Return True if ranks ended as a torch test expects of its processes."""
    ended = (RankState.EXITED, RankState.KILLED, RankState.VICTIM, RankState.OK)
    if any(outcome.state not in ended for outcome in failure.outcomes):
        return False
    if fn in test.skip_return_code_checks:
        return True
    return fn in test.special_return_code_checks and (
        _code(failure.outcomes[0]) == test.special_return_code_checks[fn]
    )


def _code(outcome: RankOutcome) -> int | None:
    if outcome.signal is not None:
        import signal

        return -signal.Signals[outcome.signal].value
    return outcome.exit_code


def _torch_bases() -> tuple[type[Any], ...]:
    common = sys.modules.get(_COMMON)
    return () if common is None else tuple(getattr(common, n) for n in _BASES)


def is_adopted(item: pytest.Item) -> bool:
    """Return True for a test of one of torch's multi-process classes."""
    cls = getattr(item, "cls", None)
    return cls is not None and issubclass(cls, _torch_bases())
