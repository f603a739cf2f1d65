"""Tables of docs/specimens.md from the record of ``specimens.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gradparity.benchmarks.tables import row, write_between

__all__ = ["PAGE", "lines", "tables", "write_tables"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "specimens.md"
PEERS = {
    "loss_5_percent": "loss curve, 5 %",
    "loss_1_percent": "loss curve, 1 %",
    "assert_close": "`assert_close` of weights",
    "hashes": "DebugMode hashes",
}
"""Key of the record -> heading of its column."""
Rows = Mapping[str, Mapping[str, Any]]


def tables(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a record: name -> markdown."""
    return {
        "made": "\n".join(_made(record)),
        "sums": "\n".join(_sums(record)),
        "known": "\n".join(_each(_named(record, "W"))),
        "unseen": "\n".join(_each(_named(record, "U"))),
        "rounded": "\n".join(_each(_named(record, "Q"))),
    }


def lines(record: dict[str, Any]) -> list[str]:
    """Return the lines of all tables, for a terminal."""
    return [line for text in tables(record).values() for line in (text, "")]


def write_tables(record: dict[str, Any], page: Path = PAGE) -> None:
    """Replace the tables on the page by the tables of a record."""
    write_between(page, tables(record))


def _named(record: dict[str, Any], first: str) -> Rows:
    rows: Rows = record["specimens"]
    return {n: r for n, r in rows.items() if n.startswith(first)}


def _made(record: dict[str, Any]) -> Iterator[str]:
    made = record["provenance"]
    yield (
        f"{made['started'][:10]}, torch {made['torch']}, Python {made['python']}, "
        f"{made['cores']} cores, load average {made['load_average_at_start']} at the "
        f"start, commit {made['commit']}: {record['seconds'] / 60:.0f} minutes for "
        "gradparity alone."
    )
    if "note" in made:
        yield ""
        yield made["note"]


def _sums(record: dict[str, Any]) -> Iterator[str]:
    rows = {n: r for n, r in record["specimens"].items() if r["is_fault"]}
    known = {n: r for n, r in rows.items() if n.startswith("W")}
    unseen = {n: r for n, r in rows.items() if n not in known}
    yield row("", "of the list", "others", "fixed versions that fail")
    yield "|---|---|---|---|"
    twins = sum(bool(r["fixed_failed"]) for r in rows.values())
    over = f"{twins} of {len(rows)}, {record['seeds']} seeds"
    found = [_share(part, "caught") for part in (known, unseen)]
    yield row("gradparity, `--quick`", *found, over)
    placed = [_share(part, "placed") for part in (known, unseen)]
    yield row("... and names the module", *placed, "")
    for key, heading in PEERS.items():
        told = [
            f"{sum(_alarm(r, 'broken', key) for r in part.values())} of {len(part)}"
            for part in (known, unseen)
        ]
        twins = sum(_alarm(r, "fixed", key) for r in rows.values())
        yield row(heading, *told, f"{twins} of {len(rows)}")


def _share(rows: Rows, key: str) -> str:
    return f"{sum(bool(r[key]) for r in rows.values())} of {len(rows)}"


def _alarm(found: Mapping[str, Any], twin: str, key: str) -> bool:
    return bool(found["peers"][twin][key])


def _each(rows: Rows) -> Iterator[str]:
    yield row(
        "", "fault", "reported in", "check", "named", "fixed version", *PEERS.values()
    )
    yield "|---|---|---|---|---|---|" + "---|" * len(PEERS)
    for name, found in rows.items():
        yield row(
            name,
            found["fault"],
            found["source"],
            _law(found),
            _module(found),
            _twin(found),
            *(_mark(found, key) for key in PEERS),
        )


def _law(found: Mapping[str, Any]) -> str:
    told = found["broken"]
    laws = ", ".join(f"`{law}`" for law in told["laws"])
    if not found["is_fault"]:
        return f"fails: {laws}" if laws else "none, rightly"
    if found["caught"]:
        return laws or "raised: the report names the call"
    return f"missed ({laws})" if laws else "**missed**"


def _module(found: Mapping[str, Any]) -> str:
    at = found["broken"]["location"]
    if not at:
        return "-"
    text = f"`{at['module']}`" if at["module"] else f"no module: {at['where']}"
    return text if found["placed"] else f"{text} (not it)"


def _twin(found: Mapping[str, Any]) -> str:
    wrong = found["fixed_failed"]
    return f"**fails** {len(wrong)} times" if wrong else "passes"


def _mark(found: Mapping[str, Any], key: str) -> str:
    broken, fixed = (found["peers"][twin][key] for twin in ("broken", "fixed"))
    if broken is None:
        return "cannot"
    text = "alarm" if broken else "-"
    return f"{text}, fixed too" if fixed else text
