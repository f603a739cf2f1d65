"""The runner on synthetic ranks: which runs it repeats before it reports a failure."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.conformance.__main__ import main
from gradparity.conformance.rank.devices import Devices
from gradparity.conformance.rank.scaler_spec import NO_SCALER
from gradparity.conformance.rank.trace import Problem, RankTrace
from gradparity.conformance.rank.worker import StoppedError
from gradparity.conformance.report.records import read_report
from gradparity.conformance.run import runner as runner_module
from gradparity.conformance.run import runs
from gradparity.conformance.run.launcher import Place
from gradparity.conformance.run.runner import BEHIND
from gradparity.conformance.run.runs import CONTROLS
from gradparity.conformance.run.waiting import Waiting
from gradparity.multiprocess import RankOutcome, RankState, WorldError
from gradparity.tests.made_up import SCENARIO, rank_trace

SCALER = "torch.amp:GradScaler"
Traces = list[RankTrace]
Run = Callable[[], Traces]
WHY = "no answer within 30 s"


class MadeUp(Place):
    """Stand-in for ranks: each run of a scaler returns the next of its results."""

    def __init__(self, **runs: list[Run]) -> None:
        super().__init__(Devices(), 30.0)
        self._stack.close()  # no rank is started, and no test closes this place
        self.runs = {SCALER: runs["scaler"], NO_SCALER: runs.get("control", [right])}
        self.calls: list[str] = []
        self.asked: set[str] = set()

    def not_runnable(self, world: int) -> str:
        return ""

    def ranks(self, world: int) -> Any:
        return self

    def alone(
        self,
        function: Callable[..., Any],
        *args: Any,
        in_group: bool = False,
        trainings: int = 0,
    ) -> Any:
        if function is runs._find_out:
            self.asked |= {*args}
        return function(*args)

    def run(
        self, _: Any, scenario: Scenario, spec: str, *rest: Any, **more: Any
    ) -> Traces:
        self.calls.append(spec)
        left = self.runs[spec]
        return (left.pop(0) if len(left) > 1 else left[0])()


def right() -> Traces:
    return [rank_trace(rank, bad=False) for rank in range(2)]


def hangs() -> Traces:
    outcomes = tuple(
        RankOutcome(rank=rank, state=RankState.HUNG, message=WHY) for rank in range(2)
    )
    raise WorldError(outcomes, outcomes[1])


def stack(file: str, line: int, function: str) -> str:
    """Return the stack of a main thread in ``function``, as faulthandler writes it."""
    return f"""Thread 0x7f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x7f02 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 2941 in all_reduce
  File "{file}", line {line} in {function}
  File "/home/me/train.py", line 3 in main"""


def hangs_in(rank_0: str, rank_1: str, *states: RankState) -> Run:
    def run() -> Traces:
        outcomes = tuple(
            RankOutcome(rank=rank, state=state, message=WHY, stacks=stacks)
            for rank, (state, stacks) in enumerate(
                zip(states, (rank_0, rank_1), strict=True)
            )
        )
        root = next(o for o in outcomes if o.state is RankState.HUNG)
        raise WorldError(outcomes, root)

    return run


def late() -> Traces:
    traces = right()
    for trace in traces:
        del trace.steps[2:]
        trace.misuse = None
        trace.steps[1].checked_sum = (np.nan if trace.rank else 3.0, 3.0)
    raise _failure(traces)


def wrong() -> Traces:
    """Raise as after a checked collective with a wrong result."""
    traces = right()
    for trace in traces:
        del trace.steps[2:]
        trace.steps[1].checked_sum = (4.0, 3.0)
    raise _failure(traces)


def raises() -> Traces:
    """Raise as if one rank raised, and the other waited for it until the limit."""
    traces = right()
    traces[0].problem = Problem(step=1, call="step", error="RuntimeError: no")
    failure = _failure(traces)
    waits = RankOutcome(rank=1, state=RankState.HUNG, message=WHY)
    raise WorldError((failure.outcomes[0], waits), failure.root)


def _failure(traces: Traces) -> WorldError:
    outcomes = tuple(
        RankOutcome(rank=t.rank, state=RankState.RAISED, exception=StoppedError(t))
        for t in traces
    )
    return WorldError(outcomes, outcomes[0])


def drifts() -> Traces:
    """Return traces that differ by one bit, as from a nondeterministic kernel."""
    traces = right()
    traces[1].steps[2].gradients["w"][1] *= np.float32(1 + 2.0**-23)
    return traces


def moved() -> Traces:
    traces = right()
    for trace in traces:
        trace.steps[3].digests = {"w": "else"}
    return traces


def checked(place: MadeUp) -> Case:
    return Runner(folder=".", place=place).run(SCALER, SCENARIO, parity=False)


def said(case: Case, law: str) -> tuple[str, str]:
    (finding,) = [v for v in case.verdicts if v.law == law]
    return finding.status, finding.message


@pytest.mark.parametrize(
    ("run", "law", "words"),
    [
        (hangs, "liveness.completes", WHY),
        (late, "collectives.no-crosstalk", "step 1: the checked all-reduce did not"),
    ],
)
def test_a_timeout_is_a_violation_only_after_a_second_try(
    run: Run, law: str, words: str
) -> None:
    place = MadeUp(scaler=[run, right])
    status, message = said(checked(place), law)
    assert status is Status.PASS
    assert "tried again alone" in message and words in message
    assert place.calls.count(SCALER) == 2

    place = MadeUp(scaler=[run])
    status, message = said(checked(place), law)
    assert status is Status.FAIL
    assert "tried again alone" in message and words in message
    assert place.calls.count(SCALER) == 2


@pytest.mark.parametrize("run", [right, wrong, raises])
def test_a_run_without_a_timeout_is_made_once(run: Run) -> None:
    place = MadeUp(scaler=[run])
    case = checked(place)
    assert place.calls.count(SCALER) == 1
    assert "again" not in "".join(v.message for v in case.verdicts)


CHECK = stack("/src/gradparity/conformance/rank/worker.py", 209, "all_say_right")
SYNC = stack("/home/me/scaler.py", 12, "update")
HUNG, VICTIM = RankState.HUNG, RankState.VICTIM


@pytest.mark.parametrize(
    ("states", "stacks", "words"),
    [
        # a rank that is in gradparity's check has made its step
        ((HUNG, HUNG), (CHECK, SYNC), "rank 1 hangs: {}; rank 0 only waits for it"),
        # the harness takes the rank in the check for the cause
        ((HUNG, VICTIM), (CHECK, SYNC), "rank 1 hangs: {}; rank 0 only waits for it"),
        ((HUNG, VICTIM), (SYNC, SYNC), "rank 0 hangs: {}; rank 1 only waits for it"),
        ((HUNG, HUNG), (SYNC, SYNC), "ranks 0, 1 hang: {}"),
    ],
)
def test_a_hang_is_reported_with_its_function_and_the_ranks_that_wait(
    states: tuple[RankState, ...], stacks: tuple[str, str], words: str
) -> None:
    case = checked(MadeUp(scaler=[hangs_in(*stacks, *states)]))
    how = f"{WHY}, in update (scaler.py:12)"
    assert said(case, "liveness.completes")[1].startswith(words.format(how))


BITWISE = ("transparency.gradient", "transparency.bitwise")


def test_two_different_controls_make_a_scaler_inconclusive() -> None:
    case = checked(MadeUp(scaler=[moved], control=[right, drifts]))
    for law in BITWISE:
        status, message = said(case, law)
        assert status is Status.INCONCLUSIVE
        assert "the gradient of w on rank 1 at step 2" in message
    assert case.status is Status.INCONCLUSIVE


def test_with_two_equal_controls_the_scaler_fails() -> None:
    place = MadeUp(scaler=[moved])
    case = checked(place)
    assert said(case, "transparency.bitwise")[0] is Status.FAIL
    assert said(case, "transparency.gradient")[0] is Status.PASS
    assert place.calls.count(NO_SCALER) == 2


def test_a_control_whose_parameters_differ_is_seen() -> None:
    case = checked(MadeUp(scaler=[moved], control=[right, moved]))
    assert "w on rank 0 at step 3" in said(case, "transparency.bitwise")[1]


@pytest.mark.parametrize(("run", "controls"), [(right, 1), (moved, 2)])
def test_a_control_is_made_again_once_where_the_tested_run_differs(
    run: Run, controls: int
) -> None:
    place = MadeUp(scaler=[run])
    runner = Runner(folder=".", place=place)
    for init_scale in (8.0, 16.0, 32.0):
        scenario = replace(SCENARIO, init_scale=init_scale)
        runner.run(SCALER, scenario, parity=False)
    runner.run(SCALER, replace(SCENARIO, precision="bf16-autocast"), parity=False)
    runner.run(SCALER, replace(SCENARIO, faults="inf@r0s1:first"), parity=False)
    assert place.calls.count(NO_SCALER) == controls


def test_a_control_without_a_tested_scaler_is_made_once() -> None:
    place = MadeUp(scaler=[right])
    runner = Runner(folder=".", place=place)
    runner.run(NO_SCALER, replace(SCENARIO, init_scale=8.0), parity=False)
    assert place.calls == [NO_SCALER]


def test_traces_are_kept_for_few_scenarios() -> None:
    """Memory does not grow with the number of scenarios (J17)."""
    made: list[weakref.ref[Any]] = []

    def noted() -> Traces:
        traces = right()
        # an array is kept as it is made, while the runner folds the traces
        made.extend(weakref.ref(trace.index["w"]) for trace in traces)
        return traces

    runner = Runner(folder=".", place=MadeUp(scaler=[noted], control=[noted]))
    for _, scenario in seeds(3 * CONTROLS):
        runner.run(SCALER, scenario, parity=False)
    gc.collect()
    alive = sum(ref() is not None for ref in made)
    assert alive == CONTROLS * SCENARIO.world_size
    assert len(made) == 2 * 3 * CONTROLS * SCENARIO.world_size


class Watched(Runner):
    """Runner that evaluates no case before ``due`` cases have begun.

    It stops after ``last`` cases have ended.
    """

    def __init__(self, due: int, last: int = 0) -> None:
        self.made_up = MadeUp(scaler=[right])
        super().__init__(folder=".", place=self.made_up)
        self.due, self.last = due, last
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.enough = threading.Event()

    def begin(self, _: str, scenario: str) -> None:
        self.begun.append(scenario)
        if len(self.begun) == self.due:
            self.enough.set()

    def end(self, case: Case) -> bool:
        self.ended.append(case.scenario.id)
        return len(self.ended) == self.last

    def _compare(self, seen: Any, parity: bool = True) -> Case:
        assert self.enough.wait(60), "the ranks wait for the comparison"
        return super()._compare(seen, parity=False)


def seeds(count: int) -> list[tuple[str, Scenario]]:
    return [(SCALER, replace(SCENARIO, seed=seed)) for seed in range(count)]


CASES = BEHIND // SCENARIO.world_size


@pytest.mark.parametrize("count", [1, CASES, CASES + 3])
def test_evaluation_may_be_some_cases_behind_and_all_end_in_order(count: int) -> None:
    runner = Watched(min(count, CASES + 1))
    runner.run_all(seeds(count), runner.begin, runner.end)
    assert runner.ended == runner.begun
    assert len(runner.ended) == count


def test_one_case_of_many_ranks_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "BEHIND", SCENARIO.world_size - 1)
    runner = Watched(2)
    runner.run_all(seeds(3), runner.begin, runner.end)
    assert runner.ended == runner.begun


def test_a_case_ends_while_the_next_one_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, first_ended = Watched(1), threading.Event()
    observe, end = runner._observe, runner.end

    def observe_late(spec: str, scenario: Scenario) -> Any:
        assert scenario.seed == 0 or first_ended.wait(60), "it waits for the next one"
        return observe(spec, scenario)

    def told(case: Case) -> bool:
        first_ended.set()
        return end(case)

    monkeypatch.setattr(runner, "_observe", observe_late)
    runner.run_all(seeds(2), runner.begin, told)
    assert runner.ended == runner.begun


def test_an_error_at_the_end_of_a_case_that_did_not_run_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Watched(1)
    monkeypatch.setattr(runner.made_up, "not_runnable", lambda _: "no such ranks")

    def end(case: Case) -> bool:
        time.sleep(0.2)  # the last case is waited for
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        runner.run_all(seeds(1), runner.begin, end)


def test_no_case_waits_for_references_to_know_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Facts about all models are requested before the first reference is trained."""
    runner, first_ended = Watched(1), threading.Event()
    observe, known = runner._observe, []

    def observe_late(spec: str, scenario: Scenario) -> Any:
        assert scenario.model != "text" or first_ended.wait(60)
        return observe(spec, scenario)

    def told(case: Case) -> bool:
        known.append(runner.made_up.asked.copy())
        first_ended.set()
        return runner.end(case)

    monkeypatch.setattr(runner, "_observe", observe_late)
    other = replace(SCENARIO, model="text")
    runner.run_all([*seeds(1), (SCALER, other)], runner.begin, told)
    assert runner.ended == runner.begun
    assert known[0] == {"digits", "text"}


def test_cases_behind_one_that_needs_the_ranks_end_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, localised, third_checked = Watched(1), [], threading.Event()
    observe, compare = runner._observe, runner._compare

    def observe_late(spec: str, scenario: Scenario) -> Any:
        assert scenario.seed < 3 or third_checked.wait(60)
        return observe(spec, scenario)

    def checked(seen: Any) -> Case:
        case = compare(seen)
        if seen.scenario.seed == 2:
            third_checked.set()
        return case

    def localise(case: Case) -> Case:
        localised.append((case.scenario.seed, len(runner.ended)))
        return case

    monkeypatch.setattr(runner, "_observe", observe_late)
    monkeypatch.setattr(runner, "_compare", checked)
    monkeypatch.setattr(runner, "_is_localised", lambda case: case.scenario.seed == 1)
    monkeypatch.setattr(runner, "_localised_where_due", localise)
    runner.run_all(seeds(4), runner.begin, runner.end)
    assert runner.ended == runner.begun
    assert localised[0] == (1, 1)


def test_no_two_threads_decide_or_end_at_once_and_the_order_stays() -> None:
    """Every seventh case needs the ranks, which only the main thread may use."""
    ended: list[int] = []
    inside: list[int] = []

    def alone(number: int) -> int:
        inside.append(number)
        time.sleep(1e-4)
        assert inside == [number], "another thread is in it, too"
        inside.clear()
        return number

    def end(number: int) -> bool:
        ended.append(alone(number))
        return False

    with ThreadPoolExecutor(1) as thread:
        waiting = Waiting[int, int](
            thread, lambda n: n, lambda n: alone(n) % 7 == 0, alone, end
        )
        for number in range(300):
            waiting.add(number, 1)
            waiting.catch_up(3)
        waiting.catch_up(0)
    assert ended == [*range(300)]


def test_nothing_ends_after_the_case_that_ends_the_run() -> None:
    runner = Watched(CASES + 1, last=2)
    runner.run_all(seeds(CASES + 3), runner.begin, runner.end)
    assert runner.ended == runner.begun[:2]


def test_cases_that_were_trained_before_an_interrupt_are_evaluated() -> None:
    runner = Watched(3)

    def begin(spec: str, scenario: str) -> None:
        runner.begin(spec, scenario)
        if len(runner.begun) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run_all(seeds(5), begin, runner.end)
    assert runner.ended == runner.begun[:2]


def test_a_planted_fault_that_strikes_nothing_ends_in_no_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 of the pipeline does not hold the parameter of the fault (F31)."""
    plan = "inf@r0s1:head.weight"
    scaler = "gradparity.fixtures.faulty:PlainScaler"
    out = ["--scaler", scaler, "--out", str(tmp_path)]
    assert main(["replay", f"pp/2/fp32/sgd/{plan}/steps=2", *out]) == 4
    (record,) = read_report(tmp_path / "report.jsonl").cases
    for law in ("skip.all-ranks-skip", "skip.no-side-effects"):
        verdict = record.verdict(law)
        assert verdict is not None and verdict.status == "inconclusive"
        assert verdict.message.startswith(
            f"{plan} was due at step 1 and was not injected"
        )
        assert (verdict.compared, verdict.not_compared) == (0, 2)
    assert plan in capsys.readouterr().out
