"""The ledger: one row a request, reserved before its first token is released, settled exactly once.

    reserve ──► reserved ──settle──► settled
                 ▲    │              (final; the daily sums change in the same unit)
                 └────┘ checkpoint (app.store.checkpoints)

Every function is a unit of the store, or a part of one. Money is integer micro-dollars and is
rounded in one place, `cost_micro_usd`. A row belongs to the UTC day on which it was reserved,
whatever the clock does afterwards. Nothing here knows of streams or engines.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import add
from typing import Any, NamedTuple

from app.core import Usage

_US_PER_S = 1_000_000
NO_KEY = "none"
"""The key of requests that were made without a stored one: in open mode, or with the setting `api_key`."""
DayKey = tuple[int, str, str, str]
"""A row of `usage_daily`: day, model, owner, key."""


class Price(NamedTuple):
    """Micro-dollars per 1,000 tokens."""

    input_micro_usd_per_1k: int = 0
    cached_micro_usd_per_1k: int = 0
    output_micro_usd_per_1k: int = 0


def cost_micro_usd(usage: Usage, price: Price) -> int:
    """The price of a request in micro-dollars. The only rounding is here: half up, of the row's whole sum."""
    cached = min(usage.cached_tokens, usage.prompt_tokens)
    released = max(usage.completion_tokens - usage.withheld_tokens, 0)
    per_1k = (
        (usage.prompt_tokens - cached) * price.input_micro_usd_per_1k
        + cached * price.cached_micro_usd_per_1k
        + released * price.output_micro_usd_per_1k
    )
    return (per_1k + 500) // 1000


def day_of(at_us: int) -> int:
    """The UTC day of a time, as 20261121."""
    at = datetime.fromtimestamp(at_us // _US_PER_S, UTC)
    return at.year * 10_000 + at.month * 100 + at.day


class BillingTerms(NamedTuple):
    """The terms that a request was reserved under and is billed by; its row never changes them."""

    day: int
    model: str
    owner: str
    price: Price
    key_id: str = NO_KEY

    @property
    def daily_key(self) -> DayKey:
        """The row of `usage_daily` that the request is added to."""
        return self.day, self.model, self.owner, self.key_id


@dataclass(frozen=True, slots=True)
class Reservation:
    """A request before its first token; see the table `requests`."""

    request_id: str
    owner: str
    model: str
    created_at_us: int
    max_tokens: int
    prompt_tokens: int
    price: Price
    stream: bytes
    idempotency_key: str | None = None
    fingerprint: bytes | None = None
    rerendered: str | None = None
    key_id: str = NO_KEY
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The caller's own names and values; `app.store.usage` groups by them."""

    @property
    def terms(self) -> BillingTerms:
        """The terms that the row will be billed by."""
        return BillingTerms(day_of(self.created_at_us), self.model, self.owner, self.price, self.key_id)


@dataclass(frozen=True, slots=True)
class Settlement:
    """The end of a request: its final counts, and a finish reason or an error's code."""

    request_seq: int
    usage: Usage
    finish: str
    settled_at_us: int
    reconciled: bool = False
    """Settled at its checkpoint, because the process that generated it died."""
    terms: BillingTerms | None = None
    """The terms of its reservation, where the caller has them; otherwise they are read from the row."""


class UnsettledRequest(NamedTuple):
    """A reservation not yet settled, with the counts of its last checkpoint."""

    seq: int
    id: str
    owner: str
    conversation_seq: int | None
    usage: Usage


def reserve(c: sqlite3.Connection, r: Reservation, conversation_seq: int | None) -> int:
    """Open the row of a request; returns its seq. Raises sqlite3.IntegrityError for an id twice."""
    cursor = c.execute(
        "INSERT INTO requests (id, owner, model, conversation_seq, state, idempotency_key, fingerprint,"
        " created_at_us, day, max_tokens, prompt_tokens, input_micro_usd_per_1k, cached_micro_usd_per_1k,"
        " output_micro_usd_per_1k, rerendered, stream, key_id, metadata)"
        " VALUES (?, ?, ?, ?, 'reserved', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            r.request_id,
            r.owner,
            r.model,
            conversation_seq,
            r.idempotency_key,
            r.fingerprint,
            r.created_at_us,
            day_of(r.created_at_us),
            r.max_tokens,
            r.prompt_tokens,
            *r.price,
            r.rerendered,
            r.stream,
            r.key_id,
            _metadata_json(r.metadata),
        ),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _metadata_json(metadata: Mapping[str, str]) -> str | None:
    """JSON for SQLite, which would not give back lone surrogates; None for no pairs."""
    if not metadata:
        return None
    return json.dumps(metadata, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")


def settle(c: sqlite3.Connection, s: Settlement) -> bool:
    """Close a row with its final counts and add it to its day's sums.

    False, and nothing is done, when it is settled already or was never reserved.
    """
    terms = s.terms or terms_of(c, s.request_seq)
    if terms is None:
        return False
    cost = cost_micro_usd(s.usage, terms.price)
    if c.execute(_CLOSE, _closing(s, cost)).rowcount != 1:
        return False
    _add_to_day(c, terms.daily_key, (1, *s.usage, cost))
    return True


_CLOSE = (
    "UPDATE requests SET state = 'settled', prompt_tokens = ?, completion_tokens = ?, cached_tokens = ?,"
    " reasoning_tokens = ?, withheld_tokens = ?, cost_micro_usd = ?, outcome = ?, reconciled = ?,"
    " settled_at_us = max(?, created_at_us) WHERE seq = ? AND state = 'reserved'"
)


def _closing(s: Settlement, cost: int) -> tuple[object, ...]:
    return (*s.usage, cost, s.finish, s.reconciled, s.settled_at_us, s.request_seq)


def settle_all(c: sqlite3.Connection, settlements: Sequence[tuple[Settlement, BillingTerms]]) -> None:
    """Close many rows at once. Raises AlreadySettled: the batch is then to be undone."""
    closings: list[tuple[object, ...]] = []
    days: dict[DayKey, tuple[int, ...]] = {}
    for s, terms in settlements:
        cost = cost_micro_usd(s.usage, terms.price)
        closings.append(_closing(s, cost))
        added, key = (1, *s.usage, cost), terms.daily_key
        days[key] = tuple(map(add, days[key], added)) if key in days else added
    if c.executemany(_CLOSE, closings).rowcount != len(closings):
        raise AlreadySettled
    for key, sums in days.items():
        _add_to_day(c, key, sums)


class AlreadySettled(Exception):
    """Raised when one of several settlements met a settled row; each must then be tried alone."""


class SettleUnit:
    """The unit that settles a request and then, if it was open, does what else belongs to its end.

    Returns the completion tokens that the row has then. Several in a row settle at once.
    """

    __slots__ = ("end", "settlement")

    def __init__(
        self, settlement: Settlement, end: Callable[[sqlite3.Connection], None] | None = None
    ) -> None:
        self.settlement = settlement
        self.end = end

    def __call__(self, c: sqlite3.Connection) -> int:
        """Settle this one."""
        s = self.settlement
        if not settle(c, s):
            return completion_tokens_of(c, s.request_seq)
        if self.end is not None:
            self.end(c)
        return s.usage.completion_tokens

    @staticmethod
    def run_many(c: sqlite3.Connection, units: Sequence[SettleUnit]) -> list[int]:
        """Settle several; see app.store.batch. Raises AlreadySettled."""
        settlements = [unit.settlement for unit in units]
        settle_all(c, [(s, s.terms or _known_terms(c, s.request_seq)) for s in settlements])
        for unit in units:
            if unit.end is not None:
                unit.end(c)
        return [s.usage.completion_tokens for s in settlements]


def _known_terms(c: sqlite3.Connection, request_seq: int) -> BillingTerms:
    terms = terms_of(c, request_seq)
    if terms is None:
        raise AlreadySettled
    return terms


def terms_of(c: sqlite3.Connection, request_seq: int) -> BillingTerms | None:
    """The terms of a reservation; None where there is none."""
    row = c.execute(
        "SELECT day, model, owner, key_id, input_micro_usd_per_1k, cached_micro_usd_per_1k,"
        " output_micro_usd_per_1k FROM requests WHERE seq = ?",
        (request_seq,),
    ).fetchone()
    if row is None:
        return None
    day, model, owner, key_id, *price = row
    return BillingTerms(day, model, owner, Price(*price), key_id)


def completion_tokens_of(c: sqlite3.Connection, request_seq: int) -> int:
    """A row's completion tokens, as they are in the store."""
    row = c.execute("SELECT completion_tokens FROM requests WHERE seq = ?", (request_seq,)).fetchone()
    return 0 if row is None else int(row[0])


def _add_to_day(c: sqlite3.Connection, key: DayKey, added: Sequence[int]) -> None:
    c.execute(
        "INSERT INTO usage_daily (day, model, owner, key_id, requests, prompt_tokens, completion_tokens,"
        " cached_tokens, reasoning_tokens, withheld_tokens, cost_micro_usd)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
        " requests = requests + excluded.requests,"
        " prompt_tokens = prompt_tokens + excluded.prompt_tokens,"
        " completion_tokens = completion_tokens + excluded.completion_tokens,"
        " cached_tokens = cached_tokens + excluded.cached_tokens,"
        " reasoning_tokens = reasoning_tokens + excluded.reasoning_tokens,"
        " withheld_tokens = withheld_tokens + excluded.withheld_tokens,"
        " cost_micro_usd = cost_micro_usd + excluded.cost_micro_usd",
        (*key, *added),
    )


_OPEN = (
    "SELECT seq, id, owner, conversation_seq, prompt_tokens, completion_tokens, cached_tokens,"
    " reasoning_tokens, withheld_tokens FROM requests WHERE state = 'reserved'"
)


def unsettled_requests(c: sqlite3.Connection) -> list[UnsettledRequest]:
    """Every reservation that is neither settled nor suspended, oldest first."""
    query = _OPEN + " AND NOT EXISTS (SELECT 1 FROM suspended WHERE request_seq = seq) ORDER BY seq"  # noqa: S608  # a constant
    return [_open_request(row) for row in c.execute(query)]


def unsettled_request(c: sqlite3.Connection, request_seq: int) -> UnsettledRequest | None:
    """A reservation not yet settled; None where there is none."""
    row = c.execute(_OPEN + " AND seq = ?", (request_seq,)).fetchone()
    return None if row is None else _open_request(row)


def _open_request(row: Sequence[Any]) -> UnsettledRequest:
    seq, request_id, owner, conversation_seq, *usage = row
    return UnsettledRequest(seq, request_id, owner, conversation_seq, Usage(*usage))
