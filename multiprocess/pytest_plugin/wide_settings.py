"""Settings of fixtures with a wider scope than a function, on a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..rank.global_state import Change


class WideSettings:
    """Settings of a fixture with a wider scope than a function."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._before: list[Any] = []
        self._before_its_end: list[Any] | None = None

    def set_up(self) -> None:
        """Note the settings before the fixture's setup, or before its next part."""
        from ..rank import global_state

        self._before = global_state.settings()

    def keep(self) -> None:
        """Keep what the fixture's setup has changed since `set_up`."""
        from ..rank import global_state

        self._changes += global_state.keep_changes(self._before)

    def begin_to_end(self) -> None:
        """Note the settings before the fixture's own teardown, which comes next."""
        from ..rank import global_state

        self._before_its_end = global_state.settings()

    def end(self) -> None:
        """Keep what the teardown has changed; undo what it has left."""
        from ..rank import global_state

        if self._before_its_end is not None:
            global_state.keep_changes(self._before_its_end)
        global_state.undo_changes(self._changes)
