"""Build the documentation as a site: ``make site``.

The pages are the Markdown of the repository in its own folders, so their links hold
here, too. Added are a page for each source file and folder to which they link, and the
reference: the public names of each package with their docstrings, and the help of each
command. Any warning of MkDocs ends the build.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

from gradparity.conformance.cli.arguments import build_parser

__all__ = ["build_site", "main"]

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**/*.md",
    "examples/**/*.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "fixtures/data/README.md",
)
STYLE = "docs/site.css"
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)((?:#[^)\s]+)?)\)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml"}
_IMAGES = (".svg", ".png")
REFERENCE = {
    "scaler": "",
    "multiprocess": "",
    "conformance": "",
    # what a workload is written against; the rest is gradparity's own
    "fixtures": "Workload MoreCalls WorkloadError",
}
"""Package -> its documented names; all public ones if empty."""


def build_site(folder: Path) -> None:
    """Write the site into ``folder``.

    Raises:
        mkdocs.exceptions.Abort: if there was a warning; it ends the process with 1.
    """
    with tempfile.TemporaryDirectory() as staged, tempfile.TemporaryDirectory() as code:
        gather(Path(staged))
        _link_packages(Path(code) / "gradparity")
        config = load_config(
            str(ROOT / "mkdocs.yml"),
            docs_dir=staged,
            site_dir=str(folder),
            strict=True,
        )
        handlers = config.plugins["mkdocstrings"].config["handlers"]
        handlers["python"]["paths"] = [code]
        config.plugins.on_startup(command="build", dirty=False)
        # elsewhere, so that sources are shown as files of the package
        with contextlib.chdir(staged):
            build(config)
        config.plugins.on_shutdown()


def gather(staged: Path) -> None:
    """Write all pages into ``staged``, as they lie in the repository."""
    for page in sorted({page for found in PAGES for page in ROOT.glob(found)}):
        linked = partial(_linked, page=page, staged=staged)
        text = _LINK.sub(linked, page.read_text())
        _write(staged / page.relative_to(ROOT), text)
    _write(staged / STYLE, (ROOT / STYLE).read_text())
    for package, names in REFERENCE.items():
        _write(staged / "reference" / f"{package}.md", _reference(package, names))
    _write(staged / "reference" / "command.md", "\n".join(_commands()))


def _link_packages(package: Path) -> None:
    """Make a package that links only the documented folders.

    The reader of docstrings reads all files below a package, and the checkout also
    contains installed packages.
    """
    package.mkdir()
    for name in ("__init__.py", *REFERENCE):
        (package / name).symlink_to(ROOT / name)


def _linked(found: re.Match[str], page: Path, staged: Path) -> str:
    """Return a link for the site, on which source files and folders are pages."""
    target = page.parent / found[1]
    if not target.exists() or target.suffix == ".md":
        return found[0]
    place = staged / os.path.relpath(target, ROOT)
    if target.is_dir():
        if not (target / "README.md").exists():
            _write(place / "README.md", _listing(target, staged))
        return f"]({found[1].rstrip('/')}/README.md{found[2]})"
    if target.suffix in _IMAGES:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(target, place)
        return found[0]
    _write_source(target, place)
    return f"]({found[1]}.md)"


def _listing(folder: Path, staged: Path) -> str:
    lines = [f"# {folder.relative_to(ROOT)}", ""]
    for file in sorted(folder.glob("*.py")):
        _write_source(file, staged / file.relative_to(ROOT))
        lines.append(f"- [{file.name}]({file.name}.md)")
    return "\n".join(lines) + "\n"


def _write_source(file: Path, place: Path) -> None:
    language = _LANGUAGES.get(file.suffix, "text")
    text = f"# {file.relative_to(ROOT)}\n\n````{language}\n{file.read_text()}````\n"
    _write(place.with_name(f"{place.name}.md"), text)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _reference(package: str, names: str) -> str:
    """Return a page of the API reference, which mkdocstrings fills in."""
    module = f"gradparity.{package}"
    found = importlib.import_module(module)
    shown = names.split() or sorted(found.__all__)
    blocks = [f"::: {module}.{name}\n" for name in shown]
    return "\n".join([f"# {module}", "", found.__doc__ or "", "", *blocks])


def _commands() -> Iterator[str]:
    """Yield the help of each command."""
    parser = build_parser()
    yield from ("# Command line", "", *_block(parser.format_help()))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from (f"## gradparity {name}", "", *_block(command.format_help()))


def _block(text: str) -> Iterator[str]:
    yield from ("```text", text.rstrip(), "```", "")


def main(argv: Sequence[str] | None = None) -> int:
    """Build the site into a folder."""
    parser = argparse.ArgumentParser(prog="site", description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("parity-report/site")
    )
    folder = parser.parse_args(argv).folder.resolve()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    build_site(folder)
    print(f"site: {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
