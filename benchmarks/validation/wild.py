"""Run the scripts of docs/wild, each alone, and record what they show.

    gradparity bench wild [NAME...]

A finding is three files of one name: ``docs/wild/NAME.py`` shows the bug and needs only
torch and the package, ``docs/wild/NAME.md`` tells it to a maintainer, and
``benchmarks/results/wild/NAME.json`` is the record. This program writes the record,
the sentence of the page that depends on it, and the table of docs/wild/README.md. What
the survey of transformers wrote is run and listed, and left as it is.

Each script runs alone, so each holds the frame of ``wild_frame.py``, and what it needs
in the place of CUDA: ``--frame`` copies both there after a change. A script whose
package is not installed is named and not run; its record stays as it was.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from gradparity.conformance.files import write_whole

__all__ = [
    "BESIDE",
    "PACKAGES",
    "PAGES",
    "README",
    "RECORDS",
    "SURVEYED",
    "ScriptError",
    "frame",
    "package_of",
    "run_script",
    "stand_in",
    "told_by_page",
    "with_frame",
    "write_pages",
]

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "wild"
README = PAGES / "README.md"
RECORDS = ROOT / "benchmarks" / "results" / "wild"
TIMEOUT_S = 600.0
"""Time limit of one script in seconds; most take less than 20 s when idle."""
PACKAGES = {
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "fairscale": "fairscale",
    "megatron-core": "megatron",
    "megatron-fsdp": "megatron_fsdp",
    "peft": "peft",
    "pytorch-lightning": "pytorch_lightning",
    "ring-attention-pytorch": "ring_attention_pytorch",
    "torch": "torch",
    "torchmetrics": "torchmetrics",
    "transformers": "transformers",
    "trl": "trl",
    "vector-quantize-pytorch": "vector_quantize_pytorch",
}
"""Package name, which begins the name of a finding -> name of the imported module."""
BESIDE = {"peft": ("transformers",), "trl": ("transformers",)}
"""Package -> packages that it requires, so its script may import them."""
SURVEYED = "transformers-tp-"
"""Findings whose script, page and record the survey writes: see ``survey/``."""
PRINTED = ("parameter", "relative error", "reference", "verdict")
"""Keys that each script prints as ``key: value``, besides other lines."""
EXIT_CODES = {"bug": 1, "no bug": 0}
"""Verdict -> exit code of its script; a script without a verdict exits with another
code, such as 3."""
_FRAME = re.compile(r"# - The frame\b.*?\n# - The finding\n", re.DOTALL)
"""Text that all scripts share."""
_STAND_IN = re.compile(r"# - The stand-in for CUDA\b.*?\n# - On a CPU\n", re.DOTALL)
"""Text that all scripts of packages that ask for CUDA share."""


class ScriptError(Exception):
    """Raised if a script has no verdict, or its exit code contradicts its verdict."""


def package_of(name: str) -> str:
    """Return the package that a finding is about."""
    return next(p for p in PACKAGES if name.startswith(f"{p}-"))


def told_by_page(page: Path) -> dict[str, str]:
    """Return the parts of a page that people write: what, where, thread, result."""
    text = page.read_text()
    told = {"what": text.split("\n", 1)[0].removeprefix("# ")}
    for key in ("where", "thread", "result"):
        found = re.search(rf"^{key.title()}: (.+?)(?:\n\n|\Z)", text, re.M | re.S)
        if not found:
            raise ValueError(f"{page.name} has no paragraph '{key.title()}: ...'")
        told[key] = " ".join(found[1].split())
    return told


# - The frame


def frame() -> str:
    """Return the lines that all scripts share, including their two marks."""
    (found,) = _FRAME.findall((Path(__file__).parent / "wild_frame.py").read_text())
    lines = str(found).splitlines(keepends=True)
    return "".join(re.sub("  # type: ignore.*", "", line) for line in lines)


def stand_in() -> str:
    """Return the lines that stand for CUDA in some scripts, including their marks."""
    source = ROOT / "examples" / "stacks" / "without_cuda.py"
    (found,) = _STAND_IN.findall(source.read_text())
    return str(found)


def with_frame(script: str) -> str:
    """Return a script's text with the current frame in place of its old one."""
    new, count = _FRAME.subn(lambda _: frame(), script)
    if count != 1:
        raise ValueError(f"expected one frame between its two marks, found {count}")
    return _STAND_IN.sub(lambda _: stand_in(), new)


# - Running


def ran(script: Path) -> tuple[int, str, str]:
    """Run a script alone under a time limit; return exit code, stdout and stderr."""
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


def run_script(script: Path) -> tuple[dict[str, str], list[str]]:
    """Run a script alone; return its values by :data:`PRINTED`, and all its lines.

    Raises:
        ScriptError: if it came to no verdict.
    """
    code, out, err = ran(script)
    # packages log, too
    lines = [line for line in out.splitlines() if not line.startswith("[")]
    told = dict(line.split(": ", 1) for line in lines if line.startswith(PRINTED))
    verdict = told.get("verdict", "none")
    if EXIT_CODES.get(verdict) != code or {*told} != {*PRINTED}:
        raise ScriptError(
            f"{script.name}: verdict {verdict!r} and exit code {code}, "
            f"expected 'bug' and 1 or 'no bug' and 0\n{out}{err[-2000:]}"
        )
    return told, lines


def record_of(name: str) -> dict[str, Any]:
    """Return the record of one finding, from its script and its page."""
    started, clock = datetime.now(UTC), time.monotonic()
    told, lines = run_script(PAGES / f"{name}.py")
    package = package_of(name)
    return {
        "id": name,
        "package": package,
        "version": version(package),
        **told_by_page(PAGES / f"{name}.md"),
        "parameter": told["parameter"],
        "relative_error": told["relative error"],
        "reference": told["reference"],
        "verdict": told["verdict"],
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
        "output": lines,
    }


# - Pages


def write_pages(readme: Path = README, records: Path = RECORDS) -> None:
    """Replace the recorded parts of the pages by those of the records."""
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
    """Run, record, write the pages; exit code 1 unless every script shows its bug.

    A script that was not run shows nothing.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = sorted(p.stem for p in PAGES.glob("*.py"))
    parser.add_argument("name", nargs="*", help="a finding; all of them if left out")
    parser.add_argument(
        "--pages", action="store_true", help="run nothing: after an edit of the pages"
    )
    parser.add_argument(
        "--frame", action="store_true", help="write the frame anew, and run nothing"
    )
    options = parser.parse_args(arguments)
    chosen = options.name or names
    if unknown := set(chosen) - set(names):
        parser.error(f"no such finding: {', '.join(sorted(unknown))}")
    if options.frame:
        for name in chosen:
            script = PAGES / f"{name}.py"
            script.write_text(with_frame(script.read_text()))
        return 0
    RECORDS.mkdir(parents=True, exist_ok=True)
    shown = sum(_shows(name, run=not options.pages) for name in chosen)
    write_pages()
    print(f"{shown} of {len(chosen)} findings show")
    return int(shown < len(chosen))


def _shows(name: str, *, run: bool) -> bool:
    """Return True if a finding's script shows the bug; write its record.

    Findings of the survey keep their records.
    """
    surveyed, package = name.startswith(SURVEYED), package_of(name)
    if run and importlib.util.find_spec(PACKAGES[package]) is None:
        text = f"{name}: not run, {package} is not installed: make setup-all"
        print(text, flush=True)
        return False
    file = RECORDS / f"{name}.json"
    try:
        if surveyed and run:
            told, _ = run_script(PAGES / f"{name}.py")
            record = json.loads(file.read_text()) | told
        elif run:
            record = record_of(name)
        else:
            record = json.loads(file.read_text())
            record |= {} if surveyed else told_by_page(PAGES / f"{name}.md")
    except ScriptError as problem:
        print(problem, file=sys.stderr, flush=True)
        return False  # its record stays as it was
    print(f"{name}: {record['verdict']}", flush=True)
    if not surveyed:
        write_whole(file, json.dumps(record, indent=1) + "\n")
    return bool(record["verdict"] == "bug")


if __name__ == "__main__":
    sys.exit(main())
