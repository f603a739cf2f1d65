"""``SimulatedCluster``: ranks that are threads, for worlds larger than the machine.

Their process is a rank of a world of one, so it is watched and ended as any other. What
became of its threads goes through the same judgement as what became of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

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
    """A ``Cluster`` whose ranks are threads of one process; "both": and gloo ranks."""

    def __init__(self, spec: WorldSpec) -> None:
        super().__init__(spec)
        self._host = Cluster.of(replace(spec, world_size=1, backend="gloo"))
        both = spec.backend == "both"
        self._real = Cluster.of(replace(spec, backend="gloo")) if both else None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of what is warm."""
        return self._host.pids + (self._real.pids if self._real is not None else ())

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
            return self._simulate(options, payload)
        real = self._real.submit(options, fn, *args, **kwargs)
        try:
            simulated = self._simulate(options, payload)
        except WorldError as failure:
            failure.add_note("gloo ranks return; simulated ones fail as shown")
            raise
        _agree(real, simulated)
        return real

    def _simulate(
        self, options: CallOptions, payload: bytes
    ) -> tuple[RankOutcome, ...]:
        plan = Simulation(
            world_size=self.spec.world_size,
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
            return outcomes_or_raise(_facts(found, self.spec.output_limit))
        except WorldError as failure:
            # Threads of this call may still be there.
            self._host.close()
            if isinstance(failure.root.exception, NotSimulatedError):
                raise failure.root.exception from None
            raise

    def _without_process(self, failure: WorldError) -> WorldError:
        message = f"{failure.root.message or ''}\n({_GONE})".strip()
        root = replace(failure.root, message=message)
        return WorldError((root,), root)


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


def _agree(real: Sequence[RankOutcome], simulated: Sequence[RankOutcome]) -> None:
    """Raise unless the ranks returned the same.

    Raises:
        WorldError: Names the first value that differs.
    """
    for mine, other in zip(real, simulated, strict=True):
        found = first_difference(mine.value, other.value)
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
    real: object, simulated: object, path: str = "returned value"
) -> str | None:
    """Describe the first value in which two structures differ, with its path.

    Numbers may differ as ``torch.testing.assert_close`` allows: gloo adds in another
    order.

    Args:
        real: What a real rank returned.
        simulated: What the same simulated rank returned.
        path: Where in the structure they are.
    """
    said = f"{path}: gloo {real!r}, simulated {simulated!r}"
    if type(real) is not type(simulated):
        return said
    if isinstance(real, float | complex) or hasattr(real, "dtype"):
        import torch  # a parent whose ranks return none need not have it

        try:
            torch.testing.assert_close(simulated, real, equal_nan=True)
        except AssertionError as error:
            return f"{said}\n{error}"
        return None
    parts, others = dict(_parts(real)), dict(_parts(simulated))
    if not parts:
        return None if real == simulated else said
    if parts.keys() != others.keys():
        return said
    found = (first_difference(parts[n], others[n], f"{path}{n}") for n in parts)
    return next((each for each in found if each is not None), None)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif is_dataclass(value):
        yield from ((f".{f.name}", getattr(value, f.name)) for f in fields(value))
