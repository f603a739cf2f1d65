"""``Cluster``: call a function on every rank of a world, from plain Python."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from . import pickling
from .errors import NotPicklableError, WorldFailure
from .messages import Context, Run, Start
from .outcomes import RankOutcome, RankState
from .parent.context import current_context
from .parent.rank_processes import Crew
from .parent.root_cause import outcomes_of
from .parent.watch import Watch
from .spec import Backend, CallOptions, Device, Isolation, WorldSpec

T = TypeVar("T")


class Cluster:
    """A world of ranks that stays warm between calls.

    The ranks are forked on first use (or by ``with``) from a server that has torch
    preloaded. A world in which a call failed is thrown away; the next call gets a new
    one. Calls from several threads wait for each other. The ranks end with ``close``,
    or when nothing refers to the cluster any more.

    Example:
        >>> with Cluster(4) as cluster:
        ...     cluster.run(lambda: current_world().rank)
        [0, 1, 2, 3]
    """

    def __init__(
        self,
        size: int,
        *,
        backend: Backend = "gloo",
        device: Device = "cpu",
        timeout_s: float = 60.0,
        isolation: Isolation = "pool",
        **settings: Any,
    ) -> None:
        """Describe the world; nothing is started yet.

        Args:
            size: Number of ranks.
            backend: Backend of the default process group.
            device: Where the ranks keep their tensors.
            timeout_s: Default limit of one call.
            isolation: Default of ``run``: "pool" keeps the process group, "group" makes
                a fresh one for each call, "process" fresh ranks.
            **settings: Further fields of ``WorldSpec``.
        """
        self.spec = WorldSpec(
            size=size,
            backend=backend,
            device=device,
            timeout_s=timeout_s,
            isolation=isolation,
            **settings,
        )
        self._crew: Crew | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._sent: Context | None = None
        self._lock = threading.RLock()

    @classmethod
    def of(cls, spec: WorldSpec) -> Self:
        """Return a cluster for a spec made elsewhere."""
        cluster = cls(spec.size)
        cluster.spec = spec
        return cluster

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.spec.size

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the warm ranks, in rank order; empty when there are none."""
        return () if self._crew is None else self._crew.pids

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the ranks, unless they are up.

        Raises:
            WorldFailure: A rank could not join its process group.
        """
        with self._lock:
            self._warm_crew()

    def close(self) -> None:
        """End the ranks; a later call would start new ones."""
        with self._lock:
            crew = self._release()
            if crew is not None:
                crew.stop()

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout_s: float | None = None,
        isolation: Isolation | None = None,
        **kwargs: Any,
    ) -> list[T]:
        """Call ``fn(*args, **kwargs)`` on every rank.

        Args:
            fn: Any function, lambdas and closures included.
            *args: Sent to every rank.
            timeout_s: Limit for the whole world, from when it is ready.
            isolation: What this call shares with earlier ones.
            **kwargs: Sent to every rank.

        Returns:
            What each rank returned, in rank order.

        Raises:
            WorldFailure: At least one rank did not return.
            NotPicklableError: The function or an argument cannot travel.
        """
        outcomes = self.outcomes(
            fn, *args, timeout_s=timeout_s, isolation=isolation, **kwargs
        )
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        isolation: Isolation | None = None,
        **kwargs: Any,
    ) -> tuple[RankOutcome, ...]:
        """Do as ``run``, but return each rank's outcome with its output."""
        options = CallOptions(
            timeout_s=self.spec.timeout_s if timeout_s is None else timeout_s,
            isolation=isolation or self.spec.isolation,
        )
        return self.submit(options, fn, *args, **kwargs)

    def submit(
        self, options: CallOptions, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[RankOutcome, ...]:
        """Do as ``outcomes``, with the call's options as one value."""
        payload = _pickled_call(fn, args, kwargs)
        with self._lock:
            if options.isolation == "process":
                return self._run_apart(payload, options.timeout_s)
            return self._run_warm(payload, options)

    def _run_warm(
        self, payload: bytes, options: CallOptions
    ) -> tuple[RankOutcome, ...]:
        crew = self._warm_crew()
        fresh = options.isolation == "group"
        try:
            return _call(crew, payload, options.timeout_s, fresh, self._news())
        except BaseException as error:  # also ctrl-C
            if options.keep_answered and _all_answered(error):
                crew.fresh_group = True
            else:  # a world in the middle of a call is of no use
                self._release()
                crew.kill()
            raise

    def _run_apart(self, payload: bytes, limit_s: float) -> tuple[RankOutcome, ...]:
        crew = _started(self.spec, current_context())
        try:
            return _call(crew, payload, limit_s, False, None)
        finally:
            crew.kill()

    def _warm_crew(self) -> Crew:
        if self._crew is not None and not self._crew.intact():
            self._crew.kill()
            self._release()
        if self._crew is None:
            self._sent = current_context()
            self._crew = _started(self.spec, self._sent)
            # Of a cluster that nobody closed; at exit the forkserver ends all ranks.
            self._finalizer = weakref.finalize(self, self._crew.kill)
            self._finalizer.atexit = False
        return self._crew

    def _release(self) -> Crew | None:
        """Return the crew, which is no longer this cluster's."""
        crew, self._crew = self._crew, None
        if self._finalizer is not None:
            self._finalizer.detach()
        return crew

    def _news(self) -> Context | None:
        now = current_context()
        if now == self._sent:
            return None
        self._sent = now
        return now


def _pickled_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    try:
        return pickling.dumps((fn, args, kwargs))
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise NotPicklableError(
            f"{name} or one of its arguments cannot be sent to the ranks: {error}"
        ) from error


def _all_answered(error: BaseException) -> bool:
    answers = (RankState.OK, RankState.RAISED)
    return isinstance(error, WorldFailure) and all(
        outcome.state in answers for outcome in error.outcomes
    )


def _started(spec: WorldSpec, context: Context) -> Crew:
    crew = Crew(spec)
    try:
        for rank in crew.ranks:
            start = Start(spec=spec, rank=rank.rank, context=context)
            rank.send(start, spec.start_timeout_s)
        _judged(crew, spec.start_timeout_s)
    except BaseException:
        crew.kill()
        raise
    return crew


def _call(
    crew: Crew, payload: bytes, limit_s: float, fresh: bool, news: Context | None
) -> tuple[RankOutcome, ...]:
    crew.runs += 1
    run = Run(
        payload=payload,
        number=crew.runs,
        fresh_group=fresh or crew.fresh_group,
        context=news,
    )
    for rank in crew.ranks:
        rank.send(run, limit_s)
    return _judged(crew, limit_s)


def _judged(crew: Crew, limit_s: float) -> tuple[RankOutcome, ...]:
    facts = Watch(crew, limit_s, crew.spec.grace_s).facts()
    # Later ranks shall find what these had to import.
    crew.learn(name for f in facts if f.reply for name in f.reply.imported)
    outcomes, root = outcomes_of(facts)
    if root is not None:
        raise WorldFailure(outcomes, outcomes[root])
    crew.fresh_group = not all(fact.reply and fact.reply.reusable for fact in facts)
    return outcomes
