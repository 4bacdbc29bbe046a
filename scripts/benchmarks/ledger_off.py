"""Our server with a journal that writes nothing, for `bench ledger`; `python -m` runs it.

The command line is the product's. Everything is as there, but for the journal: requests are taken,
streamed and ended without a row in the store. Not a setting: nobody should serve like this.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from app.api import server
from app.cli.main import main
from app.core import Counts, Key, Prompt
from app.journal.entry import JournalEntry
from app.journal.history import LoadedTurn
from app.journal.journal import Journal
from app.journal.retention import Retention
from app.runtime import Runtime
from app.safety.session.screened import session_of
from app.stream.token_stream import TokenStream


class SilentJournal(Journal):
    """Takes what the journal takes and writes none of it."""

    async def reserve(
        self,
        turn: LoadedTurn,
        prompt: Prompt,
        stream: TokenStream,
        counts: Mapping[int, Counts],
        *,
        key: Key | None = None,
    ) -> JournalEntry:
        """An entry whose reservation counts as written."""
        reserved: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        reserved.set_result(0)
        terms = self._reservation(turn.request, prompt, None if key is None else key.id).terms
        return JournalEntry(turn, prompt, stream, counts, reserved=reserved, terms=terms)

    async def settle(self, entry: JournalEntry, finish: str) -> None:
        """Nothing."""

    def settle_later(self, entry: JournalEntry, finish: str) -> None:
        """Nothing."""


class RuntimeWithoutLedger(Runtime):
    """The composition of the product, with the silent journal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.journal = SilentJournal(
            self.database,
            self.prices,
            self.balance,
            self.traffic,
            log=self.log,
            retention=Retention(self.database, self.settings.retention_s),
        )
        self.pipeline = self.build_pipeline(session_of(self.safety))


if __name__ == "__main__":
    server.Runtime = RuntimeWithoutLedger  # type: ignore[attr-defined]
    sys.exit(main())
