"""Parts of Megatron's layouts, from stand-ins, add up to the whole over all ranks."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from gradparity.benchmarks.validation import foreign
from gradparity.conformance.record.files import Stored
from gradparity.conformance.record.kept import Box, keep_values
from gradparity.conformance.record.layouts import parts_of
from gradparity.conformance.record.parts import (
    UNNAMED,
    HiddenLayoutError,
    Part,
    boxes_of_range,
)
from gradparity.conformance.record.roots import Roots
from gradparity.conformance.record.weights import begin_from, nudge, write_start
from gradparity.conformance.record.whole import Whole, merge
from gradparity.tests.record.megatron_stage import (
    LAYERS,
    Stage,
)
from gradparity.tests.record.test_jobs import TORCHRUN


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 4), (2, 1, 2, 3)])
def test_a_range_is_cut_into_boxes(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    flat = whole.view(-1)
    for start in range(len(flat) + 1):
        for end in range(start, len(flat) + 1):
            elements = [flat[:0]]
            boxes = boxes_of_range(shape, start, end)
            for offsets, sizes in boxes:
                part = whole
                for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    part = part.narrow(dim, offset, size)
                elements.append(part.reshape(-1))
            assert torch.equal(torch.cat(elements), flat[start:end])
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


# - Stand-ins: what is read of Megatron, and no more


class DistributedOptimizer:
    """Stand-in for Megatron's class: each rank steps a range of all parameters.

    If parameters are in bf16, it steps fp32 copies of its range.
    """

    def __init__(self, model: nn.Module, ranks: int, rank: int) -> None:
        names = (
            "model_float16_groups",
            "shard_float16_groups",
            "shard_fp32_from_float16_groups",
            "model_fp32_groups",
            "shard_fp32_groups",
        )
        for name in names:
            setattr(self, name, [[]])
        parameters = [*model.parameters()]
        share = -(-sum(p.numel() for p in parameters) // ranks)
        first = 0
        steps: list[Tensor] = []
        for parameter in parameters:
            start = min(max(0, rank * share - first), parameter.numel())
            end = min(max(0, (rank + 1) * share - first), parameter.numel())
            first += parameter.numel()
            if start < end:
                part = parameter.detach().view(-1)[start:end]
                steps.append(self._add(parameter, part))
        self.optimizer = torch.optim.AdamW(steps)

    def _add(self, parameter: nn.Parameter, part: Tensor) -> Tensor:
        lists: dict[str, Any] = vars(self)
        if parameter.dtype == torch.float32:
            lists["model_fp32_groups"][0].append(parameter)
            lists["shard_fp32_groups"][0].append(part)
            return part
        copy = part.float()
        parameter.main_param, parameter.main_param_sharded = copy, True  # type: ignore[attr-defined]
        lists["model_float16_groups"][0].append(parameter)
        lists["shard_float16_groups"][0].append(part)
        lists["shard_fp32_from_float16_groups"][0].append(copy)
        return copy


@pytest.fixture(autouse=True)
def megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("megatron.core.optimizer.distrib_optimizer")
    module.DistributedOptimizer = DistributedOptimizer
    monkeypatch.setitem(sys.modules, module.__name__, module)


def stored(part: Part) -> Stored:
    gradient, box = part.cut(part.stepped.grad)
    assert box == part.box and gradient.shape == part.weight.shape
    return Stored.of(box, keep_values(gradient, box))


def merged(
    ranks: Sequence[tuple[nn.Module, Any]], places: Sequence[Any] = ()
) -> dict[str, Whole]:
    """Record the gradients of all ranks, and merge them by name."""
    parts: dict[str, list[tuple[int, Stored]]] = {}
    for rank, (module, optimizer) in enumerate(ranks):
        roots = Roots()
        roots.add(module)
        roots.places = places[rank] if places else None
        for part in parts_of(optimizer, roots):
            parts.setdefault(part.name, []).append((rank, stored(part)))
        assert not roots.notes
    return {name: merge(each) for name, each in parts.items()}


def alone() -> tuple[nn.Module, Any]:
    """Return the model on one process, and its optimizer; gradients are set."""
    return with_gradients(Stage(1, 1, 0))


def with_gradients(model: nn.Module) -> tuple[nn.Module, Any]:
    for parameter in model.parameters():
        parameter.grad = 2 * parameter.detach()
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_stages_and_shards_are_one_model(tp: int, pp: int) -> None:
    one = merged([alone()])
    assert len(one) == 3 * LAYERS + 1 and "layers.1.up.weight" in one
    other = merged([with_gradients(Stage(tp, pp, rank)) for rank in range(tp * pp)])
    assert {n: w.digest for n, w in other.items()} == {
        n: w.digest for n, w in one.items()
    }
    assert all(each.is_whole and not each.unlike for each in other.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tp", "ranks"), [(1, 2), (1, 5), (2, 3)])
def test_ranges_of_a_distributed_optimizer_are_one_model(
    dtype: torch.dtype, tp: int, ranks: int
) -> None:
    def begin(tp: int, rank: int) -> nn.Module:
        return Stage(tp, 1, rank).to(dtype)

    whole = begin(1, 0).float()
    one = merged([with_gradients(whole)])
    held = []
    for rank in range(tp * ranks):
        model = begin(tp, rank % tp)
        steps = DistributedOptimizer(model, ranks, rank // tp)
        for group in steps.optimizer.param_groups:
            for each in group["params"]:
                each.grad = 2 * each
        held.append((model, steps))
    other = merged([(model, steps.optimizer) for model, steps in held])
    assert {n: w.digest for n, w in other.items()} == {
        n: w.digest for n, w in one.items()
    }
    assert all(each.is_whole for each in other.values())


def places_in(model: nn.Module, start: int, end: int) -> list[Any]:
    """Return the places of elements ``start`` to ``end`` of the flattened model."""
    places, first = [], 0
    for name, parameter in model.named_parameters():
        if first < end and start < first + parameter.numel():
            places.append((name, parameter.shape, (max(0, start - first),)))
        first += parameter.numel()
    return places


@pytest.mark.parametrize("is_view", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_flat_tensors_of_an_own_zero_are_one_model(ranks: int, is_view: bool) -> None:
    """A view of the weights shows where it lies; of a copy, the job says it."""
    one = merged([alone()])
    held, places = [], []
    for rank in range(ranks):
        model, _ = alone()
        flat = torch.cat([each.detach().view(-1) for each in model.parameters()])
        count = -(-flat.numel() // ranks)
        flat = torch.cat([flat, torch.zeros(ranks * count - flat.numel())])
        first = 0
        for each in model.parameters() if is_view else ():
            each.data = flat[first : first + each.numel()].view_as(each)
            first += each.numel()
        shard = nn.Parameter(flat[rank * count : (rank + 1) * count])
        shard.grad = 2 * shard.detach()
        held.append((model, torch.optim.SGD([shard], 0.1)))
        declared = places_in(model, rank * count, (rank + 1) * count)
        places.append(lambda *_, declared=declared: declared)
    other = merged(held, [] if is_view else places)
    assert {n: w.digest for n, w in other.items()} == {
        n: w.digest for n, w in one.items()
    }
    assert all(each.is_whole for each in other.values())


def test_a_view_of_other_numbers_has_no_name() -> None:
    both = torch.zeros(12)
    model = nn.Linear(6, 1, bias=False)
    model.weight.data = both[:6].view(1, 6)
    roots = Roots()
    roots.add(model)
    for own in (both[6:], both[:4].view(torch.int32), both[:6:2]):
        optimizer = torch.optim.SGD([own], 0.1)
        assert [part.name for part in parts_of(optimizer, roots)] == [f"{UNNAMED}0"]
    roots.add(model)  # as a second scan does
    inner = torch.optim.SGD([both[2:4]], 0.1)
    assert [p.box for p in parts_of(inner, roots)] == [Box((1, 6), (0, 2), (1, 2))]


def test_rows_of_a_fused_weight_are_ranges() -> None:
    """A rank of an own tensor parallelism holds rows of q, of k and of v."""
    whole = torch.randn(12, 2)
    one = nn.Linear(2, 12, bias=False)
    one.weight = nn.Parameter(whole)
    held, places = [], []
    for rank in range(2):
        model = nn.Linear(2, 6, bias=False)
        each = [third.chunk(2)[rank] for third in whole.chunk(3)]
        model.weight = nn.Parameter(torch.cat(each))
        held.append(with_gradients(model))
        rows = [
            ("weight", (12, 2), (4 * third + 2 * rank, 0), (2, 2)) for third in range(3)
        ]
        places.append(lambda *_, rows=rows: rows)
    right = merged([with_gradients(one)])["weight"]
    fused = merged(held, places)["weight"]
    assert fused.digest == right.digest and fused.is_whole


def test_a_list_may_be_one_place_or_none() -> None:
    flat, roots = torch.zeros(4), Roots()
    box = Box((4,), (0,), (4,))
    roots.places = lambda *_: ["a", (2, 4), (3,)]
    (piece,) = roots.pieces("b", nn.Parameter(flat), box)
    assert piece.box == Box((2, 4), (3,), (4,))
    roots.places = lambda *_: [("a", (2, 4), torch.tensor([3]), torch.tensor([4]))]
    (piece,) = roots.pieces("b", nn.Parameter(flat), box)
    assert {*map(type, piece.box.local)} == {int}
    roots.places = lambda *_: []  # padding alone
    assert not roots.pieces("b", nn.Parameter(flat), box)


@pytest.mark.parametrize(
    "places",
    [
        [("a", (2, 2), (4,))],
        [("a", (2, 2), (0, 0))],
        [("a", (2, 2))],
        [("a", (4,), (0,)), ("b", (9,), (0,))],  # begins after the end of the part
        [("a", (9,), (0,), (5,))],  # longer than the part
        [("a", (2, 2), (1, 0), (2, 2))],
        [1],
    ],
)
def test_ranges_that_a_flat_tensor_cannot_hold_are_refused(places: Any) -> None:
    roots = Roots()
    roots.places = lambda *_: places
    flat = torch.zeros(4)
    with pytest.raises(ValueError, match="for parameter 0, whose part has"):
        list(parts_of(torch.optim.SGD([flat], 0.1), roots))


def test_masters_begin_as_the_weights_of_another_layout(tmp_path: Path) -> None:
    """Weights and fp32 masters get one layout; masters keep unrounded values."""
    model, _ = alone()
    nudge(model, 1, Roots())
    write_start(tmp_path, 0, model, Roots())
    sharded = [Stage(2, 1, rank).bfloat16() for rank in range(2)]
    optimizers = [DistributedOptimizer(each, 1, 0) for each in sharded]
    for rank, each in enumerate(sharded):
        assert begin_from(tmp_path, 0, each, Roots()) == ""
        write_start(tmp_path / "masters", rank, each, Roots())
    copies = vars(optimizers[1])["shard_fp32_from_float16_groups"][0]
    for (name, whole), copy in zip(model.named_parameters(), copies, strict=True):
        halves = whole.detach().chunk(2) if "up" in name else (whole.detach(),)
        dim = 0 if "up" in name else 1 if "down" in name else None
        parts = halves if dim is None else [half.chunk(2, dim)[1] for half in halves]
        assert torch.equal(copy, torch.cat([*parts]).flatten())
    for rounded, copy in zip(sharded[1].parameters(), copies, strict=True):
        assert torch.equal(rounded.flatten(), copy.bfloat16())
    again, _ = alone()
    assert begin_from(tmp_path / "masters", 0, again, Roots()) == ""
    for mine, its in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_models_of_one_class_have_names_of_their_own() -> None:
    """Two critics share an optimizer; a third critic has none."""
    critics = [nn.Linear(3, 2) for _ in range(3)]
    roots = Roots()
    roots.called += [critics[1], critics[0], critics[2]]
    both = [*critics[0].parameters(), *critics[1].parameters()]
    names = [part.name for part in parts_of(torch.optim.Adam(both), roots)]
    assert names == ["weight (model 2)", "bias (model 2)", "weight", "bias"]
    assert roots.name_of(critics[2].weight) in roots.unstepped(names)
    assert not {*names} & {*roots.unstepped(names)}


def test_a_model_that_nobody_trains_changes_no_name() -> None:
    """Only one side may have a teacher, or an earlier model not yet collected."""
    teacher, model = nn.Linear(3, 2), nn.Linear(3, 2)
    roots = Roots()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert [part.name for part in parts_of(optimizer, roots)] == ["weight", "bias"]
    assert id(teacher.weight) in roots.names


def test_models_of_one_class_begin_each_from_its_own_weights(tmp_path: Path) -> None:
    critics = [nn.Linear(3, 2) for _ in range(4)]
    for critic in critics[:2]:
        write_start(tmp_path, 0, critic, Roots())
    for number, critic in enumerate(critics[2:]):
        assert begin_from(tmp_path, number, critic, Roots()) == ""
        assert torch.equal(critic.weight, critics[number].weight)


def test_each_master_is_nudged_once() -> None:
    model = Stage(1, 1, 0).bfloat16()
    optimizer = DistributedOptimizer(model, 1, 0)
    copies = vars(optimizer)["shard_fp32_from_float16_groups"][0]
    before = torch.cat(copies)
    nudge(model, 1, Roots())
    units = torch.cat(copies).view(torch.int32) - before.view(torch.int32)
    assert (units.abs() == 1).float().mean() > 0.95


def test_a_layout_that_cannot_be_read_is_noted() -> None:
    model, optimizer = alone()
    model.sharded_state_dict = None  # type: ignore[assignment]
    roots = Roots()
    roots.add(model)
    assert "TypeError" in roots.notes[0]
    assert len([*parts_of(optimizer, roots)]) == 3 * LAYERS + 1


@pytest.mark.world(2)
def test_uneven_shards_hide_their_layout_unless_they_say_it() -> None:
    rank, sizes = dist.get_rank(), (5, 2)
    mesh = init_device_mesh("cpu", (2,))

    def sharded() -> DTensor:
        local = torch.arange(7.0).split(sizes)[rank].clone()
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size([7]), stride=(1,)
        )

    weight = sharded()
    weight.requires_grad_().grad = sharded()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(HiddenLayoutError, match=r"by its placements: it is sharded un"):
        list(parts_of(optimizer, Roots()))
    lies = ChunkStorageMetadata(torch.Size([5 * rank]), torch.Size([sizes[rank]]))
    vars(weight._local_tensor)["__create_chunk_list__"] = lambda: [lies]
    (part,) = parts_of(optimizer, Roots())
    assert part.box == Box((7,), (5 * rank,), (sizes[rank],))
    assert torch.equal(part.weight, torch.arange(7.0).split(sizes)[rank])
    # a gradient says nothing, and is cut as the weight is
    gradient, box = part.cut(weight.grad)
    assert box == part.box and gradient.shape == part.weight.shape


@pytest.mark.slow
@pytest.mark.extras("megatron")
def test_megatrons_own_loop_is_compared(tmp_path: Path, warm_python: list[str]) -> None:
    script = str(Path(foreign.__file__).with_name("megatron_jobs.py"))
    alone = [*warm_python, script, "megatron-bf16"]
    foreign.record(tmp_path, "one", of=alone)
    for side, ranks, fault in (("right", 4, []), ("wrong", 2, ["half"])):
        launch = [*warm_python, *TORCHRUN, f"--nproc-per-node={ranks}", "--no-python"]
        of = [*launch, *alone, *fault]
        foreign.record(tmp_path, side, "--noise", "0", of=of)
        code, lines = foreign.compare(tmp_path, side)
        assert code == bool(fault), lines
        assert "start: 36 of 36 tensors have equal bits" in lines
    assert "the gradient of decoder.layers.1.mlp.linear_fc1.weight" in lines[0]
    assert "is 0.500 x that of one" in lines[0]
