"""``TestCase``: a unittest class whose tests run on every rank of a world.

Its settings have the names of torch's test classes. Instead of new processes for each
test it uses a warm ``Cluster``.
"""

from __future__ import annotations

import sys
import unittest
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .cluster import Cluster
from .errors import FailedAssertion, WorldError
from .outcomes import Left, RankOutcome
from .parent.slots import cpu_slots
from .rank.endings import SKIP, XFAIL, refuse_unrun
from .rank.unittests import CaseRef, CaseResult, run_case
from .report import render_output
from .spec import CallOptions, Isolation, WorldSpec

if TYPE_CHECKING:
    from .rank.world import World

Submit = Callable[..., tuple[RankOutcome, ...]]
"""``submit(spec, options, fn, *args)``: run a test on ranks; show its output at the
end."""

_clusters: dict[WorldSpec, Cluster] = {}


def _submit_to_own_ranks(
    spec: WorldSpec, options: CallOptions, fn: Callable[..., Any], *args: Any
) -> tuple[RankOutcome, ...]:
    # No test closes it: the forkserver ends the ranks when this process ends.
    if spec not in _clusters:
        _clusters[spec] = Cluster.of(spec)
    with cpu_slots().hold(spec.world_size):
        outcomes = _clusters[spec].submit(options, fn, *args)
    print(render_output(outcomes), end="")
    return outcomes


_NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})

_submit: Submit = _submit_to_own_ranks
_defaults = _NO_DEFAULTS


def use(submit: Submit | None, defaults: Mapping[str, Any] = _NO_DEFAULTS) -> None:
    """Make all tests run by ``submit``; by default on a cluster of this module.

    Args:
        submit: Runs a test.
        defaults: Settings for classes that do not set them.
    """
    global _submit, _defaults
    _submit, _defaults = submit or _submit_to_own_ranks, defaults


def run_on_ranks(
    spec: WorldSpec, fn: Callable[..., Any], *args: Any
) -> list[CaseResult]:
    """Run one test on every rank; raise the exception for unittest.

    Args:
        spec: Settings of the world.
        fn: Function that runs on each rank and finds the test by ``CaseRef.find``. It
            returns a ``Left`` if it skips.
        *args: Its arguments.

    Returns:
        The results of the ranks, if ``fn`` is ``run_case``.

    Raises:
        SkipTest: All ranks skipped the test.
        WorldError: At least one rank failed; or all failed as the test expects.
    """
    __tracebackhide__ = True
    options = CallOptions(
        timeout_s=spec.timeout_s,
        isolation=spec.isolation,
        is_test=True,
    )
    outcomes = _submit(spec, options, fn, *args)
    results = [o.value for o in outcomes if isinstance(o.value, CaseResult)]
    for warning in dict.fromkeys(each for r in results for each in r.warnings):
        warnings.warn_explicit(*warning)
    left = outcomes[0].value  # the same on all ranks
    if isinstance(left, Left) and left.kind == SKIP:
        raise unittest.SkipTest(left.reason)
    if isinstance(left, Left) and left.kind == XFAIL:
        raise WorldError(outcomes, outcomes[0])
    return results


class TestCase(unittest.TestCase):
    """Runs ``setUp``, the test and ``tearDown`` on every rank.

    Settings are attributes of the class. In a pytest session, ``backend``,
    ``isolation`` and ``timeout_s`` of classes that do not set them come from the
    command line and the ini file. ``setUpClass`` and ``tearDownClass`` run once, in the
    parent; ranks do not see attributes that they set on the class.

    Example:
        class TestReduce(TestCase):
            world_size = 4

            def test_all_reduce(self):
                value = torch.ones(1) * self.rank
                dist.all_reduce(value)
                self.assertEqual(value, torch.tensor([6.0]))
    """

    MAIN_PROCESS_RANK = -1
    """Value of ``rank`` in the parent."""

    world_size: Any = 2
    """Number of ranks; may be a property."""

    backend: Any = "gloo"
    """Backend of the default process group."""

    device_type: Any = "cpu"
    """Type of the device of each rank; if no class sets it, as for
    ``WorldSpec.device``."""

    default_group = True
    """True if a process group exists when ``setUp`` begins. Otherwise the test creates
    one, with the store ``current_world().store``, and destroys it."""

    isolation: Isolation = "pool"
    """Processes and state that a test shares with earlier ones: see ``WorldSpec``."""

    timeout_s = 60.0
    """Time limit of one test."""

    grace_s = 0.7
    """Seconds for other ranks to end after the first fault; see ``WorldSpec``."""

    rank = MAIN_PROCESS_RANK
    _unexpected: WorldError | None = None

    def assertEqual(
        self, first: Any, second: Any, msg: Any = None, **tolerances: Any
    ) -> None:
        """Compare as unittest does, but tensors by ``torch.testing.assert_close``.

        Args:
            first: Any value; tensors may be inside sequences and mappings.
            second: Expected value.
            msg: Shown if the values differ.
            **tolerances: ``rtol``, ``atol`` and others of ``assert_close``.
        """
        torch = sys.modules.get("torch")
        if torch is None or not _holds_tensor((first, second), torch.Tensor):
            super().assertEqual(first, second, msg)
            return
        torch.testing.assert_close(
            first, second, msg=None if msg is None else str(msg), **tolerances
        )

    def _spec(self) -> WorldSpec:
        settings: dict[str, Any] = {
            "world_size": int(self.world_size),
            "backend": self.backend,
            "device": self.device_type if self._sets("device_type") else "",
            "default_group": self.default_group,
            "isolation": self.isolation,
            "timeout_s": self.timeout_s,
            "grace_s": self.grace_s,
        }
        settings.update((n, v) for n, v in _defaults.items() if not self._sets(n))
        return WorldSpec(**settings)

    def _sets(self, name: str) -> bool:
        """Return True if a subclass or this instance sets a setting."""
        owners = (cls for cls in type(self).__mro__ if name in vars(cls))
        return name in vars(self) or next(owners) is not TestCase

    def _become_rank(self, world: World) -> None:
        """Take over rank and settings of the world on which this test runs."""
        self.rank = world.rank
        found = {"backend": world.backend, "device_type": world.device.type}
        for name, value in found.items():
            if not self._sets(name):
                setattr(self, name, value)

    # unittest calls these three; IsolatedAsyncioTestCase overrides the same ones.
    def _callSetUp(self) -> None:
        if self.rank != self.MAIN_PROCESS_RANK:
            refuse_unrun("setUp", self.setUp())  # type: ignore[func-returns-value]  # a coroutine of a subclass

    def _callTestMethod(self, method: Callable[[], object]) -> None:
        __tracebackhide__ = True
        if self.rank != self.MAIN_PROCESS_RANK:
            method()
            return
        try:
            results = run_on_ranks(self._spec(), run_case, CaseRef.of(self))
        except WorldError as failure:
            # A test may expect its own failure. It does not expect a failure of setUp
            # or tearDown, or a crash.
            if not isinstance(failure.root.value, Left) and _expects_failure(self):
                self._unexpected = failure
                return
            if isinstance(failure.root.exception, AssertionError):
                raise FailedAssertion(failure.outcomes, failure.root) from None
            raise
        # Skipped once more, for the result of the session.
        for each in dict.fromkeys(s for r in results for s in r.skipped_subtests):
            message = () if each.message is None else (each.message,)
            with self.subTest(*message, **dict(each.parameters)):
                self.skipTest(each.reason)

    def _callTearDown(self) -> None:
        __tracebackhide__ = True
        if self.rank != self.MAIN_PROCESS_RANK:
            refuse_unrun("tearDown", self.tearDown())  # type: ignore[func-returns-value]  # as above
        elif self._unexpected is not None:
            raise self._unexpected

    def _handle_test_skip(self, msg: str) -> None:
        self.skipTest(msg)  # skip_if_lt_x_gpu asks for this name


def _expects_failure(test: unittest.TestCase) -> bool:
    marked = (test, getattr(test, test._testMethodName))
    return any(getattr(m, "__unittest_expecting_failure__", False) for m in marked)


def _holds_tensor(value: Any, tensor: type[Any]) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(part, tensor) for part in value)
    return isinstance(value, tensor)
