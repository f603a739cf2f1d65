"""Render templates of jinja: pages with escaped values, and files of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .files import write_whole
from .status import as_usage, plain

__all__ = ["filled", "page", "write_page"]

# StrictUndefined: a misspelt name in a template fails here, not on a reader's page
_USUAL: dict[str, Any] = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "undefined": StrictUndefined,
}


def filled(template: Path, /, **values: Any) -> str:
    """Fill in a template of a text file; values are not escaped."""
    environment = Environment(keep_trailing_newline=True, **_USUAL)
    source = template.read_text(encoding="utf-8")
    return environment.from_string(source).render(**values)


def page(
    template: Path, filters: Mapping[str, Callable[..., object]], /, **values: Any
) -> str:
    """Fill in a template of an HTML page; text in values is escaped.

    Control characters are removed from text in values.

    Args:
        template: path of the template; included files are in the same folder.
        filters: further filters of the template, by name.
        values: values of the names in the template.
    """
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        finalize=_printable,
        **_USUAL,
    )
    environment.filters |= filters
    return environment.get_template(template.name).render(**values)


def _printable(value: object) -> object:
    """Remove control characters from text, except from our own markup."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return plain(value)
    return value


def write_page(folder: Path, text: str) -> Path:
    """Write ``index.html`` into a folder atomically.

    Raises:
        UsageError: if the folder cannot be written.
    """
    path = folder / "index.html"
    with as_usage(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path
