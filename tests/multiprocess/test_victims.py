"""Failures of ranks that end because another rank failed, which are their own."""

from gradparity.tests.multiprocess.test_pytest_plugin import PRELOADED, Session, session

pytest_plugins = ["pytester"]
__all__ = ["session"]
assert PRELOADED  # sessions of this process find torch imported

HEAD = """
@pytest.fixture
def server(world):
    yield
    if world.rank == 0:
        raise KeyError("of the teardown")

@pytest.fixture
def client(world):
    yield
    if world.rank == 1:
        raise KeyError("of the teardown")

def fail_or_wait(world):
    if world.rank == 1:
        raise ValueError("boo")
    dist.all_reduce(torch.ones(1))
"""


# regression: h28-18
def test_a_teardown_that_fails_after_another_rank(session: Session) -> None:
    """Its error was lost, and a server that had crashed was not reported."""
    done = session(f"""{HEAD}
@pytest.mark.world(2, grace_s=10)
def test_it(world, server):
    fail_or_wait(world)

@pytest.mark.world(2, grace_s=10)
def test_answers(world, client):
    world.once(lambda: int("boo"))

@pytest.mark.xfail
@pytest.mark.world(2, grace_s=10)
def test_expected(world, server):
    fail_or_wait(world)
""")
    assert "2 failed, 2 xfailed, 2 errors" in done.stdout
    out = done.stdout.replace("[world2]", "")  # an id before pytest 8.4
    assert "FAILED test_it.py::test_it - rank 1: raised ValueError: boo" in out
    assert "FAILED test_it.py::test_answers - rank 0: raised ValueError:" in out
    for rank, name in enumerate(("test_it", "test_answers")):
        assert f"ERROR test_it.py::{name} - Failed: rank {rank}: KeyError: " in out
        assert f"\nrank {rank}: KeyError: 'of the teardown'\n" in out


# regression: h28-18
def test_a_teardown_that_waits_for_others_is_no_error(session: Session) -> None:
    done = session(f"""{HEAD}
@pytest.fixture
def barrier(world):
    yield
    if world.rank == 0:
        dist.barrier()

@pytest.mark.world(2)
def test_it(world, barrier):
    fail_or_wait(world)
""")
    assert "1 failed in" in done.stdout


# regression: h28-18
def test_a_subtest_that_failed_before_another_rank(session: Session) -> None:
    done = session(f"""{HEAD}
@pytest.mark.world(2, grace_s=10)
def test_it(world, subtests):
    if world.rank == 0:
        with subtests.test("own"):
            raise KeyError("of the subtest")
    with subtests.test("ended"):
        fail_or_wait(world)
    raise OSError(world.rank)
""")
    assert "SUBFAILED[own] test_it.py::test_it - KeyError: 'of the subtest'" in (
        done.stdout
    )
    assert "SUBFAILED[ended] test_it.py::test_it - ValueError: boo" in done.stdout
    assert "CallEnded" not in done.stdout
