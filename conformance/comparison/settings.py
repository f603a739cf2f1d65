"""Settings of optimizers that a workload's own schedules change.

A ``train_step`` may change the learning rate, betas, momentum or weight decay. If the
workload has a ``scheduler``, the reference takes its values and the values on the ranks
are checked. Without a ``scheduler`` the right values are unknown: the reference trusts
the values of the ranks and checks the updates. A value that never changes must be that
of the workload's ``optimizer``. So must other numbers and flags, such as ``eps`` and
``amsgrad``; see :func:`other_constant`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn
from torch.optim import Optimizer

from ...fixtures import ResolvedWorkload
from ..rank.observe import constants_of, scheduled
from ..rank.trace import Constants, RankTrace, Setting, StepTrace

__all__ = [
    "INITIAL_RATE",
    "OtherConstant",
    "Planned",
    "Settings",
    "StackSchedule",
    "constants_by_name",
    "other_constant",
    "other_setting",
    "other_than_reference",
    "settings_of",
    "stack_schedule",
]

Settings = tuple[tuple[str, str, Setting], ...]
"""Settings of one step: (parameter, key of its param group such as ``lr``, value)."""
_Values = dict[int, dict[int, Setting]]
"""Values of a setting, by step and rank."""
_ROUNDING = 16 * 2.0**-24
"""Relative tolerance of settings. One run may compute a learning rate by a formula.
Another run may update it in fp32, with rounding in each of a dozen steps."""
INITIAL_RATE = "initial_lr"
"""Key under which torch's schedulers store the initial learning rate."""


@dataclass(frozen=True, kw_only=True)
class StackSchedule:
    """Settings that schedules changed in one run."""

    settings: tuple[Settings, ...] = ()
    """For each step: settings that the reference applies; empty if none change."""
    followed: str = ""
    """Description of the settings that the reference follows."""
    differs: tuple[int, str] | None = None
    """First step at which ranks step a parameter with different settings, and a
    description. :mod:`.parity` adds settings that differ from the reference."""
    unclear: str = ""
    """Description of changed settings whose parameters are unknown."""


def stack_schedule(
    steps: Sequence[Sequence[tuple[RankTrace, StepTrace]]],
) -> StackSchedule:
    """Find which settings change, from all steps of all ranks.

    If ranks have different values, the reference follows the first rank. Ranks with
    other values are reported: no schedule gives two ranks different values.
    """
    values_by_setting: dict[tuple[str, str], _Values] = {}
    for step, seen in enumerate(steps):
        for trace, at in seen:
            for name, settings in at.settings.items():
                for key, value in settings.items():
                    values = values_by_setting.setdefault((name, key), {})
                    values.setdefault(step, {})[trace.rank] = value
    shared, unclear = _of_copies(steps)
    named = {name for name, _ in values_by_setting}
    all_names = dict.fromkeys(
        n for seen in steps for trace, _ in seen for n in trace.index
    )
    for key, values in shared.items():
        values_by_setting |= {
            (name, key): values for name in all_names if name not in named
        }
    settings_by_step: list[list[tuple[str, str, Setting]]] = [[] for _ in steps]
    words: dict[str, str] = {}
    for (name, key), values in values_by_setting.items():
        led = {step: at[min(at)] for step, at in values.items()}
        began = (
            [*values_by_setting.get((name, INITIAL_RATE), {}).values()]
            if key == "lr"
            else []
        )
        before = [at[min(at)] for at in began[:1]]
        if key == INITIAL_RATE or len({*before, *led.values()}) == 1:
            continue
        words.setdefault(key, f"{key} ({name}: {_told(led, before)})")
        for step, value in led.items():
            if _finite(value):
                settings_by_step[step].append((name, key, value))
    return StackSchedule(
        settings=tuple(map(tuple, settings_by_step)) if words else (),
        followed=", ".join(words.values()),
        differs=min(
            _differences(values_by_setting), key=lambda each: each[0], default=None
        ),
        unclear=unclear,
    )


@dataclass(frozen=True, kw_only=True)
class OtherConstant:
    """Setting that no schedule changes, with another value than the reference's."""

    step: int
    """First step with the other value."""
    rank: int
    parameter: str
    text: str
    """Both values, with rank and step."""


class Planned:
    """Settings that the workload's own ``scheduler`` gives, step by step.

    The scheduler drives a separate optimizer, which holds copies of all trained
    parameters in the same groups. The copies have no gradients, so a step changes no
    weight.
    """

    def __init__(
        self, workload: ResolvedWorkload, optimizer: str, named: dict[str, nn.Parameter]
    ) -> None:
        copies = {n: nn.Parameter(p.detach().clone()) for n, p in named.items()}
        self.names = {parameter: name for name, parameter in copies.items()}
        self.workload = workload
        self.optimizer = workload.optimizers[optimizer]([*copies.items()])
        assert workload.scheduler is not None
        self.scheduler = workload.scheduler(self.optimizer)
        if not callable(getattr(self.scheduler, "step", None)):
            text = f"returned {self.scheduler!r}, expected torch's scheduler"
            raise workload.refuse("scheduler", text)

    @classmethod
    def of(
        cls, workload: ResolvedWorkload, optimizer: str, named: dict[str, nn.Parameter]
    ) -> Planned | None:
        """Plan the settings of a workload; return None if it has no ``scheduler``."""
        trained = {n: p for n, p in named.items() if p.requires_grad}
        return workload.scheduler and cls(workload, optimizer, trained)

    def settings(self) -> Settings:
        """Return the settings of the next step."""
        return tuple(
            (self.names[parameter], key, value)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            for key, value in scheduled(group).items()
            if key != INITIAL_RATE
        )

    def advance(self) -> None:
        """Advance the scheduler after a step that was taken."""
        with self.workload.calling("optimizer"):
            self.optimizer.step()  # torch's schedulers warn if no optimizer has stepped
        with self.workload.calling("scheduler"):
            self.scheduler.step()


def settings_of(optimizers: Mapping[str, Optimizer]) -> Settings:
    """Return the settings by parameter; each optimizer must have one parameter."""
    return tuple(
        (name, key, value)
        for name, optimizer in optimizers.items()
        for group in optimizer.param_groups
        if group["params"]  # other groups have no parameter of this kind
        for key, value in scheduled(group).items()
        if key != INITIAL_RATE
    )


def constants_by_name(optimizers: Mapping[str, Optimizer]) -> dict[str, Constants]:
    """Return other settings by parameter; each optimizer must have one parameter."""
    return {
        name: constants_of(optimizer, group)
        for name, optimizer in optimizers.items()
        for group in optimizer.param_groups
        if group["params"]  # other groups have no parameter of this kind
    }


def other_constant(
    steps: Sequence[Sequence[tuple[RankTrace, StepTrace]]],
    reference: Sequence[Mapping[str, Constants]],
    whose: str,
) -> OtherConstant | None:
    """Return the first setting of a rank that differs from the reference's, or None.

    A parameter is compared if the reference's optimizer has the same class: a wrapper
    may read a setting in another way. A key whose value changes in a run is left out,
    as a step size that the optimizer estimates. Whole numbers are left out, because
    they may count ranks or steps.

    Args:
        steps: for each step, the traces of all ranks.
        reference: for each step, the settings of the reference.
        whose: description of the reference's settings, for the message.
    """
    runs = [[at.constants for _, at in ranks] for ranks in zip(*steps, strict=True)]
    moving = set[str]().union(*map(_moving, [*runs, reference]))
    for step, (seen, due) in enumerate(zip(steps, reference, strict=False)):
        for name, want in due.items():
            for trace, at in seen:
                mine = at.constants.get(name)
                if mine is None or mine.optimizer != want.optimizer:
                    continue
                for key, expected in want.values.items():
                    pair = mine.values.get(key, expected), expected
                    is_left_out = key in moving or all(map(_is_whole, pair))
                    if is_left_out or _equal(*pair):
                        continue
                    value, theirs = _apart(*pair)
                    text = (
                        f"{key} of {name} is {value} on rank {trace.rank} at step "
                        f"{step}, and {theirs} {whose}"
                    )
                    return OtherConstant(
                        step=step, rank=trace.rank, parameter=name, text=text
                    )
    return None


def _moving(run: Iterable[Mapping[str, Constants]]) -> set[str]:
    """Return the keys of settings whose value changes between the steps of a run."""
    first: dict[tuple[str, str], Setting] = {}
    return {
        key
        for constants in run
        for name, each in constants.items()
        for key, value in each.values.items()
        if first.setdefault((name, key), value) != value
    }


def _is_whole(value: Setting) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(v, int) and not isinstance(v, bool) for v in values)


def other_than_reference(
    steps: Sequence[Sequence[tuple[RankTrace, StepTrace]]],
    reference: Sequence[Settings],
    whose: str,
    tolerance: float = _ROUNDING,
) -> tuple[int, str] | None:
    """Return (first step at which a rank has other settings, description), or None.

    Args:
        steps: for each step, the traces of all ranks.
        reference: settings of the reference at each step.
        whose: description of the reference's settings, for the message.
        tolerance: largest relative difference of equal settings.
    """
    for step, (seen, settings) in enumerate(zip(steps, reference, strict=False)):
        for name, key, want in settings:
            for trace, at in seen:
                value = at.settings.get(name, {}).get(key, want)
                if not _equal(value, want, tolerance):
                    mine, theirs = _apart(value, want)
                    return step, (
                        f"{key} of {name} is {mine} on rank {trace.rank} at step "
                        f"{step}, and {theirs} {whose}"
                    )
    return None


def _equal(value: Setting, want: Setting, tolerance: float = _ROUNDING) -> bool:
    # other classes have another number of betas
    if np.shape(value) != np.shape(want):
        return False
    return np.allclose(value, want, rtol=tolerance, atol=0.0, equal_nan=True)


def other_setting(at: StepTrace, whole: StepTrace) -> tuple[int, str]:
    """Compare the settings of a rank in one step of two runs.

    Returns:
        The number of equal settings, and a description of the first one that differs;
        "" if all are equal.
    """
    compared, settings_there = 0, _stepped_with(whole)
    for (name, key), value in _stepped_with(at).items():
        if (name, key) not in settings_there:
            continue
        want = settings_there[name, key]
        if not _equal(value, want):
            return compared, f"{key} of {name} is {', and '.join(_apart(value, want))}"
        compared += 1
    return compared, ""


def _stepped_with(at: StepTrace) -> dict[tuple[str, str], Setting]:
    # nothing shows which copy belongs to which parameter, so compare groups by their
    # values
    copies = sorted(at.copies, key=repr)
    groups = {
        f"group {number} of copies": settings for number, settings in enumerate(copies)
    }
    return {
        (name, key): value
        for name, settings in [*at.settings.items(), *groups.items()]
        for key, value in settings.items()
        if key != INITIAL_RATE
    }


def _of_copies(
    steps: Sequence[Sequence[tuple[RankTrace, StepTrace]]],
) -> tuple[dict[str, _Values], str]:
    """Return settings of optimizers that step copies of the parameters.

    Which copy belongs to which parameter is unknown. So a setting is assigned only if
    it has one value in all groups and ranks, and then to each parameter.

    Returns:
        A map from key to values for each assigned setting, and a text. The text names
        the first other setting that changes between steps, or is "".
    """
    groups: dict[str, dict[int, dict[int, list[Setting]]]] = {}
    for step, seen in enumerate(steps):
        for trace, at in seen:
            for settings in at.copies:
                for key, value in settings.items():
                    ranks = groups.setdefault(key, {}).setdefault(step, {})
                    ranks.setdefault(trace.rank, []).append(value)
    shared: dict[str, _Values] = {}
    unclear = ""
    for key, held in groups.items():
        several = [{v for own in at.values() for v in own} for at in held.values()]
        if all(len(values) == 1 for values in several):
            shared[key] = {
                step: {rank: own[0] for rank, own in at.items()}
                for step, at in held.items()
            }
            continue
        for rank in {rank for at in held.values() for rank in at}:
            own = {step: at[rank] for step, at in held.items() if rank in at}
            if key != INITIAL_RATE and len({*map(tuple, own.values())}) > 1:
                first = {step: values[0] for step, values in own.items()}
                unclear = unclear or f"{key} ({_told(first, ())})"
    return shared, unclear


def _differences(
    known: Mapping[tuple[str, str], _Values],
) -> Iterator[tuple[int, str]]:
    for (name, key), values in known.items():
        for step, at in values.items() if key != INITIAL_RATE else ():
            first = min(at)
            other = next((rank for rank in sorted(at) if at[rank] != at[first]), None)
            if other is not None:
                one, another = _apart(at[first], at[other])
                yield (
                    step,
                    f"{key} of {name} is {one} on rank {first} and {another} on rank "
                    f"{other} at step {step}",
                )


def _told(led: Mapping[int, Setting], before: Collection[Setting]) -> str:
    """Describe the first two values of a setting, each with its first step."""
    first: dict[Setting, str] = {}
    for step, value in led.items():
        first.setdefault(value, f"at step {step}")
    if len(first) == 1:  # one value: the setting changed before the run
        first = dict.fromkeys(before, "where the schedule began") | first
    return ", ".join(f"{_plain(v)} {where}" for v, where in [*first.items()][:2])


def _apart(one: Setting, other: Setting) -> tuple[str, str]:
    """Format two settings with as many digits as distinguish them."""
    pairs = [(_plain(one, n), _plain(other, n)) for n in (6, 9, 12, 17)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])


def _plain(value: Setting, digits: int = 6) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_plain(v, digits) for v in value)})"
    if isinstance(value, bool):
        return str(value)
    return f"{value:.{digits}g}"


def _finite(value: Setting) -> bool:
    return all(map(math.isfinite, value if isinstance(value, tuple) else (value,)))
