"""Which rank failed first: pure functions on made-up facts."""

from dataclasses import replace

import pytest

from gradparity.multiprocess import RankState, WorldFailure
from gradparity.multiprocess.messages import Kind, Reply
from gradparity.multiprocess.outcomes import Collective
from gradparity.multiprocess.parent.root_cause import outcomes_of, waits_in_collective
from gradparity.multiprocess.parent.watch import Fact

OK, RAISED, EXITED = RankState.OK, RankState.RAISED, RankState.EXITED
KILLED, HUNG, VICTIM = RankState.KILLED, RankState.HUNG, RankState.VICTIM

IN_COLLECTIVE = """Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 1 in wait

Current thread 0x02 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 5 in all_reduce
  File "/tests/test_it.py", line 3 in test_it
"""
ELSEWHERE = """Current thread 0x02 (most recent call first):
  File "/tests/test_it.py", line 3 in test_it
"""
DONE = """Current thread 0x02 (most recent call first):
  File "/site-packages/gradparity/multiprocess/rank/world.py", line 99 in all_agree
  File "/site-packages/torch/testing/_internal/common_distributed.py", line 1 in _run
"""
GLOO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:5"


def ok(rank: int) -> Fact:
    return Fact(rank=rank, reply=Reply(kind=Kind.OK, ended_at_s=0.0))


def raised(rank: int, at_s: float, message: str = "boo", kind: str = "E") -> Fact:
    reply = Reply(kind=Kind.RAISED, ended_at_s=at_s, error_type=kind, message=message)
    return Fact(rank=rank, reply=reply)


def ended(rank: int, at_s: float, code: int) -> Fact:
    return Fact(rank=rank, exit_code=code, ended_at_s=at_s)


def hung(rank: int, stacks: str = ELSEWHERE, stopped: bool = False) -> Fact:
    return Fact(rank=rank, stacks=stacks, stopped=stopped)


@pytest.mark.parametrize(
    ("facts", "states", "root"),
    [
        ([ok(0), ok(1)], [OK, OK], None),
        ([ok(0), raised(1, 1.0)], [OK, RAISED], 1),
        ([raised(0, 2.0), raised(1, 1.0)], [RAISED, RAISED], 1),
        ([raised(0, 1.0, GLOO, "RuntimeError"), raised(1, 2.0)], [VICTIM, RAISED], 1),
        ([raised(0, 1.0, GLOO, "ConnectionError"), ok(1)], [RAISED, OK], 0),
        (
            [raised(0, 1.0, GLOO, "RuntimeError"), ended(1, 2.0, 3)],
            [VICTIM, EXITED],
            1,
        ),
        ([hung(0), ended(1, 2.0, -9)], [VICTIM, KILLED], 1),
        ([hung(0, IN_COLLECTIVE), hung(1)], [VICTIM, HUNG], 1),
        ([hung(0, IN_COLLECTIVE), hung(1, IN_COLLECTIVE)], [HUNG, HUNG], 0),
        ([hung(0, IN_COLLECTIVE), ok(1)], [HUNG, OK], 0),
        ([raised(0, 1.0, GLOO, "RuntimeError"), hung(1)], [VICTIM, HUNG], 1),
        ([ended(0, 2.0, 1), ended(1, 1.0, 1)], [EXITED, EXITED], 1),
        ([hung(0, DONE), hung(1)], [VICTIM, HUNG], 1),
        ([hung(0, DONE), hung(1, IN_COLLECTIVE)], [VICTIM, HUNG], 1),
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


def test_only_the_main_thread_shows_where_a_rank_waits() -> None:
    assert waits_in_collective(IN_COLLECTIVE)
    assert not waits_in_collective(ELSEWHERE)
    assert not waits_in_collective("")
    swapped = ELSEWHERE.replace("Current t", "T")
    assert not waits_in_collective(IN_COLLECTIVE.replace("Current t", "T") + swapped)


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
    assert "root cause: rank" in str(WorldFailure(outcomes, outcomes[root]))


CHAINED = """Traceback (most recent call last):
  File "/lib/train.py", line 3, in step
    loss.backward()
{torch}: {message}

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/lib/train.py", line 5, in step
TrainingError: step 3 failed
"""


@pytest.mark.parametrize(
    ("torch", "message", "state"),
    [
        ("RuntimeError", GLOO, VICTIM),
        ("torch.distributed.DistBackendError", GLOO, VICTIM),
        ("RuntimeError", "shapes differ", RAISED),
        ("ConnectionError", GLOO, RAISED),
    ],
)
def test_a_rank_whose_error_follows_a_lost_connection_is_a_victim(
    torch: str, message: str, state: RankState
) -> None:
    reply = Reply(
        kind=Kind.RAISED,
        ended_at_s=1.0,
        error_type="TrainingError",
        message="step 3 failed",
        traceback=CHAINED.format(torch=torch, message=message),
    )
    outcomes, root = outcomes_of([Fact(rank=0, reply=reply), ended(1, 2.0, 9)])
    assert outcomes[0].state is state
    assert root == (1 if state is VICTIM else 0)
