"""Print safely on any terminal and in any CI log.

CI systems execute commands that they find in the log of a job. Text from a report must
not contain any, so a blank is inserted inside the prefix of a command.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, TextIO, cast

from .files import writing

if TYPE_CHECKING:  # importing rich takes a while, and most commands do not need it
    from rich.console import Console

__all__ = ["console", "harmless", "say", "say_file"]

_COMMAND = re.compile(
    r"(?m)"
    r"(?:^|(?<=\r))(\s*:)(?=:)"  # GitHub: ::error::, at the start of a line
    r"|(#)(?=#\w*\[)"  # GitHub ##[..], Azure ##vso[, TeamCity ##teamcity[: anywhere
    r"|^([-+~^])(?=\3\3\s)"  # Buildkite: a group begins by --- or the like
    r"|(section_)(?=(?:start|end):)"  # GitLab: between control characters
    r"|(travis_)(?=fold:)"
)


def harmless(text: str, mark: Callable[[str], str] = "{} ".format) -> str:
    """Return the text with all commands of CI systems broken.

    Args:
        text: lines of text.
        mark: returns the replacement for the last character of a command's prefix.
    """
    return _COMMAND.sub(lambda found: found[0][:-1] + mark(found[0][-1]), text)


def say(text: str = "", *, error: bool = False) -> None:
    """Print lines on standard output, or on standard error."""
    stream = _Stream(sys.stderr if error else sys.stdout)
    stream.write(f"{text}\n")
    stream.flush()


def say_file(text: str) -> None:
    """Print a file for another program, unchanged and always in UTF-8."""
    with writing(_NAMES[True]):
        sys.stdout.flush()
        raw = text.encode(errors="backslashreplace")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.buffer.write(raw)
        else:  # stdout was replaced, by a test or a calling program
            sys.stdout.write(raw.decode())
        sys.stdout.flush()


def console(*, error: bool = False) -> Console:
    """Return a rich console with the same safe output as :func:`say`."""
    from rich.console import Console

    stream = _Stream(sys.stderr if error else sys.stdout)
    return Console(file=cast("IO[str]", stream))


_NAMES = {True: "standard output", False: "standard error"}


class _Stream:
    """Output stream that accepts any text and breaks CI commands in it.

    The class is not a subclass of `io.IOBase`, whose finalizer flushes: the wrapped
    stream may be closed by then, and from Python 3.13 on the error would be printed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._name = _NAMES[stream is sys.stdout]

    @property
    def encoding(self) -> str:
        """Encoding of the terminal or file."""
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        with writing(self._name):
            self._stream.write(self._encodable(harmless(text)))
        return len(text)

    def flush(self) -> None:
        with writing(self._name):
            self._stream.flush()

    def _encodable(self, text: str) -> str:
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            ascii_ = text.replace("\u2026", "...")
            raw = ascii_.encode(self.encoding, errors="backslashreplace")
            return raw.decode(self.encoding)
        return text
