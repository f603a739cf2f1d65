"""``gradparity init``: write a workload file for a model, and its CI job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..conformance.cli.arguments import Parser
from ..conformance.cli.converters import file, one_of
from ..conformance.files import create, writing
from ..conformance.output import say
from ..conformance.status import EXIT_CODES, USAGE, UsageError, WriteError, plain
from .job import FILES, Address, address_of_gradparity, job_text, parse_address

if TYPE_CHECKING:  # torch is imported when the options are known to be right
    from ..conformance.draft.source import Source

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files.

    Args:
        argv: arguments after ``gradparity init``; taken from ``sys.argv`` if None.

    Returns:
        The exit code: 0 the files run as they are; 2 bad usage, nothing is written; 3
        the disk is full; 4 the files contain a TODO.
    """
    try:
        arguments = list(sys.argv[1:] if argv is None else argv)
        parser = _parser()
        parser.check_options(arguments)
        parsed = parser.parse_args(arguments)
    except UsageError as error:
        return _fail(error, USAGE)
    except SystemExit as done:  # --help
        return int(done.code or 0)
    try:
        return _init(parsed)
    except UsageError as error:
        return _fail(error, USAGE)
    except WriteError as error:
        return _fail(error, EXIT_CODES["error"])
    except SystemExit as done:  # of the user's model
        text = f"{parsed.model} ended the program: exit({done.code!r})"
        return _fail(UsageError(text), USAGE)


def _fail(error: Exception, code: int) -> int:
    say(f"gradparity init: {plain(str(error))}", error=True)
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="gradparity init",
        description="Write a workload file for a model, ready to run. One forward "
        "on this machine finds batch and loss; FSDP2 shards the blocks.",
        epilog="exit codes: 0 the files run as they are, 2 usage, 3 a file cannot be "
        "written, 4 a file has a TODO for you",
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODULE:NAME",
        help="a class of models or a function that returns one, both without "
        "arguments; with --ci also an existing workload",
    )
    add(
        "--out",
        type=file,
        metavar="FILE",
        help="the workload file, in this folder or below (stack.py)",
    )
    add(
        "--ci",
        type=one_of("CI system", tuple(FILES)),
        metavar="|".join(FILES),
        help="also write the job that gates the workload",
    )
    add(
        "--source",
        type=_address,
        metavar="URL",
        help="with --ci: the repository of gradparity, URL[@REVISION], if the "
        "installation does not show it",
    )
    return parser


def _address(text: str) -> Address:
    address = parse_address(text)
    if address is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a repository: give one such as "
            "https://github.com/OWNER/gradparity"
        )
    return address


def _init(parsed: argparse.Namespace) -> int:
    spec = parsed.model
    if not all(spec.partition(":")):
        raise UsageError(
            f"{spec!r} is not module:attribute, such as mypackage.model:MyModel"
        )
    if parsed.source and not parsed.ci:
        raise UsageError("--source goes with --ci")
    out = parsed.out or Path("stack.py")
    workload = f"{_module(out)}:Workload"
    job = FILES.get(parsed.ci)
    if job is not None:
        _refuse_existing(job, "move it away, or write the job into it by hand")
    if job is None or parsed.out is not None:
        _refuse_existing(out, "choose another name with --out")
    # Import this late: all errors that need no torch are reported by now.
    from ..conformance.draft.source import find_source, load, names_workload

    if job is not None and names_workload(load(spec)):
        if parsed.out is not None:
            raise UsageError(f"{spec} is a workload already: leave out --out")
        return _write_job(parsed, job, spec)
    way = "choose another name with --out"
    if job is not None:
        way += (
            f", or write the job for it: init {_module(out)}:Workload --ci {parsed.ci}"
        )
    _refuse_existing(out, way)
    code = _write_workload(find_source(spec), out, workload)
    return code if job is None else max(code, _write_job(parsed, job, workload))


def _module(out: Path) -> str:
    """Return the name by which the current folder imports a file.

    Raises:
        UsageError: if the file cannot be imported.
    """
    parts = out.with_suffix("").parts
    if parts and _is_installed(parts[0]):
        raise UsageError(
            f"--out {out} would hide the installed module {parts[0]}: choose another "
            "name"
        )
    if out.suffix != ".py" or not all(part.isidentifier() for part in parts):
        raise UsageError(
            f"--out {out}: expected a Python file in this folder or below with names "
            "that can be imported, such as stack.py or mypackage/stack.py"
        )
    if len(parts) > 1 and Path(parts[0]).with_suffix(".py").is_file():
        raise UsageError(
            f"--out {out}: {parts[0]}.py is a module of this folder, so {parts[0]}/ is "
            "no package: choose another folder"
        )
    return ".".join(parts)


def _is_installed(module: str) -> bool:
    """Return True if a module of this name is found outside the current folder."""
    if module in sys.builtin_module_names or not module.isidentifier():
        return module.isidentifier()
    spec = find_spec(module)
    places = (
        [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    )
    here = Path.cwd()
    return any(each and not Path(each).is_relative_to(here) for each in places)


def _refuse_existing(path: Path, way: str) -> None:
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists: {way}")


def _write(path: Path, text: str) -> None:
    """Write a new file; raise if it exists."""
    # an exception may name a file whose name is not UTF-8
    raw = text.encode(errors="backslashreplace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = create(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    with writing(path), file:
        file.write(raw)


def _write_workload(source: Source, out: Path, workload: str) -> int:
    from ..conformance.draft.probe import probe
    from ..conformance.draft.text import refusal, workload_text

    module = workload.partition(":")[0]
    probed = probe(source)
    text = workload_text(source, probed, module)
    refused = "" if probed.problem else refusal(text) or probed.refused
    _write(out, workload_text(source, probed, module, refused))
    for line in probed.lines:
        say(plain(line))
    run = f"gradparity run --quick --workload {workload} --scaler none"
    if problem := probed.problem or refused:
        say(plain(f"{out} has a TODO: {problem}"))
        say(f"then: {run}")
        return EXIT_CODES["inconclusive"]
    say(f"wrote {out}; next: {run}")
    return 0


def _write_job(parsed: argparse.Namespace, path: Path, workload: str) -> int:
    import torch

    address = parsed.source or address_of_gradparity()
    version = torch.__version__.partition("+")[0]
    _write(path, text := job_text(parsed.ci, workload, address, version))
    if "TODO" in text:
        say(
            f"{path} has a TODO: this installation does not know the repository of "
            "gradparity. Write it into the file, or delete the file and give --source"
        )
        return EXIT_CODES["inconclusive"]
    if parsed.ci == "gitlab":
        say(f"wrote {path}; next: in .gitlab-ci.yml include: {path}")
    else:
        say(f"wrote {path}")
    return 0
