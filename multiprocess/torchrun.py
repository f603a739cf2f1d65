"""``TorchrunCluster``: a world of torchrun's ranks, for a program that all of them run.

Every process of torchrun makes the same calls in the same order. Each is the agent of
one rank (:mod:`.elastic.agent`), which is a child of it; rank 0's leads, and sends the
others what came of each call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from .cluster import BaseCluster, pickled_call
from .elastic.agent import Agent, AgentCluster, Ended
from .elastic.membership import MEET_S
from .errors import HarnessError
from .outcomes import RankOutcome
from .parent.root_cause import outcomes_or_raise
from .spec import CallOptions, WorldSpec


class TorchrunCluster(BaseCluster):
    """A ``Cluster`` on the ranks of torchrun; every process makes the same calls."""

    def __init__(self, **settings: Any) -> None:
        """Join the processes that torchrun made.

        Args:
            **settings: Fields of ``WorldSpec``; the size is torchrun's.
        """
        super().__init__(
            WorldSpec(world_size=int(os.environ["WORLD_SIZE"]), **settings)
        )
        # A process may do other things for long between two calls.
        self._agent = Agent(patience_s=MEET_S)
        self.rank = self._agent.rank
        leads = self._agent.leads
        self._leader = AgentCluster(self._agent, self.spec) if leads else None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._leader is None and not self._closed:
            # Not to wait for a leader that waits for this process's next call.
            self._closed = True
            self._agent.report_error(error)
            self._agent.close()
        self.close()

    def close(self) -> None:
        """End this process's rank; the others go on after rank 0 has closed.

        torchrun ends all processes when one has failed: rank 0 must have reported by
        then.
        """
        if self._closed:
            return
        self._closed = True
        try:
            with self._agent.handling_sigterm():
                if self._leader is not None:
                    self._agent.finish(0)
                else:
                    self._agent.follow()
        except (HarnessError, Ended):
            pass  # rank 0 may have held the store, or torchrun has ended the run
        finally:
            self._agent.close()

    def submit(
        self, options: CallOptions, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[RankOutcome, ...]:
        """Call ``fn`` on every rank; return every rank's outcome, in every process.

        Raises:
            WorldError: At least one rank did not return.
            HarnessError: Another process is gone, or has closed its cluster.
        """
        payload = pickled_call(fn, args, kwargs)  # fails in all processes alike
        with self._agent.handling_sigterm():
            if self._leader is not None:
                facts = self._leader.observe(options, payload)
                # Before judging, which may raise: the other processes are to raise the
                # same.
                self._agent.post(facts)
                return self._leader.judge(options, facts)
            found = self._agent.follow_call()
        if isinstance(found, int):
            name = getattr(fn, "__qualname__", repr(fn))
            raise HarnessError(
                f"rank {self.rank} calls {name}, and rank 0 has closed its cluster: "
                "all processes must make the same calls in the same order"
            )
        return outcomes_or_raise(found)
