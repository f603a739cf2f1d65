"""The gate: report + baseline + expectations -> exit code, and formats CI knows."""

from .badge import percentage as percentage
from .baseline import Baseline as Baseline
from .baseline import BaselineError as BaselineError
from .baseline import make_baseline as make_baseline
from .baseline import read_baseline as read_baseline
from .baseline import write_baseline as write_baseline
from .decision import Decision as Decision
from .decision import Terms as Terms
from .decision import decide as decide
from .expectations import Expectation as Expectation
from .expectations import ExpectationError as ExpectationError
from .expectations import read_expectations as read_expectations
from .reasons import KINDS as KINDS
from .reasons import Outcome as Outcome
from .reasons import Reason as Reason

__all__ = [
    "KINDS",
    "Baseline",
    "BaselineError",
    "Decision",
    "Expectation",
    "ExpectationError",
    "Outcome",
    "Reason",
    "Terms",
    "decide",
    "make_baseline",
    "percentage",
    "read_baseline",
    "read_expectations",
    "write_baseline",
]
