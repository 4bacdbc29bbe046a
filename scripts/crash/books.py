"""The ledger and the conversations of the file itself, read beside the running server."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from app.store.indexing import index
from app.store.words import register
from scripts.crash.findings import Findings

PRICES = {"input": "0.00137", "cached_input": "0.00041", "output": "0.00733"}
_MICRO_PER_1K = (1370, 410, 7330)


class StoredAnswer(NamedTuple):
    """One answer of a stored turn."""

    choice: int
    text: str
    status: str
    finish_reason: str | None


class Bill(NamedTuple):
    """What must never change once a request is settled."""

    state: str
    outcome: str | None
    reconciled: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    withheld_tokens: int
    cost_micro_usd: int
    settled_at_us: int | None

    @property
    def released_tokens(self) -> int:
        """Completion tokens that were released, and are therefore reported and billed."""
        return self.completion_tokens - self.withheld_tokens

    @property
    def cut_tokens(self) -> int:
        """What was withheld of an answer that reached its length: tokens in doubt at its end."""
        return self.withheld_tokens if self.outcome == "length" else 0


@dataclass
class Row:
    """A request as the store has it."""

    seq: int
    id: str
    bill: Bill
    prices: tuple[int, int, int]
    max_tokens: int
    idempotency_key: str | None
    conversation_id: str | None
    question: str | None = None
    answers: list[StoredAnswer] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        """Whether the server died before it was settled."""
        return self.bill.reconciled == 1

    @property
    def cost_micro_usd(self) -> int:
        """What it must cost, by arithmetic of our own."""
        b, (of_input, of_cached, of_output) = self.bill, self.prices
        thousandths = (
            (b.prompt_tokens - b.cached_tokens) * of_input
            + b.cached_tokens * of_cached
            + b.released_tokens * of_output
        )
        whole, rest = divmod(thousandths, 1000)
        return whole + (rest >= 500)


_BILL = ", ".join(Bill._fields)
_ROWS = (
    f"SELECT r.seq, r.id, r.max_tokens, r.idempotency_key, c.id, input_micro_usd_per_1k,"  # noqa: S608  # our own names
    f" cached_micro_usd_per_1k, output_micro_usd_per_1k, {_BILL}"
    " FROM requests AS r LEFT JOIN conversations AS c ON c.seq = r.conversation_seq WHERE r.seq > ?"
)
_ANSWERS = (
    "SELECT r.id, q.text, a.choice, a.text, a.status, a.finish_reason FROM requests AS r"
    " JOIN messages AS a ON a.request_seq = r.seq JOIN messages AS q ON q.seq = a.parent_seq"
    " WHERE r.seq > ? ORDER BY a.seq"
)
_SUMS = (
    "count(*), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), sum(reasoning_tokens),"
    " sum(withheld_tokens), sum(cost_micro_usd)"
)
_KEY = "day, model, owner, key_id"
_OF_ROWS = f"SELECT {_KEY}, {_SUMS} FROM requests GROUP BY {_KEY}"  # noqa: S608  # same
_OF_DAYS = (
    f"SELECT {_KEY}, requests, prompt_tokens, cached_tokens, completion_tokens,"  # noqa: S608  # same
    " reasoning_tokens, withheld_tokens, cost_micro_usd FROM usage_daily"
)


class Books:
    """The store of one data directory, and what is known of it from earlier readings."""

    def __init__(self, path: Path, findings: Findings) -> None:
        self._path = path
        self._findings = findings
        self._bills: dict[str, Bill] = {}
        self._answers: dict[str, list[StoredAnswer]] = {}
        self._last_seq = 0

    def read(self) -> dict[str, Row]:
        """The requests that are new since the last reading, checked; nothing may be open now."""
        with closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as connection:
            connection.execute("BEGIN")
            self._check_nothing_open(connection)
            self._check_sums(connection)
            self._check_nothing_changed(connection)
            rows = self._new_rows(connection)
        for row in rows.values():
            self._check_row(row)
            self._bills[row.id] = row.bill
            if row.answers:
                self._answers[row.id] = row.answers
        self._last_seq = max([self._last_seq, *(row.seq for row in rows.values())])
        return rows

    @property
    def totals(self) -> tuple[int, int, int]:
        """Requests, completion tokens and micro-dollars of all rows read."""
        bills = self._bills.values()
        return len(bills), sum(b.completion_tokens for b in bills), sum(b.cost_micro_usd for b in bills)

    def _check_nothing_open(self, c: sqlite3.Connection) -> None:
        check = self._findings.check
        left = c.execute("SELECT id FROM requests WHERE state <> 'settled'").fetchall()
        check(not left, "no reservation is left open", ids=left)
        asked_of = "SELECT id FROM messages WHERE status = 'in_progress'"
        left = c.execute(asked_of).fetchall()
        check(not left, "no answer is left in progress", ids=left)

    def _check_sums(self, c: sqlite3.Connection) -> None:
        of_rows, of_days = _totals(c.execute(_OF_ROWS)), _totals(c.execute(_OF_DAYS))
        self._findings.check(
            of_rows == of_days, "daily sums are those of the rows", rows=of_rows, days=of_days
        )

    def _check_nothing_changed(self, c: sqlite3.Connection) -> None:
        kept = f"SELECT id, {_BILL} FROM requests WHERE seq <= ?"  # noqa: S608  # our own names
        bills = {id_: Bill(*bill) for id_, *bill in c.execute(kept, (self._last_seq,))}
        changed = {id_ for id_ in self._bills.keys() | bills.keys() if self._bills.get(id_) != bills.get(id_)}
        facts = {id_: (self._bills.get(id_), bills.get(id_)) for id_ in changed}
        self._findings.check(not changed, "a settled request stays as it is", changed=facts)

    def _new_rows(self, c: sqlite3.Connection) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        for seq, id_, max_tokens, key, conversation_id, of_in, of_cached, of_out, *bill in c.execute(
            _ROWS, (self._last_seq,)
        ):
            self._findings.check(id_ not in rows and id_ not in self._bills, "a request has one row", id=id_)
            prices = (of_in, of_cached, of_out)
            rows[id_] = Row(seq, id_, Bill(*bill), prices, max_tokens, key, conversation_id)
        for id_, question, *answer in c.execute(_ANSWERS, (self._last_seq,)):
            rows[id_].question = question
            rows[id_].answers.append(StoredAnswer(*answer))
        return rows

    def _check_row(self, row: Row) -> None:
        check, bill = self._findings.check, row.bill
        check(row.prices == _MICRO_PER_1K, "the price in force is on the row", row=row)
        check(bill.cost_micro_usd == row.cost_micro_usd, "the cost is that of the counts", row=row)
        check(bill.settled_at_us is not None, "a settled row has the time of it", row=row)
        if row.interrupted:
            check(bill.outcome == "interrupted", "a reconciled row says interrupted", row=row)

    def check_file(self) -> None:
        """The file as a whole, once nobody has it open: its pages, references and full-text index."""
        with closing(sqlite3.connect(self._path)) as connection:
            check = self._findings.check
            check(_all(connection, "PRAGMA integrity_check") == [("ok",)], "the file is sound")
            check(not _all(connection, "PRAGMA foreign_key_check"), "references are whole")
            check(_search_is_sound(connection), "the full-text index is that of the messages")
            answers: dict[str, list[StoredAnswer]] = {}
            for id_, _, *answer in connection.execute(_ANSWERS, (0,)):
                answers.setdefault(id_, []).append(StoredAnswer(*answer))
            check(answers == self._answers, "stored answers stay as they are")


def _totals(rows: Iterable[tuple[object, ...]]) -> dict[tuple[object, ...], tuple[object, ...]]:
    return {row[:3]: row[3:] for row in rows}


def _search_is_sound(connection: sqlite3.Connection) -> bool:
    register(connection)
    try:
        while not index(connection):  # the rest is to come, once a second
            pass
        connection.execute("INSERT INTO search (search, rank) VALUES ('integrity-check', 1)")
    except sqlite3.DatabaseError:
        return False
    finally:
        connection.rollback()
    return True


def _all(connection: sqlite3.Connection, statement: str) -> list[tuple[object, ...]]:
    return connection.execute(statement).fetchall()
