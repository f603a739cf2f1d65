"""``SimulatedCluster``: ranks that are threads, for worlds larger than the machine.

Their process is a rank of a world of one, so it is watched and ended as any other. What
became of its threads goes through the same judgement as what became of processes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import TracebackType
from typing import Any, Self

from .cluster import BaseCluster, Cluster, pickled_call
from .errors import NotSimulatedError, WorldError
from .messages import SimulatedRun, Simulation
from .outcomes import RankOutcome, RankState
from .parent.root_cause import outcomes_or_raise
from .parent.watch import Fact
from .spec import CallOptions, WorldSpec

_MARGIN_S = 3.0
"""How much later than the simulation itself the parent gives up its process."""

_GONE = "all simulated ranks shared the process"


class SimulatedCluster(BaseCluster):
    """A ``Cluster`` whose ranks are threads of one process."""

    def __init__(self, world_size: int, *, backend: str = "simulated", **settings: Any):
        """Describe the world; nothing is started yet.

        Args:
            world_size: Number of ranks.
            backend: "simulated", or "both" to compare them with gloo ranks.
            **settings: Further fields of ``WorldSpec``.
        """
        self._take(WorldSpec(world_size=world_size, backend=backend, **settings))  # type: ignore[arg-type]

    @classmethod
    def of(cls, spec: WorldSpec) -> Self:
        """Return a cluster for a spec made elsewhere."""
        cluster = cls.__new__(cls)
        cluster._take(spec)
        return cluster

    def _take(self, spec: WorldSpec) -> None:
        if not spec.simulated:
            raise ValueError(
                'SimulatedCluster takes backend "simulated" or "both", got '
                f'"{spec.backend}": Cluster has real ranks'
            )
        super().__init__(spec)
        self._host = Cluster.of(replace(spec, world_size=1, backend="gloo"))
        both = spec.backend == "both"
        self._real = Cluster.of(replace(spec, backend="gloo")) if both else None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of what is warm."""
        return self._host.pids + (self._real.pids if self._real is not None else ())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes; a later call would start new ones."""
        self._host.close()
        if self._real is not None:
            self._real.close()

    def submit(
        self, options: CallOptions, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[RankOutcome, ...]:
        """Call ``fn`` on every rank; return every rank's outcome.

        Raises:
            WorldError: A rank did not return; with backend "both" also where the
                simulated ranks did something else than the real ones.
            NotSimulatedError: The call needs real ranks.
        """
        payload = pickled_call(fn, args, kwargs)
        if self._real is None:
            return self._simulate(options, payload)[0]
        try:
            real = self._real.submit(options, fn, *args, **kwargs)
        except WorldError as failure:
            self._agree_on_failure(options, payload, failure)
            raise
        try:
            simulated, bound = self._simulate(options, payload)
        except WorldError as failure:
            failure.add_note("gloo ranks return; simulated ones fail as shown")
            raise
        _agree(real, simulated, bound)
        return real

    def _simulate(
        self, options: CallOptions, payload: bytes
    ) -> tuple[tuple[RankOutcome, ...], float]:
        plan = Simulation(
            world_size=self.spec.world_size,
            seed=self.spec.seed,
            limit_s=options.timeout_s,
            grace_s=self.spec.grace_s,
            payload=payload,
        )
        # The simulation ends itself at the limit and can say which rank was busy; the
        # parent's limit is for one that cannot, in native code.
        late = replace(options, timeout_s=options.timeout_s + _MARGIN_S)
        try:
            (outcome,) = self._host.submit(late, _simulate, plan)
        except WorldError as failure:
            raise self._without_process(failure) from None
        found: SimulatedRun = outcome.value
        try:
            outcomes = outcomes_or_raise(_facts(found, self.spec.output_limit))
        except WorldError as failure:
            # Threads of this call may still be there.
            self._host.close()
            if (failure.root.error_type or "").endswith(NotSimulatedError.__name__):
                raise NotSimulatedError(failure.root.message) from None
            raise
        # A sum of n numbers in any order is off by at most (n - 1) u times the sum of
        # their absolute values, u being the unit roundoff (higher powers of u left
        # out): two orders differ by twice that. n in place of n - 1 covers what is left
        # out.
        return outcomes, 2 * self.spec.world_size * found.epsilon * found.summed

    def _without_process(self, failure: WorldError) -> WorldError:
        message = f"{failure.root.message or ''}\n({_GONE})".strip()
        root = replace(failure.root, message=message)
        return WorldError((root,), root)

    def _agree_on_failure(
        self, options: CallOptions, payload: bytes, failure: WorldError
    ) -> None:
        try:
            self._simulate(options, payload)
        except WorldError as other:
            headline = other.root.headline
            if headline != failure.root.headline:
                failure.add_note(f"simulated ranks fail otherwise: {headline}")
        else:
            failure.add_note("simulated ranks return; gloo ones fail as shown")


def _simulate(plan: Simulation) -> SimulatedRun:
    from .rank.simulation import simulate  # needs torch, which the parent need not have

    return simulate(plan)


def _facts(run: SimulatedRun, limit: int) -> tuple[Fact, ...]:
    return tuple(
        Fact(
            rank=rank,
            reply=each.reply,
            waited_s=run.took_s,
            place=each.place,
            left_by=each.left_by,
            stacks=each.stacks,
            collectives=each.collectives,
            output=_bounded(each.output, limit),
        )
        for rank, each in enumerate(run.ranks)
    )


def _bounded(text: str, limit: int) -> str:
    if len(text) <= 2 * limit:
        return text
    left_out = f"\n[... {len(text) - 2 * limit} characters left out ...]\n"
    return text[:limit] + left_out + text[-limit:]


def _agree(
    real: Sequence[RankOutcome], simulated: Sequence[RankOutcome], bound: float
) -> None:
    """Raise unless the ranks returned the same.

    Raises:
        WorldError: Names the first value that differs.
    """
    for mine, other in zip(real, simulated, strict=True):
        found = first_difference(mine.value, other.value, bound)
        if found is not None:
            odd = replace(
                mine,
                state=RankState.RAISED,
                value=None,
                error_type="SimulationDiffers",
                message=found,
            )
            outcomes = [odd if each is mine else each for each in real]
            raise WorldError(tuple(outcomes), odd)


def first_difference(
    real: object, simulated: object, bound: float, path: str = "returned value"
) -> str | None:
    """Describe the first value in which two structures differ, with its path.

    Args:
        real: What a real rank returned.
        simulated: What the same simulated rank returned.
        bound: By how much two finite floating-point numbers may differ; 0: not at all.
        path: Where in the structure they are.
    """
    if type(real) is not type(simulated):
        kinds = f"{type(real).__name__}, simulated {type(simulated).__name__}"
        return f"{path}: gloo {kinds}"
    if hasattr(real, "dtype") and hasattr(real, "shape"):
        return _tensors_differ(real, simulated, bound, path)
    if isinstance(real, float) and isinstance(simulated, float):
        same = _same_float(real, simulated, bound)
        return None if same else _said(path, real, simulated, bound)
    parts = list(_parts(real))
    if not parts:
        same = bool(real == simulated)
        return None if same else _said(path, real, simulated, 0.0)
    others = dict(_parts(simulated))
    if [name for name, _ in parts] != list(others):
        names = f"{[n for n, _ in parts]}, simulated {list(others)}"
        return f"{path}: gloo has {names}"
    for name, part in parts:
        found = first_difference(part, others[name], bound, f"{path}{name}")
        if found is not None:
            return found
    return None


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif is_dataclass(value):
        yield from ((f".{f.name}", getattr(value, f.name)) for f in fields(value))


def _tensors_differ(real: Any, simulated: Any, bound: float, path: str) -> str | None:
    for name in ("dtype", "shape"):
        mine, other = getattr(real, name), getattr(simulated, name)
        if mine != other:
            return f"{path}.{name}: gloo {mine}, simulated {other}"
    flat, others = real.reshape(-1).tolist(), simulated.reshape(-1).tolist()
    for index, (mine, other) in enumerate(zip(flat, others, strict=True)):
        if isinstance(mine, float):
            same = _same_float(mine, other, bound)
        else:
            same = mine == other
        if not same:
            place: list[int] = []
            for length in reversed(real.shape):
                place.insert(0, index % length)
                index //= length
            return _said(f"{path}{place}", mine, other, bound)
    return None


def _same_float(mine: float, other: float, bound: float) -> bool:
    if mine != mine or other != other:
        return mine != mine and other != other
    if bound and abs(mine - other) <= bound:
        return True
    return struct.pack("d", mine) == struct.pack("d", other)  # also the sign of zero


def _said(path: str, real: object, simulated: object, bound: float) -> str:
    allowed = f", which may differ by {bound:.3g}" if bound else ""
    return f"{path}: gloo {real!r}, simulated {simulated!r}{allowed}"
