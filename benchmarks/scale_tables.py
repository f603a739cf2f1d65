"""Tables of docs/scale.md from the record of ``scale.py``, and a model from it.

The model is alpha-beta: number of sequential messages times latency, plus number of
sequential bytes times the time for a byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gradparity.benchmarks.tables import row
from gradparity.scaler.sync import LENGTH

# - On paper


def _ring(ranks: int, size: float) -> tuple[float, float]:
    return 2 * (ranks - 1), 2 * size * (ranks - 1) / ranks


def _tree(ranks: int, size: float) -> tuple[float, float]:
    depth = math.ceil(math.log2(ranks))
    return 2 * depth, 2 * depth * size


def _gather_ring(ranks: int, size: float) -> tuple[float, float]:
    return ranks - 1, size * (ranks - 1)


def _gather_doubling(ranks: int, size: float) -> tuple[float, float]:
    return math.ceil(math.log2(ranks)), size * (ranks - 1)


ALGORITHMS = {
    "all-reduce, ring": _ring,
    "all-reduce, tree": _tree,
    "all-gather, ring": _gather_ring,
    "all-gather, doubling": _gather_doubling,
}
"""Name -> function that returns (sequential messages, sequential bytes)."""
ON_PAPER = (1_000, 10_000, 100_000)
ROW = LENGTH * 8  # bytes
FLAG = 4


def modelled(algorithm: str, ranks: int, size: float, net: dict[str, float]) -> float:
    """Return the seconds of one collective; each of the ranks has ``size`` bytes."""
    hops, sent = ALGORITHMS[algorithm](ranks, size)
    return hops * net["alpha_s"] + sent * net["beta_s_per_byte"]


def modelled_torch(
    algorithm: str, ranks: int, axes: int, net: dict[str, float]
) -> float:
    """Return the seconds of torch's all-reduces of a flag, one for each equal axis."""
    side = round(ranks ** (1 / axes))
    return axes * modelled(algorithm, side, FLAG, net)


# - The tables of docs/scale.md


def tables(record: dict[str, Any]) -> dict[str, list[str]]:
    """Return name -> Markdown table, from a record."""
    network, made = record["network"], record["provenance"]
    return {
        "provenance": [
            f"{made['date']}, torch {made['torch']}, {made['cores']} cores, load "
            f"{made['load_average_at_start']:.1f} at the start."
        ],
        "network": [
            f"alpha = {network['alpha_s'] * 1e6:.0f} us, "
            f"beta = {network['beta_s_per_byte'] * 1e9:.2f} ns a byte"
        ],
        "real": list(_real_table(record)),
        "clip": list(_clip_table(record)),
        "training": list(_training_table(record)),
        "simulated": list(_simulated_table(record)),
        "paper": list(_paper_table(record)),
        "torch": list(_torch_table(record)),
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _real_table(record: dict[str, Any]) -> Iterator[str]:
    yield row(
        "ranks",
        "collectives a step",
        "message",
        "step",
        "bare all-reduce",
        "torch's step",
        "ours / torch's",
    )
    yield "|---|---|---|---|---|---|---|"
    for each in record["real"]:
        (call,) = each["calls"]["ours"]
        seconds = each["seconds"]
        yield row(
            each["ranks"],
            len(each["calls"]["ours"]),
            f"{call[0]} {call[2]}, {call[3]} bytes",
            _ms(seconds["ours"]),
            _ms(seconds["bare"]),
            _ms(seconds["torch"]),
            f"{seconds['ours'] / seconds['torch']:.2f}",
        )


def _clip_table(record: dict[str, Any]) -> Iterator[str]:
    yield row(
        "ranks",
        "collectives of a clip",
        "of torch's",
        "clip_and_step",
        "torch's three calls",
        "ours / torch's",
    )
    yield "|---|---|---|---|---|---|"
    for each in record["real"]:
        calls, seconds = each["calls"], each["seconds"]
        ours, theirs = seconds["ours, clip"], seconds["torch, clip"]
        yield row(
            each["ranks"],
            len(calls["ours, clip"]),
            len(calls["torch, clip"]),
            _ms(ours),
            _ms(theirs),
            f"{ours / theirs:.2f}",
        )


def _training_table(record: dict[str, Any]) -> Iterator[str]:
    yield row(
        "ranks",
        "collectives a step",
        "of them the scaler's",
        "bytes",
        "step",
        "memory a rank",
        "scenario",
    )
    yield "|---|---|---|---|---|---|---|"
    for each in record["real"]:
        run = each["training"]
        yield row(
            each["ranks"],
            run["calls"],
            run["scaler_calls"],
            run["sent"],
            _ms(run["step"]),
            f"{each['memory_mib_a_rank']:.0f} MiB",
            f"{each['scenario']['status']}, {each['scenario']['seconds']:.0f} s",
        )


def _simulated_table(record: dict[str, Any]) -> Iterator[str]:
    yield row("ranks", "meshes", "how", "situations", "ranks that differ", "took")
    yield "|---|---|---|---|---|---|"
    for world, how in dict.fromkeys(
        (each["ranks"], each["how"]) for each in record["simulated"]
    ):
        rows = [
            r for r in record["simulated"] if (r["ranks"], r["how"]) == (world, how)
        ]
        yield row(
            world,
            ", ".join("x".join(map(str, each["mesh"])) for each in rows),
            how,
            rows[0]["situations"],
            sum(len(each["different"]) for each in rows),
            f"{sum(each['seconds'] for each in rows):.0f} s",
        )


OURS = {"all-gather, ring": ROW, "all-gather, doubling": ROW}
"""Algorithm -> bytes that each rank of our scaler sends."""


def _paper_table(record: dict[str, Any]) -> Iterator[str]:
    sizes = [f"{name}, {size} bytes" for name, size in OURS.items()]
    yield row("ranks", *sizes, "of a step of 1 s, by doubling")
    yield "|---|" + "---|" * (len(OURS) + 1)
    for ranks in ON_PAPER:
        took = {n: modelled(n, ranks, m, record["network"]) for n, m in OURS.items()}
        share = took["all-gather, doubling"]
        yield row(f"{ranks:,}", *map(_ms, took.values()), f"{share:.2%}")


def _torch_table(record: dict[str, Any]) -> Iterator[str]:
    theirs = "all-reduce, ring", "all-reduce, tree"
    yield row("ranks", "axes", *(f"torch, {name}" for name in theirs))
    yield "|---|---|---|---|"
    for ranks in ON_PAPER:
        for axes in (1, 2):
            took = [modelled_torch(n, ranks, axes, record["network"]) for n in theirs]
            yield row(f"{ranks:,}", axes, *map(_ms, took))
