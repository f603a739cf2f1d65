"""References: trained in a separate process, from the same initial weights."""

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.conformance.comparison import reference, reference_run
from gradparity.conformance.comparison.bounds import make_parity_bounds
from gradparity.conformance.comparison.reference import Schedule
from gradparity.conformance.rank import layout
from gradparity.fixtures import WorkloadError
from gradparity.multiprocess import current_world
from gradparity.tests.workloads.stacks import Right

DIGITS = Scenario.parse("single/1/fp32/sgd/none/steps=3")
HERE = "gradparity.tests.conformance.test_references"


class Restless(Right):
    """From the third model in a process on, the same seed gives other weights."""

    made = itertools.count()

    def model(self) -> nn.Module:
        if next(self.made) >= 2:
            torch.randn(1)
        return super().model()


class Deadly(Right):
    """Ends the process in its fp64 loss, which only references compute."""

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if output.dtype == torch.float64:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(output, targets)


@contextmanager
def seeding() -> Iterator[None]:
    """Seed torch's global generator on another thread, again and again."""
    end = threading.Event()

    def seed() -> None:
        for number in itertools.count():
            if end.is_set():
                return
            torch.manual_seed(number)

    thread = threading.Thread(target=seed)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def checked(scenario: Scenario) -> Case:
    with Runner(folder=".", timeout_s=60) as runner:
        return runner.run("none", scenario)


def test_a_probe_that_seeds_while_references_train_changes_no_bound() -> None:
    quiet = checked(DIGITS)
    with seeding():
        beside = checked(DIGITS)
    assert quiet.status is beside.status is Status.PASS
    assert quiet.evidence is not None and beside.evidence is not None
    one, other = quiet.evidence.parity, beside.evidence.parity
    assert one is not None and one == other


def test_a_run_draws_nothing_from_the_generator_of_the_parent() -> None:
    scenario = Scenario.parse(
        "dp2/2/fp32/own/none/model=gradparity.tests.workloads.stacks:Right,steps=2"
    )
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert checked(scenario).status is Status.PASS
    assert torch.equal(before, torch.get_rng_state())


def test_references_that_begin_with_other_weights_are_an_error() -> None:
    case = checked(
        Scenario.parse(f"single/1/fp32/own/none/model={HERE}:Restless,steps=2")
    )
    assert case.status is Status.ERROR
    assert case.verdicts == ()
    assert "Restless: model: " in case.problem
    assert "different weights" in case.problem


@pytest.mark.parametrize("wrong", range(8))
def test_any_reference_of_a_case_may_be_the_one_that_begins_elsewhere(
    monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    for cached in (reference._train, reference_run.rows_apart):
        cached.cache_clear()
    made, right = itertools.count(), layout.initial_model

    def initial_model(*args: object) -> nn.Module:
        model = right(*args)  # type: ignore[arg-type]  # passed on as they are
        if next(made) == wrong:
            with torch.no_grad():
                next(model.parameters())[0] += 1e-6
        return model

    monkeypatch.setattr(reference_run, "initial_model", initial_model)
    schedule = Schedule(skipped=(frozenset(),) * 3, scales=(1.0,) * 3)
    try:
        with pytest.raises(WorkloadError, match=r"model: .* different weights"):
            make_parity_bounds(DIGITS, schedule)
    finally:
        reference._train.cache_clear()
        reference_run.rows_apart.cache_clear()


def test_a_crash_of_user_code_in_a_reference_ends_its_process_alone() -> None:
    case = checked(Scenario.parse(f"dp2/2/fp32/own/none/model={HERE}:Deadly,steps=2"))
    assert case.status is Status.ERROR
    assert case.problem.startswith("on one process, without other ranks: ")
    assert "SIGKILL" in case.problem


def test_a_function_alone_raises_here_what_it_raised_there() -> None:
    with Runner(folder=".") as runner:
        assert runner.place.alone(_size) == 1
        with pytest.raises(KeyError, match="gone"):
            runner.place.alone({}.__getitem__, "gone")
        assert runner.place.alone(_size) == 1


def _size() -> int:
    return current_world().world_size
