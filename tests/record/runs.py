"""Made-up runs of a job of three tensors, and their comparison."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gradparity.conformance.record.compare import Comparison, Side, compare
from gradparity.conformance.record.merge import Run
from gradparity.conformance.record.whole import Whole

SIZE = 16
NAMES = ("a", "b", "c")
NOISE = 1e-6


def whole(values: Any, digest: int) -> Whole:
    sketch = None if values is None else np.asarray(values, dtype=float)
    return Whole(
        shape=(SIZE,),
        digest=digest,
        rounded=digest // 10,
        sketch=sketch,
        square=0.0,
        largest=0.0,
        bad=0,
        held=SIZE,
    )


def on_rank_0(
    rows: Mapping[int, Iterable[int]],
) -> dict[int, dict[int, frozenset[int]]]:
    """Return rows by step as those of one rank."""
    return {step: {0: frozenset(each)} for step, each in rows.items()}


def values(step: int, name: str, draw: int = 0) -> Any:
    """Return a gradient, with other noise for each ``draw``, and no noise for 0."""
    true = np.random.default_rng([step, *name.encode()]).normal(size=SIZE)
    noise = np.random.default_rng([step, draw, *name.encode()]).normal(size=SIZE)
    return true * (1 + NOISE * bool(draw) * noise)


def run(draw: int = 0, names: Sequence[str] = NAMES, steps: int = 2) -> Run:
    tensors = {}
    for step in range(steps):
        for number, (name, given) in enumerate(zip(NAMES, names, strict=True)):
            digest = 1000 * (number + 1) + step
            tensors[step, "weight", given] = whole(None, digest)
            tensors[step, "gradient", given] = whole(values(step, name, draw), draw)
            tensors[step, "update", given] = whole(values(step, name, draw), draw)
    return Run(
        ranks=1,
        tensors=tensors,
        settings={
            (s, n): {"lr": 0.1, "fused": None} for s in range(steps) for n in names
        },
        rows_of_ranks=on_rank_0({s: {1, 2} for s in range(steps)}),
        unpadded={},
        sums={},
        bags={},
        shares={},
        has_tokens=False,
        losses={},
        drew=frozenset(),
        drops=(),
        outputs=frozenset({"float32"}),
        in_16_bits={},
        unstepped=(),
        without_gradient=frozenset(),
        unnamed=0,
        notes=(),
    )


def nudged(draw: int, names: Sequence[str] = NAMES, steps: int = 2) -> Run:
    """Return a run that started from other weights."""
    plain = run(draw, names, steps)
    tensors = {
        key: replace(each, digest=(each.digest or 0) + 7)
        if key[1] == "weight"
        else each
        for key, each in plain.tensors.items()
    }
    return replace(plain, tensors=tensors)


ONE = Side(name="one", run=run(), noisy=(run(1), nudged(2), nudged(3)))


def against(other: Run, one: Side = ONE) -> Comparison:
    return compare(one, Side(name="mesh", run=other))


def changed(other: Run, key: tuple[int, str, str], **fields: Any) -> Run:
    tensors: Mapping[Any, Whole] = other.tensors
    return replace(other, tensors={**tensors, key: replace(tensors[key], **fields)})
