"""Run the scripts of docs/wild, each alone, and record what they show.

    python -m gradparity.benchmarks.wild [NAME...]

A finding is three files of one name: ``docs/wild/NAME.py`` shows the bug and needs only
torch and the package, ``docs/wild/NAME.md`` tells it to a maintainer, and
``benchmarks/results/wild/NAME.json`` is the record. This program writes the record,
the sentence of the page that depends on it, and the table of docs/wild/README.md. What
the survey of transformers wrote is run and listed, and left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gradparity.benchmarks.tables import row, write_between

__all__ = [
    "BESIDE",
    "PACKAGES",
    "PAGES",
    "README",
    "RECORDS",
    "SURVEYED",
    "package_of",
    "told_by_page",
    "write_pages",
]

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "wild"
README = PAGES / "README.md"
RECORDS = ROOT / "benchmarks" / "results" / "wild"
TIMEOUT_S = 600.0
"""Of one script; most take less than 20 s on an idle machine."""
PACKAGES = {
    "deepspeed": "deepspeed",
    "megatron-core": "megatron",
    "peft": "peft",
    "torch": "torch",
    "transformers": "transformers",
}
"""Name in the registry, the first part of a finding's name -> what one imports."""
BESIDE = {"peft": ("transformers",)}
"""What a package requires and a script for it may use, too."""
SURVEYED = "transformers"
"""Findings whose script, page and record ``gradparity survey transformers`` writes."""
PRINTED = ("parameter", "relative error", "reference", "verdict")
"""What each script prints as ``key: value``, besides other lines."""


class ScriptError(Exception):
    """A script came to no verdict, or its exit code says another thing."""


def package_of(name: str) -> str:
    """The package that a finding is about."""
    return next(p for p in PACKAGES if name.startswith(f"{p}-"))


def told_by_page(page: Path) -> dict[str, str]:
    """What a page says by hand: heading, where, thread, what the judge told."""
    text = page.read_text()
    told = {"what": text.split("\n", 1)[0].removeprefix("# ")}
    for key in ("where", "thread", "judge"):
        found = re.search(rf"^{key.title()}: (.+?)(?:\n\n|\Z)", text, re.M | re.S)
        if not found:
            raise ValueError(f"{page.name} has no paragraph '{key.title()}: ...'")
        told[key] = " ".join(found[1].split())
    return told


# - Running


def ran(script: Path) -> tuple[int, str, str]:
    """Exit code and output of a script that is run alone, under a time limit."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # its ranks, too
            out, err = process.communicate()
    return process.returncode, out, err


def run_script(name: str) -> dict[str, Any]:
    """The record of one finding, from its script and its page."""
    script = PAGES / f"{name}.py"
    started, clock = datetime.now(UTC), time.monotonic()
    code, out, err = ran(script)
    printed = dict(
        line.split(": ", 1) for line in out.splitlines() if line.startswith(PRINTED)
    )
    verdict = printed.get("verdict", "none")
    if (verdict, code) not in {("bug", 1), ("no bug", 0)}:
        raise ScriptError(
            f"{script.name}: verdict {verdict!r} and exit code {code}, "
            f"expected 'bug' and 1 or 'no bug' and 0\n{out}{err[-2000:]}"
        )
    package = package_of(name)
    return {
        "id": name,
        "package": package,
        "version": version(package),
        **told_by_page(PAGES / f"{name}.md"),
        "parameter": printed["parameter"],
        "relative_error": printed["relative error"],
        "reference": printed["reference"],
        "verdict": verdict,
        "script": f"docs/wild/{name}.py",
        "command": f"python docs/wild/{name}.py",
        "date": f"{started:%Y-%m-%d}",
        "seconds": round(time.monotonic() - clock, 1),
        "versions": {
            "torch": version("torch"),
            "python": platform.python_version(),
            **{p: version(p) for p in (package, *BESIDE.get(package, ()))},
        },
        "machine": "2 cores, CPU, gloo",
        "output": out.splitlines(),
    }


# - Pages


def write_pages(readme: Path = README, records: Path = RECORDS) -> None:
    """Put what is recorded in the place of what the pages show of it."""
    found = [json.loads(p.read_text()) for p in sorted(records.glob("*.json"))]
    write_between(readme, {"findings": "\n".join(_findings(found))})
    for record in found:
        if record["id"].startswith(SURVEYED):
            continue
        page = readme.parent / f"{record['id']}.md"
        write_between(page, {"made": _made(record)})


def _findings(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield row("package", "finding", "off by", "parameter", "confirmed", "thread")
    yield row(*["---"] * 6)
    for r in records:
        link = f"[{r['what'].split(': ', 1)[-1]}]({r['id']}.md)"
        shown = f"[script]({r['id']}.py), {r['date']}: {r.get('verdict', 'bug')}"
        package = f"{r['package']} {r['version']}"
        error = r["relative_error"]
        off = f"{error:.2g}" if isinstance(error, float) else error.split(":")[0]
        yield row(package, link, off, r["parameter"], shown, r["thread"])


def _made(record: dict[str, Any]) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in record["versions"].items())
    return (
        f"Shown by [{record['id']}.py]({record['id']}.py): {record['verdict']}. "
        f"Parameter: {record['parameter']}. Relative error: "
        f"{record['relative_error']}. Reference: {record['reference']}. "
        f"{record['date']}, {versions}, {record['machine']}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, record, write the pages; exit code 1 unless every script shows its bug."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = sorted(p.stem for p in PAGES.glob("*.py"))
    parser.add_argument("name", nargs="*", help="a finding; all of them if left out")
    parser.add_argument(
        "--pages", action="store_true", help="run nothing: after an edit of the pages"
    )
    options = parser.parse_args(arguments)
    chosen = options.name or names
    if unknown := set(chosen) - set(names):
        parser.error(f"no such finding: {', '.join(sorted(unknown))}")
    RECORDS.mkdir(parents=True, exist_ok=True)
    bad = 0
    for name in chosen:
        file = RECORDS / f"{name}.json"
        if name.startswith(SURVEYED):
            if not options.pages:
                code, *_ = ran(PAGES / f"{name}.py")
                print(f"{name}: exit code {code}", flush=True)
                bad += code != 1
            continue
        try:
            if options.pages:
                told = told_by_page(PAGES / f"{name}.md")
                record = json.loads(file.read_text()) | told
            else:
                record = run_script(name)
        except ScriptError as problem:
            print(problem, file=sys.stderr, flush=True)
            bad += 1
            continue  # its record stays as it was
        bad += record["verdict"] != "bug"
        print(f"{name}: {record['verdict']}, {record['seconds']} s", flush=True)
        new = file.with_suffix(".new")
        new.write_text(json.dumps(record, indent=1) + "\n")
        new.replace(file)
    write_pages()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
