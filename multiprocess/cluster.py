"""``Cluster``: call a function on every rank of a world, from plain Python."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from .errors import NotPicklableError, WorldError
from .messages import Context, pickled
from .outcomes import RankOutcome
from .parent.rank_processes import RankProcesses, current_context
from .parent.root_cause import Fact, outcomes_or_raise
from .parent.watch import Watch
from .spec import CallOptions, Isolation, WorldSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Calls:
    """Runs functions on the ranks of a cluster with certain options."""

    cluster: BaseCluster
    options: CallOptions

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Call a function on every rank; see ``Cluster.run``."""
        outcomes = self.outcomes(fn, *args, **kwargs)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[RankOutcome, ...]:
        """Return each rank's outcome of a call; see ``Cluster.outcomes``."""
        return self.cluster.submit(self.options, fn, *args, **kwargs)


@dataclass(frozen=True)
class LastCall:
    """Function that ranks run before they end, unless they hang or have died."""

    fn: Callable[[], object]
    report: Callable[[WorldError], None]
    """Called if ``fn`` fails."""


class BaseCluster(ABC):
    """Base class of worlds of ranks; a subclass defines how a call reaches them."""

    def __init__(self, spec: WorldSpec) -> None:
        self.spec = spec
        self.last_call: LastCall | None = None
        self._lock = threading.RLock()
        self._options = CallOptions(timeout_s=spec.timeout_s)
        """Options of the previous call."""

        self._answered = False
        """True if all ranks have ended the previous call."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.spec.world_size

    def with_options(
        self, *, timeout_s: float | None = None, isolation: Isolation | None = None
    ) -> Calls:
        """Return calls on these ranks with other options than the cluster's own.

        Args:
            timeout_s: Time limit of the call; it starts when all ranks are ready.
            isolation: Processes and state that a call shares with earlier ones: see
                ``WorldSpec``.

        Example:
            >>> cluster.with_options(timeout_s=5).run(train, lr=0.1)
        """
        options = CallOptions(
            timeout_s=self.spec.timeout_s if timeout_s is None else timeout_s,
            isolation=isolation or self.spec.isolation,
        )
        return Calls(self, options)

    def run(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Call ``fn(*args, **kwargs)`` on every rank.

        Args:
            fn: Any function, also a lambda or closure.
            *args: Arguments, sent to every rank.
            **kwargs: Keyword arguments, sent to every rank.

        Returns:
            The result of each rank, in rank order.

        Raises:
            WorldError: At least one rank did not return.
            NotPicklableError: The function or an argument cannot be pickled.
        """
        return self.with_options().run(fn, *args, **kwargs)

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[RankOutcome, ...]:
        """Call a function like ``run``, but return each rank's outcome and output."""
        return self.with_options().outcomes(fn, *args, **kwargs)

    def submit(
        self, options: CallOptions, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[RankOutcome, ...]:
        """Call a function with these options; return each rank's outcome.

        Raises:
            WorldError: At least one rank did not return.
            NotPicklableError: The function or an argument cannot be pickled.
        """
        payload = pickled_call(fn, args, kwargs)
        with self._lock:
            try:
                self._options = options
                self._answered = False  # also after an exception, such as Ctrl-C
                facts = self._call(options, payload)
                self._answered = all(fact.answered for fact in facts)
                outcomes = outcomes_or_raise(facts)
            except BaseException:
                self._end(kill=not self._answered)
                raise
            if not all(fact.reply and fact.reply.reusable for fact in facts):
                self.close()
            return outcomes

    def end_lost(self) -> None:
        """End the ranks if one of them has ended since the previous call.

        ``last_call`` then fails and reports the lost rank. Otherwise the next call
        would start new ranks without a report.
        """
        with self._lock:
            if not self.is_warm:
                self._end(kill=True)

    def close(self) -> None:
        """End the ranks; a later call starts new ones."""
        with self._lock:
            self._end(kill=False)

    @property
    @abstractmethod
    def is_warm(self) -> bool:
        """True if the next call finds the ranks of the previous one."""

    @abstractmethod
    def _call(self, options: CallOptions, payload: bytes) -> Sequence[Fact]:
        """Call the ranks; start new ones if there are none."""

    @abstractmethod
    def _call_again(self, options: CallOptions, payload: bytes) -> Sequence[Fact]:
        """Call the ranks of the previous call; start no new ones.

        Returns:
            A fact for each rank; empty if these ranks cannot be called.
        """

    @abstractmethod
    def _give_up(self, *, kill: bool) -> None:
        """End the ranks, if there are any; with ``kill`` at once."""

    def _end(self, *, kill: bool) -> None:
        """Run ``last_call`` if all ranks ended their call; then end the ranks."""
        try:
            # also if a rank has ended since: its failure is reported by this call
            if self.last_call is not None and self._answered:
                self._make(self.last_call)
        finally:
            self._give_up(kill=kill)

    def _make(self, last: LastCall) -> None:
        options = CallOptions(
            timeout_s=max(self.spec.timeout_s, self._options.timeout_s),
            live=self._options.live,
        )
        try:
            outcomes_or_raise(self._call_again(options, pickled_call(last.fn, (), {})))
        except WorldError as failure:
            last.report(failure)


class Cluster(BaseCluster):
    """A world of ranks that stays warm between calls.

    The ranks are forked on first use (or by ``with``) from a server that has torch
    preloaded. If a call fails, its world is ended and the next call gets a new one.
    Calls from several threads wait for each other. The ranks end with ``close``, or
    when the cluster is garbage-collected.

    Example:
        >>> with Cluster(4) as cluster:
        ...     cluster.run(lambda: current_world().rank)
        [0, 1, 2, 3]
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        device: str = "",
        timeout_s: float = 60.0,
        isolation: Isolation = "pool",
        **settings: Any,
    ) -> None:
        """Describe the world; nothing is started yet.

        Args:
            world_size: Number of ranks.
            backend: Backend of the default process group, as torch takes it.
            device: Type of the device of each rank. By default "cpu" if the backend
                supports CPU tensors, else the first type that it supports.
            timeout_s: Default time limit of one call.
            isolation: Default of ``run``: "pool" keeps the process group, "group" makes
                a new one for each call, "process" starts new ranks.
            **settings: Further fields of ``WorldSpec``.
        """
        super().__init__(
            WorldSpec(
                world_size=world_size,
                backend=backend,
                device=device,
                timeout_s=timeout_s,
                isolation=isolation,
                **settings,
            )
        )
        self._ranks: RankProcesses | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    @classmethod
    def of(cls, spec: WorldSpec) -> Self:
        """Return a cluster with the settings of a spec."""
        cluster = cls(spec.world_size)
        cluster.spec = spec
        return cluster

    @property
    def is_warm(self) -> bool:
        """True if the next call finds the ranks of the previous one."""
        return self._ranks is not None and self._ranks.intact()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the warm ranks, in rank order; empty if none are running."""
        return () if self._ranks is None else self._ranks.pids

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the ranks, unless they are running.

        Raises:
            WorldError: A rank could not join its process group.
        """
        with self._lock:
            self._warm_ranks()

    def submit(
        self, options: CallOptions, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[RankOutcome, ...]:
        """Call a function with these options; return each rank's outcome."""
        if options.isolation != "process":
            return super().submit(options, fn, *args, **kwargs)
        # New ranks beside the warm ones, which stay for the next call.
        with self.of(self.spec) as new:
            options = replace(options, isolation="pool")
            return new.submit(options, fn, *args, **kwargs)

    def _warm_ranks(self) -> RankProcesses:
        if self._ranks is not None and not self._ranks.intact():
            self._end(kill=True)
        if self._ranks is None:
            self._ranks = _started(self.spec, current_context())
            # Ends the ranks of a cluster that nobody closed; at exit the forkserver
            # ends them. A method of the ranks is called, because a method of the
            # cluster would keep the cluster alive.
            self._finalizer = weakref.finalize(self, self._ranks.kill)
            self._finalizer.atexit = False
        return self._ranks

    def _call(self, options: CallOptions, payload: bytes) -> Sequence[Fact]:
        ranks = self._warm_ranks()
        # Give the ranks the parent's current folder and environment.
        ranks.call(payload, options, current_context())
        return Watch(ranks, options).facts()

    def _call_again(self, options: CallOptions, payload: bytes) -> Sequence[Fact]:
        if self._ranks is None or not self._ranks.are_ours():
            return ()
        self._ranks.call(payload, options)
        return Watch(self._ranks, options).facts()

    def _give_up(self, *, kill: bool) -> None:
        ranks, self._ranks = self._ranks, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if ranks is not None:
            (ranks.kill if kill else ranks.stop)()


def pickled_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    """Return a call pickled for the ranks.

    Raises:
        NotPicklableError: The function or an argument cannot be pickled.
    """
    try:
        return pickled((fn, args, kwargs))
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise NotPicklableError(
            f"{name} or one of its arguments cannot be sent to the ranks: {error}; "
            "send plain values and tensors, and make the rest on the ranks"
        ) from error


def _started(spec: WorldSpec, context: Context) -> RankProcesses:
    ranks = RankProcesses(spec)
    try:
        ranks.join(context)
        options = CallOptions(timeout_s=spec.start_timeout_s)
        outcomes_or_raise(Watch(ranks, options).facts())
    except BaseException:
        ranks.kill()  # also on Ctrl-C: nothing else refers to these ranks yet
        raise
    return ranks
