"""Convert a checked case to its record in the report."""

from __future__ import annotations

import logging
import os
import platform
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec
import torch

from ... import __version__
from ...fixtures import DATASETS, ONE_RANK, OfWorkload, resolve_workload
from ..comparison import laws as laws  # enters them into LAWS
from ..comparison.law import LAWS, Evidence
from ..comparison.parity import mean_loss
from ..rank.devices import Devices
from ..rank.observe import digest
from ..rank.trace import StepTrace
from ..report.records import (
    SCHEMA_VERSION,
    CaseRecord,
    Comparison,
    Curves,
    Header,
    LawText,
)
from ..script.standalone import standalone_script
from ..status import Number, UsageError, as_number
from .launcher import AloneError, Place
from .runner import Case

__all__ = ["Recorder", "case_record", "command_line", "make_header", "replay_command"]

_LOGGER = logging.getLogger(__name__)
# variables that change numbers or transports: others may be secrets
_RELEVANT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "TORCH_LOGS",
)


def make_header(
    *,
    planned: int,
    preset: str,
    seed: int,
    arguments: Sequence[str],
    place: Place,
    data: Iterable[str] = (),
    require: Sequence[str] = (),
    not_tried: Sequence[str] = (),
) -> Header:
    """Return the header of a run that starts now.

    Args:
        planned: number of cases of the run.
        preset: name of the set of scenarios.
        seed: seed of the run.
        arguments: command line.
        place: where the ranks come from: device, backend, threads.
        data: data sets that the run uses; their hashes are recorded. The hash of the
            text data depends on the Python version, so only runs that use this data may
            record it.
        require: scalers that decide the result of the report; empty means all.
        not_tried: meshes and recipes that the preset leaves out, with reasons.
    """
    data = sorted(set(data))
    return Header(
        schema=SCHEMA_VERSION,
        gradparity=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=f"{platform.system()}-{platform.machine()}".lower(),
        backend=place.devices.backend,
        device=place.devices.device,
        threads=place.threads,
        commit=_commit(),
        command=command_line(arguments),
        preset=preset,
        seed=seed,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        planned=planned,
        data={name: _fingerprint(name) for name in data},
        environment={k: os.environ[k] for k in _RELEVANT if k in os.environ},
        launcher=place.launcher(),
        gpus=tuple(place.gpu_names()),
        laws={
            law.id: LawText(text=law.text, reason=law.reason) for law in LAWS.values()
        },
        require=tuple(require),
        reference=ONE_RANK
        if any(resolve_workload(n).one_rank for n in data if n not in DATASETS)
        else "",
        not_tried=tuple(not_tried),
    )


def _fingerprint(name: str) -> str:
    """Return the hash of a data set, or of a workload's first batch."""
    if name in DATASETS:
        return DATASETS[name].fingerprint()
    tensors = resolve_workload(name).batch(0, 0).tensors
    return "-".join(digest(tensor) for tensor in tensors)


def command_line(arguments: Sequence[str]) -> str:
    """Return the command of a run, for the header."""
    return shlex.join(["gradparity", *arguments])


def _commit() -> str:
    """Return the commit of the current folder; empty outside of a git checkout."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def replay_command(scaler: str, scenario: str, devices: Devices | None = None) -> str:
    """Return the command that runs a case again, with new ranks."""
    options = ["--scaler", scaler, *(devices.options if devices else ())]
    return shlex.join(["gradparity", "replay", scenario, *options])


class Recorder:
    """Creates the records of one report.

    The first case in which a scaler fails a check contains a script that shows the
    failure. The script cannot be created while the report is rendered: that needs the
    reference, and may import modules that a scenario names.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._shown: set[tuple[str, str]] = set()

    def record(self, case: Case) -> CaseRecord:
        """Return the record of a case."""
        record = case_record(case, self.place.devices)
        broken = {(case.scaler, v.law) for v in case.verdicts if v.status == "fail"}
        # the empty set if no check is broken
        if broken <= self._shown:
            return record
        try:
            script = self.place.alone(standalone_script, case.scenario, case.scaler)
        except (UsageError, AloneError):  # not every scenario has a script
            return record
        # an error of gradparity: the record is complete without a script
        except Exception:
            _LOGGER.exception("no script could be made for %s", case.scenario.id)
            return record
        self._shown |= broken
        return msgspec.structs.replace(record, script=script)


def case_record(case: Case, devices: Devices | None = None) -> CaseRecord:
    """Return the record of a case that ran on ``devices`` (default: the CPU)."""
    scenario = case.scenario
    return CaseRecord(
        scaler=case.scaler,
        scenario=scenario.id,
        topology=scenario.topology,
        world_size=scenario.world_size,
        precision=scenario.precision,
        model=scenario.model,
        status=case.status.value,
        verdicts=case.verdicts,
        seconds=round(case.seconds, 4),
        problem=case.problem,
        whose=_whose(case),
        replay=replay_command(case.scaler, scenario.id, devices),
        location=case.location,
        worst=_worst(case.evidence),
        curves=_curves(case.evidence),
    )


def _whose(case: Case) -> str:
    """Return ``your CALL`` if the user's call raised, ``your workload`` if it hung.

    Returns "" if neither happened.
    """
    error = case.own_error
    if error is not None:
        return f"your {error.call or 'workload'}"
    hung = case.hangs and OfWorkload.OF_USER in case.scenario.workload.has
    return "your workload" if hung else ""


def _worst(evidence: Evidence | None) -> tuple[Comparison, ...]:
    if evidence is None or evidence.parity is None:
        return ()
    return tuple(
        Comparison(
            kind=row.kind,
            parameter=row.parameter,
            step=row.step,
            rank=row.rank,
            measure=row.measure,
            error=as_number(row.error),
            absolute=as_number(row.absolute),
            bound=as_number(row.bound),
        )
        for row in evidence.parity.worst.values()
    )


def _curves(evidence: Evidence | None) -> Curves | None:
    """Return the curves of a case; None if the world that saves its state failed."""
    if evidence is None or len(evidence.ranks) != evidence.scenario.world_size:
        return None
    parity = evidence.parity
    steps = [seen for _, seen in evidence.steps()]
    rows = [trace.steps for trace in evidence.ranks]
    return Curves(
        loss=[_loss(seen) for seen in steps],
        reference_loss=[as_number(x) for x in parity.reference_loss] if parity else [],
        scale=[[as_number(s.scale_after) for s in row] for row in rows],
        growth=[[s.growth_after for s in row] for row in rows],
        stepped=[[s.parameters_changed for s in row] for row in rows],
        bad=[[(s.non_finite or [""])[0] for s in row] for row in rows],
        parity=[as_number(x) for x in parity.per_step] if parity else [],
        parameters=(
            {n: as_number(x) for n, x in parity.per_parameter.items()} if parity else {}
        ),
    )


def _loss(seen: Sequence[StepTrace]) -> Number | None:
    mean = mean_loss(seen)
    return None if mean is None else as_number(mean)
