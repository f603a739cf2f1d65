"""Subtests on ranks look as in one process, and explain hangs that they cause."""

import re

import pytest

from gradparity.tests.multiprocess.test_pytest_plugin import PRELOADED, Session, session

pytest_plugins = ["pytester"]
__all__ = ["session"]
assert PRELOADED  # sessions of this process find torch imported

TEST = """
def test_it(subtests):
    for i in range(3):
        with subtests.test("of", i=i, text="a"):
            if i == 2:
                pytest.skip("no")
            assert i != 1
"""


def shown(session: Session, test: str) -> list[str]:
    """Return what the terminal shows of a test, without what names ranks and times."""
    done = session(test, "-vv", "--tb=short")
    assert "All traceback entries" not in done.stdout
    rank = r"^-+ Rank -+\n0$\n|^.* \d+%\]$|^=.*$|Failed: |^collecting .*$"
    lines = re.findall(r"SUB.*?\)|test_it FAILED", done.stdout)
    _, _, after = done.stdout.partition("= FAILURES =")
    text = re.sub(rank, "", after, flags=re.MULTILINE)
    return [*lines, *(line for line in text.splitlines() if line and ":" not in line)]


# regression: h42-8
def test_they_look_as_in_one_process(session: Session) -> None:
    """Their lines were captured with the setup, and their texts quoted twice."""
    alone = shown(session, TEST)
    assert alone[:4] == [
        "SUBPASSED[of] (i=0, text='a')",
        "SUBFAILED[of] (i=1, text='a')",
        "SUBSKIPPED[of] (i=2, text='a')",
        "test_it FAILED",
    ]
    assert shown(session, f"@pytest.mark.world(2){TEST}") == alone


# regression: h42-8
@pytest.mark.parametrize(
    "ends", ["assert False, 'a reason'", "pytest.skip('a reason')"]
)
@pytest.mark.parametrize("then", ["pass", "dist.broadcast(torch.ones(3), 0)"])
def test_one_that_leaves_out_a_collective_is_the_cause(
    session: Session, ends: str, then: str
) -> None:
    """The rank that waited for this collective was named, and nothing else."""
    done = session(f"""
@pytest.mark.world(2, timeout_s=3)
def test_it(subtests, world):
    with subtests.test("on all"):
        assert False
    with subtests.test("the reduction", i=1):
        if world.rank == 1:
            {ends}
        dist.all_reduce(torch.ones(1))
    {then}
""")
    _, _, cause = done.stdout.partition("root cause: rank 1: raised ")
    says = "in test_it [the reduction] (i=1): a reason"
    assert cause and says in cause.splitlines()[0], done.stdout
    assert "victim: rank 0" in done.stdout


# regression: h42-8
def test_one_that_fails_on_all_ranks_explains_no_hang(session: Session) -> None:
    done = session("""
@pytest.mark.world(2)
def test_it(subtests, world):
    with subtests.test("on all"):
        assert False
    if world.rank == 0:
        dist.all_reduce(torch.ones(1))
""")
    assert "root cause: rank 0: hung, waiting in a collective" in done.stdout
