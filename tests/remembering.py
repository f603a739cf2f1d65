"""Runner that makes each run once, for tests that check several facts of a run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.report.records import Location

KEPT = 64
"""Number of runs that are kept; tests of the same run are near each other."""


class Remembering(Runner):
    """Runner that remembers its results by scaler, scenario and settings."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._run = lru_cache(KEPT)(super().run)
        self._localise = lru_cache(KEPT)(self._localise_anew)
        self._cases: dict[tuple[str, Scenario], Case] = {}

    def run(self, spec: str, scenario: Scenario, *, parity: bool = True) -> Case:
        return self._run(spec, scenario, parity=parity)

    def localise(self, case: Case) -> Location | None:
        self._cases = {(case.scaler, case.scenario): case}
        return self._localise(case.scaler, case.scenario)

    def _localise_anew(self, spec: str, scenario: Scenario) -> Location | None:
        return super().localise(self._cases[spec, scenario])
