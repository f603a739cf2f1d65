"""Fill in the survey's texts, which are files in ``templates/``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

__all__ = ["filled"]

_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters["one_paragraph"] = lambda text: " ".join(text.split())
_ENVIRONMENT.filters["code"] = lambda text: f"`{text}`"


def filled(template: str, **values: Any) -> str:
    """Return the text of a template; an undefined or misspelt name raises an error."""
    return _ENVIRONMENT.get_template(template).render(**values)
