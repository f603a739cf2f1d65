"""Record of what happens to optimizers while a workload trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .engine import Engine
from .local_parts import by_full_name
from .observe import constants_of, local_part, optimizer_digest, scheduled
from .recording import grad_scale_of, local_gradients, record_gradient
from .torch_internals import nodes_made, version_of
from .trace import Constants, Event, Group, Kind, StepTrace
from .watched import NoOptimizer

__all__ = ["Events", "groups_of"]


class Events:
    """Records the events of one step, and the gradients that optimizers use.

    ``engine.optimizers`` lists the optimizers seen so far, in the order of their
    numbers.
    """

    def __init__(self, engine: Engine, seen: StepTrace) -> None:
        self.engine = engine
        self.seen = seen
        self.before = [optimizer_digest(each) for each in engine.optimizers]
        """Digest of each optimizer's state before it stepped or was passed to a
        scaler."""
        self._read: set[str] = set()
        """Parameters whose gradient was read for the optimizer that steps them."""
        self._first_use: dict[str, tuple[Tensor, int]] | None = None
        """Gradients when an optimizer first used any in this step, each with the
        version counter of its memory."""

    def note(self, kind: Kind, optimizer: Any) -> None:
        """Record an event of an optimizer.

        If the optimizer is about to use gradients (``USES``), also record its gradients
        that were not recorded earlier in this step.
        """
        nodes = nodes_made()  # count them first: the calls below may make nodes
        ends = kind in (Kind.RETURNED, Kind.STEPPED)
        groups = () if ends else tuple(groups_of(self.engine, optimizer))
        names = [name for group in groups for name in group.names]
        number = self._number(optimizer)
        if number is None:
            declared = self.engine.scenario.workload.owners is not None
            trains = names or isinstance(optimizer, NoOptimizer) or not declared
            # an optimizer that the workload does not declare trains something else
            if ends or not trains:
                return
            number = len(self.engine.optimizers)
            self.engine.optimizers.append(optimizer)
            self.before.append(optimizer_digest(optimizer))
        gradients = local_gradients(self.engine) if names else {}
        recorded = written = frozenset[str]()
        if kind is Kind.USES:
            written = self._written(names)
            if self.engine.reduction is not None:
                self.engine.reduction.change_rest(optimizer)
            recorded = self._record(optimizer, names, gradients)
        self.seen.events.append(
            Event(
                kind=kind,
                optimizer=number,
                groups=groups,
                with_grad=frozenset(names).intersection(gradients),
                recorded=recorded,
                written=written,
                nodes=nodes,
            )
        )

    def unread(self, optimizer: Any) -> dict[str, Tensor]:
        """Return gradients that a scaler is about to read for an optimizer.

        Each gradient is returned once in a step, when its optimizer is passed to the
        scaler. If networks train in turns, gradients of other optimizers may be stale
        or missing. The gradients of an optimizer of fp32 copies are unknown, so all
        gradients that were not returned before are returned for it.
        """
        if isinstance(optimizer, NoOptimizer):
            return {}
        names = {n for group in groups_of(self.engine, optimizer) for n in group.names}
        gradients = local_gradients(self.engine)
        gradients = {n: g for n, g in gradients.items() if n not in self._read}
        if names:
            gradients = {n: g for n, g in gradients.items() if n in names}
            self._read.update(gradients)
        return gradients

    def _number(self, optimizer: Any) -> int | None:
        numbered = enumerate(self.engine.optimizers)
        return next((n for n, each in numbered if each is optimizer), None)

    def _written(self, names: list[str]) -> frozenset[str]:
        """Return the ``names`` whose gradients are new or were written since first use.

        First use is the first time in this step that an optimizer uses any gradient.
        """
        gradients = local_gradients(self.engine)
        now = {n: (g, version_of(local_part(g))) for n, g in gradients.items()}
        if self._first_use is None:
            self._first_use = now
        was = self._first_use
        same = {n for n in now.keys() & was.keys() if _is_same(now[n], was[n])}
        return frozenset(now.keys() - same).intersection(names)

    def _record(
        self, optimizer: Optimizer, names: list[str], gradients: Mapping[str, Tensor]
    ) -> frozenset[str]:
        engine, seen = self.engine, self.seen
        if engine.scenario.workload.gradients is not None:
            return frozenset()
        scale = grad_scale_of(optimizer)
        # once: an optimizer and one inside it use the same gradient
        used = [n for n in names if n in gradients and n not in seen.gradients]
        for name in used:
            record_gradient(engine, seen, name, gradients[name], scale)
        return frozenset(used)


def _is_same(now: tuple[Tensor, int], was: tuple[Tensor, int]) -> bool:
    return now[0] is was[0] and now[1] == was[1]


def groups_of(engine: Engine, optimizer: Any) -> Iterator[Group]:
    """Yield an optimizer's param groups, with the names of their parameters.

    The workload's ``owners`` give the names, if it declares them. Otherwise each tensor
    is looked up among the model's parameters.
    """
    parameters, workload = engine.parameters, engine.scenario.workload
    declared: dict[str, Any] | None = None
    if workload.owners is not None:
        declared_owners = workload.owners(engine.module)
        declared = by_full_name(workload, "optimizers", declared_owners, engine.whole)
    # a scaler may be given an object that is no optimizer of torch
    own = isinstance(optimizer, Optimizer)
    for group in getattr(optimizer, "param_groups", ()):
        if declared is not None:
            names = [name for name, owner in declared.items() if owner is group]
        else:
            ids = {id(p) for p in group["params"]}
            names = [name for name, p in parameters.items() if id(p) in ids]
        if group["params"]:
            yield Group(
                tuple(names),
                scheduled(group) if own else {},
                constants_of(optimizer, group) if own else Constants(),
            )
