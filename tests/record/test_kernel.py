"""The kernel on a GPU keeps the same numbers as torch's operations."""

import importlib.util
import itertools
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gradparity.conformance.record import kept
from gradparity.conformance.record.kept import (
    Box,
    Sums,
    Wanted,
    keep_bits,
    keep_values,
    places_of,
)
from gradparity.conformance.record.pieces import pieces_of

BOXES = [
    Box((40, 100), (0, 0), (40, 100)),
    Box((40, 100), (10, 0), (20, 100)),
    Box((40, 100), (0, 50), (40, 50)),
    Box((40, 100), (130,), (1234,)),  # a range of the flattened whole
    Box((40, 100), (130,), (20,)),
    Box((3000,), (0,), (3000,)),
    Box((3000,), (1000,), (700,)),
    Box((3000,), (130,), (20,)),
    Box((4000, 1), (100, 0), (300, 1)),
    Box((30,), (0,), (30,)),
    Box((), (), ()),
    Box((40, 0), (0, 0), (40, 0)),
    Box((64, 3, 7, 5), (0, 0, 0, 0), (64, 3, 7, 5)),
    Box((64, 8, 3, 3), (0, 4, 0, 0), (64, 4, 3, 3)),
    Box((10, 200, 3), (2, 7, 1), (5, 1, 2)),
    Box((700, 900), (0, 0), (700, 900)),
    Box((64, 8, 30), (0, 0, 15), (64, 8, 15)),  # no rectangle: kept by torch
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_pieces_hold_each_element_at_its_place(box: Box) -> None:
    pieces = pieces_of(box.shape, box.offsets, box.local)
    if pieces is None:
        assert box is BOXES[-1]
        return
    columns, places = math.prod(box.shape[1:]), dict[int, int]()
    for piece in pieces:
        (row, high), (column, wide) = piece.rows, piece.columns
        for i, j in itertools.product(range(high), range(wide)):
            at = piece.at + i * piece.pitch + j
            assert at not in places
            places[at] = (row + i) * columns + column + j
    right = places_of(box, 0, box.size, torch.device("cpu")).tolist()
    assert [places[at] for at in range(len(places))] == right


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_keeps_what_torch_keeps(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wanted: list[Wanted] = []
    for number, box in enumerate(BOXES):
        part, other = (torch.randn(box.local).to("cuda", dtype) for _ in range(2))
        if number % 3 == 1 and part.numel():
            part.view(-1)[part.numel() // 2] = torch.inf if number % 2 else torch.nan
        wanted += [
            Wanted(part, box),
            Wanted(other, box, only_bits=True),
            Wanted(other, box, only_bits=True, rounded=True),
            Wanted(part, box, weight=other),
            Wanted(part, box, weight=other.float()),
            Wanted(part, box, weight=other.clamp(min=0), idle=True),
            Wanted(part, box, weight=other.abs() + 1, idle=True),
        ]
    kept_by_number = Sums(dict(enumerate(wanted))).read()
    for number, each in enumerate(wanted):
        got = kept_by_number[number]
        part = each.part.cpu()
        weight = None if each.weight is None else each.weight.cpu()
        if each.only_bits:
            right = keep_bits(part, each.box, rounded=each.rounded)
        else:
            right = keep_values(part, each.box, weight=weight, idle=each.idle)
        assert got.digest.item() == right.digest.item(), each.box
        assert got.rounded.item() == right.rounded.item(), each.box
        assert (got.sketch is None) == (right.sketch is None)
        for a, b in ((got.sketch, right.sketch), (got.numbers, right.numbers)):
            if a is not None and b is not None:
                torch.testing.assert_close(
                    a.cpu(), b, rtol=1e-11, atol=1e-11, equal_nan=True
                )


@pytest.mark.gpu
def test_parts_on_a_gpu_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    whole = torch.randn(300, 500, device="cuda")
    box = Box((300, 500), (0, 0), (300, 500))
    (right,) = Sums({0: Wanted(whole, box)}).read().values()
    halves = itertools.product((0, 150), (0, 250))
    parts = [
        Wanted(
            whole[row : row + 150, column : column + 250],
            Box((300, 500), (row, column), (150, 250)),
        )
        for row, column in halves
    ]
    first, *others = Sums(dict(enumerate(parts))).read().values()
    for other in others:
        first = first.plus(other)
    assert first.digest.item() == right.digest.item()
    assert first.sketch is not None and right.sketch is not None
    torch.testing.assert_close(first.sketch, right.sketch, rtol=1e-11, atol=1e-11)


def test_a_triton_that_does_not_run_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(*_: Any) -> Any:
        raise RuntimeError("no compiler for C")

    triton: Any = ModuleType("triton")
    triton.__spec__ = ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", triton)
    assert importlib.util.find_spec("triton") is not None
    kernel: Any = SimpleNamespace(rows_of=str, batch_of=compiled)
    name = f"{kept.__package__}.kernel"
    monkeypatch.setitem(sys.modules, name, kernel)
    kept.kernel_on.cache_clear()
    device = torch.device("cpu")
    try:
        assert [kept.kernel_on(device) for _ in range(2)] == [None, None]
    finally:
        kept.kernel_on.cache_clear()
    told = capsys.readouterr().err
    assert told.count("Triton does not run here") == 1 and "no compiler for C" in told
