"""Which rank failed first: pure functions on made-up facts."""

from dataclasses import replace

import pytest

from gradparity.multiprocess import RankState, WorldError
from gradparity.multiprocess.messages import Kind, Reply, pickled
from gradparity.multiprocess.outcomes import Collective, Left, Place
from gradparity.multiprocess.parent.root_cause import Fact, outcomes_of

OK, RAISED, EXITED = RankState.OK, RankState.RAISED, RankState.EXITED
KILLED, HUNG, VICTIM = RankState.KILLED, RankState.HUNG, RankState.VICTIM

IN_COLLECTIVE, ELSEWHERE, DONE = Place.COLLECTIVE, Place.BODY, Place.DONE
IMPORTING = Place.IMPORTING


def ok(rank: int) -> Fact:
    return Fact(rank=rank, reply=Reply(kind=Kind.OK, ended_at_s=0.0))


def raised(rank: int, at_s: float, *, waited: bool = False) -> Fact:
    reply = Reply(
        kind=Kind.RAISED,
        ended_at_s=at_s,
        error_type="RuntimeError",
        message="connection refused",  # words decide nothing
        left_a_wait=waited,
    )
    return Fact(rank=rank, reply=reply)


def left(rank: int, kind: str = "Skipped") -> Fact:
    value = pickled(Left(kind, kind, "why"))
    return Fact(rank=rank, reply=Reply(kind=Kind.OK, ended_at_s=0.0, value=value))


def ended(rank: int, at_s: float, code: int) -> Fact:
    return Fact(rank=rank, exit_code=code, ended_at_s=at_s)


def hung(rank: int, place: Place = ELSEWHERE, stopped: bool = False) -> Fact:
    return Fact(rank=rank, place=place, stopped=stopped)


def reported(fact: Fact, order: int) -> Fact:
    return replace(fact, order=order)


@pytest.mark.parametrize(
    ("facts", "states", "root"),
    [
        ([ok(0), ok(1)], [OK, OK], None),
        # regression: M18, clocks of two hosts have no common zero
        ([reported(raised(0, 9.0), 1), reported(raised(1, 1.0), 2)], [RAISED] * 2, 0),
        (
            [reported(ended(0, 1.0, 3), 2), reported(raised(1, 9.0), 1)],
            [EXITED, RAISED],
            1,
        ),
        ([ok(0), raised(1, 1.0)], [OK, RAISED], 1),
        ([raised(0, 2.0), raised(1, 1.0)], [RAISED, RAISED], 1),
        ([raised(0, 1.0), replace(raised(1, 2.0), failed_at_s=0.5)], [RAISED] * 2, 1),
        ([raised(0, 1.0, waited=True), raised(1, 2.0)], [VICTIM, RAISED], 1),
        ([raised(0, 1.0, waited=True), ok(1)], [RAISED, OK], 0),
        ([raised(0, 1.0, waited=True), ended(1, 2.0, 3)], [VICTIM, EXITED], 1),
        ([hung(0), ended(1, 2.0, -9)], [VICTIM, KILLED], 1),
        ([hung(0, IN_COLLECTIVE), hung(1)], [VICTIM, HUNG], 1),
        ([hung(0, IN_COLLECTIVE), hung(1, IN_COLLECTIVE)], [HUNG, HUNG], 0),
        ([hung(0, IN_COLLECTIVE), ok(1)], [HUNG, OK], 0),
        ([raised(0, 1.0, waited=True), hung(1)], [RAISED, VICTIM], 0),
        ([raised(0, 1.0), hung(1)], [RAISED, VICTIM], 0),
        ([left(0), left(1)], [OK, OK], None),
        ([left(0), ok(1)], [RAISED, OK], 0),
        ([left(0), left(1, "XFailed")], [RAISED, RAISED], 0),
        ([left(0), hung(1, IN_COLLECTIVE)], [RAISED, VICTIM], 0),
        ([left(0), hung(1)], [OK, HUNG], 1),
        ([left(0), raised(1, 1.0, waited=True)], [RAISED, VICTIM], 0),
        ([left(0), raised(1, 1.0)], [OK, RAISED], 1),
        ([ended(0, 2.0, 1), ended(1, 1.0, 1)], [EXITED, EXITED], 1),
        ([hung(0, DONE), hung(1)], [VICTIM, HUNG], 1),
        ([hung(0, DONE), hung(1, IN_COLLECTIVE)], [VICTIM, HUNG], 1),
        ([hung(0), hung(1, IMPORTING)], [VICTIM, HUNG], 1),
        ([hung(0, IMPORTING), hung(1, IMPORTING)], [HUNG, HUNG], 0),
        ([raised(0, 1.0), hung(1, IMPORTING)], [RAISED, VICTIM], 0),
        ([hung(0), hung(1, stopped=True)], [HUNG, HUNG], 1),
        ([raised(0, 1.0), hung(1, stopped=True)], [RAISED, HUNG], 1),
        (
            [hung(0, IN_COLLECTIVE), hung(1, IN_COLLECTIVE, stopped=True)],
            [VICTIM, HUNG],
            1,
        ),
    ],
)
def test_the_first_fault_is_the_root(
    facts: list[Fact], states: list[RankState], root: int | None
) -> None:
    outcomes, found = outcomes_of(facts)
    assert [outcome.state for outcome in outcomes] == states
    assert found == root


def failed_in(fact: Fact, *parts: str, waited: bool = False) -> Fact:
    replies = tuple(
        Reply(
            kind=Kind.RAISED,
            ended_at_s=number,
            error_type="ValueError",
            message="why",
            part=part,
            left_a_wait=waited,
        )
        for number, part in enumerate(parts)
    )
    return replace(fact, failed_parts=replies)


# regression: h42-8
def test_a_part_that_raised_explains_ranks_that_wait() -> None:
    waits = hung(0, IN_COLLECTIVE)
    outcomes, root = outcomes_of([waits, failed_in(ok(1), "a", "b")])
    assert root == 1
    assert outcomes[1].headline == "rank 1: raised ValueError: in a: why"
    assert [outcome.state for outcome in outcomes] == [VICTIM, RAISED]
    both = failed_in(waits, "a"), failed_in(hung(1, IN_COLLECTIVE), "a", "b")
    outcomes, root = outcomes_of(both)
    assert root == 1
    assert outcomes[1].headline == "rank 1: raised ValueError: in b: why"


@pytest.mark.parametrize(
    ("facts", "root"),
    [
        ([ok(0), failed_in(ok(1), "a")], None),
        ([hung(0), failed_in(ok(1), "a")], 0),
        ([raised(0, 1.0), failed_in(ok(1), "a")], 0),
        ([failed_in(hung(0, IN_COLLECTIVE), "a"), failed_in(ok(1), "a")], 0),
        ([hung(0, IN_COLLECTIVE), failed_in(ok(1), "a", waited=True)], 0),
    ],
    ids=["all end", "no wait", "own failure", "on all ranks", "followed"],
)
def test_other_parts_that_raised_explain_nothing(
    facts: list[Fact], root: int | None
) -> None:
    outcomes, found = outcomes_of(facts)
    assert found == root
    assert outcomes[1].ok


def call(rank: int, op: str, number: int = 1) -> Collective:
    return Collective("the default group", number, op, "float32[2]", f"a.py:{rank}")


@pytest.mark.parametrize(
    ("ops", "root", "says"),
    [
        (
            ["allreduce", "allreduce", "allreduce", "broadcast"],
            3,
            "collective #1 of the default group is broadcast float32[2] here (a.py:3), "
            "and allreduce float32[2] on rank 0",
        ),
        (
            ["broadcast", "allreduce"],
            0,
            "is broadcast float32[2] here (a.py:0), and allreduce float32[2] on rank 1",
        ),
        (["allreduce", "allreduce"], 0, "waiting in a collective after 0.0 s"),
    ],
)
def test_the_odd_one_of_waiting_ranks_is_the_root(
    ops: list[str], root: int, says: str
) -> None:
    facts = [
        replace(hung(rank, IN_COLLECTIVE), collectives=(call(rank, op),))
        for rank, op in enumerate(ops)
    ]
    outcomes, found = outcomes_of(facts)
    assert found == root
    assert outcomes[root].headline.endswith(says)
    assert "root cause: rank" in str(WorldError(outcomes, outcomes[root]))


def test_ranks_in_their_body_wait_for_one_that_has_issued_less() -> None:
    issued = ["broadcast", "allreduce"]
    members = (0, 1, 2)
    facts = [
        replace(
            hung(rank),
            collectives=tuple(
                replace(call(rank, op, n), ranks=members, position=n - 1)
                for n, op in enumerate(issued[:count], 1)
            ),
        )
        for rank, count in enumerate((2, 1, 2))
    ]
    outcomes, root = outcomes_of(facts)
    assert root == 1
    assert [outcome.state for outcome in outcomes] == [VICTIM, HUNG, VICTIM]
    assert "a.py:1" in str(WorldError(outcomes, outcomes[1]))


def test_the_root_cause_ends_a_short_report() -> None:
    text = "".join(f"line {n}\n" for n in range(5000)) + "x" * 10**5
    outcomes, root = outcomes_of(
        [replace(ok(0), output=text), raised(1, 1.0), raised(2, 2.0, waited=True)]
    )
    assert root == 1
    lines = str(WorldError(outcomes, outcomes[root])).splitlines()
    assert len(lines) < 100 and max(map(len, lines)) <= 1030
    assert any(line.endswith("x [... 99000 more characters]") for line in lines)
    assert lines[0] == "world of 3: rank 1: raised RuntimeError: connection refused"
    assert lines[-1] == "root cause: rank 1: raised RuntimeError: connection refused"
    assert "line 9" in lines and "line 10" not in lines and "line 4999" in lines
    assert "[... 4951 lines left out ...]" in lines
    assert outcomes[0].output == text


def test_ranks_with_equal_outcomes_are_shown_once() -> None:
    waiting = replace(hung(0, IN_COLLECTIVE), output="a warning", stacks="in wait")
    facts = [
        replace(waiting, rank=rank, collectives=(call(0, "allreduce"),))
        for rank in range(8)
    ]
    facts[2], facts[7] = raised(2, 1.0), ok(7)
    facts[5] = replace(facts[5], collectives=())
    outcomes, root = outcomes_of(facts)
    assert root == 2
    lines = [
        line for line in str(WorldError(outcomes, outcomes[2])).splitlines() if line
    ]
    assert lines[1:] == [
        "--- output of rank 0, 1, 3 to 6 ---",
        "a warning",
        "last collectives:",
        "  rank 0, 1, 3, 4, 6: #1 allreduce float32[2] in the default group, a.py:0",
        "returned normally: rank 7",
        "victim: rank 0, 1, 3 to 6: waiting in a collective after 0.0 s; killed "
        "because rank 2 failed",
        "  stacks:",
        "  in wait",
        "root cause: rank 2: raised RuntimeError: connection refused",
    ]


def test_equal_failures_are_shown_once_though_they_name_their_rank() -> None:
    """pytest shows the arguments of a test, with the world and addresses."""
    shown = [
        f"world = World(rank={rank}, size=3), <f at 0x{rank}ab>" for rank in (0, 1)
    ]
    others = f"{shown[0]}, bad buffer at 0x1000"  # an address that the test gives
    facts = [raised(rank, rank + 1.0) for rank in range(3)]
    for rank, text in enumerate((*shown, others)):
        reply = facts[rank].reply
        assert reply is not None
        facts[rank] = replace(facts[rank], reply=replace(reply, traceback=text))
    outcomes, root = outcomes_of(facts)
    assert root == 0
    told = str(WorldError(outcomes, outcomes[0]))
    assert shown[0] in told and shown[1] not in told and others in told
    assert (
        "also failed: rank 1: raised RuntimeError: connection refused\n  (as the"
        in (told)
    )


def test_output_that_differs_where_it_is_not_shown_is_shown_once() -> None:
    texts = ["".join(f"line {n * (n != 20)}\n" for n in range(90)) for _ in range(2)]
    texts[1] = texts[1].replace("line 30", "another")
    facts = [replace(raised(n, 1.0), output=text) for n, text in enumerate(texts)]
    outcomes, root = outcomes_of(facts)
    assert root is not None
    told = str(WorldError(outcomes, outcomes[root]))
    assert told.count("--- output of rank 0, 1 ---") == told.count("line 9\n") == 1


def test_output_of_which_a_rank_kept_no_middle_says_so() -> None:
    text = "".join(f"line {n}\n" for n in range(60)) * 2
    text = text.replace("line 59\nline 0\n", "line 59\n\n[... 77 bytes left out ...]\n")
    outcomes, root = outcomes_of([replace(raised(0, 1.0), output=text)])
    assert root == 0
    told = str(WorldError(outcomes, outcomes[0]))
    assert "line 9\n[... 70 lines and 77 bytes left out ...]\nline 20" in told
    assert told.count("left out") == 1


def test_a_huge_message_is_shown_whole_once() -> None:
    huge = Reply(
        kind=Kind.RAISED,
        ended_at_s=1.0,
        error_type="RuntimeError",
        message="x" * 10**6,
        traceback=f"Error: {'x' * 10**6}",
    )
    outcomes, root = outcomes_of(
        [Fact(rank=0, reply=huge), raised(1, 2.0, waited=True)]
    )
    assert root == 0
    text = str(WorldError(outcomes, outcomes[root]))
    assert "raised RuntimeError: xxx" in text and "[... 999000 more characters]" in text
    assert 10**6 <= text.count("x") < 10**6 + 5000
