"""Sketches of tensors add up over any layout, and estimate distances."""

import itertools
import math
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

from gradparity.conformance.record import kept, weights
from gradparity.conformance.record.files import Stored
from gradparity.conformance.record.kept import Box, Kept, keep_bits, keep_values
from gradparity.conformance.record.layouts import parts_of
from gradparity.conformance.record.parts import place
from gradparity.conformance.record.roots import Roots
from gradparity.conformance.record.rows import NEAR as NEAR_ROW
from gradparity.conformance.record.rows import bags_of, rows_of, sums_of, unpadded_of
from gradparity.conformance.record.weights import NEAR, nudge
from gradparity.conformance.record.whole import Whole, merge
from gradparity.multiprocess import Cluster, current_world

SHAPES = [(), (1,), (5,), (7, 3), (64, 40), (33, 70), (4, 6, 100)]


def keep(part: Tensor, box: Box) -> Kept:
    """Return what a recording keeps of a tensor, both as a weight and as a gradient."""
    values, bits = keep_values(part, box), keep_bits(part, box, rounded=True)
    assert int(values.digest) == int(bits.digest)
    return replace(values, rounded=bits.rounded)


def whole_of(tensor: Tensor) -> Whole:
    part, box = place(tensor)
    return merge([(0, Stored.of(box, keep(part, box)))])


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def equal(one: Whole, other: Whole) -> bool:
    return (one.digest, one.rounded, one.bad, one.held) == (
        other.digest,
        other.rounded,
        other.bad,
        other.held,
    ) and one.distance(other) <= 2**-24 * (one.norm + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranges_of_the_flat_tensor_add_up(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = made(shape, dtype)
    flat, cut = tensor.reshape(-1), tensor.numel() // 3
    parts = [
        (rank, Stored.of(box, keep(flat[start:stop], box)))
        for rank, (start, stop) in enumerate([(0, cut), (cut, flat.numel())])
        for box in [Box(tuple(shape), (start,), (stop - start,))]
    ]
    assert equal(merge(parts), whole_of(tensor))


def test_a_part_is_worked_on_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = made((33, 70))
    whole = whole_of(tensor)
    monkeypatch.setattr(kept, "CHUNKS", {"cpu": 100})
    monkeypatch.setattr(kept, "_known", OrderedDict())
    monkeypatch.setattr(kept, "_room", [4000])
    assert equal(whole_of(tensor), whole)
    assert len(kept._known) == 2, "no more keys are kept than there is room for"


def laid_out(shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Stored:
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = distribute_tensor(made(shape), mesh, placements)
    part, box = place(tensor)
    return Stored.of(box, keep(part, box))


PLACEMENTS = [
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Replicate(), Shard(1)),
    (Replicate(), Replicate()),
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_shards_of_any_layout_add_up(
    four: Cluster, placements: tuple[Placement, ...]
) -> None:
    for shape in ((7, 3), (64, 40), (1, 5)):
        parts = [*enumerate(four.run(laid_out, shape, placements))]
        found = merge(parts)
        assert equal(found, whole_of(made(shape))), shape
        assert found.is_whole and not found.unlike


def partial_sums() -> Stored:
    mesh = init_device_mesh("cpu", (4,))
    mine = made((64, 40)) * (current_world().rank + 1)
    tensor = DTensor.from_local(mine, mesh, [Partial()])
    part, box = place(tensor)
    return Stored.of(box, keep(part, box))


def test_summands_add_up_in_the_sketch_alone(four: Cluster) -> None:
    found = merge([*enumerate(four.run(partial_sums))])
    assert not found.is_summed and found.is_whole
    whole = whole_of(10 * made((64, 40)))
    assert found.distance(whole) <= 1e-5 * whole.norm  # of fp32 products


def test_a_replica_with_other_bits_is_named() -> None:
    one, other = made((7, 3)), made((7, 3))
    other[3, 1] += 2.0**-20
    parts = []
    for rank, tensor in enumerate((one, one, other, 1.5 * one)):
        part, box = place(tensor)
        parts.append((rank, Stored.of(box, keep(part, box))))
    near, far = merge(parts[:3]), merge(parts)
    assert (near.unlike, far.unlike) == ((2,), (2, 3))
    assert near.apart == pytest.approx(2.0**-20 / float(one.norm()), rel=0.1)
    assert far.apart == pytest.approx(0.5)


@pytest.mark.parametrize("first", [0.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_replica_that_is_not_finite_is_infinitely_far_apart(
    first: float, bad: float
) -> None:
    one, other = made((7, 3)), made((7, 3))
    one[0, 0], other[0, 0], other[3, 1] = first, bad, 1.5
    parts = []
    for rank, tensor in enumerate((one, other)):
        part, box = place(tensor)
        parts.append((rank, Stored.of(box, keep(part, box))))
    assert merge(parts).apart == math.inf


def test_replicas_that_are_summands_of_a_mean_are_averaged() -> None:
    """Gradients differ between ranks if the optimizer sums them in its step."""
    shards = made((4, 6)).chunk(2), made((4, 6)).flip(0).chunk(2)
    box = Box((4, 6), (0, 0), (2, 6)), Box((4, 6), (2, 0), (2, 6))
    parts = [
        (2 * replica + at, Stored.of(box[at], keep(shards[replica][at], box[at])))
        for replica in range(2)
        for at in range(2)
    ]
    mean = merge(parts, averages=True)
    true = whole_of((torch.cat(shards[0]) + torch.cat(shards[1])) / 2)
    assert not mean.is_summed and mean.is_whole and mean.unlike == ()
    assert mean.distance(true) <= 2**-22 * true.norm
    assert merge(parts).unlike == (2, 3)


def test_what_nobody_holds_is_counted() -> None:
    box = Box((7, 3), (0,), (10,))
    found = merge([(0, Stored.of(box, keep(made((7, 3)).reshape(-1)[:10], box)))])
    assert (found.held, found.size, found.is_whole) == (10, 21, False)


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_the_distance_of_sketches_is_that_of_tensors(scale: float) -> None:
    """The estimate is within 25 % for errors that are dense, in a row or an element."""
    base = made((200, 300))
    for seed, kind in itertools.product(range(5), ("dense", "row", "element")):
        generator = torch.Generator().manual_seed(seed)
        error = torch.randn(base.shape, generator=generator) * scale
        if kind == "row":
            error[torch.arange(200) != seed] = 0
        if kind == "element":
            error *= 0
            error[seed, 7 * seed] = scale
        distance = whole_of(base).distance(whole_of(base + error))
        true = float((base + error - base).norm())
        rounding = 2**-24 * float(base.norm())  # sketches are stored in fp32
        assert distance == pytest.approx(true, rel=0.25, abs=rounding), kind


def test_no_other_place_or_value_has_the_same_digest() -> None:
    tensor = made((64, 40))
    swapped = tensor.clone()
    swapped[[0, 1]] = tensor[[1, 0]]
    digests = [whole_of(t).digest for t in (tensor, swapped, -tensor, tensor.t())]
    assert len({*digests}) == 4
    rounded = tensor.bfloat16().float()
    assert whole_of(tensor).digest != whole_of(rounded).digest
    assert whole_of(tensor).rounded == whole_of(rounded).rounded
    assert whole_of(rounded).is_rounded and whole_of(tensor.bfloat16()).is_rounded
    assert not whole_of(tensor).is_rounded


def test_what_is_not_finite_is_counted() -> None:
    tensor = made((64, 40))
    tensor[3, 4], tensor[5, 6] = float("inf"), float("nan")
    assert whole_of(tensor).bad == 2


def test_a_layout_made_by_hand_is_declared() -> None:
    """Two ranks hold halves of a weight as plain tensors; ``places`` declares them."""
    whole = made((8, 300))
    stored = []
    for rank, half in enumerate(whole.chunk(2)):
        model = nn.Linear(300, 4, bias=False)
        model.weight.data.copy_(half)
        model.weight.grad = half.clone()
        roots = Roots()
        roots.places = lambda name, _, rank=rank: (
            f"up.{name}",
            (8, 300),
            (4 * rank, 0),
        )
        roots.add(model)
        (part,) = parts_of(torch.optim.SGD(model.parameters()), roots)
        assert part.name == "up.weight" and part.stepped.grad is not None
        gradient = part.cut(part.stepped.grad)
        stored.append((rank, Stored.of(gradient[1], keep(*gradient))))
    assert equal(merge(stored), whole_of(whole))


@pytest.mark.parametrize("pad", [0, 3])
def test_a_row_is_known_without_its_padding(pad: int) -> None:
    rows = torch.tensor([[5, 6, 7], [6, 5, 7]])
    (digests,) = rows_of([rows])
    for side, widths in ((0, (0, 2)), (1, (2, 0))):
        (padded,) = unpadded_of([nn.functional.pad(rows, widths, value=pad)])
        assert torch.equal(padded[:, side], digests)
        (more,) = unpadded_of(
            [nn.functional.pad(rows, (3 * widths[0], 3 * widths[1]), value=pad)]
        )
        assert torch.equal(padded[:, side], more[:, side])
    (plain,) = unpadded_of([rows])
    assert plain.shape == (2, 2) and not {*plain.flatten().tolist()} & {
        *digests.tolist()
    }


def test_a_row_with_a_point_is_known_up_to_rounding() -> None:
    rows = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    (sums,), (near,) = sums_of([rows]), sums_of([rows.bfloat16()])
    size = sums[:, :1]
    assert ((sums - near).abs() <= NEAR_ROW * size).all()
    apart = [
        (sums[i] - sums[j]).abs().max() / size[i] for i, j in ((0, 1), (1, 2), (0, 2))
    ]
    assert min(apart) > 4 * NEAR_ROW


def test_a_bag_of_tokens_adds_up_over_pieces_of_rows() -> None:
    tokens = torch.arange(48).reshape(4, 12) % 7
    (whole,) = bags_of([{"input_ids": tokens}])
    parts = [bags_of([made((4, 2)), part]) for part in tokens.chunk(3, 1)]
    assert bags_of([torch.zeros(())]) == []
    assert int(whole) == sum(int(bags[0]) for bags in parts)
    other = tokens.clone()
    other[0, 0] += 1
    assert int(bags_of([other])[0]) != int(whole)


def test_a_bag_of_floats_adds_up_wherever_the_rows_lie() -> None:
    by_time = made((4, 6, 3))  # rows in dim 1, as of torch's recurrent layers
    whole, other = bags_of([by_time, made((2, 6))])
    parts = [bags_of([part.contiguous()]) for part in by_time.chunk(2, 1)]
    assert int(whole) == sum(int(part) for (part,) in parts) != int(other)
    assert int(bags_of([by_time + 1])[0]) != int(whole)


def rows_of_dtensors() -> list[list[int]]:
    """Return the recorded values of this rank's half of some rows."""
    mesh, rows = init_device_mesh("cpu", (2,)), made((4, 6))
    kept_of = []
    for dim in range(2):
        tensor = distribute_tensor(rows, mesh, [Shard(dim)])
        with CommDebugMode() as seen:
            (digests,) = rows_of([tensor], floats=True)
            (bag,) = bags_of([tensor])
        assert seen.get_total_counts() == 0
        kept_of += [digests.tolist(), [int(bag)]]
    return kept_of


def test_rows_of_a_dtensor_are_those_of_its_ranks(two: Cluster) -> None:
    whole, (bag,) = rows_of([made((4, 6))], floats=True)[0], bags_of([made((4, 6))])
    (first, *bags), (second, *others) = two.run(rows_of_dtensors)
    assert [*first, *second] == whole.tolist()
    for at in (0, 2):  # of rows, and of columns
        assert (bags[at][0] + others[at][0] - int(bag)) % 2**64 == 0


def test_an_update_knows_a_unit_in_the_last_place_of_its_weights() -> None:
    weight, gradient = made((64, 40)), made((40, 64)).t()
    step = 1e-3 * gradient.sign()
    box = place(weight)[1]
    before, after = (
        keep_values(w, box, weight=gradient) for w in (weight, weight - step)
    )
    found = after.update(before, 2.0**-23)
    true = float((step * gradient.abs()).norm())
    assert found.sketch is not None
    assert float(found.sketch.norm()) == pytest.approx(true, rel=0.25)
    units = 2.0**-23 * float((weight * gradient).norm())
    assert float(found.numbers[0]) ** 0.5 == pytest.approx(units, rel=0.25)


@pytest.mark.parametrize(
    ("shape", "reach", "root"), [((200, 300), NEAR, 1.3), ((50, 60), 349, 18.0)]
)
def test_a_nudge_is_of_one_unit_and_16_bits_round_some_weights_otherwise(
    shape: tuple[int, int], reach: int, root: float
) -> None:
    """A smaller nudge would not change any product of a small model in 16 bits."""
    torch.manual_seed(0)
    model = nn.Linear(*shape, bias=False)
    before = model.weight.detach().clone()
    across = []
    for seed in (1, 2):
        model.weight.data.copy_(before)
        nudge(model, seed, Roots())
        units = (
            model.weight.detach().view(torch.int32) - before.view(torch.int32)
        ).abs()
        assert units.min() == 1 and units.max() <= reach + 1
        assert units.float().square().mean().sqrt() < root
        across.append(model.weight.bfloat16() != before.bfloat16())
        in_fp16 = model.weight.half() != before.half()
        assert 7 < int(across[-1].sum()) < 60 and 7 < int(in_fp16.sum()) < 60
    assert not torch.equal(*across)


@pytest.mark.parametrize("chunk", [1, 100])
def test_a_nudge_in_chunks_gives_the_same_bits(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, an embedding of 10^8 elements would take gigabytes."""

    def nudged() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 60)
        model.weight.data = model.weight.data.t().contiguous().t()  # columns in memory
        model.scalar = nn.Parameter(torch.tensor(0.5))
        model.narrow = nn.Parameter(torch.randn(5, 6, 7).bfloat16())
        nudge(model, 1, Roots())
        return [each.detach() for each in model.parameters()]

    whole = nudged()
    monkeypatch.setattr(weights, "CHUNK", chunk)
    assert all(map(torch.equal, nudged(), whole))


def test_a_tiny_model_is_not_moved_far() -> None:
    model = nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    nudge(model, 1, Roots())
    units = model.weight.detach().view(torch.int32) - before.view(torch.int32)
    assert units.abs().max() <= 513
