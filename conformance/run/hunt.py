"""The hunt: draw scenarios from the whole space, and shrink one with a violation.

Hypothesis draws a scenario from the fixtures' tables, and warm clusters run it. If a
check fails, hypothesis shrinks towards the first entry of every table (fewest ranks,
fp32, SGD, no fault). The smallest failing scenario is printed as a ``gradparity
replay`` command.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from rich.console import Console
from rich.text import Text

from ...fixtures import KINDS
from ..rank.scaler_spec import refuse_unfit
from ..report.terminal import plain
from ..script.standalone import write_standalone
from ..space.catalogue import (
    OVERFLOWING_SCALE,
    TARGETS,
    Selection,
    columns,
    fits,
    split_parameter,
    to_scenario,
)
from ..space.scenario import Scenario
from ..status import Status, UsageError
from .recorder import replay_command
from .runner import Case, Runner

__all__ = ["HuntSettings", "hunt", "scenarios"]

# a scenario shrinks to the first; the last is no power of two
SCALES = (1024.0, 1.0, 2.0**16, OVERFLOWING_SCALE, 3.0)
MAX_STEPS = 12
ROUND = 10
"""Number of scenarios to draw before the time budget is checked again."""


@dataclass(frozen=True, kw_only=True)
class HuntSettings:
    """Settings of a hunt, which draws random scenarios until a check fails."""

    scaler: str
    selection: Selection
    folder: str
    budget_s: float
    """Seconds for drawing; shrinking a violation may take as long again."""
    database: str = ".hypothesis/gradparity"
    """Folder with failing scenarios, which the next hunt tries first."""
    timeout_s: float = 60.0
    script: Path | None = None
    """Path of a standalone script of the violation; None for no script."""

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise UsageError(f"the budget must be positive, got {self.budget_s}")


class _Violation(Exception):
    """Raised inside hypothesis for a violation.

    An ``AssertionError`` is not used, because gradparity itself may raise one.
    """


@dataclass(kw_only=True)
class Found:
    """Result of a hunt."""

    tried: int = 0
    """Number of scenarios that ran."""
    case: Case | None = None
    """Last case with a violation; after shrinking, the smallest."""
    broken: list[str] = field(default_factory=list)
    """Scenarios in which the harness broke; they have no verdict."""


@st.composite
def fault_plans(draw: st.DrawFn, world_size: int, steps: int, model: str) -> str:
    """Draw up to three faults anywhere in the run, as text for a scenario."""
    count = draw(st.integers(0, 3))
    targets = [split_parameter(model) if t == "split" else t for t in TARGETS]
    parts = [
        f"{draw(st.sampled_from(sorted(KINDS)))}"
        f"@r{draw(st.sampled_from([*map(str, range(world_size)), '*']))}"
        f"s{draw(st.integers(0, steps - 1))}"
        f":{draw(st.sampled_from(targets))}"
        for _ in range(count)
    ]
    return ";".join(parts) or "none"


@st.composite
def scenarios(draw: st.DrawFn, selection: Selection) -> Scenario:
    """Draw any scenario that torch itself can train."""
    row: dict[str, str] = {"when": "never"}  # faults are drawn more freely below
    for column, values in columns(selection).items():
        # choices that fit pairwise can always be completed by default values
        open_ = [v for v in values if fits(row | {column: v}, selection.workload)]
        if column not in row:
            row[column] = draw(st.sampled_from(open_))
    steps = draw(st.integers(1, MAX_STEPS))
    scenario = to_scenario(
        row,
        selection,
        steps=steps,
        seed=draw(st.integers(0, 1000)),
        init_scale=draw(st.sampled_from(SCALES)),
        growth_interval=draw(st.integers(1, 4)),
    )
    if selection.no_scaler or not scenario.parsed_recipe.enabled:
        return scenario
    faults = draw(fault_plans(scenario.world_size, steps, scenario.model))
    return replace(scenario, faults=faults)


def hunt(settings_: HuntSettings, console: Console) -> int:
    """Draw and run scenarios until the budget is spent or a violation is shrunk.

    Returns:
        0 no violation, 1 a violation, 3 no violation, but the harness broke in a
        scenario or no scenario ran.
    """
    finding = Found()
    with Runner(folder=settings_.folder, timeout_s=settings_.timeout_s) as runner:
        refuse_unfit(runner.place.ranks(1), settings_.scaler, settings_.folder)
        end = time.monotonic() + settings_.budget_s
        search = _search(settings_, runner, finding)
        try:
            while time.monotonic() < end:
                search()  # one round, because hypothesis has no time budget
        except _Violation:
            pass  # ``finding`` holds the shrunk violation
    return _print_found(settings_, finding, console)


def _search(
    settings_: HuntSettings, runner: Runner, found: Found
) -> Callable[[], None]:
    end = time.monotonic() + 2 * settings_.budget_s
    status_by_scenario: dict[Scenario, Status] = {}

    @settings(
        max_examples=ROUND,
        deadline=None,
        database=DirectoryBasedExampleDatabase(settings_.database),
        derandomize=False,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.reuse, Phase.generate, Phase.shrink),
    )
    @given(scenarios(settings_.selection))
    def search(scenario: Scenario) -> None:
        if scenario not in status_by_scenario:
            if time.monotonic() > end:
                # when time is out, new scenarios count as passing, which ends shrinking
                return
            case = runner.run(settings_.scaler, scenario)
            found.tried += 1
            status_by_scenario[scenario] = case.status
            _note(case, found)
        if status_by_scenario[scenario] is Status.FAIL:
            raise _Violation

    return search


def _note(case: Case, found: Found) -> None:
    if case.status is Status.FAIL:
        found.case = case
    if case.status is Status.ERROR:
        found.broken.append(f"{case.scenario.id}: {case.problem}")


def _print_found(settings_: HuntSettings, found: Found, console: Console) -> int:
    fine = ": no check failed" if found.tried and found.case is None else ""
    lines = [f"{found.tried} scenarios tried with {settings_.scaler}{fine}"]
    lines += [f"harness failure: {text}" for text in found.broken[:3]]
    if found.case is not None:
        case = found.case
        first = next(v for v in case.verdicts if v.status == Status.FAIL)
        lines += [
            f"violation of {first.law}: {first.message}",
            *_script(settings_, case.scenario),
            replay_command(case.scaler, case.scenario.id),
        ]
    for line in lines:
        console.print(Text(plain(line)), soft_wrap=True)
    if found.case is not None:
        return 1
    return 3 if found.broken or not found.tried else 0


def _script(settings_: HuntSettings, scenario: Scenario) -> list[str]:
    if settings_.script is None:
        return []
    try:
        write_standalone(settings_.script, scenario, settings_.scaler)
    # without a script the replay line still shows the violation
    except UsageError as error:
        return [str(error)]
    return [f"script: {settings_.script}"]
