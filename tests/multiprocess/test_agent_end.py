"""End of an agent's run: the first reason is kept, and later ones are ignored."""

import os
from collections.abc import Callable

import pytest

# A public name of torch.distributed, which does not export it to mypy.
from torch.distributed import HashStore

from gradparity.multiprocess import HarnessError
from gradparity.multiprocess.elastic import agent as agent_module
from gradparity.multiprocess.elastic.agent import Agent, Ended
from gradparity.multiprocess.elastic.store import SignedStore
from gradparity.multiprocess.environment import AGENT_VARIABLE

Make = Callable[[int], Agent]


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return rank 0's agent in a run in which no other agent is present."""

    def make(size: int) -> Agent:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(size))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("GRADPARITY_SECRET", "0123456789abcdef")
        monkeypatch.setattr(agent_module, "forkserver", lambda: None)
        store = SignedStore(HashStore(), rank=0, scope=("none", "agent0"))
        monkeypatch.setattr(agent_module, "torchrun_store", lambda name: store)
        monkeypatch.setattr("gradparity.multiprocess.elastic.membership.ANSWER_S", 0.1)
        return Agent()

    monkeypatch.setenv(AGENT_VARIABLE, "")  # put back afterwards
    return make


def test_sigterm_ends_every_later_wait(leader: Make) -> None:
    agent = leader(1)
    agent.check()
    agent._on_sigterm(15, None)
    for _ in range(2):
        with pytest.raises(Ended, match=r"ended by torchrun \(SIGTERM\) on all ranks"):
            agent.check()
    agent.close()


def test_sigterm_before_all_have_come_ends_an_orderly_end_too(leader: Make) -> None:
    agent = leader(2)
    agent._on_sigterm(15, None)
    with pytest.raises(Ended, match="rank 1: its process does not answer"):
        agent.members()
    agent.reported()
    agent.finish(3)  # there is nobody to be told, and nothing is raised
    agent.close()
    assert AGENT_VARIABLE not in os.environ


def test_a_silent_agent_ends_every_later_wait(
    leader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = leader(2)
    found = [[], [1], []]  # heard again, too late
    monkeypatch.setattr(agent._monitor, "silent", lambda: found.pop(0))
    agent.check()
    for _ in range(2):
        with pytest.raises(HarnessError, match=r"not heard for 15 s: host .*: rank 1"):
            agent.check()
    agent.close()
