"""``@pytest.mark.world`` in the test suite of a user."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

# Imported here, so that the sessions below find them and do not import them anew;
# a second import of torch in one process would crash it.
from gradparity.multiprocess.pytest_plugin import controller, hypothesis

pytest_plugins = ["pytester"]
PRELOADED = (controller, hypothesis, torch)

HEAD = """
import os, time, warnings
import pytest, torch, torch.distributed as dist

def total(world):
    value = torch.ones(1) * world.rank
    dist.all_reduce(value)
    return value.item()
"""

Session = Callable[..., "Done"]


@dataclass
class Done:
    stdout: str
    returncode: int
    stderr: str


@pytest.fixture
def session(pytester: pytest.Pytester) -> Session:
    """Run pytest on a test module in this process, which has imported torch."""

    def run(body: str, *options: str) -> Done:
        pytester.makepyfile(test_it=HEAD + body)
        result = pytester.runpytest_inprocess("-q", "-rA", *options, "test_it.py")
        return Done(result.stdout.str(), int(result.ret), result.stderr.str())

    return run


def test_passing_tests(session: Session) -> None:
    done = session("""
@pytest.fixture
def plain():
    return 7

@pytest.fixture(params=[1, 2])
def scaled(world, request):
    return request.param * world.rank

@pytest.fixture
def torn_down(scaled, tmp_path):
    yield scaled, tmp_path
    print("torn down on", dist.get_rank())

@pytest.mark.world(world_size=[1, 2, 3])
def test_sizes(world):
    assert total(world) == sum(range(world.world_size))

@pytest.mark.world(world_size=2)
@pytest.mark.parametrize("x", [1, 2])
def test_parametrized(world, x):
    assert dist.get_world_size() == 2 and x in (1, 2)

@pytest.mark.world(2)
def test_fixtures(world, plain, torn_down):
    scaled, folder = torn_down
    assert plain == 7
    assert scaled in (world.rank, 2 * world.rank)
    assert folder.is_dir()

@pytest.mark.world(world_size=2)
def test_a_world_test_need_not_take_the_world():
    assert dist.get_world_size() == 2

@pytest.mark.world(world_size=2)
def test_patches(world, monkeypatch):
    monkeypatch.setenv("PATCHED", "1")

@pytest.mark.world(world_size=2)
def test_patches_are_undone():
    assert "PATCHED" not in os.environ

class TestClass:
    def setup_method(self):
        self.value = 3

    @pytest.mark.world(world_size=2, isolation="process")
    def test_method(self, world):
        assert self.value == 3 and total(world) == 1

@pytest.mark.world(world_size=2)
def test_skipped(world):
    pytest.skip("not today")

@pytest.mark.world(world_size=2)
def test_expected(world):
    pytest.xfail("some day")

@pytest.mark.world(world_size=2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_expected_kind(world):
    if world.rank == 1:
        raise ValueError

@pytest.mark.world(world_size=2)
def test_output(world):
    print("said by", world.rank)
""")
    assert done.returncode == 0, done.stdout
    assert "12 passed, 1 skipped, 2 xfailed" in done.stdout
    assert "not today" in done.stdout
    assert "--- rank 1 ---\nsaid by 1" in done.stdout
    assert "torn down on 1" in done.stdout


def test_a_default_device_of_a_module_is_that_of_all_its_tests(
    session: Session,
) -> None:
    done = session("""
if "GRADPARITY_WORLD" in os.environ:  # this process runs other tests, too
    torch.set_default_device("meta")

@pytest.mark.world(2)
@pytest.mark.parametrize("turn", [0, 1])
def test_module(turn):
    assert torch.ones(1).is_meta
    torch.set_default_device("cpu")  # its own: the next test has meta

@pytest.fixture(scope="class")
def on_cpu():
    torch.set_default_device("cpu")
    yield
    torch.set_default_device("meta")

class TestOnCpu:
    @pytest.mark.world(2)
    @pytest.mark.parametrize("turn", [0, 1])
    def test_fixture(self, world, on_cpu, turn):
        assert total(world) == 1

@pytest.mark.world(2)
def test_last():
    assert torch.ones(1).is_meta
""")
    assert "5 passed" in done.stdout, done.stdout


def test_failing_tests(session: Session) -> None:
    done = session(
        """
@pytest.fixture
def stuck():
    import threading
    return threading.Lock()

@pytest.mark.world(world_size=2)
def test_assert(world):
    left = [world.rank, 5]
    assert left == [0, 5]

@pytest.mark.world(world_size=2)
def test_some_skip(world):
    if world.rank == 1:
        pytest.skip("only me")

@pytest.mark.world(world_size=2)
def test_some_skip_some_wait(world):
    if world.rank == 1:
        pytest.skip("only me")
    total(world)

@pytest.mark.world(world_size=2)
def test_warning(world):
    warnings.warn("an error here", stacklevel=1)

@pytest.mark.world(world_size=2)
def test_fixture_that_no_pickle_takes(world, stuck):
    assert not stuck.locked()

@pytest.mark.world(world_size=2)
def test_request(world, request):
    assert request.function.__name__ == "test_request"

def test_unmarked(world):
    pass

import unittest
class TestCase(unittest.TestCase):
    @pytest.mark.world(world_size=2)
    def test_unittest(self):
        self.assertEqual(dist.get_world_size(), 2)

@pytest.mark.world(world_size=2)
def test_innocent(world):
    assert total(world) == 1
""",
        "-Werror",
    )
    out = done.stdout
    assert done.returncode == 1
    assert "4 failed, 4 passed, 1 error" in out, out
    assert "PASSED test_it.py::test_innocent" in out  # and an id, before pytest 8.4
    assert "assert [1, 5] == [0, 5]" in out  # pytest's assert, on a rank
    assert re.search(r"At index 0 diff: .*1.* != .*0", out)
    assert re.search(r"FAILED \S+::test_assert\S* - rank 1: raised AssertionError", out)
    assert out.count("the ranks do not agree on the outcome:") == 2
    assert "rank 0: waiting in a collective" in out
    assert "UserWarning: an error here" in out
    assert "the fixture `world` needs @pytest.mark.world" in out


@pytest.mark.parametrize(
    ("marker", "says"),
    [
        (
            "world_size=3, world_sise=2",
            "has no setting world_sise; did you mean world_size? It has backend,",
        ),
        ("2, 3", "takes one size"),
        ("world_size=0", "world_size must be at least 1, got 0"),
        ("2, min_size=2", 'min_size is for world_size="all", got world_size=2'),
        ('"all", min_size=0', "min_size must be an int of at least 1, got 0"),
        ('"most"', 'world_size must be an int or "all"'),
    ],
)
def test_a_wrong_marker_fails_its_test_alone(
    session: Session, marker: str, says: str
) -> None:
    """Other tests of the file run, and an expected failure is another one."""
    done = session(f"""
@pytest.mark.xfail
@pytest.mark.world({marker})
def test_it(world):
    pass

@pytest.mark.world([0, 1])
def test_sizes(world):
    pass

@pytest.mark.skip
@pytest.mark.world({marker})
def test_skipped(world):
    pass
""")
    assert "1 passed, 1 skipped, 2 errors" in done.stdout
    # with an id before pytest 8.4
    assert re.search(r"^test_it\.py::test_it(\[\w+\])?: ", done.stdout, re.MULTILINE)
    assert says in done.stdout
    assert "test_it.py::test_sizes[world0]: world_size must be at least" in done.stdout
    assert "plugin.py" not in done.stdout  # no line of ours
    assert "During handling" not in done.stdout


def test_a_breakpoint_on_a_rank_says_what_to_do(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
def reached():
    print("the debugger of rank", dist.get_rank())

@pytest.mark.world(world_size=2)
def test_it(world):
    breakpoint()
"""
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    says = "RuntimeError: a rank has no terminal: print what you look for"
    assert says in session(body).stdout
    monkeypatch.setenv("PYTHONBREAKPOINT", "test_it.reached")
    assert "the debugger of rank 1" in session(body).stdout


def test_a_wide_fixture_that_asks_for_the_world_is_refused(session: Session) -> None:
    done = session("""
@pytest.fixture(scope="module")
def wide(world):
    return 1

@pytest.mark.world(world_size=2)
def test_it(world, wide):
    pass
""")
    assert done.returncode == 1
    assert "ScopeMismatch" in done.stdout


def test_pytest_timeout_ends_the_call(session: Session) -> None:
    done = session("""
@pytest.mark.world(world_size=2)
@pytest.mark.timeout(1)
def test_slow(world):
    time.sleep(1000)

@pytest.mark.world(world_size=2)
def test_innocent(world):
    assert total(world) == 1
""")
    assert "1 failed, 1 passed" in done.stdout
    assert "Timeout" in done.stdout


def test_exitfirst_keyword_and_last_failed(session: Session) -> None:
    body = """
@pytest.mark.world(world_size=2)
def test_bad(world):
    assert world.rank == 0

@pytest.mark.world(world_size=2)
def test_good(world):
    pass
"""
    assert "1 failed in" in session(body, "-x").stdout
    assert "1 passed, 1 deselected" in session(body, "-k", "good").stdout
    assert "1 failed, 1 deselected" in session(body, "--lf").stdout


@pytest.mark.slow
def test_xdist(session: Session) -> None:
    done = session(
        """
@pytest.mark.world(world_size=[1, 2, 4])
@pytest.mark.parametrize("x", [1, 2])
def test_it(world, x):
    assert total(world) == sum(range(world.world_size))

@pytest.mark.world(world_size=2)
def test_bad(world):
    assert world.rank == 0
""",
        "-n2",
    )
    assert "1 failed, 6 passed" in done.stdout, done.stdout
    assert "root cause: rank 1: raised AssertionError" in done.stdout


IN_A_PACKAGE = """
import pytest
from ..helper import Thing

@pytest.fixture
def thing():
    return Thing()

@pytest.mark.world(world_size=2)
def test_inner(world, thing):
    assert type(thing) is Thing

def on_rank(number):
    assert number == 7
    return Thing()

def test_outer():
    from gradparity.multiprocess import Cluster, WorldError

    with Cluster(2) as cluster:
        assert [type(made) for made in cluster.run(on_rank, 7)] == [Thing] * 2
        with pytest.raises(WorldError, match="assert 8 == 7"):
            cluster.run(on_rank, 8)
"""


@pytest.mark.parametrize("mode", ["importlib", "prepend"])
@pytest.mark.few(1)
def test_import_modes(session: Session, mode: str, tmp_path: Path) -> None:
    # With importlib no folder of it is on the import path.
    package = tmp_path / "inner" / "package"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "helper.py").write_text("class Thing: pass")
    (package / "sub" / "__init__.py").touch()
    (package / "sub" / "test_inner.py").write_text(IN_A_PACKAGE)
    done = session(
        """
class Local:
    pass

@pytest.mark.world(world_size=2)
@pytest.mark.parametrize("kind", [Local])
def test_it(world, kind):
    assert kind is Local
""",
        f"--import-mode={mode}",
        str(package),
    )
    assert "3 passed" in done.stdout, done.stdout


def test_hypothesis_draws_alike_on_all_ranks_and_shrinks(session: Session) -> None:
    done = session("""
from hypothesis import assume, given, strategies as st

@pytest.mark.world(world_size=2)
@given(n=st.integers(0, 1000))
def test_shrinks(world, n):
    value = torch.tensor([n])
    dist.all_reduce(value)
    assert value.item() < 100

@pytest.mark.world(world_size=2)
@given(n=st.integers(0, 1000))
def test_assumes(world, n):
    assume(n % 2 == 0)
    value = torch.tensor([n])
    dist.all_reduce(value)
    assert value.item() == 2 * n

class TestMethod:
    @pytest.mark.world(world_size=2)
    @given(n=st.integers(0, 10))
    def test_method(self, world, n):
        assert 0 <= n <= 10
""")
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "n=50," in done.stdout
    assert "root cause: rank" in done.stdout


def test_a_session_without_worlds_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("""
import sys

def test_it():
    assert "torch" not in sys.modules
    assert "gradparity.multiprocess.pytest_plugin.plugin" in sys.modules
    assert "gradparity.multiprocess.cluster" not in sys.modules
""")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "test_it.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "1 passed" in done.stdout, done.stdout


def test_a_world_without_its_devices_is_skipped(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = session("""
@pytest.mark.world(world_size=2, device="cuda", backend="nccl")
def test_it(world):
    pass
""")
    assert "needs 2 CUDA devices, 0 visible" in done.stdout


WORKER = """
def pytest_configure(config):
    config.workerinput = {"workerid": "gw0"}  # as a worker of pytest-xdist has
"""


def test_the_largest_worlds_run_first_under_xdist(
    session: Session, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(WORKER)
    done = session(
        """
def test_plain():
    pass

@pytest.mark.world(world_size=[1, 2, 3])
def test_sizes(world):
    pass
""",
        "--collect-only",
    )
    assert done.stdout.split()[:4] == [
        "test_it.py::test_sizes[world3]",
        "test_it.py::test_sizes[world2]",
        "test_it.py::test_sizes[world1]",
        "test_it.py::test_plain",
    ]


def test_a_marker_of_a_parameter(session: Session) -> None:
    done = session("""
@pytest.mark.parametrize("x", [1, pytest.param(3, marks=pytest.mark.world(3))])
def test_alone(x):
    assert not dist.is_initialized() or dist.get_world_size() == x

@pytest.mark.world(2)
@pytest.mark.parametrize("x", [2, pytest.param(3, marks=pytest.mark.world(3))])
def test_both(x):
    assert dist.get_world_size() == x
""")
    assert "3 passed, 1 error" in done.stdout, done.stdout
    assert (
        "test_both[3]: a parameter has the marker `world` and its test" in done.stdout
    )


# regression: M8
ADDS_MARKERS = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        settings = {"bad": {"world_sise": 2}, "many": {"world_size": [1, 2]}}
        for name, given in settings.items():
            if name in item.name:
                item.add_marker(pytest.mark.world(**given))
                break
        else:
            item.add_marker(pytest.mark.world(3))
"""


@pytest.mark.parametrize("worker", [False, True])
def test_a_marker_that_a_conftest_adds(
    session: Session,
    pytester: pytest.Pytester,
    worker: bool,
) -> None:
    pytester.makeconftest(ADDS_MARKERS + WORKER * worker)
    done = session("""
@pytest.fixture
def doubled(world):
    return 2 * world.rank

@pytest.mark.parametrize("x", [1, 2])
def test_parametrized(x):
    assert dist.get_world_size() == 3

@pytest.mark.parametrize("x", [1, 2])
def test_takes_the_world(world, x, doubled):
    assert total(world) == 3 and doubled == 2 * world.rank

def test_plain(world):
    assert world.world_size == 3

def test_bad(world):
    pass

@pytest.mark.parametrize("x", [1, 2])
def test_many(x):
    pass
""")
    assert "5 passed, 3 errors" in done.stdout, done.stdout
    assert "test_bad: @pytest.mark.world has no setting world_sise" in done.stdout
    assert "the world sizes [1, 2] make several tests" in done.stdout
