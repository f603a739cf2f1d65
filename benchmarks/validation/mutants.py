"""``gradparity mutants``: run every faulty scaler through every check.

1. Run the wrong scalers scenario by scenario, so that they share clusters, runs without
   a scaler and references.
2. Drop each scaler once it is caught, unless ``--every`` is given.
3. Run the rest in the next preset.
4. Run the right scalers with several seeds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gradparity.benchmarks.validation.mutants_matrix import (
    Matrix,
    Row,
    as_text,
    write_matrix,
)
from gradparity.conformance.cli.arguments import NARROWING, add_options, repeated
from gradparity.conformance.cli.converters import folder
from gradparity.conformance.report.terminal import plain
from gradparity.conformance.run.recorder import make_header
from gradparity.conformance.run.runner import Case, Runner
from gradparity.conformance.space.catalogue import Selection, select
from gradparity.conformance.space.scenario import Scenario
from gradparity.conformance.status import Status, UsageError
from gradparity.fixtures.faulty import FAULTY, RIGHT

__all__ = ["MODULE", "MutantSettings", "main", "mutants"]

MODULE = "gradparity.fixtures.faulty"


@dataclass(frozen=True, kw_only=True)
class MutantSettings:
    """Options of one run over scalers with known faults."""

    selection: Selection
    folder: str
    presets: Sequence[str] = ("quick",)
    """Presets in order: a wrong scaler that passes one runs in the next."""
    scalers: Sequence[str] = ()
    """Class names in ``fixtures.faulty``; empty means all."""
    every: bool = False
    """True to run wrong scalers in every scenario, even after they were caught."""
    seeds: int = 1
    """Number of seeds for the right scalers."""
    share: int = 1
    """Number of parts into which the first preset is cut; each seed runs one part with
    the right scalers."""
    out: Path | None = None
    """Folder for ``mutants.json`` and ``mutants.md``."""
    timeout_s: float = 30.0
    quiet: bool = False
    arguments: Sequence[str] = ()
    """Command line, for the header."""

    def __post_init__(self) -> None:
        known = {s.__name__ for s in [*FAULTY, *RIGHT]}
        for name in self.scalers:
            if name not in known:
                raise UsageError(
                    f"unknown scaler {name!r}: expected a class of {MODULE}, such as "
                    f"{', '.join(sorted(known)[:3])}"
                )
        if self.seeds < 0 or self.share < 1:
            raise UsageError(
                f"seeds must be at least 0 and share at least 1, got {self.seeds} and "
                f"{self.share}"
            )


@dataclass(kw_only=True)
class _Tally:
    """Counts for one row of the matrix, while it is filled."""

    scaler: type[Any]
    law: str
    tried: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    first: tuple[str, str, str] | None = None
    """Preset, scenario and finding of the first catch."""
    broken: int = 0

    @property
    def caught(self) -> bool:
        return self.law in self.failed

    def take(self, case: Case, preset: str) -> None:
        failed = [v for v in case.verdicts if v.status == Status.FAIL]
        self.tried += 1
        self.broken += case.status is Status.ERROR
        self.failed.update(v.law for v in failed)
        # A right scaler has no law that must catch it: any violation of it counts.
        due = [v for v in failed if v.law == self.law or not self.law]
        if due and self.first is None:
            self.first = (preset, case.scenario.id, plain(due[0].message))

    def row(self) -> Row:
        preset, scenario, message = self.first or ("", "", "")
        return Row(
            scaler=self.scaler.__name__,
            fault=(self.scaler.__doc__ or "").strip().splitlines()[0],
            law=self.law,
            tried=self.tried,
            failed=dict(sorted(self.failed.items())),
            preset=preset,
            scenario=scenario,
            message=message,
            broken=self.broken,
        )


def main(argv: Sequence[str]) -> int:
    """Parse the arguments, run all scalers and print the result.

    Args:
        argv: arguments after ``gradparity mutants``.

    Returns:
        See :func:`mutants`.

    Raises:
        UsageError: if an option has a wrong value.
    """
    parsed = _parser().parse_args(argv)
    settings = MutantSettings(
        selection=Selection(
            topologies=parsed.topology,
            models=parsed.model,
            precisions=parsed.precision,
            optimizers=parsed.optimizer,
            world_size=parsed.world_size,
            seed=parsed.seed,
        ),
        folder=os.getcwd(),
        presets=parsed.preset or ["quick"],
        scalers=parsed.only,
        every=parsed.every,
        seeds=parsed.seeds,
        share=parsed.share,
        out=parsed.out,
        quiet=parsed.quiet,
        arguments=["mutants", *argv],
    )
    return mutants(settings, Console())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradparity mutants",
        description="Does each faulty scaler fail its check?",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--preset", **repeated("NAME", "take what is missed to the next (quick)"))
    add("--only", **repeated("CLASS", "a class of fixtures.faulty"))
    add_options(parser, NARROWING)
    add(
        "--every",
        action="store_true",
        help="check wrong scalers in all scenarios, caught or not",
    )
    add(
        "--seeds",
        type=int,
        default=1,
        metavar="N",
        help="seeds for the right scalers (1)",
    )
    add(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="each seed takes one Nth of the first preset (1)",
    )
    add(
        "--out",
        type=folder,
        metavar="DIR",
        help="folder for mutants.json and mutants.md",
    )
    add("--quiet", action="store_true", help="no progress")
    return parser


def mutants(settings: MutantSettings, console: Console) -> int:
    """Run all scalers, print the matrix and write it if `out` is given.

    Returns:
        0 if every wrong scaler fails its check and every right one passes; 3 if the
        harness broke; else 1.

    Raises:
        UsageError: for unknown presets, before anything is started.
    """
    # an unknown preset is found now, and not after the first one has run
    for preset in settings.presets:
        select(preset, settings.selection)
    started = time.monotonic()
    runner = Runner(folder=settings.folder, timeout_s=settings.timeout_s)
    header = make_header(
        planned=0,  # not known: a scaler that is caught is left out of the rest
        place=runner.place,
        preset=" ".join(settings.presets),
        seed=settings.selection.seed,
        arguments=settings.arguments,
    )
    wanted = settings.scalers
    wrong = [
        _Tally(scaler=s, law=b.law)
        for s, b in FAULTY.items()
        if not wanted or s.__name__ in wanted
    ]
    right = [
        _Tally(scaler=s, law="") for s in RIGHT if not wanted or s.__name__ in wanted
    ]
    with runner:
        _check_wrong(settings, runner, wrong, console)
        _check_right(settings, runner, right, console)
    matrix = Matrix(
        header=header,
        seeds=settings.seeds,
        seconds=round(time.monotonic() - started, 1),
        rows=[tally.row() for tally in [*wrong, *right]],
    )
    return _print_matrix(settings, matrix, console)


def _check_wrong(
    settings: MutantSettings, runner: Runner, wrong: list[_Tally], console: Console
) -> None:
    for preset in settings.presets:
        missed = [t for t in wrong if not t.caught]
        for scenario in select(preset, settings.selection):
            due = [t for t in missed if settings.every or not t.caught]
            if not due:
                break
            _check(settings, runner, due, (preset, scenario))
            _progress(settings, console, scenario, f"{len(due)} checked", due)


def _check_right(
    settings: MutantSettings, runner: Runner, right: list[_Tally], console: Console
) -> None:
    for preset, scenario in _seeded(settings) if right else ():
        _check(settings, runner, right, (preset, scenario))
        failed = [t for t in right if t.failed]
        _progress(settings, console, scenario, f"{len(failed)} failed", failed)


def _seeded(settings: MutantSettings) -> Iterator[tuple[str, Scenario]]:
    """Yield (preset, scenario) for the right scalers, with one seed after another."""
    preset, first = settings.presets[0], settings.selection.seed
    for seed in range(first, first + settings.seeds):
        chosen = select(preset, replace(settings.selection, seed=seed))
        # another part for each seed: together the seeds cover the preset
        for scenario in chosen[seed % settings.share :: settings.share]:
            yield preset, scenario


def _check(
    settings: MutantSettings,
    runner: Runner,
    tallies: Sequence[_Tally],
    where: tuple[str, Scenario],
) -> None:
    preset, scenario = where
    for tally in tallies:
        # parity is dear where each scaler has a scale, and so references, of its own
        asked = settings.every or not tally.law or tally.law.startswith("parity")
        spec = f"{MODULE}:{tally.scaler.__name__}"
        tally.take(runner.run(spec, scenario, parity=asked), preset)


def _progress(
    settings: MutantSettings,
    console: Console,
    scenario: Scenario,
    text: str,
    of: Sequence[_Tally],
) -> None:
    if not settings.quiet:
        names = [t.scaler.__name__ for t in of if t.failed][:4]
        line = plain(f"{scenario.id}: {text} {' '.join(names)}")
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_matrix(settings: MutantSettings, matrix: Matrix, console: Console) -> int:
    lines = as_text(matrix)
    console.print(lines, markup=False, highlight=False, soft_wrap=True)
    if settings.out is not None:
        path = write_matrix(matrix, settings.out)
        console.print(f"matrix: {path}", markup=False, soft_wrap=True)
    for row in matrix.rows:
        if not row.as_it_should_be:
            what = "failed" if row.right else f"not caught by {row.law}"
            text = f"{row.scaler}: {what}: {row.message} {dict(row.failed)}"
            console.print(plain(text), markup=False, highlight=False, soft_wrap=True)
    if any(row.broken for row in matrix.rows):
        return 3
    return 0 if all(row.as_it_should_be for row in matrix.rows) else 1
