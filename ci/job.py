"""CI job that gates a workload, and the address from which it installs gradparity."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from .. import __version__
from ..conformance.templates import filled

__all__ = ["FILES", "Address", "address_of_gradparity", "job_text", "parse_address"]

FILES = {
    "github": Path(".github", "workflows", "gradparity.yml"),
    "gitlab": Path(".gitlab", "gradparity.yml"),
}
"""CI system -> path of the job file."""
_TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True, kw_only=True)
class Address:
    """A Git repository on a server, and the revision to check out."""

    host: str
    path: str
    """Owner and name: ``OWNER/gradparity``."""
    revision: str = f"v{__version__}"
    known: bool = True

    @property
    def url(self) -> str:
        """Address for ``git clone``, without user name or token."""
        return f"https://{self.host}/{self.path}"


UNKNOWN = Address(host="GIT-HOST", path="OWNER/gradparity", known=False)


def parse_address(text: str) -> Address | None:
    """Parse ``https://HOST/OWNER/NAME[.git][@REVISION]`` or ``git@HOST:OWNER/NAME``.

    Returns:
        The address; None for a text of another form.
    """
    text = re.sub(r"^git@([\w.-]+):", r"https://\1/", text.removeprefix("git+"))
    parts = urlsplit(text)
    path, _, revision = parts.path.strip("/").partition("@")
    path = path.removesuffix(".git")
    fits = re.fullmatch(r"[\w.-]+(/[\w.-]+)+", path)
    if parts.scheme not in ("https", "http", "ssh") or not parts.hostname or not fits:
        return None
    if not re.fullmatch(r"[\w./-]*", revision):
        return None
    port = f":{parts.port}" if parts.port and parts.scheme != "ssh" else ""
    address = Address(host=f"{parts.hostname}{port}", path=path)
    return replace(address, revision=revision) if revision else address


def address_of_gradparity() -> Address:
    """Return the repository that the installed gradparity comes from.

    pip stores the origin of a package with its metadata (PEP 610). If the origin is a
    checkout, the address is that of its git remote ``origin``. A package from an index
    has no origin: a release names its repository among its project URLs.
    """
    try:
        installed = distribution("gradparity")
    except PackageNotFoundError:
        return UNKNOWN
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "")
    except ValueError:
        urls = dict(
            line.split(", ", 1)
            for line in installed.metadata.get_all("Project-URL") or ()
        )
        return parse_address(urls.get("Repository", "")) or UNKNOWN
    url, vcs = origin["url"], origin.get("vcs_info")
    if vcs:
        revision = vcs.get("requested_revision") or vcs["commit_id"]
        return parse_address(f"{url}@{revision}") or UNKNOWN
    if not url.startswith("file:"):
        return UNKNOWN
    folder = url2pathname(urlsplit(url).path)
    asked = ["git", "-C", folder, "remote", "get-url", "origin"]
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(asked, capture_output=True, text=True, check=True)
        return parse_address(answer.stdout.strip()) or UNKNOWN
    return UNKNOWN


def job_text(system: str, workload: str, address: Address, torch: str) -> str:
    """Return the text of a job file.

    Args:
        system: a key of :data:`FILES`.
        workload: ``module:attribute``.
        address: address of gradparity.
        torch: version of torch to install.
    """
    if system == "github" and address.host != "github.com":
        address = UNKNOWN  # an action of another server cannot be used
    return filled(
        _TEMPLATES / f"stack-{system}.yml.jinja",
        workload=workload,
        address=address,
        torch=torch,
        python=".".join(map(str, sys.version_info[:2])),
        project=_project(),
    )


def _project() -> str:
    """Return the pip arguments that install the project in this folder."""
    if Path("pyproject.toml").is_file() or Path("setup.py").is_file():
        return " -e ."
    return " -r requirements.txt" if Path("requirements.txt").is_file() else ""
