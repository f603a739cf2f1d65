"""Copies that an optimizer steps in place of parameters, and that no module has."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradparity.conformance.record.batches import WORD
from gradparity.conformance.record.compare import DIFFERENT, SAME, Side, compare
from gradparity.conformance.record.exact import compare_exactly
from gradparity.conformance.record.kept import keep_bits
from gradparity.conformance.record.merge import Run, read_merged
from gradparity.conformance.record.orders import Orders
from gradparity.conformance.record.parts import place
from gradparity.conformance.record.recorder import Recorder
from gradparity.multiprocess import Cluster
from gradparity.tests.record.test_recorder import recorded

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
STEPS = 3
WriteBack = Callable[[int, int], bool]


def always(step: int, index: int) -> bool:
    return True


def training(
    dtype: torch.dtype,
    write_back: WriteBack = always,
    *,
    ranks: int = 1,
    flat: bool = False,
) -> Iterator[Tensor]:
    """Yield the losses of a loop that steps fp32 copies of its weights.

    Args:
        dtype: dtype of the model.
        write_back: function that returns True for each step and each index of a
            parameter whose new value is written into the model.
        ranks: number of micro-batches, whose gradients are summed in fp32 as on ranks.
        flat: true if copies have one dim.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 3)).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    copies = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    if flat:
        copies = [each.detach().reshape(-1).requires_grad_() for each in copies]
    optimizer = torch.optim.AdamW(copies, 1e-2)
    for step in range(STEPS):
        rows = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        for part in rows.to(dtype).chunk(ranks):
            model.zero_grad()
            yield model(part).float().square().mean() / ranks
            for own, parameter in zip(copies, model.parameters(), strict=True):
                assert parameter.grad is not None
                gradient = parameter.grad.float().view_as(own)
                own.grad = gradient if own.grad is None else own.grad + gradient
        optimizer.step()
        with torch.no_grad():
            for n, (parameter, own) in enumerate(
                zip(model.parameters(), copies, strict=True)
            ):
                if write_back(step, n):
                    parameter.copy_(own.view_as(parameter))


def reference(folder: Path, dtype: torch.dtype) -> Side:
    plain, *noisy = (
        recorded(
            folder / f"{n}-{nudge}", training(dtype), steps=(0, STEPS), nudge=nudge
        )
        for n, nudge in enumerate((0, 0, 1, 2))
    )
    return Side(name="one", run=plain, noisy=noisy)


def micro(folder: Path, losses: Iterator[Tensor]) -> Side:
    return Side(name="mesh", run=recorded(folder / "mesh", losses, steps=(0, STEPS)))


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_copy_has_the_name_and_shape_of_its_parameter(
    dtype: torch.dtype, flat: bool, tmp_path: Path
) -> None:
    run = recorded(tmp_path, training(dtype, flat=flat), steps=(0, 1))
    assert run.names("gradient", 0) == NAMES and run.unstepped == ()
    assert run.tensors[0, "weight", "0.weight"].shape == (64, 6)
    compared = [] if dtype == torch.float16 else NAMES
    assert run.has_copied(0) == dict.fromkeys(compared, True)


def test_the_weights_of_a_model_with_equal_ones_are_no_copies(tmp_path: Path) -> None:
    """Both critics begin with the same weights, and one is called first."""
    first = nn.Linear(3, 1)
    second = copy.deepcopy(first)
    optimizer = torch.optim.SGD(second.parameters(), 0.1)

    def losses() -> Iterator[Tensor]:
        rows = torch.ones(2, 3)
        yield (first(rows) + second(rows)).sum()
        optimizer.step()

    run: Run = recorded(tmp_path, losses(), steps=(0, 1))
    assert run.has_copied(0) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_right_job_with_copies_is_the_same(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    one = reference(tmp_path, dtype)
    mesh = micro(tmp_path, training(dtype, ranks=2))
    found = compare(one, mesh)
    assert found.code == SAME, found.lines


@pytest.mark.parametrize(
    ("lost", "more"), [([1], ""), ([0, 1, 2, 3], " and 3 more"), ([3], "")]
)
def test_results_that_are_not_written_back_are_told(
    lost: list[int], more: str, tmp_path: Path
) -> None:
    one = reference(tmp_path, torch.bfloat16)
    losses = training(torch.bfloat16, lambda step, n: n not in lost, ranks=2)
    found = compare(one, micro(tmp_path, losses))
    assert found.code == DIFFERENT
    told = f"the model does not have the values of {NAMES[lost[0]]}{more}: does each"
    assert found.headline.startswith("step 1: ") and told in found.headline


def test_copies_of_runs_of_unequal_lengths_are_equal_to_the_bit(
    tmp_path: Path,
) -> None:
    """After its last step a run has not written its copies back yet."""
    short, long, wrong = (
        Side(name=name, run=recorded(tmp_path / name, losses, steps=(0, steps)))
        for name, steps, losses in (
            ("short", 1, training(torch.bfloat16)),
            ("long", 2, training(torch.bfloat16)),
            ("wrong", 2, training(torch.bfloat16, lambda step, n: n != 1)),
        )
    )
    assert compare_exactly(short, long).code == SAME
    found = compare_exactly(long, wrong)
    told = "step 1: the value in the model of 0.bias has other bits"
    assert (found.code, found.headline) == (DIFFERENT, told)


def test_a_side_that_steps_its_own_weights_may_be_the_reference(tmp_path: Path) -> None:
    one = reference(tmp_path, torch.float32)
    kinds = ("weight", "gradient", "update", "idle update", "buffer")
    own = {k: each for k, each in one.run.tensors.items() if k[1] in kinds}
    assert len(own) < len(one.run.tensors)
    object.__setattr__(one.run, "tensors", own)
    losses = training(torch.float32, lambda step, n: n != 1, ranks=2)
    found = compare(one, micro(tmp_path, losses))
    assert found.code == DIFFERENT and "the values of 0.bias:" in found.headline


def nudged_shards(folder: str) -> None:
    """Record one step of a sharded model with sharded copies."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5, bias=False, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    copies = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, 0.1)
    recorder = Recorder(Orders(out=folder, steps=(0, 1), nudge=1))
    recorder.install()
    try:
        model(torch.ones(4, 6, dtype=torch.bfloat16)).float().sum().backward()
        (parameter,) = model.parameters()
        assert parameter.grad is not None
        copies[0].grad = parameter.grad.float()
        optimizer.step()
        recorder.write()
    finally:
        recorder.remove()


def test_sharded_copies_are_nudged_like_whole_ones(
    two: Cluster, tmp_path: Path
) -> None:
    two.run(nudged_shards, str(tmp_path / "two"))
    run = read_merged(tmp_path / "two")
    torch.manual_seed(0)
    start = nn.Linear(6, 5, bias=False, dtype=torch.bfloat16).weight.detach().float()
    kept = keep_bits(start, place(start)[1])
    weight = run.tensors[0, "weight", "weight"]
    assert weight.is_whole and weight.digest != int(kept.digest) % WORD
