"""Observers: detected changes of an optimizer, and errors inside an observer."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from gradparity.conformance import Runner, Scenario, Status
from gradparity.conformance.rank.observe import CallLog, optimizer_digest
from gradparity.conformance.rank.trace import Collective
from gradparity.conformance.run import runner
from gradparity.multiprocess import Cluster
from gradparity.tests.workloads.compiled_stacks import Coded


def test_zeros_are_no_optimizer_state_and_anything_else_is() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    fresh = optimizer_digest(optimizer)
    optimizer.state[weight] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros(3)}
    assert optimizer_digest(optimizer) == fresh
    optimizer.state[weight]["step"] += 1
    counted = optimizer_digest(optimizer)
    optimizer.state[weight]["exp_avg"][1] = 1e-30
    assert len({fresh, counted, optimizer_digest(optimizer)}) == 3


def test_state_of_another_parameter_is_another_state() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([first, second], lr=1.0, momentum=0.9)
    optimizer.state[first] = {"momentum_buffer": torch.ones(3)}
    digest = optimizer_digest(optimizer)
    optimizer.state[second] = optimizer.state.pop(first)
    assert optimizer_digest(optimizer) != digest


def test_the_state_of_a_subclass_is_what_it_holds() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    fresh, seen = optimizer_digest(optimizer), set()
    for value in (0.0, 1.0, 2.0, 1.5):
        coded = Coded(*torch.frexp(torch.full((3,), value)))
        optimizer.state[weight] = {"exp_avg": coded}
        seen.add(optimizer_digest(optimizer))
    assert fresh in seen and len(seen) == 4


def test_an_error_of_gradparity_is_reported_and_ends_no_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("some parameter")

    scenario = Scenario.parse("single/1/fp32/sgd/none/steps=2")
    scaler = "gradparity.fixtures.faulty:PlainScaler"
    with Runner(folder=".", timeout_s=30) as running:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "apply_checks", broken)
            case = running.run(scaler, scenario)
        assert case.status is Status.ERROR
        assert case.problem == "gradparity itself failed: KeyError: 'some parameter'"
        assert running.run(scaler, scenario).status is Status.PASS


def collectives_of_two_groups() -> list[Collective]:
    """Issue collectives in two groups of ranks; return those that were logged."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    log = CallLog()
    with log:
        dist.all_reduce(torch.ones(2), group=mine)
        dist.barrier()
        functional.all_reduce(torch.ones(3), "sum", mine).add(1)
        dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1), group=mine)
    return log.collectives


def test_a_collective_is_noted_with_the_ranks_of_its_group(four: Cluster) -> None:
    for rank, seen in enumerate(four.run(collectives_of_two_groups)):
        mine = (0, 1) if rank < 2 else (2, 3)
        assert [(c.call, c.ranks) for c in seen] == [
            ("allreduce[2:float32]", mine),
            ("barrier", (0, 1, 2, 3)),
            ("all_reduce[3:float32]", mine),
            ("allgather[1:float32],[1:float32]", mine),
        ]
    assert str(seen[0]) == "allreduce[2:float32] over ranks 2, 3"
