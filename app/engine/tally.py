"""Token ids counted where an engine hands them over, apart from the counts that are billed.

The ledger is compared with this: nothing here reads `Delta.counts`, nothing there reads this.
"""

from __future__ import annotations

from collections.abc import Sized

REMEMBERED = 4096


class TokenTally:
    """The number of one request's token ids so far, all choices together; whoever hands ids over adds it.

    Who keeps the ids of each choice has them counted there, at no cost per token.
    """

    __slots__ = ("_added", "_kept")

    def __init__(self) -> None:
        self._added = 0
        self._kept: list[Sized] = []

    @property
    def token_ids(self) -> int:
        """Token ids that were handed over."""
        return self._added + sum(map(len, self._kept))

    def add(self, token_ids: int) -> None:
        """Count token ids that were handed over."""
        self._added += token_ids

    def count(self, kept: Sized) -> None:
        """Count the ids that are in `kept` whenever the number is asked for."""
        self._kept.append(kept)


class Tallies:
    """The tally of each request: running, and ended but not asked for yet.

    Of the ended ones the oldest are forgotten beyond `remembered`.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._running: dict[str, TokenTally] = {}
        self._ended: dict[str, int] = {}

    def begin(self, rid: str) -> TokenTally:
        """A tally for a new request."""
        tally = self._running[rid] = TokenTally()
        return tally

    def end(self, rid: str) -> None:
        """No more ids of `rid` will reach its reader."""
        tally = self._running.pop(rid, None)
        if tally is None:
            return
        self._ended[rid] = tally.token_ids
        if len(self._ended) > self._remembered:
            del self._ended[next(iter(self._ended))]

    def of(self, rid: str) -> int:
        """Ids handed over for `rid` so far, 0 when unknown; an ended one is forgotten."""
        tally = self._running.get(rid)
        return self._ended.pop(rid, 0) if tally is None else tally.token_ids
