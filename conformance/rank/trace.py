"""Trace: observations on one rank, step by step.

Everything is observed through the public protocol of the tested scaler (``get_scale``,
``state_dict``, ``step``, ``update``) or by its effect on the model. Arrays stay in
memory for the comparison with the reference; everything else goes into the report.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Collective",
    "Constants",
    "Decision",
    "Draw",
    "Event",
    "Group",
    "Kind",
    "Misuse",
    "Problem",
    "RankTrace",
    "Reduction",
    "Restored",
    "Saved",
    "Setting",
    "StepTrace",
]

Floats = NDArray[np.floating[Any]]
Setting = float | tuple[float, ...]
"""Value in an optimizer's param group, such as a learning rate or betas."""


@dataclass(frozen=True)
class Constants:
    """Settings of a param group that schedules leave as they are, such as ``eps``."""

    optimizer: str = ""
    """Class of the optimizer, with its module. Another class may read a setting in
    another way."""
    values: dict[str, Setting] = field(default_factory=dict)
    """Key of the param group -> number, flag or tuple of these."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An exception that a legal call of the tested scaler raised."""

    step: int
    """Step in which it was raised; -1 for the constructor."""
    call: str
    """Name of the call, for example ``step``."""
    error: str
    """Type and message of the exception."""


@dataclass(frozen=True, kw_only=True)
class Misuse:
    """A call in a wrong order, and its effect."""

    call: str
    """Description of the call."""
    error: str
    """Type of the exception that it raised; empty if it was accepted."""
    changed: tuple[str, ...]
    """Parts of the state that the call changed; must be empty for a rejected call."""


@dataclass(frozen=True)
class Collective:
    """A collective that a rank issued."""

    call: str
    """Name of the call and its data, for example ``allreduce[6:float64]``."""
    ranks: tuple[int, ...]
    """Ranks of its process group."""

    def __str__(self) -> str:
        return f"{self.call} over ranks {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """An all-reduce or reduce-scatter that a rank issued for gradients."""

    collective: Collective
    dtype: str
    """Dtype of the reduction, for example ``float32``."""
    elements: int
    """Number of elements of the reduced tensor."""


@dataclass(kw_only=True)
class Draw:
    """A call of a module that itself drew random numbers on a rank.

    Calls of a dropout layer that drew none are included.
    """

    module: str
    """Name of the module."""
    layer: str
    """Class of the module."""
    state: str
    """Digest of the generators' states at the start of the call. Equal states give
    equal numbers. Empty if the call drew none."""
    recomputed: bool = False
    """True if the call was part of a recomputed forward in backward."""
    applied: str = ""
    """Digest of the tensor to which the numbers were applied, if the module has no
    parameters. Equal digests mean the same activation."""
    varied: bool = False
    """True if the tensor cannot be equal on two ranks by accident, as zeros can."""
    by_row: bool = False
    """True if different elements were dropped in different rows."""
    kept: float | None = None
    """Factor of the elements that were kept, if it is the same for all of them."""

    def __str__(self) -> str:
        return f"{self.layer} {self.module}".strip()


class Kind(StrEnum):
    """Kind of an event of an optimizer in a training step."""

    HANDED = "handed"
    """A call of the scaler with this optimizer begins."""
    RETURNED = "returned"
    """A call of the scaler with this optimizer has ended."""
    BEGINS = "begins"
    """The optimizer's own ``step`` begins."""
    USES = "uses"
    """The optimizer is about to use gradients; again after each call of a closure."""
    STEPPED = "stepped"
    """The optimizer's ``step`` has ended."""
    CHANGED = "changed"
    """The optimizer's state has changed in the step."""


@dataclass(frozen=True)
class Group:
    """A param group at the time of an event."""

    names: tuple[str, ...] = ()
    """Names of the group's parameters in the model; empty if it has other tensors."""
    settings: dict[str, Setting] = field(default_factory=dict)
    """Settings that schedules may change, if known."""
    constants: Constants = field(default_factory=Constants)


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event of an optimizer in a training step, such as a call of ``step``."""

    kind: Kind
    optimizer: int
    """Number of the optimizer, in the order in which this rank saw them first."""
    groups: tuple[Group, ...] = ()
    with_grad: frozenset[str] = frozenset()
    """Parameters that have a gradient."""
    recorded: frozenset[str] = frozenset()
    """Parameters whose gradient was copied at this event, its first use."""
    written: frozenset[str] = frozenset()
    """For ``USES``: parameters whose gradient was written after an optimizer first used
    any gradient in this step."""
    nodes: int = 0
    """Number of autograd nodes so far; a forward creates more."""

    @property
    def names(self) -> list[str]:
        """Names of all parameters; empty if the optimizer steps other tensors."""
        return [name for group in self.groups for name in group.names]


@dataclass(kw_only=True)
class Decision:
    """One rank's part in the decision of a group of optimizers in one step."""

    non_finite: list[str] = field(default_factory=list)
    """Parameters of the group whose local gradient is not finite, scaled or
    unscaled."""
    parameters_changed: bool | None = None
    """True if any local element changed; None if nothing of the group trains here."""
    state_changed: bool = False
    """True if the state of any optimizer of the group changed."""
    others: int = 0
    """Number of other decision groups that train on this rank."""
    names: list[str] = field(default_factory=list)
    """Parameters of the group that train on this rank."""


Average = dict[str, tuple[int, str]]
"""Parameter -> number of local elements of its running average, and their digest."""


@dataclass(kw_only=True)
class StepTrace:
    """Trace of one step on one rank, filled as the step proceeds."""

    step: int
    complete: bool = False
    """True if the step was observed to its end."""
    loss: float | None = None
    """This rank's loss, or None. The weighted mean over ranks is the batch's loss."""
    loss_dtype: str = ""
    """Name in torch of the loss's dtype; empty if it is a plain number."""
    weight: float | None = 1.0
    """Weight of this rank in the mean of ``loss``; None if the rank's counts are
    unknown."""
    counts: tuple[float, ...] = ()
    """Divisors of the sums over all ranks, if the loss is (sum, count)."""
    reported_norm: float | None = None
    """Norm of the whole unscaled gradient before clipping, as the workload reports
    it."""
    schedule: tuple[str, str] | None = None
    """Digest of the learning-rate schedule before and after the step, if reported."""
    average: tuple[Average, Average] | None = None
    """Running average of the weights before and after the step, if reported."""
    averages: dict[str, Floats] = field(default_factory=dict)
    """Parameter -> values of its running average after the step: of this rank's part,
    or of the whole."""
    skips: tuple[int, int] | None = None
    """The workload's count of skipped steps before and after the step, if reported."""
    scale_before: float = 1.0
    scale_after: float = 1.0
    growth_before: int | None = 0
    """Growth tracker before the step; None if the scaler's state_dict has none."""
    growth_after: int | None = 0
    events: list[Event] = field(default_factory=list)
    """Events of optimizers, in order; ``fold`` derives decisions, settings and
    ``late``."""
    calls: set[str] = field(default_factory=set)
    """Names of the scaler's methods that were called."""
    raw: dict[str, bool] | None = None
    """Maps a parameter to True if its gradient was not finite when a scaler was about
    to read it. None if no scaler read gradients."""
    own_skip: bool = False
    """True if all ranks skipped by the workload's own decision, and counted the
    skip."""
    changed: frozenset[str] = frozenset()
    """Parameters with a changed local element."""
    decisions: list[Decision] = field(default_factory=list)
    """One for each decision group."""
    faults: list[str] = field(default_factory=list)
    """Faults that were written into gradients, as text."""
    digests: dict[str, str] = field(default_factory=dict)
    """Parameter name -> digest of its local elements after the step."""
    collectives: list[Collective] = field(default_factory=list)
    """Collectives issued inside the scaler's calls, in order."""
    reductions: list[Reduction] = field(default_factory=list)
    """Reductions of gradients from backward to the step, if a dtype is promised."""
    checked_sum: tuple[float, float] | None = None
    """Result and expected result of the all-reduce after the step; the result is nan if
    it was lost."""
    gradients: dict[str, Floats] = field(default_factory=dict)
    """Unscaled local gradients that the optimizer used, flattened."""
    places: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Parameter -> position of each gradient element in the flat full tensor. Without
    an entry, the positions are those of the parameter (``RankTrace.index``)."""
    partial: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter -> ranks over which its gradient is still to be summed."""
    parameters: dict[str, Floats] = field(default_factory=dict)
    """Local parameters after the step, flattened."""
    buffers: dict[str, Floats] = field(default_factory=dict)
    """Buffer -> value after the step, if its dtype is that of the model's buffer."""
    buffer_digests: dict[str, str] = field(default_factory=dict)
    """Buffer name -> digest of its value after the step."""
    draws: list[Draw] = field(default_factory=list)
    """Calls of modules that drew random numbers, if random layers are on."""
    drawn_outside: int = 0
    """Number of draws outside of any observed module's call."""
    drew: bool = False
    """True if the step drew random numbers."""
    settings: dict[str, dict[str, Setting]] = field(default_factory=dict)
    """Parameter -> settings of its param group when the optimizer was called. Only
    settings that schedules may change, and only with a ``train_step``."""
    constants: dict[str, Constants] = field(default_factory=dict)
    """Parameter -> other settings of its param group when the optimizer was called."""
    copies: list[dict[str, Setting]] = field(default_factory=list)
    """Settings as in ``settings``, for each param group of optimizers that step copies
    of parameters."""
    late: list[str] = field(default_factory=list)
    """Parameters whose gradients come from a forward that ran after weights had already
    moved in this step. Only with a ``train_step``."""
    unclear_choices: int = 0
    """Number of a router's rows that match two reference rows with different
    choices."""

    @property
    def bad(self) -> set[str]:
        """Parameters whose gradient is not finite, before or after unscaling."""
        read = self.raw or {}
        return {name for name, is_bad in read.items() if is_bad} | {
            name
            for name, values in self.gradients.items()
            if name not in read and not np.isfinite(values).all()
        }

    @property
    def non_finite(self) -> list[str]:
        """Parameters of all decisions whose local gradient is not finite."""
        return [name for decision in self.decisions for name in decision.non_finite]

    @property
    def parameters_changed(self) -> bool | None:
        """True if any local element changed; None if nothing trains here."""
        changes = [
            d.parameters_changed
            for d in self.decisions
            if d.parameters_changed is not None
        ]
        return any(changes) if changes else None


@dataclass(frozen=True, kw_only=True)
class Restored:
    """State of a new scaler after the workload's own save and load."""

    saved: tuple[float, int | None]
    """Scale and growth tracker at the save."""
    loaded: tuple[float, int | None]
    """Scale and growth tracker of the new scaler after the load."""
    new: tuple[float, int | None]
    """Scale and growth tracker of the new scaler before the load."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """State of a scaler, with which a scaler on another number of ranks begins."""

    scaler: bytes
    """The state dict as ``torch.save`` writes it."""
    state: tuple[float, int | None]
    """Scale and growth tracker."""


@dataclass(kw_only=True)
class RankTrace:
    """Everything observed on one rank."""

    rank: int
    coordinate: dict[str, int]
    """Mesh axis -> index of this rank."""
    index: dict[str, NDArray[np.int64]]
    """Parameter -> position of each local element in the flat full tensor."""
    shards: dict[str, str]
    """Parameter -> digest of its entry in ``index``: replicas have equal digests."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Parameter of the model -> number of elements of the whole."""
    trains: frozenset[str] = frozenset()
    """Parameters that have local elements and require a gradient."""
    owned: list[list[str]] = field(default_factory=list)
    """For each decision group: names of its parameters, equal on all ranks."""
    unjoined: tuple[int, ...] = ()
    """Number of optimizers of each rank, if the numbers differ and only the order of
    the optimizers shows which belong together; else empty."""
    left: frozenset[str] = frozenset()
    """Parameters that another rank with the same elements steps. On this rank they need
    no gradient."""
    reduce_dtype: str = ""
    """Dtype in which the workload promises to reduce gradients; empty: no promise."""
    narrows: bool = False
    """True if matrix products round fp32 inputs first, as with TF32."""
    initial: str = ""
    """Digest of the whole model's weights before ``parallelize``."""
    dropouts: dict[str, float] = field(default_factory=dict)
    """Name of a dropout in the model before ``parallelize`` -> its probability."""
    start: dict[str, Floats] = field(default_factory=dict)
    """Parameter name -> local elements before the first step, flattened."""
    buffers: dict[str, Floats] = field(default_factory=dict)
    """Buffer -> value before the first step."""
    buffer_digests: dict[str, str] = field(default_factory=dict)
    """Buffer -> digest of its value before the first step."""
    steps: list[StepTrace] = field(default_factory=list)
    problem: Problem | None = None
    """Call of the tested scaler that raised, or None."""
    hung: str = ""
    """Description of how this rank hung until the time limit; else empty. The process
    was killed, so its steps are lost."""
    misuse: list[Misuse] | None = None
    """Wrong calls made after the last step; None if the run did not get there."""

    restored: Restored | None = None
    """Result of the workload's own save and load after the last step; None without
    these methods, without a scaler, or if the run did not get there."""

    loaded: tuple[int, str] | None = None
    """(number of weights that the load restored bit for bit, first weight that it did
    not), of those that training had changed. None if the workload loaded no checkpoint
    of its own."""

    lost_buffer: str = ""
    """First buffer that the workload's own load did not restore: no rank had saved its
    value, or it is the initial one. Empty if all were restored."""

    saved: Saved | None = None
    """State of the scaler after the last step, if another world begins with it."""

    loaded_state: tuple[float, int | None] | None = None
    """Scale and growth tracker of the state with which the scaler began; None without a
    load."""

    @property
    def completed(self) -> int:
        """Number of completed steps."""
        return sum(step.complete for step in self.steps)

    def places(self, step: StepTrace, name: str) -> NDArray[np.int64]:
        """Return positions of local gradient elements in the flat full tensor."""
        return step.places.get(name, self.index[name])

    def places_of_average(self, name: str, elements: int) -> NDArray[np.int64] | None:
        """Return positions of a running average in the flat full tensor.

        An average has the elements of this rank's part, or of the whole parameter.
        Returns None if ``elements`` is the size of neither.
        """
        index = self.index.get(name)
        if index is not None and len(index) == elements:
            return index
        return np.arange(elements) if self.sizes.get(name) == elements else None

    def reached(self, step: int) -> bool:
        """Return True if ``step`` is the last one in this trace and was completed."""
        last = self.steps[-1] if self.steps else None
        return last is not None and last.complete and last.step == step
