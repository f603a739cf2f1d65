"""Run one test of torch's test classes on a rank.

torch's classes start processes and tell them by private methods what to run. Here the
ranks already exist, and run exactly what those processes would.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

from .. import linux
from ..environment import on_torchrun
from ..outcomes import Left
from .endings import SKIP, conclude, early_end, refuse_unrun, torch_skip
from .world import current_world

EXIT_0 = Left("exit", "SystemExit", "0")
"""Early end of a process of torch's classes by ``sys.exit(0)``; the test passes."""

_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_TORCHRUN = ("MASTER_ADDR", "MASTER_PORT")
"""Environment variables with torchrun's address, which a rank does not get."""


@dataclass(frozen=True, kw_only=True)
class CaseRef:
    """Reference to one test method, which can be sent to the ranks."""

    cls: type[Any]
    """Class of the test; the ranks import its module."""

    method: str
    env: Mapping[str, str]
    """Values in the parent of variables that a rank sets anew or does not get; empty
    under torchrun."""

    @classmethod
    def of(cls, test: unittest.TestCase) -> CaseRef:
        """Return a reference to the test of a test-case instance."""
        passed_on = () if on_torchrun() else (*_OF_RANKS, *_OF_TORCHRUN)
        env = {k: os.environ[k] for k in passed_on if k in os.environ}
        return cls(cls=type(test), method=test._testMethodName, env=env)


def run_process_test(
    case: CaseRef, file_name: str, settings: Mapping[str, Any]
) -> Left | None:
    """Do the work of a process of torch's ``MultiProcessTestCase``.

    Args:
        case: The test.
        file_name: File for the rendezvous.
        settings: Further arguments of the class's ``_run``.

    Returns:
        Early end of the test, such as a skip; else None.
    """
    _patch_run_test()
    with _as_in_a_child(case) as cls:
        rank = current_world().rank
        return _leave_process(
            lambda: cls._run(rank, case.method, file_name, None, **settings)
        )


_prepared: tuple[type[Any], dict[str, str]] | None = None
"""Class of ``MultiProcContinuousTest`` whose process group exists, and the environment
changes that its creation made."""


def run_continuous_test(case: CaseRef, file_name: str) -> Left | None:
    """Do the work of a process of torch's ``MultiProcContinuousTest``.

    Args:
        case: The test.
        file_name: File for the rendezvous, if the process group must be created.

    Returns:
        Early end of the test, such as a skip; else None.
    """
    import torch.distributed as dist

    from . import left_behind

    world = current_world()

    def run(cls: Any) -> None:
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

    with _as_in_a_child(case, keeps_group=True) as cls:
        return _leave_process(lambda: run(cls))


def run_threaded_test(case: CaseRef) -> Left | None:
    """Run a test of torch's ``MultiThreadedTestCase``, whose ranks are threads.

    Returns:
        A skip of the test, or None.
    """
    with _as_in_a_child(case) as cls:
        cls.setUpClass()
        try:
            test = cls(case.method)
            result = _Result()
            with _threads_agree(cls, test.world_size):
                test.run(result)
            return conclude(result.raised, _skip)
        finally:
            cls.tearDownClass()


@contextmanager
def _threads_agree(cls: Any, size: int) -> Iterator[None]:
    """Fail a test that only some threads skip; torch's class would report a skip."""
    own = cls._check_return_codes

    def check(failed: list[tuple[int, Any]], *args: Any) -> None:
        skips = [r for r, err in failed if isinstance(err[1], unittest.SkipTest)]
        if skips and len(failed) < size:
            raise AssertionError(f"ranks {skips} skip the test, and others pass it")
        own(failed, *args)

    with mock.patch.object(cls, "_check_return_codes", check):
        yield


@contextmanager
def _as_in_a_child(case: CaseRef, *, keeps_group: bool = False) -> Iterator[Any]:
    """Yield the class of a test, in the state of a process that the parent started.

    The time limit of the test starts, since its module has been imported. The test
    raises if it returns code that has not run. torch's classes and unittest ignore
    returned values, so such a test would pass.

    Args:
        case: The test.
        keeps_group: True to keep groups and caches for the next test of the class.
    """
    cls, name = case.cls, case.method
    current_world()._begin()  # noqa: SLF001  # its own world
    own = inspect.getattr_static(cls, name)

    @functools.wraps(getattr(cls, name))
    def checked(self: Any, *args: Any) -> None:
        bound = own.__get__(self, cls) if hasattr(own, "__get__") else own
        refuse_unrun(name, bound(*args))

    for variable in (*_OF_RANKS, "PYTEST_CURRENT_TEST"):
        os.environ.pop(variable, None)  # put back by the caller
    os.environ.update(case.env)
    os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"  # as torch's classes do
    forget = _forget if not keeps_group else lambda: None
    forget()
    try:
        with mock.patch.object(cls, name, checked):
            yield cls
    finally:
        forget()


class _Result(unittest.TestResult):
    """Keeps the exceptions of a test, not only their texts."""

    def __init__(self) -> None:
        super().__init__()
        self.raised: list[tuple[str, BaseException]] = []

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        """Keep the exception of an error, of a failure, or of an expected failure.

        An expected failure is kept too: the same test in the parent expects it.
        """
        self.raised.append((test.id(), err[1]))

    addFailure = addExpectedFailure = addError

    def addSubTest(
        self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any
    ) -> None:
        """Keep the exception of a failed subtest."""
        if err is not None:
            self.addError(subtest, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        """Keep a skip of the test; one of a subtest does not end the test."""
        if not hasattr(test, "test_case"):
            self.raised.append((test.id(), unittest.SkipTest(reason)))


def _skip(error: BaseException) -> Left | None:
    """Return the skip that an error means, or None; torch also skips by exit codes."""
    if isinstance(error, SystemExit) and (reason := torch_skip(error)) is not None:
        return Left(SKIP, "unittest.case.SkipTest", reason)
    left = early_end(error)
    return left if left is not None and left.kind == SKIP else None


def _leave_process(run: Callable[[], object]) -> Left | None:
    """Run a test of torch's multi-process classes on this rank.

    Returns:
        The skip or the exit with 0 by which the test ended early; None if it ran to its
        end. A rank that exits with another code ends here.
    """
    try:
        run()
    except BaseException as error:
        if (left := _skip(error)) is not None:
            return left
        if not isinstance(error, SystemExit):
            raise
        if not error.code:
            return EXIT_0
        # Exit for real, so that the other ranks lose the connection.
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        linux.flush_standard_streams()
        os._exit(error.code if isinstance(error.code, int) else 1)
    return None


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
