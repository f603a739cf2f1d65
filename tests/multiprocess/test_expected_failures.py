"""A mark that expects a failure hides no failure of ranks or of the harness."""

import pytest

from gradparity.tests.multiprocess.test_pytest_plugin import Session, session

pytest_plugins = ["pytester"]
__all__ = ["session"]

UNEXPECTED = """
pytestmark = [pytest.mark.xfail, pytest.mark.world(2, timeout_s=2)]

@pytest.mark.parametrize("value", [time.time()])
def test_has_another_name_on_ranks(value):
    pass

def test_crashes(world):
    if world.rank == 1:
        os.kill(os.getpid(), 11)

def test_exits():
    os._exit(0)

def test_hangs(world):
    if world.rank == 1:
        time.sleep(100)

def test_fails_and_crashes(world):
    if world.rank == 1:
        os.kill(os.getpid(), 9)
    raise ValueError

def test_skips_on_one_rank(world):
    if world.rank == 1:
        pytest.skip("away")
    raise ValueError

def test_leaves_on_one_rank(world):
    if world.rank == 1:
        pytest.exit("away")

@pytest.fixture
def ends_early(world):
    yield
    if world.rank == 0:
        os._exit(3)

def test_crashes_after_its_failure(ends_early):
    raise ValueError

@pytest.fixture
def never_ends(world):
    yield
    if world.rank == 0:
        time.sleep(100)

def test_hangs_after_its_failure(world, never_ends):
    if world.rank == 0:
        raise ValueError
"""


# regression: H2-A5
def test_only_exceptions_of_tests_are_expected(session: Session) -> None:
    done = session(UNEXPECTED)
    assert "9 failed in" in done.stdout, done.stdout
    assert "rank 0 died in its teardown: exit code 3" in done.stdout
    assert "rank 1: skip away" in done.stdout


# regression: H2-A5
def test_a_fault_of_the_harness_is_not_expected(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADPARITY_CPU_SLOTS", "abc")
    done = session("""
@pytest.mark.world(2)
@pytest.mark.xfail
def test_it():
    pass
""")
    assert "1 failed in" in done.stdout, done.stdout


# regression: H2-B15
def test_an_exception_that_cannot_be_sent_is_compared_with_the_mark(
    session: Session,
) -> None:
    done = session("""
class Expected(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a}{b}")

@pytest.mark.world(2)
@pytest.mark.xfail(raises=Expected, strict=True)
def test_expected(world):
    if world.rank == 0:
        raise Expected(1, 2)

@pytest.mark.world(2)
@pytest.mark.xfail(raises=KeyError)
def test_not_expected():
    raise Expected(1, 2)

@pytest.fixture
def fails():
    yield
    raise KeyError

@pytest.mark.world(2)
@pytest.mark.xfail(raises=Expected)
def test_not_expected_in_the_teardown(fails):
    raise Expected(1, 2)
""")
    assert "1 failed, 2 xfailed, 1 error" in done.stdout, done.stdout


# regression: H2-A5
def test_a_failure_before_a_teardown_that_waits_is_expected(session: Session) -> None:
    done = session("""
@pytest.fixture
def meets(world):
    yield
    dist.barrier()

@pytest.mark.world(2)
@pytest.mark.xfail(raises=ValueError)
def test_it(world, meets):
    if world.rank == 1:
        raise ValueError
    total(world)
    total(world)
""")
    assert "1 xfailed" in done.stdout and done.returncode == 0, done.stdout


# regression: H2-A5
def test_a_teardown_that_is_slower_than_others_is_expected(session: Session) -> None:
    done = session("""
@pytest.fixture
def is_slow(world):
    yield
    if world.rank == 0:
        time.sleep(5)

@pytest.mark.world(2, grace_s=0.1)
@pytest.mark.xfail
def test_it(is_slow):
    raise ValueError
""")
    assert "1 xfailed" in done.stdout, done.stdout


# regression: H2-A7
def test_each_phase_that_fails_is_shown_as_failed(session: Session) -> None:
    done = session("""
@pytest.fixture
def fails_first(world):
    yield
    if world.rank == 0:
        raise ValueError("of the teardown")

@pytest.mark.world(2, grace_s=9)
def test_call_and_teardown(world, fails_first):
    if world.rank == 1:
        time.sleep(0.4)
        raise KeyError("of the call")

@pytest.mark.world(2, grace_s=9)
@pytest.mark.xfail(raises=KeyError)
def test_only_the_call_is_expected(world, fails_first):
    if world.rank == 1:
        time.sleep(0.4)
        raise KeyError("expected")

@pytest.fixture
def fails_late(world):
    if world.rank == 1:
        time.sleep(0.4)
        raise KeyError("of the setup")

@pytest.mark.world(2, grace_s=9)
def test_setup_and_call(world, fails_late):
    raise ValueError("of the call on rank 0")
""")
    assert "1 failed, 1 xfailed, 3 errors" in done.stdout, done.stdout
    assert "FAILED test_it.py::test_call_and_teardown" in done.stdout
    assert "rank 1: raised KeyError: 'of the setup'" in done.stdout
    assert "root cause: rank 0: raised ValueError: of the call on rank 0" in done.stdout
