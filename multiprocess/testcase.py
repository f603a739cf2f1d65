"""``TestCase``: a unittest class whose tests run on every rank of a world.

It has the names of torch's test classes, so that a class changes its base and little
else. What they start processes for is done by a ``Cluster`` that stays warm.
"""

from __future__ import annotations

import os
import sys
import tempfile
import unittest
from collections.abc import Callable
from typing import Any

from .cluster import Cluster
from .environment import hosts
from .errors import HarnessError
from .outcomes import Left, RankOutcome
from .parent.slots import cpu_slots
from .rank.unittests import CaseRef, run_case
from .rank.world import current_world
from .report import render_output
from .spec import Backend, CallOptions, Device, Isolation, WorldSpec

Submit = Callable[..., tuple[RankOutcome, ...]]
"""``submit(spec, options, fn, *args)``, as a runner of the pytest plugin has it."""

_clusters: dict[WorldSpec, Cluster] = {}


def _submit_to_own_ranks(
    spec: WorldSpec, options: CallOptions, fn: Callable[..., Any], *args: Any
) -> tuple[RankOutcome, ...]:
    # Not closed by any test: the forkserver ends the ranks with this process.
    if spec not in _clusters:
        _clusters[spec] = Cluster.of(spec)
    with cpu_slots().hold(spec.world_size):
        return _clusters[spec].submit(options, fn, *args)


_submit: Submit = _submit_to_own_ranks


def use(submit: Submit | None) -> None:
    """Have all tests run where ``submit`` says; on ranks of our own by default."""
    global _submit
    _submit = submit or _submit_to_own_ranks


def run_on_ranks(spec: WorldSpec, fn: Callable[..., Any], *args: Any) -> None:
    """Run one test on every rank; raise what unittest is to see of it.

    Args:
        spec: The world.
        fn: What each rank calls; returns ``Left`` where it skipped.
        *args: Its arguments.

    Raises:
        SkipTest: All ranks have skipped it.
        WorldError: At least one rank has failed.
    """
    __tracebackhide__ = True
    options = CallOptions(timeout_s=spec.timeout_s, isolation=spec.isolation)
    outcomes = _submit(spec, options, fn, *args)
    sys.stdout.write(render_output(outcomes))
    left = outcomes[0].value  # alike on all ranks
    if isinstance(left, Left) and left.kind != "SystemExit":
        raise unittest.SkipTest(left.reason)


class TestCase(unittest.TestCase):
    """Runs ``setUp``, the test and ``tearDown`` on every rank.

    Settings are attributes of the class. ``setUpClass`` and ``tearDownClass`` run once,
    in the parent; what they set on the class is not seen on the ranks.

    Example:
        class TestReduce(TestCase):
            world_size = 4

            def test_all_reduce(self):
                value = torch.ones(1) * self.rank
                dist.all_reduce(value)
                self.assertEqual(value, torch.tensor([6.0]))
    """

    MAIN_PROCESS_RANK = -1
    """``rank`` in the parent."""

    world_size: Any = 2
    """Number of ranks; may be a property."""

    backend: Any = "gloo"
    """Backend of the default process group."""

    device_type: Any = "cpu"
    """Where the ranks keep their tensors."""

    default_group = True
    """Whether a process group is there when ``setUp`` begins; otherwise ``create_pg``
    makes one, or the test does, with ``file_name`` for its store."""

    destroy_pg_upon_exit = True
    """Whether a process group that the test has made is destroyed after it."""

    isolation: Isolation = "pool"
    """What a test shares with earlier ones: see ``WorldSpec``."""

    timeout_s = 60.0
    """Limit of one test for the whole world."""

    rank = MAIN_PROCESS_RANK
    _file_name = ""
    _groups = 0

    @property
    def file_name(self) -> str:
        """A file that all ranks can use, new for each test.

        Raises:
            HarnessError: They are on several hosts, which share no file.
        """
        if not self._file_name and self.rank != self.MAIN_PROCESS_RANK:
            raise HarnessError(
                "file_name is one file for all ranks, and these are on several hosts: "
                "make the process group with create_pg(), or use current_world().store"
            )
        return self._file_name

    @file_name.setter
    def file_name(self, path: str) -> None:
        self._file_name = path

    @property
    def pg(self) -> Any:
        """The default process group."""
        import torch.distributed as dist

        return dist.group.WORLD

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def init_pg(self, eager_init: bool = False, backend: str | None = None) -> None:
        """Make the default process group, unless it is there.

        Args:
            eager_init: As torch's classes have it; bound to its device at once.
            backend: The class's by default.
        """
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            size, device = int(self.world_size), None
            self._groups += 1  # keys of an earlier one would be taken for this one's
            if eager_init and str(self.device_type) != "cpu":
                device = torch.device(str(self.device_type), self.rank)
            dist.init_process_group(
                backend or str(self.backend),
                store=dist.PrefixStore(f"group{self._groups}", current_world().store),
                rank=self.rank,
                world_size=size,
                device_id=device,
            )

    def create_pg(
        self, device: str | None = None, world_size: int | None = None
    ) -> Any:
        """Return the default process group, made where it is not there.

        Args:
            device: As torch's classes have it; the class's is used.
            world_size: Likewise.
        """
        self.init_pg()
        return self.pg

    def destroy_pg(self, device_id: int | None = None) -> None:
        """Wait for all ranks, and destroy the group if it is not the world's own.

        Args:
            device_id: As torch's classes have it.
        """
        import torch.distributed as dist

        dist.barrier()
        if not self.default_group:
            dist.destroy_process_group()

    def assertEqual(
        self, first: Any, second: Any, msg: Any = None, **tolerances: Any
    ) -> None:
        """Compare as unittest does; tensors by ``torch.testing.assert_close``.

        Args:
            first: Any value; tensors may lie in sequences and mappings.
            second: What it must be equal to.
            msg: Shown when it is not.
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
        backend: Backend = self.backend
        device: Device = self.device_type
        return WorldSpec(
            world_size=int(self.world_size),
            backend=backend,
            device=device,
            default_group=self.default_group,
            isolation=self.isolation,
            timeout_s=self.timeout_s,
        )

    # What unittest calls around a test; IsolatedAsyncioTestCase overrides the same.
    def _callSetUp(self) -> None:
        if self.rank != self.MAIN_PROCESS_RANK:
            self.setUp()

    def _callTestMethod(self, method: Callable[[], object]) -> None:
        __tracebackhide__ = True
        if self.rank != self.MAIN_PROCESS_RANK:
            method()
            return
        case = CaseRef.of(self)
        if hosts() > 1:
            run_on_ranks(self._spec(), run_case, case, {})
            return
        # One for each test: a FileStore with keys of an earlier test would answer with
        # them.
        handle, path = tempfile.mkstemp(prefix="gradparity-")
        os.close(handle)
        try:
            run_on_ranks(self._spec(), run_case, case, {"file_name": path})
        finally:
            if os.path.exists(path):  # a FileStore removes its own
                os.remove(path)

    def _callTearDown(self) -> None:
        if self.rank != self.MAIN_PROCESS_RANK:
            try:
                self.tearDown()
            finally:
                self._end_group()

    def _end_group(self) -> None:
        import torch.distributed as dist

        made = not self.default_group and dist.is_initialized()
        if made and self.destroy_pg_upon_exit:
            dist.destroy_process_group()

    def _handle_test_skip(self, msg: str) -> None:
        self.skipTest(msg)  # skip_if_lt_x_gpu asks for this name


def _holds_tensor(value: Any, tensor: type[Any]) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(part, tensor) for part in value)
    return isinstance(value, tensor)
