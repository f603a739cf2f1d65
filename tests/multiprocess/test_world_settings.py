"""Settings of a test's world: marker, command line and ini file."""

import math
import re
import time
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch

from gradparity.multiprocess import Cluster, WorldError, WorldSpec, current_world
from gradparity.multiprocess.pytest_plugin import settings
from gradparity.multiprocess.pytest_plugin.settings import (
    defaults_of,
    spec_of,
    world_of,
)
from gradparity.multiprocess.spec import CallOptions
from gradparity.multiprocess.testcase import TestCase
from gradparity.tests.multiprocess.test_pytest_plugin import Session, session

pytest_plugins = ["pytester"]
__all__ = ["session"]


def test_a_marker_wins_over_an_option_and_an_option_over_the_ini_file(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeini("""
[pytest]
world_timeout_s = 7.5
world_backend = nccl
world_isolation = group
""")
    config = pytester.parseconfig("--world-isolation=process")
    defaults = defaults_of(config)
    spec = world_of(2, {}, defaults, None).spec
    assert (spec.timeout_s, spec.backend, spec.device) == (7.5, "nccl", "cuda")
    assert spec.isolation == "process"
    marked = {"timeout_s": 3, "backend": "gloo", "isolation": "pool"}
    spec = world_of(2, marked, defaults, None).spec
    assert (spec.timeout_s, spec.backend, spec.device) == (3, "gloo", "cpu")
    assert spec.isolation == "pool"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("timeout-s=soon", "world_timeout_s of the command line or the ini file"),
        ("timeout-s=0", "timeout_s must be above 0"),
        ("backend=glo", "backend must be one of gloo, nccl, "),
    ],
)
def test_a_wrong_default_ends_the_session(
    session: Session, option: str, says: str
) -> None:
    done = session("", f"--world-{option}")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert says in done.stderr


def test_a_default_reaches_the_ranks(session: Session) -> None:
    done = session(
        """
@pytest.mark.world(world_size=2)
def test_slow(world):
    time.sleep(1000)
""",
        "--world-timeout-s=0.5",
    )
    assert "1 failed" in done.stdout
    assert "hung, still running" in done.stdout


def test_a_class_has_the_defaults_that_it_does_not_set(session: Session) -> None:
    done = session(
        """
from gradparity.multiprocess import TestCase, current_world

if "GRADPARITY_WORLD" in os.environ:
    time.sleep(2.1)  # regression: M18, the limit of a test is not that of its import

class TestDefaults(TestCase):
    def test_backend(self):
        assert current_world().backend == self.backend == "cpu:gloo,cuda:gloo"
        assert current_world().device.type == self.device_type == "cpu"

    def test_slow(self):
        time.sleep(1000)
""",
        "--world-timeout-s=2",
        "--world-backend=cpu:gloo,cuda:gloo",
    )
    assert "1 passed" in done.stdout and "1 failed" in done.stdout, done.stdout
    assert "hung, still running after" in done.stdout


def test_a_rank_that_is_stopped_while_it_imports_has_the_limit_of_the_test(
    session: Session,
) -> None:
    done = session(
        """
import signal

if "GRADPARITY_WORLD" in os.environ and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)

@pytest.mark.world(2, timeout_s=1)
def test_it():
    dist.barrier()
"""
    )
    assert "1 failed" in done.stdout
    hung = r"rank 1: hung, stopped by a signal after \d{1,2}\.\d s"
    assert re.search(hung, done.stdout), done.stdout


def start_within(cluster: Cluster, limit_s: float) -> CallOptions:
    """Limit the imports of the next test, on ranks that are already running."""
    cluster.start()
    assert cluster._ranks is not None
    cluster._ranks.spec = replace(cluster.spec, start_timeout_s=limit_s)
    return CallOptions(timeout_s=60.0, is_test=True)


def test_a_test_may_take_longer_than_its_import() -> None:
    def test() -> int:
        current_world()._begin()
        time.sleep(2.5)
        return 7

    with Cluster(1) as cluster:
        outcomes = cluster.submit(start_within(cluster, 2.0), test)
    assert outcomes[0].value == 7


def test_an_import_that_never_ends_names_its_limit() -> None:
    def test() -> None:
        if current_world().rank == 0:
            current_world()._begin()
        time.sleep(1000)

    with Cluster(2) as cluster, pytest.raises(WorldError) as caught:
        cluster.submit(start_within(cluster, 0.5), test)
    message = caught.value.outcomes[1].message or ""
    says = r"still importing the test after \d+\.\d s; start_timeout_s limits this"
    assert re.match(says, message), message


def test_a_limit_may_be_longer_than_the_kernel_can_wait() -> None:
    with Cluster(1, timeout_s=1e9, start_timeout_s=1e9) as cluster:
        assert cluster.run(int) == [0]


class Base(TestCase):
    timeout_s = 50.0
    backend = "gloo"


class OfBase(Base):
    device_type = "cuda"


def test_what_a_class_sets_wins_over_the_defaults() -> None:
    defaults = {"timeout_s": 3.0, "backend": "nccl", "isolation": "group"}
    of_class, of_none = OfBase()._marker_settings(), TestCase()._marker_settings()
    spec, plain = (spec_of(2, each, defaults) for each in (of_class, of_none))
    assert (spec.timeout_s, spec.backend, spec.device) == (50.0, "gloo", "cuda")
    assert (plain.timeout_s, plain.backend, plain.device) == (3.0, "nccl", "cuda")
    assert spec.isolation == plain.isolation == "group"


def test_a_world_may_have_as_many_ranks_as_there_are_cores(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "cores", lambda: 3)
    done = session("""
@pytest.mark.world("all")
def test_all():
    assert dist.get_world_size() == 3

@pytest.mark.world(world_size=["all", 2], min_size=3)
def test_enough(world):
    assert world.world_size in (2, 3)

@pytest.mark.world("all", min_size=4)
def test_too_many():
    raise AssertionError
""")
    assert "3 passed, 1 skipped" in done.stdout, done.stdout
    assert "needs at least 4 CPU cores, and there are 3" in done.stdout


def test_a_skip_for_too_few_ranks_names_the_line_of_its_test(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "cores", lambda: 3)
    done = session("""
@pytest.mark.world("all", min_size=4)
def test_one():
    raise AssertionError

@pytest.mark.world("all", min_size=4)
def test_two():
    raise AssertionError
""")
    skips = re.findall(r"SKIPPED \[1\] test_it\.py:(\d+): needs", done.stdout)
    assert len({*skips}) == 2, done.stdout


def test_a_world_may_have_as_many_ranks_as_there_are_gpus_or_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    on_gpus = {"device": "cuda", "backend": "nccl"}
    none = world_of("all", on_gpus, {}, None)
    assert none.too_small == "needs at least 1 visible CUDA devices, and there are 0"
    assert world_of("all", on_gpus, {}, 6).spec.world_size == 6
    if not torch.xpu.is_available():
        none = world_of("all", {"backend": "xccl"}, {}, None)
        assert none.too_small == "needs at least 1 visible XPU devices, and there are 0"
    few = world_of("all", {"min_size": 7}, {}, 6)
    assert few.too_small == "needs at least 7 ranks of torchrun, and there are 6"


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ({}, "cpu"),
        ({"device": "cuda"}, "cuda"),
        ({"backend": "nccl"}, "cuda"),
        ({"backend": "NCCL"}, "cuda"),
        ({"backend": "xccl"}, "xpu"),
        ({"backend": "cuda:nccl"}, "cuda"),
        ({"backend": "cuda:nccl,cpu:gloo"}, "cpu"),
        ({"backend": "cpu:gloo,cuda:nccl", "device": "cuda"}, "cuda"),
    ],
)
def test_a_world_is_on_a_device_that_its_backend_serves(
    settings: dict[str, str], device: str
) -> None:
    assert WorldSpec(world_size=2, **settings).device == device  # type: ignore[arg-type]  # names of fields


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backend": "glo"}, "backend must be one of gloo, nccl, .*; got 'glo'"),
        ({"backend": "cpu:glo"}, "backend 'cpu:glo' has 'glo', expected one of gloo"),
        ({"backend": "cpu:gloo,cuda"}, "Invalid device:backend pairing"),
        (
            {"backend": "nccl", "device": "cpu"},
            'backend "nccl" needs device="cuda", got device="cpu"',
        ),
        (
            {"backend": "gloo", "device": "xpu"},
            'needs device="cpu" or "cuda", got device="xpu"',
        ),
        ({"pg_options": "options"}, 'must be "module:function", got "options"'),
    ],
)
def test_a_backend_that_torch_does_not_take_is_refused(
    settings: dict[str, str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        WorldSpec(world_size=2, **settings)  # type: ignore[arg-type]  # names of fields


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"timeout_s": "60"}, "timeout_s must be a number, got '60'"),
        ({"timeout_s": True}, "timeout_s must be a number, got True"),
        ({"start_timeout_s": None}, "start_timeout_s must be a number, got None"),
        ({"start_timeout_s": math.inf}, "start_timeout_s must be above 0 and finite"),
        ({"grace_s": "a"}, "grace_s must be a number, got 'a'"),
        ({"grace_s": -1}, "grace_s must be finite and not negative: -1"),
        ({"grace_s": math.nan}, "grace_s must be finite and not negative: nan"),
        ({"seed": "1"}, "seed must be an int, got '1'"),
        ({"seed": 2**64}, "seed must have 64 bits at most, got 18446744073709551616"),
        ({"threads": 1.5}, "threads must be an int, got 1.5"),
        ({"output_limit": 0}, "output_limit must be above 0"),
        ({"share_devices": 1}, "share_devices must be a bool, got 1"),
        ({"default_group": "no"}, "default_group must be a bool, got 'no'"),
        ({"preload": 3}, "preload must be a tuple of names, got 3"),
        ({"isolation": 3}, "isolation must be one of pool, group, process; got 3"),
    ],
)
def test_a_setting_of_another_type_or_range_is_refused(
    setting: dict[str, Any], says: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{says}"):
        world_of(2, setting, {}, None)


def test_the_least_grace_and_seed_are_accepted() -> None:
    assert WorldSpec(world_size=1, grace_s=0, seed=-(2**63)).grace_s == 0


# regression: H28-14
def test_markers_of_module_class_and_function_are_merged(session: Session) -> None:
    done = session(
        """
from gradparity.multiprocess import TestCase, current_world

pytestmark = pytest.mark.world(3, isolation="group", timeout_s=50)

@pytest.mark.world(timeout_s=20)
def test_module(world):
    assert world.world_size == 3

@pytest.mark.world(1)
def test_function(world):
    assert world.world_size == 1

@pytest.mark.world(["all", 2], min_size=1)
class TestSizes:
    @pytest.mark.world(1)
    def test_fixed(self, world):
        assert world.world_size == 1

    @pytest.mark.world(timeout_s=20)
    def test_several(self, world):
        assert world.world_size in (2, os.cpu_count())

class TestBase:
    @pytest.mark.world(timeout_s=20)
    def test_inherited(self, world):
        assert world.world_size == self.size

    size = 3

@pytest.mark.world(2)
class TestDerived(TestBase):
    size = 2

@pytest.mark.world(1)
class TestAgain(TestDerived):
    size = 1

class TestOurBase(TestCase):
    world_size = 2

@pytest.mark.world(1)
class TestOurDerived(TestOurBase):
    def test_marker(self):
        assert current_world().world_size == self.world_size == 1

class TestOurs(TestCase):
    world_size = 2
    default_group = False

    @pytest.mark.world(timeout_s=20)
    def test_class(self):
        assert current_world().world_size == self.world_size == 2
        assert not dist.is_initialized()

    @pytest.mark.world(1)
    def test_method(self):
        assert current_world().world_size == self.world_size == 1

    @pytest.mark.world([1, 2])
    def test_too_many(self):
        pass
"""
    )
    assert "11 passed, 1 error in" in done.stdout, done.stdout
    assert "which only a marker of a plain test function or class can" in done.stdout
    assert (
        "world_size has no size"
        in session("""
@pytest.mark.world([])
def test_none():
    pass
""").stdout
    )


def test_tensors_are_compared_inside_of_other_values() -> None:
    one, own = torch.tensor(1.0), TestCase()
    equal: tuple[tuple[Any, Any], ...] = (
        (torch.tensor(6), 6),
        (7, torch.tensor([7])),
        ([torch.tensor(6), 1, None], [6, 1, None]),
        ({"a": one, "n": "x", "s": {1, 2}}, {"a": one, "n": "x", "s": {1, 2}}),
        ((one, torch.float32), (one, torch.float32)),
        (torch.ones(2), torch.ones(2)),
    )
    for first, second in equal:
        own.assertEqual(first, second)
    other: tuple[tuple[Any, Any], ...] = (
        (torch.tensor(6), 7),
        (torch.ones(2), 1),
        (torch.tensor(1), one),
        (one, None),
        ({"a": one}, {"b": one}),
        ([one], [one, one]),
        ([one, {"n": "x"}], [one, {"n": "y"}]),
    )
    for first, second in other:
        with pytest.raises(AssertionError):
            own.assertEqual(first, second)
    with pytest.raises(AssertionError, match=r"at \[1\]\['n'\]"):
        own.assertEqual(*other[-1])
    with pytest.raises(AssertionError, match="of the caller"):
        own.assertEqual([one], [one + 1], "of the caller")


# regression: H31-H6
def test_numbers_and_arrays_beside_tensors_are_not_rounded() -> None:
    one, own, double = torch.tensor(1.0), TestCase(), torch.float64
    of_numpy = numpy.ones(3)[::-1]
    of_numpy.flags.writeable = False
    equal: tuple[tuple[Any, Any], ...] = (
        (torch.tensor(1e300, dtype=double), 1e300),
        (torch.tensor(2**63 + 5, dtype=torch.uint64), 2**63 + 5),
        (torch.tensor([2**53 + 1]), 2**53 + 1),
        (torch.tensor(0.1), 0.1),
        (1.001, torch.tensor(1.0, dtype=torch.bfloat16)),
        (torch.tensor(1j), 1j),
        (torch.tensor(True), 1),
        (one, numpy.float32(1)),
        ([one, of_numpy], [one, of_numpy]),
        (torch.ones(3), of_numpy),
    )
    for first, second in equal:
        own.assertEqual(first, second)
    other: tuple[tuple[Any, Any], ...] = (
        (torch.tensor(math.inf), 1e300),
        (torch.tensor(1 + 1e-6, dtype=double), 1.0),
        (torch.tensor([2**53 + 1]), 2**53),
        (torch.tensor(1.0), 1j),
        ([one, of_numpy], [one, 2 * of_numpy]),
        ([one, of_numpy], [one, [1.0, 1.0, 1.0]]),
        (torch.zeros(3), of_numpy),
    )
    for first, second in other:
        with pytest.raises(AssertionError):
            own.assertEqual(first, second)
    own.assertEqual([one, 1.0], [one, 1.1], rtol=0.2, atol=0.0)
    own.assertEqual([one, True], [one, 1], rtol=0.2, atol=0.0)
    with pytest.raises(AssertionError, match=r"at \[1\]"):
        own.assertEqual([one, 1.0], [one, 1.1], rtol=0.01, atol=0.0)
