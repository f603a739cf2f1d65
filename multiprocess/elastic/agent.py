"""Agent: a process of torchrun that starts, watches and ends one rank of each world.

The rank is a child process, forked like the ranks of a ``Cluster``. So the agent can
report a rank that crashes, and kill a rank that hangs in native code.

1. All agents join in torchrun's store. The agent of rank 0 leads: its ``AgentCluster``
   takes calls. The others ``follow``.
2. The leader posts a request. An agent whose rank is in that world forks this rank,
   which joins the process group. The others wait for the next request. When all ranks
   are ready, the leader starts the call and its clock.
3. Each agent watches its rank and posts its observations. The leader combines them.
4. torchrun sends SIGTERM when one of its processes has ended. Then every agent posts
   that it is present. An agent that does not post is the cause. If the leader is the
   cause, the first remaining agent replaces it and reports.

None of this uses the process group under test.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Self

from .. import linux
from ..cluster import BaseCluster
from ..environment import AGENT_VARIABLE
from ..errors import HarnessError
from ..messages import Kind
from ..outcomes import RankOutcome
from ..parent.forkserver_client import forkserver
from ..parent.rank_processes import current_context
from ..parent.root_cause import Fact
from ..spec import CallOptions, WorldSpec
from .local_rank import CallRequest, ContextChange, LocalRanks, RemoteRanks
from .membership import (
    ANSWER_S,
    MEET_S,
    Heartbeat,
    HeartbeatMonitor,
    Member,
    Membership,
)
from .store import SignedStore, pack, torchrun_store, unpack

_REPORT_S = 20.0
_LATENESS_S = 0.3

_GO, _NO = b"go", b"no"

Message = CallRequest | int
"""Message of the leader: a call, or finally the exit code of every agent."""

_numbers = itertools.count()
"""Counter that names the agents of this process (``agent0``). All processes create
their agents in the same order, so the names agree."""


class Ended(BaseException):
    """Raised when the run is over for this agent; the text says why."""


class Agent:
    """This process's agent in a run under torchrun; a context manager."""

    def __init__(self, gpus: int = 0) -> None:
        """Join the other agents.

        Args:
            gpus: Number of CUDA devices that this process can see.
        """
        env = os.environ
        self.rank = int(env["RANK"])
        self.size = int(env["WORLD_SIZE"])
        self.attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.hosts = int(env.get("GROUP_WORLD_SIZE", "1"))
        local_size = int(env.get("LOCAL_WORLD_SIZE", self.size))
        name = f"agent{next(_numbers)}"
        self._meeting = torchrun_store(name)
        self._membership = Membership(self._meeting, self.size)
        self._calls = 0
        self._terminated = False
        self._over: BaseException | None = None
        self._monitor: HeartbeatMonitor | None = None
        self._heartbeat: Heartbeat | None = None
        if self.leads:
            self._monitor = HeartbeatMonitor(self._meeting.raw, self.size)
        else:
            self._heartbeat = Heartbeat(torchrun_store(name).raw, self.rank)
            self._heartbeat.start()
        # After the first heartbeat, so that the leader, which waits for all records,
        # finds a heartbeat of each agent.
        self._membership.join(gpus, local_size)
        env[AGENT_VARIABLE] = str(os.getpid())
        self._began = current_context()
        # Ranks of an earlier attempt may still use the store, so keys contain the
        # attempt.
        run = f"gradparity/{self.attempt}/{self.size}/{name}"
        self._own = LocalRanks(self.rank, local_size, self.hosts, run, self._began.env)
        forkserver()  # it imports torch while this process continues

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        # The process is about to end. torchrun ends all processes when the first has
        # ended, so report the exit code before.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _on_sigterm(self, number: int, frame: object) -> None:
        self._terminated = True  # check() raises where that is safe

    @property
    def leads(self) -> bool:
        """True if this is the agent of rank 0."""
        return self.rank == 0

    @property
    def _store(self) -> SignedStore:
        return self._membership.run_store(self.check)

    def close(self) -> None:
        """End the ranks of this agent."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._own.end_all()
        os.environ.pop(AGENT_VARIABLE, None)

    def members(self) -> list[Member]:
        """Return every agent's record in rank order; wait for all of them.

        Raises:
            HarnessError: An agent did not join.
        """
        return self._membership.members(self.check)

    def check(self) -> None:
        """Raise if the run is over; called repeatedly while waiting for another agent.

        The first reason is kept: every later call raises it again.

        Raises:
            Ended: torchrun has asked this process to end.
            HarnessError: The leader no longer receives heartbeats of some agents.
        """
        if self._over is None:
            if self._terminated:
                self._over = Ended(self._membership.why_ended())
            elif self._monitor and (silent := self._monitor.silent()):
                self._over = HarnessError(self._membership.describe_silent(silent))
        if self._over is not None:
            raise self._over

    # -- the leader's side

    def call(self, request: CallRequest) -> tuple[bool, list[Fact]]:
        """Carry out a request on all agents.

        Returns:
            True if all ranks were ready, and one fact for each rank. The facts are
            about the call, or about the start if a rank was not ready.
        """
        # [Note: Two rounds of a call]
        # 1. start: every agent reports that its rank has joined, or how it ended;
        # 2. run: only if all have joined.
        # So the clock of a call starts when its world is ready, and a rank that cannot
        # start does not leave the others in a collective. An agent that sees a fault
        # sets the flag of the round; the other ranks then have only the grace period.
        # Keys contain the number of the call, so that a late answer to an earlier call
        # is not mistaken for an answer to this one.
        try:
            self._post(request)
            spec, options = request.spec, request.options
            own = self._own.start(request, self._others("start"))
            limit_s = spec.start_timeout_s + _REPORT_S
            ready = self._gather("start", own, spec.world_size, limit_s)
            going = all(f.reply and f.reply.kind is Kind.READY for f in ready)
            self._let_go(spec, going)
            if not going:
                self._own.end(request.world)
                return False, ready
            own = self._own.run(request, self._others("run"))
            # a rank on another host may still import the test
            imports_s = spec.start_timeout_s if options.is_test else 0.0
            limit_s = imports_s + options.timeout_s + spec.grace_s + _REPORT_S
            return True, self._gather("fact", own, spec.world_size, limit_s)
        except BaseException:  # also Ctrl-C, or the timeout of pytest-timeout
            # Agents that can still be reached leave this call for the next request.
            with contextlib.suppress(HarnessError):  # the store itself may be gone
                self._let_go(request.spec, False)
                for phase in ("start", "run"):
                    self._meeting.set_flag(self._fault(phase))
            self._own.end(request.world)
            raise

    def _post(self, message: Message) -> None:
        """Send a message to all followers."""
        self._calls += 1
        if self.size > 1:
            self._store.put_message("message", self._calls, pack(message))

    def change(self) -> ContextChange:
        """Return the settings that changed in this process since it became an agent."""
        return ContextChange.between(self._began, current_context())

    def finish(self, code: int) -> None:
        """End the run after the report was written; the leader calls this last.

        Args:
            code: Exit code for the followers.
        """
        # torchrun's agent may be gone, or the failure came before all had joined. The
        # other agents notice that by themselves.
        with contextlib.suppress(HarnessError, Ended):
            self.reported()
            self._post(code)
            # torchrun ends all processes when the first has failed, and then reports
            # -15.
            until = linux.now_s() + ANSWER_S
            for rank in range(1, self.size):
                self._meeting.wait(f"bye/{rank}", max(0.0, until - linux.now_s()))

    def note(self, text: str) -> None:
        """Store a note for the agent that may replace the leader; see ``serve``."""
        self._store.put("note", text.encode())

    def reported(self) -> None:
        """Tell the other agents that the report is written, so they may end."""
        self._meeting.set_flag("reported")

    def _gather(self, what: str, own: Fact, size: int, limit_s: float) -> list[Fact]:
        facts = [own]
        until = linux.now_s() + limit_s  # one limit for all ranks together
        for rank in range(1, size):
            packed_fact = self._store.take(
                f"{what}/{rank}",
                self._calls,
                max(0.0, until - linux.now_s()),
                functools.partial(self._check_rank, rank, linux.now_s()),
                author=rank,
            )
            if packed_fact is None:
                raise HarnessError(
                    f"rank {rank}: {self._membership.state(rank)}; its agent sent "
                    f"nothing for {limit_s:g} s ({what} of call {self._calls})"
                )
            facts.append(unpack(packed_fact, Fact))
        return facts

    def _check_rank(self, rank: int, since_s: float) -> None:
        """Raise if waiting for ``rank`` is useless, because its agent is gone."""
        self.check()
        # The state of the process is in the store and in /proc, which is too slow to
        # read for a rank that answers at once.
        late = linux.now_s() - since_s > _LATENESS_S
        if late and self._membership.is_gone(rank):
            raise HarnessError(f"rank {rank}: {self._membership.state(rank)}")

    def _let_go(self, spec: WorldSpec, going: bool) -> None:
        if spec.world_size > 1:
            self._store.put_message("go", self._calls, _GO if going else _NO)

    # -- a follower's side

    def follow(self) -> int:
        """Carry out the leader's requests until it is done.

        Returns:
            The exit code.

        Raises:
            Ended: torchrun ended the agents.
        """
        try:
            while True:
                message = self._next_message()
                if isinstance(message, int):
                    self._meeting.set_flag(f"bye/{self.rank}")
                    return message
                if self.rank < message.spec.world_size:
                    self._serve(message)
        except Exception as error:
            # The leader reports it.
            text = f"its process raised {type(error).__name__}: {error}"
            self._membership.report_error(text)
            raise

    def serve(
        self,
        tell: Callable[[str], None],
        take_over: Callable[[str, str], None] = lambda reason, note: None,
    ) -> int:
        """Follow the leader; return the exit code, also if the run breaks off.

        Args:
            tell: Shows a text to the user.
            take_over: Called on the agent that replaces the leader, with the reason and
                the leader's note.
        """
        try:
            return self.follow()
        except HarnessError as error:
            tell(f"gradparity: rank {self.rank}: {error}")
        except Ended as ended:
            is_first = self._membership.first_left() == self.rank
            if is_first and self._membership.is_gone(0):
                take_over(f"{ended}", self._membership.read_note())
                tell(f"gradparity: {ended}")
                self.reported()
            else:
                self._meeting.wait("reported", ANSWER_S + _REPORT_S)
        return 3  # the command line's exit code of a run that did not complete

    def _next_message(self) -> Message:
        self._calls += 1
        while True:
            try:
                message = self._read_message(MEET_S, self.check)
            except Ended:
                # The last message of the leader may have come just before SIGTERM.
                message = self._read_message(0.0)
                if not isinstance(message, int):
                    raise
            if message is not None:
                return message

    def _read_message(
        self, limit_s: float, check: Callable[[], None] = lambda: None
    ) -> Message | None:
        packed_message = self._store.take(
            "message", self._calls, limit_s, check, author=0, readers=self.size - 1
        )
        if packed_message is None:
            return None
        message: Message = unpack(packed_message, Message)  # type: ignore[arg-type]
        return message

    def _serve(self, request: CallRequest) -> None:
        ready = self._own.start(request, self._others("start"))
        self._store.put_message(f"start/{self.rank}", self._calls, pack(ready))
        # Longer than the leader waits for any rank, so the leader refuses before this
        # agent gives up.
        limit_s = request.spec.start_timeout_s + 2 * _REPORT_S
        others = request.spec.world_size - 1
        answer = self._store.take(
            "go", self._calls, limit_s, self.check, author=0, readers=others
        )
        if answer == _GO:
            fact = self._own.run(request, self._others("run"))
            self._store.put_message(f"fact/{self.rank}", self._calls, pack(fact))
        else:
            self._own.end(request.world)

    def _others(self, phase: str) -> RemoteRanks:
        return RemoteRanks(self._meeting, self._fault(phase), self.check)

    def _fault(self, phase: str) -> str:
        return f"fault/{self._calls}/{phase}"


class AgentCluster(BaseCluster):
    """A cluster whose ranks are children of the agents; used by the leader."""

    def __init__(self, agent: Agent, spec: WorldSpec) -> None:
        """Describe the world; nothing is started yet.

        Args:
            agent: Agent of rank 0.
            spec: Settings of the world.
        """
        if not agent.leads:
            raise HarnessError(
                f"AgentCluster is for rank 0, and this is rank {agent.rank}: call "
                "Agent.follow() here"
            )
        if spec.world_size > agent.size:
            raise HarnessError(
                f"the world needs {spec.world_size} ranks, torchrun made {agent.size}: "
                f"start {spec.world_size} processes (--nproc-per-node), or ask for a "
                "smaller world"
            )
        super().__init__(spec)
        self._agent = agent
        self._world = 0
        """Id of the current world, a number; 0 if there is none."""

    def submit(
        self, options: CallOptions, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[RankOutcome, ...]:
        """Call a function on every rank of the world; return each rank's outcome.

        Raises:
            WorldError: At least one rank did not return.
            HarnessError: An agent can no longer be reached.
            Ended: torchrun ended the agents.
        """
        if options.isolation != "process":
            return super().submit(options, fn, *args, **kwargs)
        self.close()
        try:
            return super().submit(options, fn, *args, **kwargs)
        finally:
            self.close()  # no later call gets these ranks

    @property
    def is_warm(self) -> bool:
        """True if the next call finds the ranks of the previous one."""
        return self._world > 0

    def _call(self, options: CallOptions, payload: bytes) -> Sequence[Fact]:
        # If a rank was lost between two calls, no call is its cause.
        if facts := self._call_again(options, payload):
            return facts
        self._world = self._agent._calls + 1  # never used before  # noqa: SLF001  # its own agent
        is_ready, facts = self._request(options, payload)
        if not is_ready:
            self._world = 0
        return facts

    def _call_again(self, options: CallOptions, payload: bytes) -> Sequence[Fact]:
        if not self.is_warm:
            return ()
        is_ready, facts = self._request(options, payload)
        return facts if is_ready else ()

    def _give_up(self, *, kill: bool) -> None:
        self._world = 0  # the ranks end with their agents, or if others replace them

    def _request(
        self, options: CallOptions, payload: bytes
    ) -> tuple[bool, Sequence[Fact]]:
        request = CallRequest(
            spec=self.spec,
            options=options,
            payload=payload,
            world=self._world,
            context=self._agent.change(),
        )
        return self._agent.call(request)
