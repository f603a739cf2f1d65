"""Tests of torch's test classes run unchanged on our ranks."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradparity.multiprocess.pytest_plugin import adopt
from gradparity.tests.fault_matrix import MATRIX
from gradparity.tests.multiprocess.test_pytest_plugin import Session, session

pytest_plugins = ["pytester"]
__all__ = ["session"]


@pytest.fixture(scope="module")
def common() -> Any:
    """Module of torch's test classes, imported before a session begins in this process.

    pytester removes modules from ``sys.modules`` that were imported after its fixture
    was set up. The next test would import torch's again, but torch can register its
    operators only once in a process.
    """
    pytest.importorskip("expecttest", reason="torch's classes need it")
    names = ("common_distributed", "distributed._tensor.common_dtensor")
    found = [importlib.import_module(f"torch.testing._internal.{n}") for n in names]
    return found[0]


def test_our_class(session: Session) -> None:
    done = session("""
import unittest
from gradparity.multiprocess import TestCase, current_world

class TestOurs(TestCase):
    world_size = 2

    def setUp(self):
        self.value = torch.ones(1) * self.rank
        self.addCleanup(lambda: print("cleaned up on", self.rank))

    def tearDown(self):
        print("torn down on", self.rank)

    def test_sum(self):
        dist.all_reduce(self.value)
        self.assertEqual([self.value], [torch.tensor([1.0])])

    def test_tensors_differ(self):
        self.assertEqual(self.value, torch.tensor([0.0]))

    @unittest.expectedFailure
    def test_expected(self):
        self.assertEqual(self.rank, 2)

    @unittest.expectedFailure
    def test_unexpected(self):
        pass

    def test_skipped(self):
        self.skipTest("not today")

    def test_skipped_by_one(self):
        if self.rank == 1:
            self.skipTest("not today")

    def test_parts(self):
        for i in range(4):
            with self.subTest(i=i):
                self.assertNotEqual(i % 2, self.rank)

    def test_exits(self):
        if self.rank == 1:
            os._exit(0)

class TestOwnGroup(TestCase):
    default_group = False

    def test_own(self):
        assert not dist.is_initialized()
        store = current_world().store
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size)
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == self.world_size
        dist.barrier()
        dist.destroy_process_group()

    def test_own_again(self):
        self.test_own()
""")
    subtests = 4 if pytest.version_tuple >= (9,) else 0  # reported since pytest 9
    counts = f"{5 + subtests} failed, 3 passed, 1 skipped, 1 xfailed"
    assert counts in done.stdout, done.stdout
    assert "torn down on 1\ncleaned up on 1" in done.stdout
    for said in (
        "world of 2: rank 1: raised AssertionError: Tensor-likes are not close!",
        "world of 2: rank 1: raised Skipped: not today",
        "TestOurs::test_parts - ",
        "world of 2: rank 1: exited with code 0",
        "Unexpected success",
    ):
        assert said in done.stdout, said


WARNS = """
import threading
from gradparity.multiprocess import TestCase

class TestOurs(TestCase):
    def test_warns(self):
        warnings.warn("look here")
        warnings.warn(f"on rank {self.rank}", DeprecationWarning)
        with self.assertWarns(UserWarning):
            warnings.warn("expected")

    def test_thread(self):
        thread = threading.Thread(target=int, args=("in a thread",))
        thread.start()
        thread.join()
"""


@pytest.mark.parametrize("action", ["default", "error"])
def test_warnings_of_our_class_pass_the_filters_of_the_session(
    session: Session, action: str
) -> None:
    done = session(WARNS, "-W", action)
    if action == "error":
        assert "UserWarning: look here" in done.stdout and "2 failed" in done.stdout
    else:
        assert "2 passed, 4 warnings" in done.stdout
        told = "PytestUnhandledThreadExceptionWarning: Exception in thread Thread-"
        assert done.stdout.count(told) == 1
        assert done.stdout.count("UserWarning: look here") == 1
        assert done.stdout.count("DeprecationWarning: on rank") == 2


@pytest.mark.slow
def test_our_class_is_refused_without_pytest(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import unittest
from gradparity.multiprocess import TestCase

class TestOurs(TestCase):
    def test_nothing(self):
        pass

unittest.main()
""")
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "no world is active" in done.stderr and "run by pytest" in done.stderr


TORCHS = """
import sys, unittest
import torch.testing._internal.common_distributed as common
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests, parametrize)
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorTestBase, with_comms)

class TestProcesses(common.MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _group(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size)

    def test_sum(self):
        self._group()
        value = torch.ones(1) * self.rank
        dist.all_reduce(value)
        self.assertEqual(value, torch.tensor([1.0]))

    @common.requires_gloo()
    @common.skip_if_lt_x_gpu(2)
    def test_needs_gpus(self):
        raise AssertionError

    def test_skipped(self):
        self.skipTest("not today")

    @unittest.expectedFailure
    def test_expected(self):
        self.assertEqual(self.rank, 0)

    def test_inline(self):
        self.assertExpectedInline(str(3 + 4), '''7''')

    def test_leaves_early(self):
        sys.exit(0)

    def test_exits(self):
        if self.rank == 1:
            os._exit(0)

    def test_hangs(self):
        self._group()
        if self.rank == 1:
            time.sleep(1000)
        dist.barrier()

class TestForgotten(common.MultiProcessTestCase):
    def test_runs_nowhere(self):
        raise AssertionError

class TestContinuous(common.MultiProcContinuousTest):
    world_size = 2
    made = 0

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def _init_pg(cls, *args):
        super()._init_pg(*args)
        cls.made += 1

    @classmethod
    def device_type(cls):
        return "cpu"

    def test_a(self):
        dist.barrier()

    def test_b_wrong(self):
        assert self.rank == 0

    def test_c(self):  # torch's class would skip it now
        dist.barrier()

    def test_d_one_group(self):
        assert type(self).made == 1 and os.environ["LOCAL_RANK"] == str(self.rank)

@instantiate_parametrized_tests
class TestThreads(common.MultiThreadedTestCase):
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    @parametrize("value", [1, 2])
    def test_sum(self, value):
        reduced = torch.ones(1) * value
        dist.all_reduce(reduced)
        self.assertEqual(reduced.item(), 3 * value)

    def test_wrong(self):
        self.assertNotEqual(self.rank, 1)

    def test_kills(self):
        os._exit(3)

class TestDTensor(DTensorTestBase):
    world_size = 2

    @with_comms
    def test_mesh(self):
        from torch.distributed.tensor import distribute_tensor, Shard
        mesh = self.build_device_mesh()
        whole = torch.arange(4.0)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        self.assertEqual((sharded * 2).full_tensor(), whole * 2)
"""


@pytest.mark.slow
def test_torchs_classes(
    common: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(common.TIMEOUT_OVERRIDE, "test_hangs", 8)
    own = {name: vars(getattr(common, name)).copy() for name in adopt._BASES}
    done = session(TORCHS, "--gradparity-adopt")
    assert "6 failed, 9 passed, 2 skipped, 1 xfailed" in done.stdout
    for said in (
        "Need at least 2 CUDA devices",
        "not today",
        "PASSED test_it.py::TestContinuous::test_c",
        "world of 2: rank 1: exited with code 0",
        "world of 2: rank 1: hung, still running",
        "test_it.TestForgotten.test_runs_nowhere is run by no rank",
        "world of 2: rank 1: raised AssertionError: assert 1 == 0",
        "world of 1: rank 0: raised RuntimeError: Thread 1 exited with exception",
        "world of 1: rank 0: exited with code 3",
    ):
        assert said in done.stdout, said
    # The session's end gives torch's classes their own methods back.
    assert own == {name: vars(getattr(common, name)).copy() for name in adopt._BASES}


FAULTS = """
import torch.testing._internal.common_distributed as common
from gradparity.tests.fault_matrix import MATRIX, act, nothing

class TestFaults(common.MultiProcessTestCase):
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _act(self, bad, others):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size)
        act(bad, others)

def add(number, bad, others, limit_s):
    def test(self):
        self._act(bad, others)
    test.__name__ = f"test_{number:02}"
    common.TIMEOUT_OVERRIDE[test.__name__] = limit_s
    setattr(TestFaults, test.__name__, test)

for number, fault in enumerate(MATRIX.values()):
    add(2 * number, fault.bad, fault.others, max(8, fault.limit_s))
    add(2 * number + 1, nothing, nothing, 60)
"""
NOT_OF_THIS = (
    "result that does not pickle",
    "returned normally",
    "victim: rank 0",
    "in wait",
    "lines left out",
)
"""Rows and messages of the fault matrix that a test of torch's classes does not have.

Such a test returns no result. It creates the process group itself, so a rank that
raises breaks the connections of the others, which then raise as well."""


@pytest.mark.slow
def test_the_fault_matrix_on_torchs_class(
    common: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = dict(common.TIMEOUT_OVERRIDE)
    monkeypatch.setattr(common, "TIMEOUT_OVERRIDE", overrides)
    done = session(FAULTS, "--gradparity-adopt")
    for number, (name, fault) in enumerate(MATRIX.items()):
        assert f"PASSED test_it.py::TestFaults::test_{2 * number + 1:02}" in done.stdout
        if name in NOT_OF_THIS:
            continue
        assert f"FAILED test_it.py::TestFaults::test_{2 * number:02}" in done.stdout
        report = done.stdout.split(f" TestFaults.test_{2 * number:02} _")[1]
        report = report.split("_ TestFaults.test_")[0]  # the next test
        assert "world of 3: rank 1: " in report, name
        for words in fault.says:
            assert words.startswith(NOT_OF_THIS) or words in report, (name, words)
