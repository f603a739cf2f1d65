"""Run one unittest test on a rank: of our ``TestCase``, or of torch's test classes.

torch's classes start processes and tell them by private methods what to run. Here the
ranks already exist, and run exactly what those processes would.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import threading
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from unittest import mock

from .. import linux
from ..environment import on_torchrun
from ..outcomes import Failed, Left
from ..python_internals import message_of
from .endings import SKIP, XFAIL, conclude, early_end, refuse_unrun
from .world import current_world

EXIT_0 = Left("exit", "SystemExit", "0")
"""Early end of a process of torch's classes by ``sys.exit(0)``; the test passes."""

_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT")
"""Environment variables that a rank sets anew, beside ``_OF_RANKS``."""

ExcInfo = (
    tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
)


@dataclass(frozen=True, kw_only=True)
class CaseRef:
    """Reference to one test method, which can be sent to the ranks."""

    module: str
    cls: str | type[Any]
    """Name of the class in its module, or the class itself if the module has no name
    for it."""

    method: str
    env: Mapping[str, str]
    """Values in the parent of variables that a rank sets anew; empty under torchrun."""

    @classmethod
    def of(cls, test: unittest.TestCase) -> CaseRef:
        """Return a reference to the test of a test-case instance."""
        kind = type(test)
        home = vars(sys.modules[kind.__module__])
        # A class may be made by a function, so use the name that its module has for it.
        names = [kind.__qualname__, *(n for n, v in home.items() if v is kind)]
        name = next((n for n in names if home.get(n) is kind), None)
        if kind.__module__ == "__main__":
            name = None  # the name is that of another class on the ranks
        passed_on = () if on_torchrun() else (*_OF_RANKS, *_OF_TORCHRUN)
        return cls(
            module=kind.__module__,
            cls=name or kind,
            method=test._testMethodName,
            env={k: os.environ[k] for k in passed_on if k in os.environ},
        )

    def find(self) -> Any:
        """Import and return the class; the time limit of the test starts then."""
        cls = self.cls
        if isinstance(cls, str):
            cls = getattr(importlib.import_module(self.module), cls)
        current_world()._begin()  # noqa: SLF001  # its own world
        return cls


class Shown(str):
    """Text of a value; its ``repr`` is the text itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class SkippedSubtest:
    """Subtest that was skipped on a rank."""

    message: str | None
    parameters: tuple[tuple[str, Shown], ...]
    reason: str


@dataclass(frozen=True)
class CaseResult(Left):
    """Result of a test of our own class; ``kind`` is empty unless it ended early."""

    warnings: tuple[tuple[str, type[Warning], str, int], ...] = ()
    """(text, category, file, line) of each warning, for the parent's filters."""

    skipped_subtests: tuple[SkippedSubtest, ...] = ()


def run_case(case: CaseRef) -> CaseResult:
    """Run a test with its setUp, tearDown and cleanups, as unittest does."""
    # An instance of this rank: the parent's instance has attributes of pytest, and is
    # not sent.
    cls = case.find()
    with (
        _runs(cls, case.method),
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(threading, "excepthook", _warn_of_thread),
    ):
        warnings.simplefilter("default")
        test = cls(case.method)
        test._become_rank(current_world())
        result = _Result()
        left = _run_by_unittest(test, result) or Left("", "", "")
    seen = ((str(w.message), w.category, w.filename, w.lineno) for w in caught)
    skipped = tuple(result.skipped_subtests)
    return CaseResult(left.kind, left.name, left.reason, tuple(seen), skipped)


def _warn_of_thread(error: threading.ExceptHookArgs) -> None:
    """Warn of an exception that ended a thread, as pytest does in one process."""
    pytest = sys.modules.get("pytest")
    own = "PytestUnhandledThreadExceptionWarning"
    name = error.thread.name if error.thread is not None else "?"
    lines = traceback.format_exception(
        error.exc_type, error.exc_value, error.exc_traceback
    )
    text = f"Exception in thread {name}\n\n{''.join(lines)}"
    warnings.warn(text, getattr(pytest, own, RuntimeWarning), stacklevel=1)


def run_process_test(
    case: CaseRef, file_name: str, settings: Mapping[str, Any]
) -> Left | None:
    """Do the work of a process of torch's ``MultiProcessTestCase``.

    Args:
        case: The test.
        file_name: File for the rendezvous.
        settings: Further arguments of the class's ``_run``.
    """
    cls = case.find()
    _patch_run_test()
    with _as_child(case.env), _runs(cls, case.method):
        _forget()
        try:
            return _leave_process(
                lambda: cls._run(
                    current_world().rank, case.method, file_name, None, **settings
                )
            )
        finally:
            _forget()


_prepared: tuple[type[Any], dict[str, str]] | None = None
"""Class of ``MultiProcContinuousTest`` whose process group exists, and the environment
changes that its creation made."""


def run_continuous_test(case: CaseRef, file_name: str) -> Left | None:
    """Do the work of a process of torch's ``MultiProcContinuousTest``.

    Args:
        case: The test.
        file_name: File for the rendezvous, if the process group must be created.
    """
    import torch.distributed as dist

    from . import left_behind

    cls, world = case.find(), current_world()

    def run() -> None:
        global _prepared
        if _prepared is None or _prepared[0] is not cls or not dist.is_initialized():
            _forget()
            cls.rank, cls.world_size = world.rank, world.world_size
            before = dict(os.environ)
            cls._init_pg(world.rank, world.world_size, file_name)
            changed = {k: v for k, v in os.environ.items() if before.get(k) != v}
            _prepared = cls, changed
            left_behind.allow_present()  # the next tests of the class use this group
        os.environ.update(_prepared[1])
        cls._run_test_given_id(case.method)

    with _as_child(case.env), _runs(cls, case.method):
        return _leave_process(run)


def run_threaded_test(case: CaseRef) -> Left | None:
    """Run a test of torch's ``MultiThreadedTestCase``, whose ranks are threads."""
    cls = case.find()
    with _as_child(case.env), _runs(cls, case.method):
        _forget()
        try:
            cls.setUpClass()
            try:
                test = cls(case.method)
                with _threads_agree(cls, test.world_size):
                    return _run_by_unittest(test, _Result())
            finally:
                cls.tearDownClass()
        finally:
            _forget()


@contextmanager
def _threads_agree(cls: Any, size: int) -> Iterator[None]:
    """Fail a test that only some threads skip; torch's class would report a skip."""
    own = cls._check_return_codes

    def check(failed: list[tuple[int, ExcInfo]], *args: Any) -> None:
        skips = [r for r, err in failed if isinstance(err[1], unittest.SkipTest)]
        if skips and len(failed) < size:
            raise AssertionError(f"ranks {skips} skip the test, and others pass it")
        own(failed, *args)

    with mock.patch.object(cls, "_check_return_codes", check):
        yield


@contextmanager
def _runs(cls: type[Any], name: str) -> Iterator[None]:
    """Raise in this context if a test method returns code that has not run.

    torch's classes and unittest ignore what it returns, so the test would pass.
    """
    own = inspect.getattr_static(cls, name)

    @functools.wraps(getattr(cls, name))
    def checked(self: Any, *args: Any) -> None:
        bound = own.__get__(self, cls) if hasattr(own, "__get__") else own
        refuse_unrun(name, bound(*args))

    inherited = name not in vars(cls)
    setattr(cls, name, checked)
    try:
        yield
    finally:
        if inherited:
            delattr(cls, name)
        else:
            setattr(cls, name, own)


def _run_by_unittest(test: unittest.TestCase, result: _Result) -> Left | None:
    test.run(result)
    return conclude(result.raised, result.early)


class _Result(unittest.TestResult):
    """Keeps the exception of a test, not only its text."""

    def __init__(self) -> None:
        super().__init__()
        self.raised: list[tuple[str, BaseException]] = []
        self.skipped_subtests: list[SkippedSubtest] = []
        self._expected: BaseException | None = None

    def addError(self, test: unittest.TestCase, err: ExcInfo) -> None:
        """Keep the exception of an error or a failure, and report it."""
        self._keep(test, err)
        error = err[1]
        if isinstance(error, Exception) and self.early(error) is None:
            # At once, because tearDown may wait for ranks that no longer come.
            current_world()._fail(Failed(error, None))  # noqa: SLF001  # its own world

    addFailure = addError

    def addSubTest(
        self, test: unittest.TestCase, subtest: unittest.TestCase, err: ExcInfo | None
    ) -> None:
        """Keep the exception of a failed subtest."""
        if err is not None:
            self._keep(subtest, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """Keep a skip of the test, or of a subtest, which does not end the test."""
        if not hasattr(test, "test_case"):
            self.raised.append((test.id(), unittest.SkipTest(reason)))
            return
        subtest: Any = test
        shown = tuple((name, Shown(repr(v))) for name, v in subtest.params.items())
        skipped = SkippedSubtest(message_of(subtest), shown, reason)
        self.skipped_subtests.append(skipped)

    def addExpectedFailure(self, test: unittest.TestCase, err: ExcInfo) -> None:
        """Keep an expected failure, which the parent expects as well."""
        self._keep(test, err)
        self._expected = err[1]

    def early(self, error: BaseException) -> Left | None:
        """Return how an exception ends the test without a failure, or None."""
        if error is self._expected:
            return Left(XFAIL, type(error).__name__, str(error))
        return _early_end(error)

    def _keep(self, test: unittest.TestCase, err: ExcInfo) -> None:
        if err[1] is not None:
            self.raised.append((test.id(), err[1]))


def _early_end(error: BaseException) -> Left | None:
    """Return how an error ends a test early; knows the exit codes of torch's skips."""
    if isinstance(error, SystemExit):
        common = sys.modules.get("torch.testing._internal.common_distributed")
        for skip in common.TEST_SKIPS.values() if common is not None else ():
            if error.code == skip.exit_code:
                return Left(SKIP, "unittest.case.SkipTest", str(skip.message))
    return early_end(error)


def _leave_process(run: Callable[[], object]) -> Left | None:
    """Do the work of a process of torch's classes; return its early end or None."""
    try:
        run()
    except BaseException as error:
        if (left := _early_end(error)) is not None:
            return left
        if not isinstance(error, SystemExit):
            raise
        if not error.code:
            return EXIT_0
        # Other ranks must see what they would see of a process that has ended.
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        linux.flush_standard_streams()
        os._exit(error.code if isinstance(error.code, int) else 1)
    return None


@contextmanager
def _as_child(env: Mapping[str, str]) -> Iterator[None]:
    """Set the environment that a child of the parent would have."""
    for name in (*_OF_RANKS, "PYTEST_CURRENT_TEST"):
        os.environ.pop(name, None)  # put back by the caller
    os.environ.update(env)
    os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"  # as torch's classes do
    yield


def _forget() -> None:
    """Reset the state of a process that has run a test: groups, caches and objects."""
    import torch
    import torch.distributed as dist

    # This module imports torch, and the plugin imports the module before the session
    # does.
    from .torch_internals import forget_meshes

    global _prepared
    _prepared = None
    if dist.is_initialized():
        with suppress(Exception):  # after a failed test, ending may fail, too
            dist.destroy_process_group()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    forget_meshes()
    dist.set_debug_level_from_env()


def _patch_run_test() -> None:
    import torch.distributed as dist
    from torch.testing._internal import (  # noqa: PLC2701  # the classes it adopts
        common_distributed,
        common_utils,
    )

    def run_test(self: Any, test_name: str, parent_pipe: object) -> None:
        # torch's own method also starts a thread for requests of the parent, makes
        # fatal signals print C++ stacks, and turns exceptions into exit codes. Here the
        # parent of the ranks does all that.
        common_utils.set_rng_seed()
        getattr(self, test_name)()
        if dist.is_initialized():
            # A rank that is done may end its group while others still connect to it.
            current_world()._wait_until_all_are_done(limit_s=10.0)  # noqa: SLF001  # its own world
        if self.destroy_pg_upon_exit and dist.is_initialized():
            dist.destroy_process_group()

    setattr(common_distributed.MultiProcessTestCase, "run_test", run_test)  # noqa: B010
