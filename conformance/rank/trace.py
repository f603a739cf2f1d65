"""Trace: observations on one rank, step by step.

Observed means: through the public protocol of the judged scaler (``get_scale``,
``state_dict``, ``step``, ``update``) and by its effect on the model. Arrays stay in
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
"""A value in an optimizer's param group, such as a learning rate or betas."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """An exception that a legal call of the judged scaler raised."""

    step: int
    """Step in which it was raised; -1 in the constructor."""
    call: str
    """The call, for example ``step``."""
    error: str
    """Type and message of the exception."""


@dataclass(frozen=True, kw_only=True)
class Misuse:
    """A call in a wrong order, and its effect."""

    call: str
    """The call, in words."""
    error: str
    """Type of the exception that refused it; empty where it was accepted."""
    changed: tuple[str, ...]
    """Changes that the call made; a refused call may change nothing."""


@dataclass(frozen=True)
class Collective:
    """A collective that a rank issued."""

    call: str
    """The call and what it sends, for example ``allreduce[6:float64]``."""
    ranks: tuple[int, ...]
    """The ranks of its process group, which are the same on all of them."""

    def __str__(self) -> str:
        return f"{self.call} over ranks {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """An all-reduce or reduce-scatter that a rank issued for gradients."""

    collective: Collective
    dtype: str
    """Name in torch, for example ``float32``."""
    elements: int
    """Number of elements of the reduced tensor."""


@dataclass(kw_only=True)
class Draw:
    """A call of a module that drew random numbers on a rank, itself."""

    module: str
    """Its name."""
    layer: str
    """Its class."""
    state: str
    """Digest of the generators' states when it began: equal ones draw alike."""
    recomputed: bool = False
    """True if it ran in backward, in a forward that runs again."""
    applied: str = ""
    """Digest of what the numbers were applied to, where the module has no parameters;
    equal digests mean the same activation."""
    varied: bool = False
    """True if ranks cannot hold it by accident, as they may hold one of zeros."""
    by_row: bool = False
    """True if rows were dropped differently."""
    kept: float | None = None
    """Factor of the elements that it kept, where it is one for all of them."""

    def __str__(self) -> str:
        return f"{self.layer} {self.module}".strip()


class Kind(StrEnum):
    """Kind of an event of an optimizer in a training step."""

    HANDED = "handed"
    """A call of the scaler with this optimizer begins."""
    RETURNED = "returned"
    """The call has ended."""
    BEGINS = "begins"
    """Its own ``step`` begins."""
    USES = "uses"
    """It is about to use gradients; again after each evaluation of a closure."""
    STEPPED = "stepped"
    """Its ``step`` has ended."""
    CHANGED = "changed"
    """After the step its state is another one."""


@dataclass(frozen=True)
class Group:
    """A param group, as its optimizer had it at an event."""

    names: tuple[str, ...] = ()
    """Its parameters, by their names in the model; empty: it steps other tensors."""
    settings: dict[str, Setting] = field(default_factory=dict)
    """Settings that schedules move, as far as they are known."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to an optimizer in a training step."""

    kind: Kind
    optimizer: int
    """Its number: the optimizers of a rank are counted as they are first seen."""
    groups: tuple[Group, ...] = ()
    with_grad: frozenset[str] = frozenset()
    """The parameters that have a gradient."""
    recorded: frozenset[str] = frozenset()
    """Parameters whose gradient was copied here, where it is used first."""
    written: frozenset[str] = frozenset()
    """At a use: parameters whose gradient was made or written since the first use in
    this step, when no weight had moved."""
    nodes: int = 0
    """Nodes of the autograd graph so far: a forward makes more of them."""

    @property
    def names(self) -> list[str]:
        """Names of all parameters; empty if the optimizer steps other tensors."""
        return [name for group in self.groups for name in group.names]


@dataclass(kw_only=True)
class Decision:
    """Steps of optimizers that decide together, on one rank in one step."""

    non_finite: list[str] = field(default_factory=list)
    """Its parameters whose local gradient is not finite, scaled or unscaled."""
    parameters_changed: bool | None = None
    """True if any local element changed; None where nothing of it trains here."""
    state_changed: bool = False
    """True if the state of any of its optimizers changed."""
    others: int = 0
    """Number of decision groups beside this one that train on this rank."""
    names: list[str] = field(default_factory=list)
    """Its parameters that train on this rank."""


Average = dict[str, tuple[int, str]]
"""Parameter name -> how many elements of its running average are here, and a digest."""


@dataclass(kw_only=True)
class StepTrace:
    """One rank, one step. Built up as the step goes on."""

    step: int
    complete: bool = False
    """True if the step was observed to its end."""
    loss: float | None = None
    """This rank's loss, or None; the mean of all by their weights is the batch's."""
    loss_dtype: str = ""
    """Name in torch of the dtype that the loss had; empty where it was a number."""
    weight: float | None = 1.0
    """Weight of this rank in that mean; None if the rank's counts are not known."""
    counts: tuple[float, ...] = ()
    """Divisors of the sums of all ranks, where the loss is (sum, count)."""
    reported_norm: float | None = None
    """The norm of the whole unscaled gradient before clipping, as the stack reports."""
    schedule: tuple[str, str] | None = None
    """Digest of the learning rate's schedule before and after the step, if given."""
    average: tuple[Average, Average] | None = None
    """The running average of the weights before and after the step, if given."""
    averages: dict[str, Floats] = field(default_factory=dict)
    """Its values after the step, where they are laid out as the parameters and the
    reference is the workload on one rank."""
    skips: tuple[int, int] | None = None
    """Skipped steps that the stack has counted, before and after the step, if given."""
    scale_before: float = 1.0
    scale_after: float = 1.0
    growth_before: int | None = 0
    """The growth tracker; None where the scaler's state_dict lacks it."""
    growth_after: int | None = 0
    events: list[Event] = field(default_factory=list)
    """Events of optimizers, in order; ``fold`` makes the decisions of it, the
    settings and what is late."""
    calls: set[str] = field(default_factory=set)
    """Methods of the scaler that were called, by name."""
    raw: dict[str, bool] | None = None
    """Parameter name -> whether its gradient was not finite when a scaler was about to
    read the gradients; None where none did."""
    own_skip: bool = False
    """True if all ranks skipped by the stack's own decision, and counted the skip."""
    changed: frozenset[str] = frozenset()
    """Parameters of which a local element changed."""
    decisions: list[Decision] = field(default_factory=list)
    """One a decision group."""
    faults: list[str] = field(default_factory=list)
    """Faults that were injected, as text."""
    digests: dict[str, str] = field(default_factory=dict)
    """Parameter name -> digest of its local elements after the step."""
    collectives: list[Collective] = field(default_factory=list)
    """Collectives issued inside the scaler's calls, in order."""
    reductions: list[Reduction] = field(default_factory=list)
    """Reductions of gradients, where a dtype is promised: from backward to the step."""
    checked_sum: tuple[float, float] | None = None
    """Result and expectation of the checked all-reduce after the step; the result is
    nan where it was lost."""
    gradients: dict[str, Floats] = field(default_factory=dict)
    """Unscaled local gradients as the optimizer saw them, flattened."""
    places: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Parameter name -> place of each element of its gradient in the flat full tensor;
    those of the parameter (``RankTrace.index``), unless it is laid out otherwise."""
    partial: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter name -> ranks over which its gradient is still to be summed, if any."""
    parameters: dict[str, Floats] = field(default_factory=dict)
    """Local parameters after the step, flattened."""
    buffers: dict[str, Floats] = field(default_factory=dict)
    """Buffer name -> value after the step, where it has the dtype of the model's."""
    buffer_digests: dict[str, str] = field(default_factory=dict)
    """Buffer name -> digest of its value after the step."""
    draws: list[Draw] = field(default_factory=list)
    """Calls of modules that drew in the passes, where random layers are on."""
    drawn_outside: int = 0
    """How often numbers were drawn there in no call of a module that is seen."""
    drew: bool = False
    """True if anything drew random numbers in the passes."""
    settings: dict[str, dict[str, Setting]] = field(default_factory=dict)
    """Parameter name -> what schedules move in its param group, as the optimizer had it
    when it was called, where the workload trains by itself."""
    copies: list[dict[str, Setting]] = field(default_factory=list)
    """The same of each param group of optimizers that step none of the parameters
    themselves, but copies of them."""
    late: list[str] = field(default_factory=list)
    """Parameters that were stepped after a forward in this step had other weights than
    the first, where the workload trains by itself."""
    unclear_choices: int = 0
    """Rows of a learned router that could be either of two of the reference."""

    @property
    def bad(self) -> set[str]:
        """Parameters whose gradient is not finite, before or after it is unscaled."""
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
        """True if any local element changed; None where nothing trains here."""
        changes = [
            d.parameters_changed
            for d in self.decisions
            if d.parameters_changed is not None
        ]
        return any(changes) if changes else None


@dataclass(frozen=True, kw_only=True)
class Restored:
    """State of a new scaler after a stack's own save and load."""

    saved: tuple[float, int | None]
    """Scale and growth tracker when the stack saved."""
    loaded: tuple[float, int | None]
    """The same of a new scaler once the stack has loaded."""
    new: tuple[float, int | None]
    """The same of a new scaler before."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The state of a training, from which another world goes on."""

    scaler: bytes
    """The judged scaler's state dict as ``torch.save`` writes it; empty without one."""
    optimizers: dict[str, dict[str, Any]]
    """Parameter name -> key -> its optimizer's state: a flat array has a value an
    element, a 0-d array or anything else is one value of the whole parameter."""
    parameters: dict[str, Floats] = field(default_factory=dict)
    """Name -> elements, flat; a rank leaves it empty: its last step holds them."""


@dataclass(kw_only=True)
class RankTrace:
    """Everything observed on one rank."""

    rank: int
    coordinate: dict[str, int]
    """Mesh axis -> index of this rank."""
    index: dict[str, NDArray[np.int64]]
    """Parameter name -> place of each local element in the flat full tensor."""
    shards: dict[str, str]
    """Parameter name -> digest of ``index``: equal digests mean replicas."""
    trains: frozenset[str] = frozenset()
    """Parameters that have local elements and require a gradient."""
    owned: list[list[str]] = field(default_factory=list)
    """Per decision group: names of its parameters, equal on all ranks."""
    unjoined: tuple[int, ...] = ()
    """Number of optimizers of each rank, where it differs and nothing but their order
    says which of them belong together; else empty."""
    left: frozenset[str] = frozenset()
    """Parameters that another rank, which holds the same elements, steps for this
    one: no gradient of them is due here."""
    reduce_dtype: str = ""
    """Dtype in which the workload promises to reduce gradients; empty: no promise."""
    narrows: bool = False
    """True if products of fp32 numbers round them first, as with TF32."""
    initial: str = ""
    """Digest of the whole model's weights before the layout."""
    dropouts: dict[str, float] = field(default_factory=dict)
    """Name of a dropout of the model before the layout -> its probability."""
    start: dict[str, Floats] = field(default_factory=dict)
    """Parameter name -> local elements before the first step, flattened."""
    buffers: dict[str, Floats] = field(default_factory=dict)
    """Buffer name -> value before the first step."""
    buffer_digests: dict[str, str] = field(default_factory=dict)
    """Buffer name -> digest of that."""
    steps: list[StepTrace] = field(default_factory=list)
    problem: Problem | None = None
    """The call of the judged scaler that raised, if one did."""
    hung: str = ""
    """How this rank hung until the time limit, in words; else empty. The process was
    killed, so the steps it had made are lost."""
    misuse: list[Misuse] | None = None
    """Wrong calls made after the last step; None where the run did not get there."""

    restored: Restored | None = None
    """The stack's own checkpoint after the last step; None where it has none."""

    loaded: tuple[int, str] | None = None
    """How many of the weights that training had moved are those saved, bit for bit,
    once the stack has loaded its own checkpoint; and the first that is not. None
    without a load."""

    saved: Saved | None = None
    """The state after the last step, where another world goes on from it."""

    @property
    def completed(self) -> int:
        """Number of steps that were observed to their end."""
        return sum(step.complete for step in self.steps)

    def places(self, step: StepTrace, name: str) -> NDArray[np.int64]:
        """Place of each local element of a gradient in the flat full tensor."""
        return step.places.get(name, self.index[name])

    def reached(self, step: int) -> bool:
        """True if ``step`` is the last one and was observed to its end."""
        last = self.steps[-1] if self.steps else None
        return last is not None and last.complete and last.step == step
