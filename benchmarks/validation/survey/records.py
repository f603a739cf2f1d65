"""Records of a survey: a header and one line per model, appended during the run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from gradparity.conformance.status import UsageError

__all__ = [
    "LOADED",
    "ODD_HEADS",
    "WEIGHTS",
    "Header",
    "ModelRecord",
    "Rule",
    "Run",
    "ScriptRecord",
    "Survey",
    "append",
    "read_survey",
    "wildcards",
]


WEIGHTS = "weights"
"""Name used in place of a check: a model must be loaded as it was saved."""
LOADED = "weights as loaded"
"""Name of the run that checks loaded weights; it is recorded only if it fails."""
ODD_HEADS = "3 heads over 2 ranks"
"""Name of the run whose number of heads is no multiple of the number of ranks."""


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header", tag_field="kind"):
    """Versions, machine and settings of a survey."""

    package: str
    version: str
    """Version of the package."""
    torch: str
    python: str
    gradparity: str
    machine: str
    command: str
    started: str
    limit_s: float
    """Time limit of a model under a plan."""
    jobs: int = 1
    """Number of models that ran at a time."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """How a package treats a parameter under a plan."""

    style: str
    """Rule of the plan for the parameter; empty if the plan has none."""
    where: str
    """Name, file and line of the class that applies the rule, or else of the
    parameter's module."""
    module: str
    """Class of the module that holds the parameter."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario of a model."""

    name: str
    """Name of the run, such as ``2 micro-batches``."""
    scenario: str
    """Id of the scenario, for ``gradparity replay``."""
    status: str
    """Status of the case."""
    message: str = ""
    """Message of the first failed check, or the reason for no verdict."""
    ended: str = ""
    """State of the rank that broke the run, a value of ``RankState``."""
    law: str = ""
    laws: tuple[str, ...] = ()
    """Names of all failed checks."""
    step: int | None = None
    parameter: str = ""
    """Parameter with the largest error."""
    error: float = 0.0
    """Error of the gradient of ``parameter``, relative to the true gradient's norm."""
    bound: float = 0.0
    departed: dict[str, float] = {}
    """Parameter -> largest error of its gradient in the first bad step."""
    where: str = ""
    """First module that differs, and the last collective before it."""
    forward: str = ""
    """Module with the first wrong output, if forward is wrong."""
    seconds: float = 0.0

    @property
    def misloaded(self) -> bool:
        """True if the loaded weights were wrong, before any training."""
        return self.law == WEIGHTS


class ModelRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag="model", tag_field="kind"
):
    """One model type under one plan."""

    plan: str
    model: str
    folder: str
    verdict: str
    """``right``, ``wrong``, or the reason for no verdict: ``raises``, ``too slow``,
    ``crashed``, ``not built``, ``undecided``."""
    reason: str = ""
    runs: tuple[Run, ...] = ()
    rules: dict[str, Rule] = {}
    """Names of wrong parameters, with ``*`` for the number of a layer."""
    replaced: dict[str, str] = {}
    """Rules that replace the plan's own, because the model raises with those."""
    seconds: float = 0.0
    finished: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """(plan, model type): identifies a record in a survey."""
        return self.plan, self.model

    @property
    def checked(self) -> bool:
        """True if there is a verdict."""
        return self.verdict in ("right", "wrong")


class ScriptRecord(
    msgspec.Struct, frozen=True, kw_only=True, tag="script", tag_field="kind"
):
    """Result of running a failure's script alone."""

    finding: str
    """Id of the finding."""
    plan: str
    model: str
    shows: bool
    text: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Values that identify the script in a survey."""
        return self.finding, self.plan, self.model


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """A whole survey; a model that ran twice has its last record."""

    headers: tuple[Header, ...]
    """Headers, one for each call of the command: an interrupted survey is continued."""
    models: tuple[ModelRecord, ...]
    scripts: tuple[ScriptRecord, ...] = ()


def wildcards(name: str) -> str:
    """Return a parameter's name with ``*`` for each number of a layer, as in rules."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


Line = Header | ModelRecord | ScriptRecord
_DECODER = msgspec.json.Decoder(Line)
_ENCODER = msgspec.json.Encoder()


def read_survey(path: Path) -> Survey:
    """Read all complete lines; a last line that was cut off is left out.

    Raises:
        UsageError: if a line is not a record.
    """
    headers: list[Header] = []
    models: dict[tuple[str, str], ModelRecord] = {}
    scripts: dict[tuple[str, str, str], ScriptRecord] = {}
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    # after the last newline: nothing, or the line that a killed survey was writing
    for number, line in enumerate(lines[:-1], 1):
        try:
            found = _DECODER.decode(line)
        except msgspec.DecodeError as error:
            raise UsageError(f"{path}, line {number}: no record: {error}") from error
        match found:
            case Header():
                headers.append(found)
            case ModelRecord():
                models[found.key] = found
            case ScriptRecord():
                scripts[found.key] = found
    return Survey(
        headers=tuple(headers),
        models=tuple(models.values()),
        scripts=tuple(scripts.values()),
    )


def append(path: Path, record: Line) -> None:
    """Append a line after the last complete one.

    An unfinished line of a killed survey is removed first: with a new line appended it
    could not be parsed.
    """
    with path.open("ab+") as file:
        file.seek(0)
        text = file.read()
        if text and not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)
        file.write(_ENCODER.encode(record) + b"\n")
        file.flush()
        # hours of work must survive a loss of power
        os.fsync(file.fileno())
