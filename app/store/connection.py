"""The writer's connection: units of a batch may leave something to be done once, at the batch's end."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TypeVar, cast

EndOfBatch = Callable[[sqlite3.Connection], None]
"""Done in the batch's transaction, after its last unit."""
Hook = TypeVar("Hook", bound=EndOfBatch)


class BatchConnection(sqlite3.Connection):
    """A connection that knows whether a batch is in progress, and what its end has to do."""

    _hooks: dict[Callable[[], EndOfBatch], EndOfBatch] | None = None

    def begin_batch(self) -> None:
        """From now on units may leave something to the batch's end."""
        self._hooks = {}

    def run_hooks(self) -> None:
        """Do what was left to the batch's end; until then nothing more can be."""
        hooks, self._hooks = self._hooks or {}, None
        for hook in hooks.values():
            hook(self)

    def end_batch(self) -> None:
        """The batch was committed, or undone with all that was left to its end."""
        self._hooks = None

    def hook(self, make: Callable[[], Hook]) -> Hook | None:
        """The batch's hook of that kind, made for the first unit that wants it; None outside a batch."""
        hooks = self._hooks
        if hooks is None:
            return None
        if make not in hooks:
            hooks[make] = make()
        return cast("Hook", hooks[make])


def at_end_of_batch(connection: sqlite3.Connection, make: Callable[[], Hook]) -> Hook | None:
    """See `BatchConnection.hook`; None on other connections, too."""
    return connection.hook(make) if isinstance(connection, BatchConnection) else None
