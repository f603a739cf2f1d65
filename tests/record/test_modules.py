"""Outputs of blocks: which modules are blocks, and numbers that add up over rows."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.utils.checkpoint import checkpoint

from gradparity.conformance.record.batches import WORD
from gradparity.conformance.record.files import Stored
from gradparity.conformance.record.kept import SLOTS, Box, keep_values
from gradparity.conformance.record.modules import GRADIENT, OUTPUT, Blocks, blocks_of
from gradparity.conformance.record.rows import rows_of
from gradparity.conformance.record.whole import merge_outputs
from gradparity.multiprocess import Cluster

LINEAR = nn.Linear(2, 2)


class Parts(nn.Module):
    """Module with named children, which is not a ``ModuleList``."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def layers(count: int = 2) -> nn.ModuleList:
    feed_forward = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return nn.ModuleList(Parts({"up": feed_forward}) for _ in range(count))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["0", "1"]),
        (
            Parts(
                {
                    "model": Parts({"words": nn.Embedding(2, 2), "layers": layers()}),
                    "head": nn.Linear(2, 2),
                }
            ),
            ["model.words", "model.layers.0", "model.layers.1", "head"],
        ),
        (Parts({"module": Parts({"up": nn.Linear(2, 2)})}), ["module.up"]),
    ],
    ids=["list", "decoder", "wrapped"],
)
def test_elements_of_lists_and_what_stands_beside_them_are_blocks(
    model: nn.Module, names: list[str]
) -> None:
    assert [name for name, _ in blocks_of(model)] == names


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def test_nothing_inside_of_compiled_code_is_a_block() -> None:
    parts = {"a": compiled(LINEAR), "b": nn.Sequential(compiled(LINEAR))}
    assert [name for name, _ in blocks_of(Parts(parts))] == ["a", "b.0"]
    in_place = nn.Sequential(nn.Linear(2, 2))
    in_place.compile(backend="eager")
    assert [*blocks_of(Parts({"a": in_place, "b": LINEAR}))] == [("b", LINEAR)]
    for model in (compiled(nn.Sequential(LINEAR)), in_place):
        with pytest.raises(ValueError, match="compiled as a whole"):
            Blocks(lambda _: nullcontext()).hook(model)


def rows_digests(words: Tensor) -> Tensor:
    (digests,) = rows_of([words])
    return digests


def stored(values: Tensor, words: Tensor, box: Box | None = None) -> Stored:
    shape = tuple(values.shape)
    place = box or Box(shape, (0,) * len(shape), shape)
    return Stored.of(place, keep_values(values, place, rows=rows_digests(words)))


def drawn() -> tuple[Tensor, Tensor]:
    """Return random words (8, 6) and outputs (8, 6, 4)."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(1 << 20, (8, 6), generator=generator)
    return words, torch.randn(8, 6, 4, generator=generator)


def of(words: Tensor) -> frozenset[int]:
    return frozenset(rows_digests(words).tolist())


@pytest.mark.parametrize("order", ["as it is", "permuted"])
def test_rows_add_up_in_any_order_and_on_any_rank(order: str) -> None:
    words, values = drawn()
    whole = stored(values, words)
    if order == "permuted":
        places = torch.randperm(8, generator=torch.Generator().manual_seed(1))
        words, values = words[places], values[places]
    parts = [(n, stored(values[n::2], words[n::2])) for n in range(2)]
    merged = merge_outputs(parts, {n: of(words[n::2]) for n in range(2)})
    assert merged.is_whole and merged.shape == (8, 6, 4)
    assert merged.digest == whole.digest % WORD
    assert merged.sketch is not None and whole.sketch is not None
    assert len(merged.sketch) == SLOTS
    assert abs(merged.sketch - whole.sketch).max() < 1e-6


def test_ranks_with_the_same_rows_hold_replicas_or_parts_of_known_places() -> None:
    words, values = drawn()
    rows = dict.fromkeys(range(2), of(words))
    one = stored(values, words)
    assert merge_outputs([(0, one), (1, one)], rows).digest == one.digest % WORD
    halves = [
        (n, stored(half, words, Box((8, 6, 4), (0, 3 * n, 0), (8, 3, 4))))
        for n, half in enumerate(values.chunk(2, dim=1))
    ]
    both = merge_outputs(halves, rows)
    assert both.is_whole and both.digest == one.digest % WORD
    assert not merge_outputs(halves[:1], rows).is_whole
    # pieces of an unknown place look like replicas with other bits
    pieces = [(n, stored(half, words)) for n, half in enumerate(values.chunk(2, dim=1))]
    assert not merge_outputs(pieces, rows).is_whole


def test_what_some_rows_lack_is_not_whole() -> None:
    words, values = drawn()
    parts = [(0, stored(values[:4], words[:4]))]
    rows = {0: of(words[:4]), 1: of(words[4:])}
    assert not merge_outputs(parts, rows).is_whole


class Twice(nn.Module):
    """Model that calls one block twice, and may recompute its activations."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(1 << 20, 4), nn.ModuleList([Grows()])
        self.recompute = recompute

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for _ in range(2):
            block: Any = self.blocks[0]
            x = (
                checkpoint(block, x, use_reentrant=False)
                if self.recompute
                else block(x)
            )
        total: Tensor = x.square().sum()
        return total


class Grows(nn.Module):
    """Block that returns the sine of twice its input."""

    def forward(self, x: Tensor) -> Tensor:
        return (2 * x).sin()


def test_each_call_is_read_once_though_it_runs_again_in_backward() -> None:
    words, _ = drawn()
    digests = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model, blocks = Twice(recompute), Blocks(lambda _: nullcontext())
        blocks.hook(model)
        for part in words.chunk(2):
            blocks.begin(0, [rows_digests(part)])
            loss = model(part)
            blocks.end()
            loss.backward()
        _, sums_by_key = blocks.read()
        assert [*sums_by_key] == [
            (0, OUTPUT, "words"),
            (0, OUTPUT, "blocks.0"),
            (0, OUTPUT, "blocks.0 (call 2)"),
            (0, GRADIENT, "blocks.0 (call 2)"),
            (0, GRADIENT, "blocks.0"),
            (0, GRADIENT, "words"),
        ]
        assert all(box.shape == (8, 6, 4) for box, _ in sums_by_key.values())
        digests.append([int(kept.digest) for _, kept in sums_by_key.values()])
    assert digests[0] == digests[1]


class Positioned(nn.Module):
    """Model of words and positions, with as many positions as the batch has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1 << 20, 4), nn.Embedding(8, 4)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(8))[: words.shape[1]]
        total: Tensor = x.square().sum()
        return total


def read_blocks(parts: Iterable[Tensor]) -> dict[tuple[int, str, str], Stored]:
    torch.manual_seed(0)
    model, blocks = Positioned(), Blocks(lambda _: nullcontext())
    blocks.hook(model)
    for part in parts:
        blocks.begin(0, [rows_digests(part)])
        loss = model(part)
        blocks.end()
        loss.backward()
    return {key: Stored.of(*sums) for key, sums in blocks.read()[1].items()}


def test_rows_that_are_given_again_count_once() -> None:
    one, other = drawn()[0].chunk(2)
    once, again = read_blocks([one, other]), read_blocks([one, one, other])
    for kind in (OUTPUT, GRADIENT):
        key = 0, kind, "words"
        assert again[key].digest == once[key].digest, kind


def test_a_block_with_the_same_output_for_other_rows_has_no_rows() -> None:
    words, _ = drawn()
    one, other = words.chunk(2)
    assert (0, OUTPUT, "places") in read_blocks([words])
    assert {name for _, _, name in read_blocks([one, other])} == {"words"}
    of_ranks = [read_blocks([part]) for part in (one, other)]
    rows = {rank: of(part) for rank, part in enumerate((one, other))}
    for name, is_whole in (("words", True), ("places", False)):
        parts = [(rank, each[0, OUTPUT, name]) for rank, each in enumerate(of_ranks)]
        assert merge_outputs(parts, rows).is_whole == is_whole


class Learned(nn.Module):
    """Block that returns its parameter, which has as many rows as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))

    def forward(self) -> Tensor:
        return self.weight


class Returned(nn.Module):
    """Model of words and a block that returns its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1 << 20, 4), Learned()

    def forward(self, words: Tensor) -> Tensor:
        total: Tensor = (self.words(words)[:, 0] + self.places()).square().sum()
        return total


def test_a_parameter_that_a_block_returns_keeps_no_hook() -> None:
    words, _ = drawn()
    model, blocks = Returned(), Blocks(lambda _: nullcontext())
    blocks.hook(model)
    blocks.begin(0, [rows_digests(words)])
    loss = model(words)
    blocks.end()
    blocks.remove()
    model.places.weight.square().sum().backward()  # a later step, of other rows
    assert (0, GRADIENT, "places") not in blocks.read()[1]
    loss.backward()
    assert (0, GRADIENT, "words") in blocks.read()[1]


class Flat(nn.Module):
    """Model of two layers: one gets rows of tokens, the other a flat list of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up = nn.Embedding(64, 4), nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)

    def forward(self, words: Tensor) -> Tensor:
        x = self.up(self.words(words)).sin()
        total: Tensor = self.down(x.flatten(0, 1)).square().sum()
        return total


def of_layout(placements: Sequence[Placement] | None) -> Any:
    """Return the recorded numbers of the blocks on one rank, and its rows' digests."""
    torch.manual_seed(0)
    model, blocks = Flat(), Blocks(lambda _: nullcontext())
    words = torch.randint(64, (8, 6), generator=torch.Generator().manual_seed(0))
    if placements is not None:
        mesh = init_device_mesh("cpu", (2, 2))
        distribute_module(model, mesh)
        words = distribute_tensor(words, mesh, placements)
    blocks.hook(model)
    blocks.begin(0, rows_of([words]), [words])
    loss = model(words)
    blocks.end()
    loss.backward()
    rows, kept = blocks.read()
    digests = frozenset(torch.cat(rows[0]).tolist())
    return {key: Stored.of(*sums) for key, sums in kept.items()}, digests


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Replicate()),
        (Replicate(), Shard(0)),
        (Shard(0), Shard(0)),
    ],
    ids=str,
)
def test_a_batch_in_a_dtensor_has_the_rows_of_this_rank(
    four: Cluster, placements: Sequence[Placement]
) -> None:
    whole, _ = of_layout(None)
    ranks = four.run(of_layout, placements)
    rows = {rank: digests for rank, (_, digests) in enumerate(ranks)}
    assert len(whole) == 6
    for key, alone in whole.items():
        parts = [(rank, kept[key]) for rank, (kept, _) in enumerate(ranks)]
        merged = merge_outputs(parts, rows)
        assert merged.is_whole and merged.shape == alone.place.shape, key
        assert merged.sketch is not None
        assert abs(merged.sketch - alone.sketch).max() < 1e-6, key
