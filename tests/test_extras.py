"""``make test-all`` runs with all packages that the extras name; none is skipped."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import gradparity
from gradparity.tests.extras import fail_without

ROOT = Path(gradparity.__file__).parent
NAME = re.compile(r"[A-Za-z0-9._-]+")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def named() -> set[str]:
    """Return packages of all extras, and those installed without dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        line for extra in project["optional-dependencies"].values() for line in extra
    ]
    alone = (ROOT / ".ci" / "alone.txt").read_text().splitlines()
    lines += [line for line in alone if not line.startswith("#")]
    found = {match[0] for match in map(NAME.match, lines) if match}
    return {normal(name) for name in found} - {"gradparity"}


def pinned(file: str) -> set[str]:
    lines = (ROOT / file).read_text().splitlines()
    return {normal(line.partition("==")[0]) for line in lines if line[:1] != "#"}


@pytest.mark.extras
def test_every_package_of_the_extras_is_installed() -> None:
    lost = []
    for name in sorted(named()):
        try:
            version(name)
        except PackageNotFoundError:
            lost.append(name)
    assert lost == [], "run make setup-all"


def test_every_package_of_the_extras_is_pinned_once() -> None:
    tests, rest = pinned("constraints.txt"), pinned("constraints-all.txt")
    assert tests & rest == set()
    assert named() - tests - rest == set()


def test_a_test_without_its_package_fails(request: pytest.FixtureRequest) -> None:
    request.node.add_marker(pytest.mark.extras("torch", "no_such_package"))
    told = "not installed: no_such_package; run make setup-all"
    with pytest.raises(pytest.fail.Exception, match=told):
        fail_without(request.node)
