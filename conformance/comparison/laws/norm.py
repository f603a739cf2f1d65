"""Norm: the reported norm and the clipping factor are those of the whole gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ....fixtures import REFERENCE_LINE, OfWorkload
from ...formulas import clip_factor
from ...rank.trace import StepTrace
from ...space.facts import clips_by_norm
from ..law import (
    Evidence,
    Finding,
    count_or_inconclusive,
    failed,
    inconclusive,
    law,
    rank_list,
    skipped,
)
from ..measured import ClipRow, Parity, gradient_of

_STOPPED = "the run stopped before its norms could be compared"
_DEPART = "the gradients themselves differ from the fp64 truth"


@law(
    "norm.reported",
    "A norm that a rank reports is that of the whole unscaled gradient before "
    "clipping.",
    "A norm that lacks a shard or counts a replica twice gives a wrong clipping "
    "factor. Count each shard once, a replicated tensor once in all, and experts over "
    "their own groups. Include every type, placement and optimizer.",
    of_stack=True,
    hidden="elsewhere the references are not finite, or the weights already differ "
    "from the truth",
)
def reported(evidence: Evidence) -> Finding:
    """Compare each rank's reported norm with that of the fp64 truth.

    Ranks may add in different orders: each norm must be within the measured bound, but
    ranks need not be bitwise equal.
    """
    report = {rank for _, seen in evidence.steps() for rank in _reports(evidence, seen)}
    trains = OfWorkload.LOOP not in evidence.scenario.workload.has
    if not report and (not trains or any(True for _ in evidence.steps())):
        alone = evidence.alone
        if alone is not None and any(map(math.isfinite, alone.norms)):
            return inconclusive(
                "one rank reports a norm, and no rank of this mesh does"
            )
        return skipped("the workload reports no norm")
    parity = evidence.parity
    if parity is None:
        return inconclusive(_STOPPED)
    if parity.undecided:
        return inconclusive(parity.undecided)
    compared, missed = 0, 0
    for step, seen in evidence.steps():
        if any(s.non_finite for s in seen):
            continue  # in a step to be skipped the norm is not finite
        due, bound = parity.reference_norm[step], parity.norm_bound[step]
        reported = _reports(evidence, seen)
        # "not <=" also catches a norm of nan. A rank whose weights differ has another
        # gradient, and may report the right norm of it.
        wrong = {r: n for r, n in reported.items() if not abs(n - due) <= bound}
        # if the bound is as large as the norm, a norm of 0 would pass
        blind = not wrong and not bound < (due or math.inf)
        if _has_departed(parity, step) or not math.isfinite(bound) or blind:
            missed += len(report)
            continue
        missed += len(report) - len(reported)
        compared += len(reported)
        if wrong and _is_of_its_gradients(evidence, step, seen, wrong):
            text = "and the reported norm is that of these"
            finding = inconclusive(f"step {step}: {_DEPART} (parity.gradient), {text}")
            return replace(finding, compared=compared, not_compared=missed)
        if wrong:
            finding = _misreported(step, wrong, reported, (due, bound))
            ratios = [norm / due for norm in wrong.values()] if due else []
            text = f"{finding.message}{_order(evidence, seen, ratios)}"
            return replace(
                finding, message=text, compared=compared, not_compared=missed
            )
    if not compared and all(any(s.non_finite for s in x) for _, x in evidence.steps()):
        return skipped("every step had a bad gradient, so no norm is known")
    return count_or_inconclusive(compared, "norms within their bound", missed)


def _has_departed(parity: Parity, step: int) -> bool:
    """Return True if the weights before ``step`` already differ from the truth's."""
    first = parity.first_bad.get("update")
    return first is not None and first.step < step


def _reports(evidence: Evidence, seen: Sequence[StepTrace]) -> dict[int, float]:
    """Return the norm that each rank reports, without ranks that report none."""
    return {
        trace.rank: s.reported_norm
        for s, trace in zip(seen, evidence.ranks, strict=True)
        if s.reported_norm is not None
    }


def _misreported(
    step: int,
    wrong: dict[int, float],
    reported: dict[int, float],
    truth: tuple[float, float],
) -> Finding:
    due, bound = truth
    rank, got = max(wrong.items(), key=lambda item: _distance(item[1], due))
    right = [r for r in reported if r not in wrong]
    others = f"; {rank_list(right)} right" if right else ""
    return failed(
        message=f"{rank_list([*wrong])} wrong: rank {rank} reports the "
        f"norm {got:.6g}, that of the whole gradient is {due:.6g}, {got / due:.4g} "
        f"times it, bound {bound:.3g}{others}"
        if due
        else f"rank {rank} reports the norm {got:.6g} of a gradient of 0",
        step=step,
        ranks=tuple(wrong),
        numbers={"got": got, "expected": due, "bound": bound},
    )


def _order(
    evidence: Evidence, seen: Sequence[StepTrace], ratios: Sequence[float]
) -> str:
    """Return text if the reported norms are of order 1 or inf; else "".

    The text also says what to do. Ratios of norms are compared, because clipping does
    not change them.
    """
    parity = evidence.parity
    assert parity is not None
    used = _used_norm(evidence, seen)
    slack = _slack(parity, seen[0].step)
    for order in (math.inf, 1.0):
        ratio = _used_norm(evidence, seen, order) / used if used else 0.0
        if ratios and all(abs(each - ratio) <= slack * ratio for each in ratios):
            return (
                f". That is the norm of order {order:g}, and the reference clips by "
                f"order 2: {REFERENCE_LINE}"
            )
    return ""


def _distance(got: float, due: float) -> float:
    return abs(got - due) if math.isfinite(got) else math.inf


def _is_of_its_gradients(
    evidence: Evidence, step: int, seen: Sequence[StepTrace], reported: dict[int, float]
) -> bool:
    """Return True if the gradients are wrong, and the reported norm is right for them.

    If so, only ``parity.gradient`` reports a fault.
    Clipping hides a factor of all gradients. So where they are clipped, they must
    differ by enough to explain the norm: with an error E, by (1 + E) / (1 - E) times.
    """
    parity = evidence.parity
    assert parity is not None
    first = parity.first_bad.get("gradient")
    if first is None or first.step > step or not reported:
        return False
    due, error = parity.reference_norm[step], first.error
    if first.step == step:
        error = max(row.error for row in parity.departed["gradient"])
    most = math.inf if parity.clip_norm is None else parity.clip_norm
    is_clipped = min(reported.values()) > most
    if is_clipped and error < 1 and due:
        times = (1 + error) / (1 - error)
        if any(not due / times <= norm <= due * times for norm in reported.values()):
            return False
    used, slack = _used_norm(evidence, seen), _slack(parity, step)
    clipped = [norm * clip_factor(norm, most) for norm in reported.values()]
    return all(abs(used - norm) <= slack * used for norm in clipped)


def _used_norm(
    evidence: Evidence, seen: Sequence[StepTrace], order: float = 2.0
) -> float:
    """Return the norm of the whole gradient that the optimizers used.

    An element that several ranks hold counts once.
    """
    at_ranks = list(zip(evidence.ranks, seen, strict=True))
    norms, counted_places = [0.0], dict[str, NDArray[np.int64]]()
    for trace, at in at_ranks:
        for name in at.gradients:
            places = trace.places(at, name)
            before = counted_places.get(name, places[:0])
            # elements that an earlier rank also holds are replicas
            values = gradient_of(at_ranks, trace, at, name)[~np.isin(places, before)]
            norms.append(float(np.linalg.norm(values.astype(np.float64), order)))
            counted_places[name] = np.union1d(before, places)
    return float(np.linalg.norm(norms, order))


def _slack(parity: Parity, step: int) -> float:
    """Return the permitted relative error of a norm.

    The error is twice the bound, because two norms are compared.
    """
    return 2 * parity.norm_bound[step] / (parity.reference_norm[step] or 1.0)


def _rows_of(parity: Parity, step: int) -> tuple[list[ClipRow], list[ClipRow]]:
    """Return a step's clip rows in two lists: with known factors, and all others."""
    rows = [row for row in parity.clipped if row.step == step]
    clear = [row for row in rows if row.above_noise]
    return clear, [row for row in rows if not row.above_noise]


def _wrong_in(rows: Sequence[ClipRow]) -> list[ClipRow]:
    return [row for row in rows if not abs(row.factor - row.due) <= row.bound]


def _has_other_gradients(
    evidence: Evidence, step: int, seen: Sequence[StepTrace]
) -> bool:
    """Return True if gradients of a step are wrong, so the clip factor is unknown."""
    parity = evidence.parity
    assert parity is not None
    if _has_departed(parity, step):
        return True
    clear, _ = _rows_of(parity, step)
    return bool(_wrong_in(clear)) and not _is_clipping(evidence, seen, clear)


def _why_no_factor(evidence: Evidence) -> str:
    assert evidence.parity is not None
    if "gradient" in evidence.parity.first_bad or any(
        _has_other_gradients(evidence, *step) for step in evidence.steps()
    ):
        return f"{_DEPART} (parity.gradient)"
    return (
        "rounding is as large as the gradient, so it has no direction: use more rows "
        "in this precision, begin no layer with zeros, or use fp32 alone (--precision "
        "fp32)"
    )


@law(
    "norm.factor",
    "Clipping multiplies every gradient on every rank by min(1, clip_norm / (norm + "
    "1e-6)), with the norm of the whole gradient.",
    "A tensor left out, or a rank that clips by its own norm, changes the direction of "
    "the gradient. A factor that is wrong but equal on all ranks comes from a wrong "
    "norm: see norm.reported.",
    of_stack=True,
    hidden=_why_no_factor,
)
def factor(evidence: Evidence) -> Finding:
    """Compare the factor that each gradient was clipped by with the right factor."""
    scenario, parity = evidence.scenario, evidence.parity
    training = scenario.parsed_recipe.training
    clips = clips_by_norm(scenario.workload, training)
    if scenario.workload.one_rank:
        text = "clipping is that of train_step on one rank: parity.gradient compares it"
        return skipped(text)
    if not (clips if parity is None else parity.clip_norm):
        return skipped("gradients are not clipped by their norm")
    if parity is None:
        return inconclusive(_STOPPED)
    compared, missed = 0, 0
    for step, seen in evidence.steps():
        clear, small = _rows_of(parity, step)
        wrong = _wrong_in(clear)
        missed += len(small)
        if _has_other_gradients(evidence, step, seen):
            missed += len(clear)
            continue
        compared += len(clear)
        if wrong:
            finding = _clipped_otherwise(evidence, clear, wrong)
            return replace(finding, compared=compared, not_compared=missed)
    if not compared and not missed:
        return skipped("every step had a bad gradient: none was clipped")
    return count_or_inconclusive(compared, "gradients clipped by their factor", missed)


def _is_clipping(
    evidence: Evidence, seen: Sequence[StepTrace], rows: Sequence[ClipRow]
) -> bool:
    """Return True if wrong factors come from clipping and not from wrong gradients.

    After correct clipping the norm is at most ``clip_norm``, even if the gradient is
    wrong. A larger norm comes from clipping. A smaller one comes from clipping only if
    all tensors have the same factor; different factors come from wrong gradients.
    """
    parity = evidence.parity
    assert parity is not None and parity.clip_norm is not None
    step, due = rows[0].step, rows[0].due
    slack = _slack(parity, step) * parity.clip_norm
    excess = _used_norm(evidence, seen) - parity.clip_norm
    # after clipping the norm is clip_norm, or nothing was to be clipped: only the
    # gradient is wrong
    if abs(excess) <= slack or due == 1.0:
        return False
    if _is_of_its_gradients(evidence, step, seen, _reports(evidence, seen)):
        return False
    return excess > 0 or _is_one_factor(rows)


def _is_one_factor(rows: Sequence[ClipRow]) -> bool:
    best = min(rows, key=lambda row: row.bound)
    return all(abs(r.factor - best.factor) <= r.bound + best.bound for r in rows)


def _clipped_otherwise(
    evidence: Evidence, rows: Sequence[ClipRow], wrong: Sequence[ClipRow]
) -> Finding:
    worst = max(wrong, key=lambda row: abs(row.factor - row.due) / row.bound)
    parity = evidence.parity
    assert parity is not None
    ranks = sorted({row.rank for row in wrong})
    names = list(dict.fromkeys(row.parameter for row in wrong))
    everything = len(wrong) == len(rows)
    whose = "every gradient" if everything else f"{', '.join(names[:4])}"
    more = f" and {len(names) - 4} more" if not everything and len(names) > 4 else ""
    return failed(
        message=f"{whose}{more} on {rank_list(ranks)} clipped by "
        f"another factor: {worst.parameter} on rank {worst.rank} came with "
        f"{worst.factor:.6g}, due is {worst.due:.6g} (clip_norm "
        f"{parity.clip_norm:g}, norm {parity.reference_norm[worst.step]:.6g}), bound "
        f"{worst.bound:.3g}",
        step=worst.step,
        ranks=tuple(ranks),
        parameter=worst.parameter,
        numbers={"got": worst.factor, "expected": worst.due, "bound": worst.bound},
        cause="not clipped" if abs(worst.factor - 1) <= worst.bound else "",
    )
