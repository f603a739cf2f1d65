"""``TestCase``: a unittest class whose tests run on every rank of a world.

Settings have the names that torch's test classes use. pytest runs the tests of such a
class like tests with the marker ``world``.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Complex, Number, Real
from typing import Any

from .rank.endings import refuse_unrun
from .rank.world import current_world
from .spec import Isolation

_SETTINGS = {
    "world_size": "world_size",
    "backend": "backend",
    "device_type": "device",
    "default_group": "default_group",
    "isolation": "isolation",
    "timeout_s": "timeout_s",
    "grace_s": "grace_s",
}
"""Attribute of a class -> setting of the marker."""


class TestCase(unittest.TestCase):
    """Runs setUpClass, setUp, the test, tearDown and cleanups on every rank.

    Run the tests by pytest. Settings are attributes of the class. If a class does not
    set ``backend``, ``isolation`` or ``timeout_s``, the command line or the ini file
    can set them.

    Example:
        class TestReduce(TestCase):
            world_size = 4

            def test_all_reduce(self):
                value = torch.ones(1) * self.rank
                dist.all_reduce(value)
                self.assertEqual(value, torch.tensor([6.0]))
    """

    world_size: Any = 2
    """Number of ranks; may be a property."""

    backend: Any = "gloo"
    """Backend of the default process group."""

    device_type: Any = "cpu"
    """Type of the device of each rank; if no class sets it, the default of
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

    rank = -1
    """Rank on which the test runs."""

    def assertEqual(
        self, first: Any, second: Any, msg: Any = None, **tolerances: Any
    ) -> None:
        """Compare as unittest does, but tensors by ``torch.testing.assert_close``.

        Args:
            first: Any value, also lists, tuples and dicts that contain tensors. A
                tensor of one element may be compared with a number, and any tensor with
                a NumPy array. Other values beside tensors must be equal; numbers may
                differ within ``tolerances``.
            second: Expected value.
            msg: Shown if the values differ.
            **tolerances: ``rtol``, ``atol`` and others of ``assert_close``.
        """
        torch = sys.modules.get("torch")
        if torch is None or not _holds_tensor((first, second), torch.Tensor):
            super().assertEqual(first, second, msg)
            return
        self._compare(torch, first, second, msg, tolerances, "")

    def _compare(
        self,
        torch: Any,
        first: Any,
        second: Any,
        msg: Any,
        tolerances: Mapping[str, Any],
        place: str,
    ) -> None:
        text = msg if msg is not None or not place else f"at {place}"
        is_tensor = [isinstance(each, torch.Tensor) for each in (first, second)]
        values = first, second = _tensor_of(torch, first), _tensor_of(torch, second)
        has_tensor = any(isinstance(each, torch.Tensor) for each in values)
        if all(isinstance(each, dict) for each in values):
            super().assertEqual(first.keys(), second.keys(), text)
            parts = [(key, first[key], second[key]) for key in first]
        elif all(isinstance(each, list | tuple) for each in values):
            super().assertEqual(len(first), len(second), text)
            parts = [*zip(range(len(first)), first, second, strict=True)]
        elif (has_tensor or tolerances) and all(
            isinstance(each, torch.Tensor | Number) for each in values
        ):
            settings = dict(tolerances)
            if not all(is_tensor):
                settings = {"check_dtype": False, "check_device": False} | settings
            torch.testing.assert_close(
                *_comparable(torch, values),
                msg=lambda own: own + (f"\n{text}" if text else ""),
                **settings,
            )
            return
        elif not has_tensor:
            super().assertEqual(first, second, text)
            return
        else:
            self.fail(self._formatMessage(text, f"{first!r} != {second!r}"))
        for key, one, other in parts:
            self._compare(torch, one, other, msg, tolerances, f"{place}[{key!r}]")

    def run(self, result: unittest.TestResult | None = None) -> Any:
        """Run the test on this rank.

        Raises:
            RuntimeError: This process is not a rank, as under ``python -m unittest``.
        """
        world = current_world()
        of_world = {"backend": world.backend, "device_type": world.device.type}
        for name, value in of_world.items():
            if not self._sets(name):
                setattr(self, name, value)
        self.rank = world.rank
        with suppress(AttributeError):  # a property of the class
            self.world_size = world.world_size  # a marker may have chosen another one
        return super().run(result)

    def _marker_settings(self) -> dict[str, Any]:
        """Return the settings that this test's class sets, named as in the marker."""
        return {
            setting: getattr(self, name)
            for name, setting in _SETTINGS.items()
            if self._sets(name)
        }

    def _sets(self, name: str) -> bool:
        """Return True if a subclass or this instance sets a setting."""
        owners = (cls for cls in type(self).__mro__ if name in vars(cls))
        return name in vars(self) or next(owners) is not TestCase

    # unittest calls these two.
    def _callSetUp(self) -> None:
        refuse_unrun("setUp", self.setUp())  # type: ignore[func-returns-value]  # a coroutine of a subclass

    def _callTearDown(self) -> None:
        refuse_unrun("tearDown", self.tearDown())  # type: ignore[func-returns-value]  # as above

    def _handle_test_skip(self, msg: str) -> None:
        self.skipTest(msg)  # skip_if_lt_x_gpu asks for this name


def _holds_tensor(value: Any, tensor: type[Any]) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(part, tensor) for part in value)
    return isinstance(value, tensor)


def _tensor_of(torch: Any, value: Any) -> Any:
    """Convert a NumPy array to a tensor; return any other value unchanged."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return value
    return torch.as_tensor(value.copy())  # torch warns of arrays that are read-only


def _comparable(torch: Any, values: Sequence[Any]) -> Sequence[Any]:
    """Convert a tensor of one element and a number so that neither is rounded.

    Two tensors are returned unchanged. A floating-point tensor keeps its dtype, which
    sets the default tolerances.
    """
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    if len(tensors) == 2:
        return values
    if any(each.numel() != 1 for each in tensors):
        return [torch.as_tensor(each) for each in values]  # whose shapes differ
    if any(each.is_floating_point() or each.is_complex() for each in tensors):
        return [
            each.reshape(())
            if isinstance(each, torch.Tensor)
            else torch.tensor(
                each, dtype=torch.cdouble if _is_complex(each) else torch.double
            )
            for each in values
        ]
    # + makes a bool an int, since torch does not compare a bool with a number
    return [+(v.item() if isinstance(v, torch.Tensor) else v) for v in values]


def _is_complex(number: Number) -> bool:
    return isinstance(number, Complex) and not isinstance(number, Real)
