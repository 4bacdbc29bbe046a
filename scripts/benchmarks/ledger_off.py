"""Our server with a journal that writes nothing, for `bench ledger`; `python -m` runs it.

The command line is the product's. Everything is as there, but for the journal: requests are taken,
streamed and ended without a row in the store. Not a setting: nobody should serve like this.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from app.api import server
from app.cli.main import main
from app.core import Counts, Prompt
from app.generation.history import Asked
from app.generation.journal import Journal
from app.generation.journal_entry import Entry
from app.pipeline import Pipeline
from app.runtime import Runtime
from app.stream.token_stream import TokenStream


class SilentJournal(Journal):
    """Takes what the journal takes and writes none of it."""

    async def reserve(
        self, asked: Asked, prompt: Prompt, stream: TokenStream, counts: Mapping[int, Counts]
    ) -> Entry:
        """An entry whose reservation counts as written."""
        entry = Entry(asked, prompt, stream, counts)
        entry.request_seq = 0
        return entry

    async def settle(self, entry: Entry, outcome: str) -> None:
        """Nothing."""

    def settle_later(self, entry: Entry, outcome: str) -> None:
        """Nothing."""


class RuntimeWithoutLedger(Runtime):
    """The composition of the product, with the silent journal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.journal = SilentJournal(
            self.database, self.prices, self.balance, self.traffic, self.log, self.settings.retention_s
        )
        self.pipeline = Pipeline(
            self.places, self.history, self.journal, self.traffic, self.checks, self.log, self.prefixes
        )


if __name__ == "__main__":
    server.Runtime = RuntimeWithoutLedger  # type: ignore[attr-defined]
    sys.exit(main())
