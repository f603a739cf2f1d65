"""Parity catches small errors, and right runs pass."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from gradparity.conformance import Runner, Scenario
from gradparity.conformance.comparison import bounds, kept
from gradparity.conformance.comparison.bounds import make_parity_bounds
from gradparity.conformance.comparison.compare import HALF, SAFETY_FACTOR
from gradparity.conformance.comparison.noise.sides import BOTH, Sides
from gradparity.conformance.comparison.parity import demanded_schedule, measure_parity
from gradparity.conformance.comparison.reference import (
    LEAST,
    Reference,
    Schedule,
    train_reference,
)
from gradparity.conformance.comparison.reference_run import rows_apart
from gradparity.conformance.comparison.variants import (
    NOISY,
    PLAIN,
    TRUTH,
    Variant,
    on_sides,
    reordered,
)
from gradparity.conformance.rank.trace import Decision, RankTrace, StepTrace
from gradparity.fixtures.models import DigitsMLP

DIGITS = Scenario.parse("single/1/fp32/sgd/none/steps=4")
TEXT = Scenario.parse("single/1/fp32/adamw/none/model=text,steps=4")
NONE: frozenset[str] = frozenset()
PARAMETERS = [name for name, _ in DigitsMLP().named_parameters()]
# another order of reduction than any of the references that make the bounds
UNSEEN = reordered(parts=8, reverse=True)


def traces_of(
    scenario: Scenario, variant: Variant = UNSEEN, schedule: Schedule | None = None
) -> list[RankTrace]:
    """Return the trace of a rank that trains like ``variant`` of the reference."""
    schedule = schedule or Schedule(
        skipped=(NONE,) * scenario.steps, scales=(1.0,) * scenario.steps
    )
    run = train_reference(scenario, schedule, variant)
    index = {n: np.arange(len(g)) for n, g in run.gradients[0].items()}
    trace = RankTrace(rank=0, coordinate={"dp": 0}, index=index, shards={})
    trace.start = {n: np.zeros(len(i), np.float32) for n, i in index.items()}
    for step in range(scenario.steps):
        seen = StepTrace(step=step, complete=True, loss=run.losses[step])
        seen.scale_before = schedule.scales[step]
        seen.gradients = {
            n: g.astype(np.float32) for n, g in run.gradients[step].items()
        }
        seen.parameters = {
            n: u.astype(np.float32) for n, u in run.updates[step].items()
        }
        trace.steps.append(seen)
    return [trace]


@pytest.mark.parametrize(
    "scenario",
    [DIGITS, pytest.param(TEXT, marks=pytest.mark.slow)],
    ids=["digits", "text"],
)
def test_a_right_run_is_within_its_bounds(scenario: Scenario) -> None:
    parity = measure_parity(scenario, traces_of(scenario))
    # attention does not depend on the bias of its keys: their gradients are rounding
    assert parity.not_compared.total() < 0.01 * parity.compared.total()
    assert parity.first_bad == {}


def _off_by_a_thousandth(trace: RankTrace) -> None:
    trace.steps[2].gradients["up.weight"] *= np.float32(1.001)


def _one_sign_in_a_bias(trace: RankTrace) -> None:
    trace.steps[1].gradients["head.bias"][0] *= -1


def _all_zero(trace: RankTrace) -> None:
    trace.steps[0].gradients["down.weight"][:] = 0


def _one_element(trace: RankTrace) -> None:
    gradient = trace.steps[0].gradients["up.weight"]
    gradient[np.abs(gradient).argmax()] *= np.float32(1.01)


def _forgotten_unscale(trace: RankTrace) -> None:
    trace.steps[0].gradients["norm.bias"] *= np.float32(65536)


def _not_a_number(trace: RankTrace) -> None:
    trace.steps[3].gradients["norm.weight"][5] = np.nan


def _half_an_update(trace: RankTrace) -> None:
    trace.steps[3].parameters["down.bias"] *= np.float32(0.5)


def _wrong_loss(trace: RankTrace) -> None:
    assert trace.steps[2].loss is not None
    trace.steps[2].loss *= 1.001


WRONGS: list[tuple[str, int, Callable[[RankTrace], None]]] = [
    ("gradient", 2, _off_by_a_thousandth),
    ("gradient", 1, _one_sign_in_a_bias),
    ("gradient", 0, _all_zero),
    ("gradient", 0, _one_element),
    ("gradient", 0, _forgotten_unscale),
    ("gradient", 3, _not_a_number),
    ("update", 3, _half_an_update),
    ("loss", 2, _wrong_loss),
]


@pytest.mark.parametrize(
    ("kind", "step", "spoil"), WRONGS, ids=[w[2].__name__ for w in WRONGS]
)
def test_small_wrongs_are_caught_at_their_step(
    kind: str, step: int, spoil: Callable[[RankTrace], None]
) -> None:
    traces = traces_of(DIGITS)
    spoil(traces[0])
    parity = measure_parity(DIGITS, traces)
    assert set(parity.first_bad) == {kind}
    assert parity.first_bad[kind].step == step


def test_a_flushed_tiny_gradient_is_caught() -> None:
    """Zeros in place of gradients of 1e-7 fail; ``assert_close`` would accept them."""
    traces = traces_of(DIGITS)
    gradient = traces[0].steps[0].gradients["up.weight"]
    tiny = np.abs(gradient) < np.abs(gradient).max() * 1e-3
    assert tiny.any() and np.abs(gradient[tiny]).max() < 1e-4
    gradient[tiny] = 0
    parity = measure_parity(DIGITS, traces)
    assert "gradient" in parity.first_bad


def test_partial_gradients_are_summed_over_their_ranks() -> None:
    (whole,) = traces_of(DIGITS)
    halves = []
    for rank in range(2):
        (trace,) = traces_of(DIGITS)
        trace.rank, trace.coordinate = rank, {"tp": rank}
        for seen in trace.steps:
            seen.gradients["norm.bias"] /= np.float32(2)
            seen.partial = {"norm.bias": (0, 1)}
        halves.append(trace)
    assert measure_parity(DIGITS, halves).first_bad == {}
    for trace in halves:
        for seen in trace.steps:
            seen.partial = {}
    assert "gradient" in measure_parity(DIGITS, halves).first_bad
    assert whole.steps[0].partial == {}


def test_the_demanded_schedule_is_what_any_rank_saw() -> None:
    first, second = traces_of(DIGITS)[0], traces_of(DIGITS)[0]
    for trace in (first, second):
        trace.owned = [["up.weight", "head.weight"], ["up.bias"]]
        for seen in trace.steps:
            seen.decisions = [Decision(), Decision()]
    second.steps[2].decisions[0].non_finite = ["up.weight"]
    schedule = demanded_schedule([first, second])
    held = frozenset({"up.weight", "head.weight"})
    assert schedule.skipped == (NONE, NONE, held, NONE)


def test_skipped_steps_freeze_the_reference() -> None:
    schedule = Schedule(
        skipped=(NONE, frozenset(PARAMETERS), NONE, NONE), scales=(1.0,) * 4
    )
    run = train_reference(DIGITS, schedule, NOISY[0])
    assert np.array_equal(run.updates[0]["up.weight"], run.updates[1]["up.weight"])
    assert not np.array_equal(run.updates[1]["up.weight"], run.updates[2]["up.weight"])


def test_references_differ_by_rounding_only() -> None:
    schedule = Schedule(skipped=(NONE,) * 4, scales=(1.0,) * 4)
    runs = [train_reference(DIGITS, schedule, v) for v in NOISY]
    first = runs[0].gradients[0]["up.weight"]
    for run in runs[1:]:
        other = run.gradients[0]["up.weight"]
        assert 0 < np.linalg.norm(other - first) < 1e-5 * np.linalg.norm(first)


def test_topologies_share_the_bounds_of_equal_references() -> None:
    none, skips = (
        Schedule(skipped=skipped, scales=(1.0, 1.0))
        for skipped in ((NONE, NONE), (NONE, frozenset(PARAMETERS)))
    )
    one, other, rounded = (
        Scenario.parse(f"{place}/sgd/none/steps=2")
        for place in ("fsdp/2/fp32", "tp/2/fp32", "tp/2/bf16-autocast")
    )
    made = make_parity_bounds(one, none)
    assert make_parity_bounds(other, none) is made
    for scenario, schedule in ((other, skips), (rounded, none)):
        different = make_parity_bounds(scenario, schedule)
        assert different is not made
        assert different.gradient != made.gradient


@pytest.mark.slow
def test_adam_leaves_elements_out_whose_sign_rounding_decides() -> None:
    half = Scenario.parse("single/1/fp16-autocast/adamw/none/model=text,steps=2")
    plain = Scenario.parse("single/1/fp16-autocast/sgd/none/model=text,steps=2")
    schedule = Schedule(skipped=(NONE, NONE), scales=(1024.0, 1024.0))
    left_out = [
        sum(
            int((weight == 0).sum())
            for weight in make_parity_bounds(s, schedule).weights[1].values()
        )
        for s in (half, plain)
    ]
    assert left_out[0] > 0
    assert left_out[1] == 0


@pytest.mark.slow
def test_adam_errs_more_where_gradients_are_small() -> None:
    """One error of an update fails if its gradient is large, and passes if small."""
    scenario = Scenario.parse("single/1/fp16-autocast/adam/none/steps=3")
    (trace,) = traces_of(scenario)
    name = "head.weight"
    parity_bounds = make_parity_bounds(scenario, demanded_schedule([trace]))
    weights, (_, bound) = parity_bounds.weights[2][name], parity_bounds.update[2][name]
    assert weights.max() == 1.0
    for element, is_bad in (
        (weights.argmax(), True),
        (np.where(weights > 0, weights, 2.0).argmin(), False),
    ):
        (trace,) = traces_of(scenario)
        trace.steps[2].parameters[name][element] += np.float32(2 * bound)
        assert ("update" in measure_parity(scenario, [trace]).first_bad) is is_bad


def test_the_weight_of_an_update_is_its_smallest_gradient() -> None:
    scenario = Scenario.parse("single/1/fp32/adam/none/steps=3")
    held = frozenset(PARAMETERS)
    schedule = Schedule(skipped=(NONE, held, NONE), scales=(1.0,) * 3)
    parity_bounds = make_parity_bounds(scenario, schedule)
    for name in PARAMETERS:
        sizes = [
            np.abs(parity_bounds.truth.gradients[step][name])
            * (np.abs(parity_bounds.truth.gradients[step][name]) > bound[name][1])
            for step, bound in (
                (0, parity_bounds.gradient[0]),
                (2, parity_bounds.gradient[2]),
            )
        ]
        smallest = np.minimum(*sizes)
        assert (parity_bounds.weights[1][name] == sizes[0] / sizes[0].max()).all()
        assert (parity_bounds.weights[2][name] == smallest / smallest.max()).all()


def test_an_update_is_seen_through_the_rounding_of_its_parameter() -> None:
    """Updates of the keys' bias are noise, because attention does not depend on it."""
    scenario = Scenario.parse("single/1/fp32/sgd/none/model=text,steps=2")
    (trace,) = traces_of(scenario)
    name = "blocks.1.attention.key.bias"
    schedule = Schedule(skipped=(NONE, NONE), scales=(1.0, 1.0))
    start = train_reference(scenario, schedule, PLAIN).start[name]
    trace.start[name] = start.astype(np.float32)
    for seen in trace.steps:
        seen.parameters[name] = np.nextafter(trace.start[name], np.float32(1))
    assert measure_parity(scenario, [trace]).first_bad == {}
    for seen in trace.steps:
        seen.parameters[name] = trace.start[name] * np.float32(1 + 2.0**-18)
    assert measure_parity(scenario, [trace]).first_bad["update"].parameter == name


WHOLE = Schedule(skipped=(NONE,) * 4, scales=(1024.0,) * 4)
TURNED = "blocks.1.feed_forward.down.weight"


def test_sides_flip_the_sign_of_each_small_element_once() -> None:
    scenario = Scenario.parse("single/1/fp32/sgd/none/steps=2")
    schedule = Schedule(skipped=(NONE, NONE), scales=(1.0, 1.0))
    plain = train_reference(scenario, schedule, PLAIN)
    gradient = plain.gradients[0]["up.weight"]
    limit = float(np.median(np.abs(gradient)))
    step = (("up.weight", limit),)
    moved, small = plain.updates[0], np.abs(gradient) <= limit
    flips = np.zeros(gradient.shape, int)
    for side in BOTH:
        variant = on_sides(Sides(side=side, signs=(step, ())))
        run = train_reference(scenario, schedule, variant)
        assert np.array_equal(run.gradients[0]["up.weight"], gradient)
        other = run.updates[0]
        flipped = other["up.weight"] != moved["up.weight"]
        turned = -moved["up.weight"][flipped]
        assert np.allclose(other["up.weight"][flipped], turned, atol=1e-6)
        assert np.array_equal(other["head.bias"], moved["head.bias"])
        first, second = (r.gradients[1]["up.weight"] for r in (plain, run))
        assert not np.array_equal(first, second)
        flips += flipped
    assert np.array_equal(flips, (small & (moved["up.weight"] != 0)).astype(int))


@pytest.mark.parametrize(
    ("precision", "optimizer", "sides"),
    [
        ("fp16-autocast", "adamw", BOTH),
        pytest.param("bf16-autocast", "adagrad", BOTH, marks=pytest.mark.slow),
        pytest.param("fp16-autocast", "sgd-momentum", (), marks=pytest.mark.slow),
        ("fp32", "adamw", ()),
    ],
)
def test_signs_of_adaptive_optimizers_in_half_precision_have_both_sides(
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    optimizer: str,
    sides: tuple[int, ...],
) -> None:
    variants: list[Variant] = []

    def noted(scenario: Scenario, schedule: Schedule, variant: Variant) -> Reference:
        variants.append(variant)
        return train_reference(scenario, schedule, variant)

    monkeypatch.setattr(bounds, "train_reference", noted)
    text = f"single/1/{precision}/{optimizer}/none/steps=4"
    make_parity_bounds(Scenario.parse(text), WHOLE)
    found = [each for v in variants if (each := _sides_of(v))]
    assert tuple(moves.side for moves in found) == sides
    for moves in found:
        assert len(moves.signs) == 4
        assert min(map(len, moves.signs)) > 0


def _sides_of(variant: Variant) -> Sides | None:
    return next((each for each in variant.noise if isinstance(each, Sides)), None)


@pytest.mark.parametrize("overflows", [False, True])
def test_half_of_what_a_side_changes_is_noise(
    monkeypatch: pytest.MonkeyPatch, overflows: bool
) -> None:
    """Half of the effect of a side run is noise, unless that run overflowed."""
    runs: dict[Variant, Reference] = {}

    def noted(scenario: Scenario, schedule: Schedule, variant: Variant) -> Reference:
        run = train_reference(scenario, schedule, variant)
        sides = _sides_of(variant)
        if overflows and sides and sides.side == BOTH[0]:
            bad = {n: np.full(g.shape, np.inf) for n, g in run.gradients[3].items()}
            run = replace(run, gradients=(*run.gradients[:3], bad))
        return runs.setdefault(variant, run)

    monkeypatch.setattr(bounds, "train_reference", noted)
    scenario = Scenario.parse("single/1/fp16-autocast/adamw/none/steps=4")
    found = make_parity_bounds(scenario, WHOLE).gradient[3]
    plain = runs[PLAIN].gradients
    sides = [run.gradients for variant, run in runs.items() if _sides_of(variant)]
    shares = []
    for name, (_, largest) in found.items():
        changes = [np.abs(s[k][name] - plain[k][name]) for s in sides for k in range(4)]
        effect = max(c.max() for c in changes if np.isfinite(c).all())
        shares.append(SAFETY_FACTOR * HALF * effect / largest)
    assert max(shares) == pytest.approx(1.0)


@pytest.mark.slow
def test_one_flipped_weight_is_no_false_positive() -> None:
    """One flipped sign in a tiny gradient passes, because rounding may cause it."""
    scenario = Scenario.parse("single/1/fp16-autocast/adagrad/none/model=text,steps=4")
    truth = train_reference(scenario, WHOLE, TRUTH)
    size = np.abs(truth.gradients[0][TURNED])
    limit = float(np.sort(size)[3])  # some ten thousandth of the largest
    assert limit < 1e-3 * size.max()
    signs = (((TURNED, limit),), (), (), ())
    turned = on_sides(Sides(side=1, signs=signs))
    (trace,) = traces_of(scenario, turned, WHOLE)
    assert measure_parity(scenario, [trace]).first_bad == {}
    trace.steps[0].gradients[TURNED] *= np.float32(1.02)
    assert measure_parity(scenario, [trace]).first_bad["gradient"].step == 0


def test_few_references_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are kept up to a limit in bytes, and always those of one scenario."""

    def train(seed: int) -> Reference:
        scenario = Scenario.parse(f"single/1/fp32/sgd/none/steps=1,seed={seed}")
        schedule = Schedule(skipped=(frozenset(),), scales=(1.0,))
        return train_reference(scenario, schedule, TRUTH)

    first = train(1000)
    sizes = [values.nbytes for values in (*first.gradients, first.start)[-1].values()]
    assert first.nbytes == 3 * sum(sizes)  # gradients, updates and the start
    assert train(1000) is first  # the scalers of a scenario share it
    alive = weakref.ref(first)
    size = first.nbytes
    del first
    monkeypatch.setattr(kept, "LIMIT", (LEAST + 2) * size)
    for seed in range(1001, 1002 + LEAST):
        train(seed)
    assert alive() is train(1000)  # used last
    monkeypatch.setattr(kept, "LIMIT", 0)
    for seed in range(1001, 1001 + LEAST):
        train(seed)
    gc.collect()
    assert alive() is None
    assert train(1001) is train(1001)


FREQUENCY = "gradparity.benchmarks.validation.wild_workloads:Frequency"
STATISTICS = "gradparity.tests.workloads.stacks:BatchStatistics"
ALIKE = "gradparity.tests.workloads.stacks:RowsAlike"
WEAK = "gradparity.tests.workloads.stacks:BalancesAGate"


@pytest.mark.parametrize(
    ("model", "apart"),
    [
        *(("digits", True), ("text", True), (ALIKE, True)),
        *((FREQUENCY, False), (STATISTICS, False), (WEAK, False)),
    ],
)
def test_references_cut_rows_where_gradients_are_sums_over_them(
    model: str, apart: bool
) -> None:
    assert rows_apart(model) == apart


@pytest.mark.parametrize("model", [STATISTICS, ALIKE])
def test_references_are_rounded_otherwise_where_rows_are_alike_or_coupled(
    model: str,
) -> None:
    scenario = Scenario.parse(f"dp2/2/fp32/own/none/model={model},steps=1")
    schedule = Schedule(skipped=(frozenset(),), scales=(1.0,))
    runs = [train_reference(scenario, schedule, v) for v in NOISY]
    seen = {tuple(g.tobytes() for g in run.gradients[0].values()) for run in runs}
    assert len(seen) == len(NOISY)  # equal ones would measure the noise of one run
    truth = train_reference(scenario, schedule, TRUTH).gradients[0]
    largest = max(float(np.linalg.norm(g)) for g in truth.values())
    for run in runs:
        for name, gradient in run.gradients[0].items():
            error = np.linalg.norm(gradient - truth[name])
            assert error < 1e-5 * largest  # rounding, and no other training


@pytest.mark.parametrize(
    ("precision", "seed"),
    [("bf16-autocast", 12), ("bf16-autocast", 17), ("fp16-autocast", 11)],
)
def test_a_parameter_of_one_element_passes(
    runner: Runner, precision: str, seed: int
) -> None:
    """Noise runs that round each row alike all had a small error by chance."""
    model = "gradparity.tests.workloads.stacks:Scalars"
    text = f"tp2/2/{precision}/own/none/model={model},steps=2,seed={seed}"
    found = runner.run("none", Scenario.parse(text))
    assert found.status == "pass", found.verdicts


def test_references_cut_into_parts_hide_no_fault_of_an_embedding(
    runner: Runner,
) -> None:
    """The faulty embedding divides gradients by a token's count on one rank only."""
    text = f"tp2/2/fp32/own/none/model={FREQUENCY},steps=1"
    case = runner.run("none", Scenario.parse(text))
    found = next(v for v in case.verdicts if v.law == "parity.gradient")
    assert (found.status, found.parameter) == ("fail", "0.weight")


def test_a_layer_with_batch_statistics_is_inconclusive(runner: Runner) -> None:
    text = f"dp2/2/fp32/own/none/model={STATISTICS},steps=1"
    case = runner.run("none", Scenario.parse(text))
    found = next(v for v in case.verdicts if v.law == "parity.gradient")
    assert found.status == "inconclusive"
    assert "gradients are not sums over rows" in found.message
    assert case.status == "inconclusive"
