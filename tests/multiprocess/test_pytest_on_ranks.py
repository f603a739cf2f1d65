"""Each feature of pytest works on ranks as it does in one process.

The table in docs/pytest-on-ranks.md names these tests.
"""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradparity.tests.multiprocess.test_pytest_plugin import Session, session

pytest_plugins = ["pytester"]
__all__ = ["session"]
PAGE = Path(__file__).parents[2] / "docs" / "pytest-on-ranks.md"

# regression: M3, M6, M12
FEATURES = """
import doctest, logging, sys, threading, unittest

log = logging.getLogger("ours")
made, ended, state = [], [], {}

def fixture_of(scope):
    @pytest.fixture(scope=scope)
    def fixture():
        made.append(scope)
        yield scope, os.getpid(), made.count(scope)
        ended.append(scope)
    return fixture

one, two, three, four, five = map(
    fixture_of, ["session", "package", "module", "class", "function"])

class TestScopes:
    @pytest.mark.world(2)
    @pytest.mark.parametrize("turn", [0, 1])
    def test_scopes(self, world, turn, one, two, three, four, five):
        all_ = (one, two, three, four, five)
        assert {pid for _, pid, _ in all_} == {os.getpid()}
        assert [number for _, _, number in all_] == [1, 1, 1, 1, 1 + turn]

@pytest.mark.world(2)
def test_ends_of_scopes(one, three):
    assert ended == ["function", "function", "class"], ended

@pytest.fixture(autouse=True, scope="module")
def float64():
    torch.set_default_dtype(torch.float64)
    os.environ["OF_MODULE"] = "1"
    yield
    torch.set_default_dtype(torch.float32)

@pytest.mark.world(2)
@pytest.mark.parametrize("turn", [0, 1])
def test_autouse(turn):
    assert torch.ones(1).dtype is torch.float64 and os.environ["OF_MODULE"] == "1"
    torch.set_default_dtype(torch.float16)  # its own: the next test has float64

@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(os, "sep", "!")
    monkeypatch.setenv("PATCHED", "1")

@pytest.mark.world(2)
def test_monkeypatch(patched):
    assert os.sep == "!" and os.environ["PATCHED"] == "1"

@pytest.mark.world(2)
def test_monkeypatch_is_undone():
    assert os.sep == "/" and "PATCHED" not in os.environ

@pytest.fixture
def sets_a_global(world):
    state["rank"] = world.rank

@pytest.mark.world(2)
def test_globals(world, sets_a_global):
    assert state["rank"] == world.rank

@pytest.mark.world(2)
def test_capsys(capsys):
    print("out")
    assert capsys.readouterr().out == "out\\n"

@pytest.mark.world(2)
def test_capfd(capfd):
    os.write(2, b"err")
    assert capfd.readouterr().err == "err"

@pytest.mark.world(2)
def test_caplog(caplog, world):
    log.warning("from %d", world.rank)
    assert caplog.messages == [f"from {world.rank}"]

@pytest.mark.world(2)
def test_recwarn(recwarn):
    warnings.warn("some", stacklevel=1)
    assert len(recwarn) == 1

@pytest.mark.world(2)
def test_warns():
    with pytest.warns(UserWarning, match="some"):
        warnings.warn("some", stacklevel=1)

@pytest.mark.world(2)
def test_warnings():
    warnings.warn("for the summary", stacklevel=1)

@pytest.mark.world(2)
def test_tmp_path(world, tmp_path, tmp_path_factory):
    (tmp_path / "own").write_text(str(world.rank))
    shared = world.once(lambda: tmp_path)
    assert (shared == tmp_path) == (world.rank == 0)
    assert (shared / "own").exists() and tmp_path_factory.mktemp("more").is_dir()

@pytest.mark.world(2)
def test_once(world):
    import random
    assert world.once(lambda: (os.getpid(), 1))[1] == 1
    pids = [None] * 2
    dist.all_gather_object(pids, world.once(os.getpid))
    assert pids[0] == pids[1]

@pytest.mark.world(2)
def test_record_property(record_property, world):
    record_property("size", world.world_size)

@pytest.mark.world(2)
def test_request(request, pytestconfig, cache):
    assert request.node.name == "test_request" and request.config is pytestconfig
    request.addfinalizer(lambda: state.update(finalized=True))

@pytest.mark.world(2)
def test_request_is_finalized():
    assert state["finalized"]

@pytest.fixture
def used():
    state["used"] = True

@pytest.mark.world(2)
@pytest.mark.usefixtures("used")
def test_usefixtures():
    assert state["used"]

@pytest.fixture(params=["a", "b"])
def param(request):
    return request.param

@pytest.mark.world([1, 2])
@pytest.mark.parametrize("kind", [dict, pytest.param(list, id="l")])
def test_parametrize(world, kind, param):
    assert kind in (dict, list) and param in "ab"

@pytest.mark.world(2)
def test_skip():
    pytest.skip("later")

@pytest.mark.world(2)
@pytest.mark.skipif("sys.platform == 'linux'", reason="of a mark")
def test_skipif():
    raise AssertionError

@pytest.mark.world(2)
def test_importorskip():
    pytest.importorskip("no_such_module")

@pytest.mark.world(2)
def test_xfail(world):
    pytest.xfail("some day")

@pytest.mark.world(2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_xfail_of_one_rank(world):
    if world.rank == 1:
        raise ValueError
    total(world)

@pytest.mark.world(2)
@pytest.mark.xfail(raises=(ValueError, KeyError), strict=True)
def test_xfail_of_ranks_that_differ(world):
    raise [ValueError, KeyError][world.rank]

@pytest.mark.world(2)
@pytest.mark.xfail(run=False)
def test_xfail_without_a_run():
    os._exit(1)

@pytest.fixture
def known(request):
    request.applymarker(pytest.mark.xfail(raises=ValueError, strict=True))

@pytest.mark.world(2)
def test_xfail_of_a_fixture(known):
    raise ValueError

@pytest.fixture(scope="class")
def another_number():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        yield

@pytest.mark.usefixtures("another_number")
class TestOfAnotherNumber:
    @pytest.mark.world(2)
    @pytest.mark.parametrize("turn", [0, 1])
    def test_number(self, turn):
        assert os.getpid() == 1

def setup_module(module):
    module.of_module = dist.get_rank() if dist.is_initialized() else None

@pytest.mark.world(2)
def test_setup_module(world):
    assert of_module == world.rank

class TestSetup:
    @classmethod
    def setup_class(cls):
        cls.of_class = 3

    def setup_method(self, method):
        self.of_method = method.__name__

    @pytest.mark.world(2)
    def test_setup_class(self):
        assert self.of_class == 3 and self.of_method == "test_setup_class"

class TestCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.of_class = 4

    def setUp(self):
        self.addCleanup(lambda: state.update(cleaned=True))

    @pytest.mark.world(2)
    def test_unittest(self):
        self.assertEqual((self.of_class, dist.get_world_size()), (4, 2))

    @pytest.mark.world(2)
    def test_unittest_cleanup(self):
        self.assertTrue(state["cleaned"])

    @pytest.mark.world(2)
    @unittest.expectedFailure
    def test_expected_failure(self):
        self.assertEqual(1, 2)
"""

PASSED = 34


def test_features_that_pass(session: Session, pytester: pytest.Pytester) -> None:
    done = session(FEATURES, "--junitxml=out.xml")
    says = f"{PASSED} passed, 3 skipped, 6 xfailed, 1 warning"
    assert says in done.stdout, done.stdout
    assert "UserWarning: for the summary" in done.stdout
    assert re.search(r"SKIPPED \[1\] test_it.py:\d+: later", done.stdout)
    xml = (pytester.path / "out.xml").read_text()
    assert xml.count('<property name="size" value="2"') == 1
    assert "did not end" not in done.stderr and "Do not expect" not in done.stdout


# regression: M7
FAILURES = """
import logging, os, sys, threading

@pytest.mark.world(2)
def test_assert(world):
    assert {"a": world.rank, "b": 1} == {"a": 0, "b": 1}

@pytest.mark.world(2)
def test_reads(world):
    assert not sys.stdin.read()

@pytest.fixture
def counted(request):
    before = request.session.testsfailed
    yield
    print("of this test", request.session.testsfailed - before, "failed")

@pytest.mark.world(2)
def test_log(world, counted):
    logging.getLogger("ours").error("from %d", world.rank)
    raise ValueError

@pytest.mark.world(2)
def test_thread(world):
    thread = threading.Thread(target=int, args=("in a thread",))
    thread.start()
    thread.join()

@pytest.mark.world(2)
def test_subtests(subtests, world):
    for i in range(3):
        with subtests.test(i=i):
            assert i < 2 or world.rank == 0

@pytest.fixture
def broken(world):
    if world.rank == 1:
        raise KeyError("of the setup")

@pytest.mark.world(2)
def test_setup(broken):
    pass

@pytest.fixture
def unclean(world):
    yield
    if world.rank == 1:
        raise KeyError("of the teardown")

@pytest.mark.world(2)
def test_teardown(unclean):
    pass

@pytest.mark.world(2)
@pytest.mark.xfail(strict=True)
def test_unexpected():
    pass

@pytest.mark.world(2)
def test_unexpected_by_a_mark_of_its_own(request):
    request.applymarker(pytest.mark.xfail(strict=True))

@pytest.mark.world(2)
def test_marked_by_one_rank(request, world):
    if world.rank == 1:
        request.applymarker(pytest.mark.xfail)

@pytest.mark.world(2)
def test_dies_before_its_mark(request, world):
    if world.rank == 1:
        os._exit(3)
    request.applymarker(pytest.mark.xfail)

@pytest.mark.world(2)
def test_returns():
    return 1

class NoPickle(Exception):
    __reduce__ = None

@pytest.mark.world(2)
@pytest.mark.parametrize("expected", [0, 1])
@pytest.mark.parametrize("other", [KeyError, NoPickle])
@pytest.mark.xfail(raises=ValueError)
def test_not_expected(world, expected, other):
    raise ValueError if world.rank == expected else other

@pytest.mark.world(2)
@pytest.mark.parametrize("value", [object()])
def test_innocent(value):
    pass
"""


def test_features_that_fail(session: Session) -> None:
    done = session(FAILURES, "-Werror", "-vv")
    out = done.stdout
    assert "{'a': 1} != {'a': 0}" in out
    assert "--- rank 0 ---\nERROR " in out and "ERROR    ours:test_it.py" in out
    assert "OSError: pytest: reading from stdin while output is captured!" in out
    assert "of this test 1 failed" in out
    assert "PytestUnhandledThreadExceptionWarning" in out
    assert "ERROR at setup of test_setup" in out and "of the setup" in out
    assert "ERROR at teardown of test_teardown" in out and "of the teardown" in out
    assert out.count("\n[XPASS(strict)]") == 2
    assert "only some ranks have marked the test xfail" in out
    assert "FAILED test_it.py::test_dies_before_its_mark" in out
    assert "PytestReturnNotNoneWarning" in out
    assert out.count("FAILED test_it.py::test_not_expected[") == 4
    assert "PASSED test_it.py::test_innocent" in out
    assert "SUBFAILED(i=2)" in out or "SUBFAIL" in out
    assert "contains 1 failed subtest" in out


SELECTS = """
def pytest_collection_modifyitems(config, items):
    '''Run the second half, as plugins that split a suite do.'''
    half = len(items) // 2
    config.hook.pytest_deselected(items=items[:half])
    items[:] = items[half:]
"""


def test_a_plugin_that_selects_does_so_in_the_parent_only(
    session: Session, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(SELECTS)
    others = "".join(f"def test_{i}(): pass\n" for i in range(3))
    pytester.makepyfile(test_other=others)
    done = session(
        """
@pytest.mark.world(2)
@pytest.mark.parametrize("x", range(5))
def test_it(x):
    pass
""",
        "test_other.py",
    )
    assert "4 passed, 4 deselected" in done.stdout


# regression: M5
RERUNS = """
from _pytest.runner import runtestprotocol

def pytest_runtest_protocol(item, nextitem):
    for _ in range(3):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if not any(report.failed for report in reports):
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


def test_features_that_run_a_test_again(
    session: Session, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(RERUNS)
    done = session("""
def count(name):
    with open(f"{name}{dist.get_rank()}", "a+") as file:
        file.write(".")
        file.seek(0)
        return len(file.read())

@pytest.fixture
def counted(world):
    return count("setup")

@pytest.mark.world(2)
def test_flaky(world, counted):
    tries = count("call")
    assert counted == tries
    assert tries == 3
""")
    assert "1 passed in" in done.stdout, done.stdout


def test_the_end_of_a_session_is_that_of_its_ranks(session: Session) -> None:
    done = session(
        """
import gc

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        raise ValueError("in the end")

@pytest.mark.world(2)
def test_stops(request, world):
    gc.disable()  # a collection would report the cycle before the session ends
    Cycle()
    if world.rank == 1:
        request.session.shouldstop = "enough"

@pytest.mark.world(2)
def test_is_not_run():
    pass
""",
        "-Werror",
    )
    assert "1 passed, 1 error in" in done.stdout, done.stdout
    assert "Interrupted: enough" in done.stdout and done.returncode == 2
    assert "in the end" in done.stdout


CONFIGURES = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--chosen", default="by default")

@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["of node"] = node.config.option.chosen

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.seen = config.workerinput["chosen"], config.workerinput["of node"]
"""


@pytest.mark.parametrize("xdist", [True, False])
def test_a_plugin_configures_ranks_as_workers_of_xdist(
    session: Session, pytester: pytest.Pytester, xdist: bool
) -> None:
    pytester.makeconftest(CONFIGURES)
    done = session(
        """
@pytest.mark.world(2)
def test_it(pytestconfig):
    print("the rank has", *pytestconfig.seen)
""",
        "--chosen=mine",
        *([] if xdist else ["-p", "no:xdist"]),
    )
    assert done.stdout.count("the rank has mine mine") == 2, done.stdout


@pytest.mark.parametrize("option", ["-s", "--capture=tee-sys"])
def test_output_that_is_not_captured_has_the_rank_in_front(
    session: Session, option: str
) -> None:
    done = session(
        """
@pytest.mark.world(world_size=2)
def test_fails():
    print("and fails")
    raise ValueError("on purpose")

@pytest.fixture(scope="module")
def wide():
    yield
    print("the end")

@pytest.mark.world(world_size=2)
def test_speaks(world, wide):
    print("here")

from gradparity.multiprocess import TestCase

class TestOurs(TestCase):
    def test_it(self):
        print("in a class")
""",
        option,
        "-rN",
    )
    assert "2 passed" in done.stdout and "1 failed" in done.stdout
    shown = 1 if option == "-s" else 2  # pytest's own report has it, too
    for rank in 0, 1:
        assert done.stdout.count(f"rank {rank}: and fails\n") == shown, done.stdout
    for text in "here", "in a class", "the end":
        for rank in 0, 1:
            assert done.stdout.count(f"rank {rank}: {text}\n") == 1, done.stdout
    assert "--- rank" not in done.stdout and "--- output" not in done.stdout


def test_each_feature_of_the_page_has_a_test() -> None:
    rows = re.findall(r"^\|.*\| `(test_\w+)` \|$", PAGE.read_text(), re.MULTILINE)
    here = Path(__file__).read_text()
    assert rows
    assert [name for name in rows if f"def {name}(" not in here] == []


DRAWN = """
from hypothesis import HealthCheck, given, note, settings, target, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine, invariant, rule, run_state_machine_as_test)

seen = []

@pytest.mark.world(2)
@settings(max_examples=20)
@given(data=st.data())
def test_data(world, data):
    n = data.draw(st.integers(0, 9))
    note(f"n is {n}")
    target(float(n))
    value = torch.tensor([n])
    dist.all_reduce(value)
    assert value.item() == 2 * n
    seen.append(n)

@pytest.mark.world(2)
def test_data_alike(world):
    everyone = [None, None]
    dist.all_gather_object(everyone, seen)
    assert everyone[0] == everyone[1] and len(seen) >= 10

@pytest.mark.world(2)
@given(n=st.integers(0, 1000))
def test_one_rank_fails(world, n):
    assert n < 70 or world.rank == 0

@pytest.mark.world(2)
@given(n=st.integers(0, 1000))
def test_others_wait(world, n):
    assert n < 70 or world.rank == 0
    dist.barrier()

@pytest.mark.world(2)
@given(n=st.integers(0, 1000))
def test_one_rank_skips(world, n):
    if world.rank == 1:
        pytest.skip("only me")

@pytest.mark.world(2)
@given(n=st.integers(0, 1000))
def test_kinds_of_failure(world, n):
    if world.rank == 1 and n > 100:
        raise KeyError("high")
    if world.rank == 0 and n > 50:
        raise ValueError("low")

class Sums(RuleBasedStateMachine):
    total = 0

    @rule(n=st.integers(0, 100))
    def add(self, n):
        value = torch.tensor([n])
        dist.all_reduce(value)
        assert value.item() == 2 * n
        self.total += n

    @rule()
    def wait(self):
        dist.barrier()

@pytest.mark.world(2)
class TestSums(Sums.TestCase):
    pass

@pytest.mark.world(2)
def test_sums_below(world):
    class Below(Sums):
        @invariant()
        def below(self):
            assert self.total < 130

    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(Below)
    assert "state.add(n=" in str(caught.value.__notes__)
"""


def test_a_failed_example_of_a_class_of_unittest_names_its_rank(
    session: Session,
) -> None:
    done = session("""
import unittest
from hypothesis import given, strategies as st

class TestDrawn(unittest.TestCase):
    @pytest.mark.world(2)
    @given(st.integers(1, 1000))
    def test_it(self, n):
        assert n < 1 or dist.get_rank() == 0
""")
    assert "root cause: rank 1: raised AssertionError" in done.stdout, done.stdout
    # a busy machine may leave no time to shrink, and then writes the example otherwise
    assert re.search(r"\bn=1\b", done.stdout) and "Agreed" not in done.stdout


@pytest.mark.slow
def test_examples_stay_in_step(session: Session) -> None:
    done = session(DRAWN)
    out = done.stdout
    assert "4 failed, 4 passed" in out, out
    assert "n=70," in out and "Agreed" not in out
    assert re.search(r"not shrunk since other ranks wait: .*n=\d+", out)
    assert "the ranks do not agree on the outcome" in out
    assert "ValueError: low" in out and "n=51," in out
    says = "victim: rank 0: raised gradparity.multiprocess.pytest_plugin.hypothesis"
    assert f"{says}.OtherRankFailed: the example failed on rank [1]" in out


# regression: M11
@pytest.mark.slow
def test_pdb_looks_at_the_rank_that_failed(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        """
import pytest, torch.distributed as dist

@pytest.mark.world(2, timeout_s=2)
def test_it(world):
    marked = 40 + world.rank
    if world.rank == 1:
        raise ValueError("boo")
    dist.barrier()

@pytest.mark.world(2)
def test_innocent(world):
    dist.barrier()
"""
    )
    keys, screen = pty.openpty()
    command = [sys.executable, "-m", "pytest", "-q", "--pdb", "--color=no"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=screen, stdout=screen, stderr=screen
    ) as process:
        os.close(screen)
        shown = read_until(keys, b"(Pdb) ")
        time.sleep(3)  # longer than the test's limit
        os.write(keys, b"p 'marked', marked\n")
        shown += read_until(keys, b"(Pdb) ")
        os.write(keys, b"q\n")
        shown += read_until(keys, b" passed in ")
        process.wait(30)
    os.close(keys)
    assert b"pdb on rank 1 of 2" in shown and b"('marked', 41)" in shown
    assert b"1 failed, 1 passed" in shown, shown.decode()


def read_until(fd: int, end: bytes) -> bytes:
    read = b""
    while end not in read and select.select([fd], [], [], 60)[0]:
        try:
            read += os.read(fd, 4096)
        except OSError:  # the other side is closed
            break
    return read
