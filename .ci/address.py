"""Write the address of the repository into what a release carries.

    python .ci/address.py https://github.com/OWNER/gradparity

Forks and mirrors have other addresses, so the sources contain none. A release workflow
knows its own: metadata get project URLs, links of the README work on a package index,
and examples of CI name this repository as the source of the action.
"""

import re
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
NAMES_THE_ACTION = ("ci/templates/github-actions.yml", "docs/gate.md")
BEFORE_URLS = "[project.optional-dependencies]\n"
RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)]+)\)")


def main(url: str, root: Path = ROOT) -> None:
    """Edit the files below ``root``."""
    url = url.rstrip("/").removesuffix(".git")
    path = urlsplit(url).path.strip("/")
    if urlsplit(url).scheme != "https" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", path):
        sys.exit(f"{url!r} is no address such as https://github.com/OWNER/gradparity")
    pyproject = root / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    if "urls" in project:
        sys.exit(f"{pyproject} has project URLs already: {project['urls']}")
    at_tag = f"{url}/blob/v{project['version']}"
    urls = {
        "Repository": url,
        "Documentation": f"{at_tag}/README.md",
        "Changelog": f"{at_tag}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    table = "".join(f'{name} = "{value}"\n' for name, value in urls.items())
    before, heading, after = text.partition(BEFORE_URLS)
    pyproject.write_text(
        f"{before}[project.urls]\n{table}\n{heading}{after}", encoding="utf-8"
    )
    replace(root / "README.md", RELATIVE_LINK, rf"]({at_tag}/\1)")
    for name in NAMES_THE_ACTION:
        replace(root / name, re.compile("OWNER/gradparity"), path)


def replace(file: Path, pattern: re.Pattern[str], by: str) -> None:
    """Replace all matches; exit with an error if nothing matches."""
    text, count = pattern.subn(by, file.read_text(encoding="utf-8"))
    if not count:
        sys.exit(f"{file} has no match of {pattern.pattern}")
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
