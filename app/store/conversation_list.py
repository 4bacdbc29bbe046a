"""The conversations of an owner: listed, searched, renamed, deleted and restored.

The order is that of creation, by `seq`: a page's cursor names the last conversation on it, so
pages neither shift nor repeat while rows are added.
"""

from __future__ import annotations

import base64
import binascii
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from app.errors import BadRequest
from app.store.conversations import find
from app.store.words import folded, is_letter, tag

WIPED = 0
"""The value of `deleted_at_us` once the text is gone; only app.store.purge still reads the row."""

_COLUMNS = "c.seq, c.id, c.title, c.model, c.total_tokens, c.created_at_us, c.updated_at_us"
_END = 2**63 - 1
_EXCERPT_CHARS, _BEFORE_CHARS = 160, 40
"""Of a message that matches: what is shown, and what of it stands before the first word."""
_SEARCHED_CHARS = 100_000
"""A word that stands later in a message is in no excerpt."""
_MIN_BEGINNING = 4
"""Letters. FTS5 reads all that a beginning matches before its first row, for `th` most of the index."""
_PHRASE_WORDS = 16
"""FTS5 reads all words of a phrase in each row that has them; a longer phrase is sought in pieces."""
_RUN_ON = re.compile("[\u0e00-\u1dff\u2e80-\U0010ffff]")
"""Letters of scripts that say much with one letter: Thai to CJK."""


@dataclass(frozen=True, slots=True)
class ConversationPage:
    """Conversations, newest first; `next_cursor` is None on the last page."""

    conversations: list[dict[str, Any]]
    next_cursor: str | None


def page(
    connection: sqlite3.Connection, owner: str, limit: int, cursor: str | None, *, words: str = ""
) -> ConversationPage:
    """A page of at most `limit` conversations after the cursor; with `words`, of those that match.

    Raises BadRequest for a cursor that no page had.
    """
    before_seq = _END >> 32 if cursor is None else _position(cursor)
    if words:
        rows = list(islice(_matching(connection, owner, before_seq, words), limit + 1))
    else:
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM conversations AS c"  # noqa: S608  # constants
            " WHERE owner = ? AND deleted_at_us IS NULL AND seq < ? ORDER BY seq DESC LIMIT ?",
            (owner, before_seq, limit + 1),
        ).fetchall()
    more = len(rows) > limit
    rows = rows[:limit]
    entries = [_as_listed(row) for row in rows]
    if words:
        for entry, row in zip(entries, rows, strict=True):
            entry["excerpt"] = None if row[-1] is None else _excerpt(row[-1], words)
    return ConversationPage(entries, _cursor(rows[-1][0]) if more else None)


def _excerpt(text: str, words: str) -> str:
    """Some words of a message around the first that was searched for, or its beginning."""
    plain = text.casefold()
    phrases = words.casefold().split()
    places = [place for phrase in phrases if (place := plain.find(phrase)) >= 0]
    if not places:
        places = [place for word in folded(words) if (place := plain.find(word)) >= 0]
    start = min(places, default=0) - _BEFORE_CHARS
    start = max(0, min(start, len(text) - _EXCERPT_CHARS))  # casefolding may have made the text longer
    end = start + _EXCERPT_CHARS
    return f"{'…' * (start > 0)}{' '.join(text[start:end].split())}{'…' * (end < len(text))}"


def _matching(
    connection: sqlite3.Connection, owner: str, before_seq: int, words: str
) -> Iterator[tuple[Any, ...]]:
    """The conversations with a message or title that matches, newest first; each with the message's text.

    Each begins below the one before, so that one of many messages that match costs no more than another.
    """
    query = match_all(words, owner)
    while query:
        row = connection.execute(
            f"SELECT {_COLUMNS}, substr(m.text, 1, {_SEARCHED_CHARS}) FROM search"  # noqa: S608
            " CROSS JOIN conversations AS c ON c.seq = search.rowid >> 32"
            " LEFT JOIN messages AS m ON m.seq = search.rowid & 0xFFFFFFFF"
            " WHERE search MATCH ? AND search.rowid < ? AND c.owner = ? AND c.deleted_at_us IS NULL"
            " ORDER BY search.rowid DESC LIMIT 1",
            (query, before_seq << 32, owner),
        ).fetchone()
        if row is None:
            break
        yield row
        before_seq = row[0]


def match_all(words: str, owner: str) -> str:
    """An FTS5 query for every one of an owner's `words`, the last, unless short, as a beginning.

    What holds no letter or digit is ignored; the query is empty where nothing is left. There is nothing
    in a folded word that FTS5 could misread. https://www.sqlite.org/fts5.html#fts5_phrases
    """
    mark = tag(owner)
    phrases: dict[str, None] = {}
    last: list[str] = []
    for word in words.split():
        last = folded(word)
        for start in range(0, len(last), _PHRASE_WORDS):
            piece = last[start : start + _PHRASE_WORDS]
            phrase = '"' + " ".join(mark + prefix for prefix in piece) + '"'
            phrases.pop(phrase, None)
            phrases[phrase] = None  # the last is last, where it is an earlier one again
    if not phrases:
        return ""
    as_beginning = sum(map(len, last)) >= _MIN_BEGINNING or any(map(_RUN_ON.search, last))
    as_beginning &= bool(last) and not is_letter(last[-1])  # which begins no longer word
    return " ".join(phrases) + ("*" if as_beginning else "")


def _cursor(seq: int) -> str:
    return base64.urlsafe_b64encode(seq.to_bytes(6)).decode()


def _position(cursor: str) -> int:
    try:
        raw = base64.b64decode(cursor.encode("ascii"), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raw = b""
    if len(raw) != 6 or raw[:2] >= b"\x80":
        raise BadRequest(
            "cursor must be the next_cursor of an earlier page.", code="invalid_cursor", param="cursor"
        )
    return min(int.from_bytes(raw), _END >> 32)


def _as_listed(row: tuple[Any, ...]) -> dict[str, Any]:
    conversation_id, title, model, total_tokens, created_at_us, updated_at_us = row[1:7]
    return {
        "id": conversation_id,
        "title": title,
        "model": model,
        "total_tokens": total_tokens,
        "created_at": created_at_us // 1_000_000,
        "updated_at": updated_at_us // 1_000_000,
    }


def listed(connection: sqlite3.Connection, owner: str, conversation_id: str) -> dict[str, Any]:
    """One conversation as an entry of the list. Raises NotFound."""
    seq = find(connection, owner, conversation_id)
    query = f"SELECT {_COLUMNS} FROM conversations AS c WHERE seq = ?"  # noqa: S608  # constants
    return _as_listed(connection.execute(query, (seq,)).fetchone())


def rename(
    connection: sqlite3.Connection, owner: str, conversation_id: str, title: str, *, at_us: int
) -> dict[str, Any]:
    """Give a conversation another title; returns it as listed. Raises NotFound."""
    connection.execute(
        "UPDATE conversations SET title = ?, updated_at_us = max(updated_at_us, ?) WHERE seq = ?",
        (title, at_us, find(connection, owner, conversation_id)),
    )
    return listed(connection, owner, conversation_id)


def delete(connection: sqlite3.Connection, owner: str, conversation_id: str, at_us: int) -> None:
    """Hide a conversation; it can be restored until it is purged. Raises NotFound."""
    connection.execute(
        "UPDATE conversations SET deleted_at_us = ? WHERE seq = ?",
        (max(at_us, WIPED + 1), find(connection, owner, conversation_id)),
    )


def restore(connection: sqlite3.Connection, owner: str, conversation_id: str) -> dict[str, Any]:
    """Show a deleted conversation again; returns it as listed. Raises NotFound once it is purged."""
    connection.execute(
        "UPDATE conversations SET deleted_at_us = NULL WHERE id = ? AND owner = ? AND deleted_at_us <> ?",
        (conversation_id, owner, WIPED),
    )
    return listed(connection, owner, conversation_id)
