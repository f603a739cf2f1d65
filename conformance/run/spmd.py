"""Commands under torchrun: rank 0 leads, the other agents follow."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ...multiprocess.elastic.agent import Agent
from ..output import say
from ..rank.devices import visible_gpus
from ..report.records import append_footer
from ..status import EXIT_CODES, plain

__all__ = ["main_on_torchrun"]

Command = Callable[[Sequence[str], Agent | None], int]
ON_RANKS = ("run", "replay")
"""Commands that use torchrun's ranks; all others run on rank 0 alone."""
_BROKEN = EXIT_CODES["error"]


def main_on_torchrun(arguments: Sequence[str], command: Command) -> int:
    """Do this process's part of a command; return the same exit code on all ranks.

    Args:
        arguments: command line, the same on all ranks.
        command: function that runs on rank 0 only, with its agent as argument.
    """
    leads = os.environ["RANK"] == "0"
    if not arguments or arguments[0] not in ON_RANKS:
        return command(arguments, None) if leads else 0
    with Agent(gpus=visible_gpus()) as agent:
        return _lead(agent, arguments, command) if leads else _follow(agent)


def _lead(agent: Agent, arguments: Sequence[str], command: Command) -> int:
    code = _BROKEN
    try:
        code = command(arguments, agent)
    except SystemExit as error:  # argparse exits for bad usage, and for --help
        code = error.code if isinstance(error.code, int) else 2
    finally:
        agent.finish(code)
    return code


def _follow(agent: Agent) -> int:
    def end_report(reason: str, path: str) -> None:
        if path and Path(path).is_file():
            append_footer(Path(path), reason)

    return agent.serve(lambda text: say(plain(text), error=True), end_report)
