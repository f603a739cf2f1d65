"""Files beside the checkout hide no installed package."""

import sys
from pathlib import Path

import pytest

import gradparity

ABOVE = Path(gradparity.__file__).parents[1]
INSTALLED = Path(pytest.__file__).parents[1]


def test_installed_packages_come_before_what_lies_beside_the_checkout() -> None:
    """The checkout is a package, so pytest puts the folder above it on the path."""
    path = [Path(entry or ".").resolve() for entry in sys.path]
    assert ABOVE not in path[: path.index(INSTALLED)]
