"""pdb on a rank, in the terminal of the parent."""

from __future__ import annotations

import fcntl
import pdb

from ..outcomes import Place
from .flight_recorder import placed
from .world import current_world


def debug(terminal: str, error: BaseException | None, text: str) -> None:
    """Let the user look at a failure of this rank; no limit ends the call meanwhile.

    Args:
        terminal: Path of the parent's terminal.
        error: The failure.
        text: Shown before.
    """
    with (
        placed(Place.DEBUGGER),
        open(terminal) as keys,
        open(terminal, "w") as screen,
    ):
        fcntl.flock(keys, fcntl.LOCK_EX)  # one rank after the other
        world = current_world()
        title = f"pdb on rank {world.rank} of {world.world_size}"
        screen.write(f"\n{text}\n>>>>>> {title} >>>>>>\n")
        debugger = pdb.Pdb(stdin=keys, stdout=screen)
        debugger.reset()
        debugger.interaction(None, None if error is None else error.__traceback__)
