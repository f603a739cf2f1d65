"""Ranks whose hypothesis tests draw or end differently say so at once."""

import pytest

from gradparity.tests.multiprocess.test_pytest_plugin import PRELOADED, Session, session

pytest_plugins = ["pytester"]
__all__ = ["session"]
assert PRELOADED  # sessions of this process find torch imported

HEAD = """
import os
from hypothesis import assume, example, given, settings, strategies as st
"""
DIFFER = "drew other values for an example than rank 0: every rank must draw the same"


# regression: h42-7
@pytest.mark.parametrize(
    ("body", "cause", "says"),
    [
        (
            "d.draw(st.integers()) if world.rank == 1 else None",
            "Failed: rank [1] " + DIFFER,
            "the example, not shrunk: world=World(rank=",
        ),
        (
            "d.draw(st.integers(0, 8 + world.rank))",
            "Failed: rank [1] " + DIFFER,
            "",
        ),
        (
            "assume(world.rank == 0); d.draw(st.integers())",
            "Failed: the ranks do not agree on an example: ranks [1] reject it, and "
            "rank [1] drew other values for an example than rank 0",
            "",
        ),
        (
            "assert world.rank == 0; d.draw(st.integers())",
            "AssertionError: assert 1 == 0",
            "the example, not shrunk since the ranks drew different values: ",
        ),
    ],
    ids=["one rank draws", "other bounds", "assume before", "fails before"],
)
def test_different_values(session: Session, body: str, cause: str, says: str) -> None:
    """The rank that drew more hung until the limit, done and waiting."""
    done = session(f"""{HEAD}
@pytest.mark.world(2)
@given(d=st.data())
def test_it(world, d):
    {body}
""")
    assert "1 failed" in done.stdout
    assert f"rank 1: raised {cause}" in done.stdout
    assert says in done.stdout
    assert "hung" not in done.stdout and "contextlib" not in done.stdout


def test_different_numbers_of_state_machines(session: Session) -> None:
    """The rank that ran one more hung until the limit."""
    done = session(f"""{HEAD}
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

class Machine(RuleBasedStateMachine):
    @rule()
    def nothing(self):
        pass

@pytest.mark.world(2)
def test_it(world):
    for _ in range(1 + world.rank):
        run_state_machine_as_test(Machine)
""")
    cause = (
        "root cause: rank 1: raised Failed: the ranks run different numbers of "
        "examples: rank [0] has"
    )
    assert cause in done.stdout and "hung" not in done.stdout, done.stdout


# regression: h42-7
def test_different_numbers_of_examples(session: Session) -> None:
    done = session(f"""{HEAD}
@pytest.mark.world(2)
def test_it(world):
    @settings(max_examples=5 + 5 * world.rank)
    @given(st.integers())
    def inner(n):
        pass

    from gradparity.multiprocess.pytest_plugin.hypothesis import Steps

    with Steps(1).of(inner):
        inner()
""")
    cause = (
        "root cause: rank 1: raised Failed: the ranks run different numbers of "
        "examples: rank [0] has run all of its examples, and this rank ran another one"
    )
    assert cause in done.stdout and "returned normally: rank 0" in done.stdout


# regression: h42-7
def test_a_skip_or_an_error_of_one_rank_is_the_cause(session: Session) -> None:
    """The victim was named, which waits for the next example."""
    done = session(f"""{HEAD}
@pytest.mark.world(2)
@given(st.integers())
def test_skips(world, n):
    if world.rank == 1:
        pytest.skip("not here")

@pytest.mark.world(2)
@given(st.integers())
def test_exits(world, n):
    if world.rank == 1:
        raise SystemExit("not here")
""")
    cause = "root cause: rank 1: raised {}: not here"
    assert cause.format("Skipped") in done.stdout
    assert cause.format("SystemExit") in done.stdout
    victim = "OtherRankFailed: rank 1 left the test"
    lines = done.stdout.splitlines()
    assert sum(line.startswith("victim") and victim in line for line in lines) == 2


# regression: h42-7
def test_an_assumption_of_one_rank_shows_its_example(session: Session) -> None:
    """Lines of contextlib came before the sentence."""
    done = session(f"""{HEAD}
@pytest.mark.world(2)
@given(n=st.integers(0, 100))
def test_it(world, n):
    assume(n < 10 or world.rank == 0)

@pytest.mark.world(2)
@example(n=3)
@given(n=st.integers(0, 100))
def test_passes(world, n):
    assume(n != 4)
""")
    assert "1 failed, 1 passed" in done.stdout
    _, _, cause = done.stdout.partition("root cause: rank ")
    title, first, *_ = cause.splitlines()
    says = "the ranks do not agree on an example: ranks [1] reject it"
    assert title.endswith(f"raised Failed: {says}") and first == f"  {says}"
    assert "n=10," in cause and "contextlib" not in done.stdout
