"""The rows of `bench store`: a month of requests, and conversations of made-up words.

Inserted as plain rows in large transactions through the real schema, so that its triggers fill the
full-text index; the daily sums are built by the product's own `rebuild`. Words follow Zipf's law, as those
of a language do: a few are in most messages, most are in a handful.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np

from app.core import Usage
from app.metering.usage import number_of
from app.store import conversation_list, conversations, indexing, ledger, usage
from app.store.conversations import FinishedAnswer, NewMessage, NewTurn
from app.store.opening import prepare

MONTH = date(2026, 10, 1)
DAYS = 31
MODELS = ("builtin", "small", "medium", "large")
OWNER = "local"
MESSAGES_PER_CONVERSATION = 3
WORDS_PER_MESSAGE = (15, 90, 15)
VOCABULARY = 50_000
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
_PRICE = ledger.Price(150, 75, 600)
_PER_TRANSACTION = 50_000
_ONE_BY_ONE = 1000
_MONTH_US = int(datetime(MONTH.year, MONTH.month, 1, tzinfo=UTC).timestamp()) * 1_000_000


@dataclass(frozen=True, slots=True)
class Filled:
    """What is in a filled store, for those who ask it; `probes` are words to search for, by kind."""

    requests: int
    conversations: int
    middle_cursor: str
    probes: dict[str, str]
    long_conversation_id: str
    long_messages: int


def fill(path: Path, requests: int, owners: int, conversations_: int, long_messages: int) -> Filled:
    """Make a store with that many rows at `path`, not yet synced to the disk."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        prepare(connection, path)
        connection.execute("PRAGMA synchronous=OFF")
        add_requests(connection, requests, owners)
        probes = add_conversations(connection, conversations_)
        long_id = add_long_conversation(connection, long_messages)
        index_all(connection)
        middle = conversation_list.page(connection, OWNER, conversations_ // 2, None).next_cursor
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        connection.close()
    assert middle is not None
    return Filled(requests, conversations_, middle, probes, long_id, long_messages)


def add_requests(connection: sqlite3.Connection, rows: int, owners: int, *, seed: int = 1) -> None:
    """`rows` settled requests of one month, of `owners` owners over four models; and their daily sums."""
    rng = np.random.default_rng(seed)
    insert = (
        "INSERT INTO requests (id, owner, model, state, created_at_us, day, settled_at_us, max_tokens,"
        " prompt_tokens, cached_tokens, completion_tokens, input_micro_usd_per_1k, cached_micro_usd_per_1k,"
        " output_micro_usd_per_1k, cost_micro_usd, outcome, stream)"
        " VALUES (?, ?, ?, 'settled', ?, ?, ?, 1024, ?, ?, ?, ?, ?, ?, ?, 'stop', x'')"
    )
    for first in range(0, rows, _PER_TRANSACTION):
        numbers = range(first, min(first + _PER_TRANSACTION, rows))
        _in_transaction(connection, insert, _requests(rng, numbers, rows, owners))
    connection.execute("BEGIN IMMEDIATE")
    for day in range(DAYS):
        usage.rebuild(connection, number_of(MONTH + timedelta(day)))
    connection.execute("COMMIT")


def _requests(
    rng: np.random.Generator, numbers: range, rows: int, owners: int
) -> Iterator[tuple[object, ...]]:
    size = len(numbers)
    tokens = rng.integers(1, 2000, size=(size, 2)).tolist()
    picks = np.stack([rng.integers(0, owners, size), rng.integers(0, len(MODELS), size)], axis=1).tolist()
    step_us = DAYS * 86_400 * 1_000_000 // rows
    for number, (prompt, completion), (owner, model) in zip(numbers, tokens, picks, strict=True):
        at_us = _MONTH_US + number * step_us
        cached = prompt // 3
        cost = ledger.cost_micro_usd(Usage(prompt, completion, cached), _PRICE)
        name = OWNER if owner == 0 else f"key-{owner}"
        yield (
            *(f"chatcmpl-{number:028x}", name, MODELS[model], at_us, ledger.day_of(at_us), at_us + 2_000_000),
            *(prompt, cached, completion, *_PRICE, cost),
        )


def add_conversations(connection: sqlite3.Connection, count: int, *, seed: int = 1) -> dict[str, str]:
    """`count` conversations of one owner, of three messages each; returns words to search for."""
    writer = _Writer(seed)
    insert_conversation = (
        "INSERT INTO conversations (id, owner, title, model, created_at_us, updated_at_us, total_tokens)"
        " VALUES (?, ?, ?, ?, ?, ?, 200)"
    )
    insert_message = (
        "INSERT INTO messages (id, conversation_seq, parent_seq, role, text, created_at_us, status,"
        " finish_reason) VALUES (?, ?, ?, ?, ?, ?, 'complete', ?)"
    )
    for numbers in _transactions(count):
        _in_transaction(connection, insert_conversation, (_conversation(writer, n) for n in numbers))
        _in_transaction(
            connection, insert_message, itertools.chain.from_iterable(_messages(writer, n) for n in numbers)
        )
    return writer.probes()


def _transactions(count: int) -> Iterator[range]:
    """Many at once, and the last ones one by one, as a server writes them: the index is laid by that."""
    bulk = max(0, count - _ONE_BY_ONE)
    for first in range(0, bulk, _PER_TRANSACTION // 10):
        yield range(first, min(first + _PER_TRANSACTION // 10, bulk))
    for number in range(bulk, count):
        yield range(number, number + 1)


def _conversation(writer: _Writer, number: int) -> tuple[object, ...]:
    at_us = _MONTH_US + number * 1_000_000
    return f"conv_{number:028x}", OWNER, writer.text(6), MODELS[number % len(MODELS)], at_us, at_us


def _messages(writer: _Writer, number: int) -> Iterator[tuple[object, ...]]:
    for place, words in enumerate(WORDS_PER_MESSAGE):
        seq = number * MESSAGES_PER_CONVERSATION + place + 1
        role, ended = ("assistant", "stop") if place % 2 else ("user", None)
        parent = seq - 1 if place else None
        at_us = _MONTH_US + number * 1_000_000
        yield f"msg_{seq:028x}", number + 1, parent, role, writer.text(words), at_us, ended


class _Writer:
    """Texts of seeded words, and a count of the texts that hold each word."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._words = _vocabulary(self._rng)
        share = 1.0 / np.arange(1, VOCABULARY + 1)
        self._cumulative = np.cumsum(share / share.sum())
        self._holding: Counter[str] = Counter()
        self._picks: list[int] = []

    def text(self, words: int) -> str:
        """A text of that many words, from the most frequent to the rarest by chance."""
        if len(self._picks) < words:
            drawn = np.searchsorted(self._cumulative, self._rng.random(1_000_000))
            self._picks = np.minimum(drawn, VOCABULARY - 1).tolist()
        picked = [self._words[self._picks.pop()] for _ in range(words)]
        self._holding.update(set(picked))
        return " ".join(picked)

    def probes(self) -> dict[str, str]:
        """What to search for, by kind; each is hard in its own way."""
        often = [word for word, _ in self._holding.most_common()]
        long = [word for word in often if len(word) >= 4]
        rare = next(word for word in reversed(long) if self._holding[word] > 1)
        middle, next_to_it = long[len(long) // 50], long[len(long) // 50 + 1]
        widest = self._widest_beginning()
        return {
            "a rare word": rare,
            "a common word": often[0],
            "a word between": middle,
            "two common words": f"{often[1]} {often[0]}",
            "a rare and a common word": f"{rare} {often[0]}",
            "two words seldom together": f"{middle} {next_to_it}",
            "the beginning of most words": widest,
            "a common word and that": f"{often[0]} {widest}",
            "a word that nobody wrote": "xyzzyplugh",
        }

    def _widest_beginning(self) -> str:
        """The four letters that begin the words of most texts."""
        beginnings: Counter[str] = Counter()
        for word, count in self._holding.items():
            beginnings[word[:4]] += count if len(word) >= 4 else 0
        return beginnings.most_common(1)[0][0]


def _vocabulary(rng: np.random.Generator) -> list[str]:
    """Different words of one to four syllables, the short ones first, as in a language."""
    words: dict[str, None] = {}
    while len(words) < VOCABULARY:
        syllables = 1 + len(words) % 2 if len(words) < 100 else int(rng.integers(2, 5))
        words["".join(_SYLLABLES[i] for i in rng.integers(0, len(_SYLLABLES), syllables))] = None
    return list(words)


def add_long_conversation(connection: sqlite3.Connection, messages: int) -> str:
    """A conversation of `messages` messages, written turn by turn by the product; returns its id."""
    conversation_id, parent_seq, base_seq = f"conv_{1:028x}".replace("0", "f"), None, None
    connection.execute("BEGIN IMMEDIATE")
    for number in range(messages // 2):
        at_us = _MONTH_US + number
        answer_id = f"msg_a{number:027x}"
        question = NewMessage(f"msg_q{number:027x}", "user", f"question {number} of a long talk")
        turn = NewTurn(
            conversation_id,
            OWNER,
            MODELS[0],
            "A long talk",
            number == 0,
            parent_seq,
            [question],
            [answer_id],
            at_us,
        )
        seq = conversations.ensure(connection, turn)
        reservation = ledger.Reservation(
            f"chatcmpl-a{number:027x}", OWNER, MODELS[0], at_us, 64, 20, _PRICE, b"{}"
        )
        request_seq = ledger.reserve(connection, reservation, seq)
        conversations.add_turn(connection, turn, seq, request_seq)
        ids = np.arange(40, dtype="<u4").tobytes()
        text = (
            f"answer {number} of some twenty words, as many as a short answer has, to the question before it"
        )
        answer = FinishedAnswer(answer_id, text, None, "complete", "stop", ids, ids[:48], base_seq)
        conversations.finish_answers(connection, [answer], at_us, 60)
        ledger.settle(connection, ledger.Settlement(request_seq, Usage(20, 40), "stop", at_us))
        [parent_seq] = connection.execute("SELECT seq FROM messages WHERE id = ?", (answer_id,)).fetchone()
        base_seq = parent_seq
    connection.execute("COMMIT")
    return conversation_id


def index_all(connection: sqlite3.Connection) -> None:
    """Index what was added, as much in one transaction as a server does."""
    whole = False
    while not whole:
        connection.execute("BEGIN IMMEDIATE")
        whole = indexing.index(connection)
        connection.execute("COMMIT")


def _in_transaction(connection: sqlite3.Connection, statement: str, rows: Iterator[Sequence[object]]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(statement, rows)
    connection.execute("COMMIT")
