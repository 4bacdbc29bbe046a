"""Migrations: applied once, in order, wholly or not at all; a released one never changes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.store.conversation_list import page
from app.store.conversations import FinishedAnswer, NewMessage, NewTurn, add_turn, ensure, finish_answers
from app.store.indexing import index
from app.store.schema import BEFORE_0_1, MIGRATIONS, Migration, applied, migrate
from app.store.usage import UsageSums, differences, usage
from app.store.words import register
from tests.support.ledgers import at

SCHEMAS = sorted(Path(__file__).parent.glob("schema_*.sql"))
"""Each schema as it was released. Never change one: an installation may have it."""
FIRST_NAMES = [*sorted(BEFORE_0_1), "010_grammars"]
"""The migrations that a store of 0.1.0 has had."""


def connect() -> sqlite3.Connection:
    """An empty database in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("PRAGMA foreign_keys = ON")
    register(connection)
    return connection


@pytest.fixture
def c() -> Iterator[sqlite3.Connection]:
    """An empty database."""
    connection = connect()
    yield connection
    connection.close()


def schema(c: sqlite3.Connection) -> str:
    """Every table, index, view and trigger that was made, as it was made."""
    rows = c.execute(
        "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
        r" AND name NOT LIKE 'search\_%' ESCAPE '\' ORDER BY rowid"
    )
    return "".join(f"{sql};\n" for (sql,) in rows)


def load(c: sqlite3.Connection, number: int) -> None:
    """Make the schema of that many migrations as an installation of that version has it."""
    c.executescript(SCHEMAS[number - 1].read_text("utf-8"))
    c.execute("INSERT INTO keys_version VALUES (0)")
    c.execute("INSERT INTO safety_secret VALUES (x'00')")
    for name in (*sorted(BEFORE_0_1), *(migration.name for migration in MIGRATIONS[:number])):
        c.execute("INSERT INTO migrations VALUES (?, '2026-11-20 00:00:00')", (name,))


def load_first(c: sqlite3.Connection) -> None:
    """Make the first schema as an installation of that version has it."""
    load(c, 1)


def fill(c: sqlite3.Connection) -> None:
    """A conversation of one turn, answered and billed."""
    turn = NewTurn(
        conversation_id="conv_1",
        owner="local",
        model="llama",
        title="Rivers",
        is_new=True,
        parent_seq=None,
        messages=[NewMessage("msg_1", "user", "Which river is the longest?", None)],
        answer_ids=["msg_2"],
        created_at_us=at("2026-11-20"),
    )
    conversation_seq = ensure(c, turn)
    request_seq = bill(c)
    add_turn(c, turn, conversation_seq, request_seq)
    answer = FinishedAnswer("msg_2", "The Nile.", None, "complete", "stop", b"", b"", None)
    finish_answers(c, [answer], at("2026-11-20"), 30)


def bill(c: sqlite3.Connection) -> int:
    """A settled request and the sums of its day, with the columns that every schema has; returns its seq."""
    cursor = c.execute(
        "INSERT INTO requests (id, owner, model, state, created_at_us, day, settled_at_us, max_tokens,"
        " prompt_tokens, completion_tokens, input_micro_usd_per_1k, cached_micro_usd_per_1k,"
        " output_micro_usd_per_1k, cost_micro_usd, outcome, stream)"
        " VALUES ('chatcmpl-1', 'local', 'llama', 'settled', ?, 20261120, ?, 100, 10, 20, 500, 50, 1500, 35,"
        " 'stop', x'')",
        (at("2026-11-20"), at("2026-11-20")),
    )
    key, unknown = (", key_id", ", 'unknown'") if "013_ledger_keys" in applied(c) else ("", "")
    c.execute(
        "INSERT INTO usage_daily (day, model, owner, requests, prompt_tokens, cached_tokens,"
        f" completion_tokens, reasoning_tokens, withheld_tokens, cost_micro_usd{key})"
        f" VALUES (20261120, 'llama', 'local', 1, 10, 0, 20, 0, 0, 35{unknown})"
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def contents(c: sqlite3.Connection) -> list[object]:
    """What `fill` left, as a reader of any version sees it."""
    return [
        c.execute("SELECT id, owner, title, total_tokens FROM conversations").fetchall(),
        c.execute("SELECT id, role, text, status FROM messages ORDER BY seq").fetchall(),
        c.execute("SELECT state, completion_tokens, cost_micro_usd FROM requests").fetchall(),
        c.execute("SELECT day, requests, completion_tokens FROM usage_daily").fetchall(),
    ]


def add_note(c: sqlite3.Connection) -> None:
    """A migration that changes rows too."""
    c.execute("ALTER TABLE conversations ADD COLUMN note TEXT")
    c.execute("UPDATE conversations SET note = 'was ' || title")


def broken(c: sqlite3.Connection) -> None:
    """A migration that fails when it has done a part of its work."""
    add_note(c)
    c.execute("CREATE TABLE half (n)")
    c.execute("INSERT INTO nowhere VALUES (1)")


SECOND = Migration("002_note", add_note)


@pytest.mark.parametrize("number", range(1, len(MIGRATIONS) + 1))
def test_a_schema_is_as_it_was_released(c: sqlite3.Connection, number: int):
    """The first so many migrations make exactly the stored schema, to the character."""
    migrate(c, MIGRATIONS[:number])
    assert schema(c) == SCHEMAS[number - 1].read_text("utf-8")


@pytest.mark.parametrize("number", range(1, len(MIGRATIONS) + 1))
def test_an_older_installation_is_brought_up_to_date(c: sqlite3.Connection, number: int):
    """From each schema with data in it, to the schema a new installation has, and nothing lost."""
    load(c, number)
    fill(c)
    before = contents(c)
    migrate(c, MIGRATIONS)
    assert contents(c) == before
    assert index(c)
    assert [row["id"] for row in page(c, "local", 20, None, words="nile").conversations] == ["conv_1"]
    assert applied(c) == [*sorted(BEFORE_0_1), *(migration.name for migration in MIGRATIONS)]
    new = connect()
    migrate(new, MIGRATIONS)
    assert sorted(schema(c).split(";\n")) == sorted(schema(new).split(";\n"))
    new.close()
    assert c.execute("SELECT number FROM keys_version").fetchall() == [(0,)]
    assert c.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert c.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.mark.parametrize("number", range(1, 4))
def test_what_was_billed_before_keys_were_kept_is_of_an_unknown_key(c: sqlite3.Connection, number: int):
    """The totals are what they were, under the key `unknown`, and the books balance."""
    load(c, number)
    fill(c)
    migrate(c, MIGRATIONS)
    assert usage(c, 20261101, 20261130, ("key",)) == [
        ({"key": "unknown", "owner": "local"}, UsageSums(1, 10, 20, cost_micro_usd=35))
    ]
    assert differences(c) == []


def test_a_suspended_request_keeps_its_key(c: sqlite3.Connection):
    """The store knew it already: the request is billed to it when it goes on."""
    load(c, 3)
    fill(c)
    c.execute("UPDATE requests SET state = 'reserved'")
    c.execute("INSERT INTO suspended VALUES (1, 'tr-3f9a1c2b4d5e', x'', x'')")
    migrate(c, MIGRATIONS)
    assert c.execute("SELECT key_id FROM requests").fetchall() == [("tr-3f9a1c2b4d5e",)]


def test_an_index_of_other_words_is_made_anew_while_the_server_runs(c: sqlite3.Connection):
    """A migration only empties it, and notes each row once; none of the old words is left."""
    load(c, len(SCHEMAS) - 1)
    fill(c)
    c.execute("DELETE FROM unindexed WHERE rowid & 0xFFFFFFFF = 0")
    c.execute("INSERT INTO search (rowid, text) VALUES (1 << 32, 'oldtitle')")
    migrate(c, MIGRATIONS)
    assert c.execute("SELECT count(*) FROM search_docsize").fetchone() == (0,)
    assert c.execute("SELECT rowid FROM unindexed").fetchall() == [(row,) for row in rows_of(c)]
    assert c.execute("PRAGMA secure_delete").fetchone() == (1,)
    assert index(c)
    c.execute("INSERT INTO search (search, rank) VALUES ('integrity-check', 1)")
    assert [row["id"] for row in page(c, "local", 20, None, words="rivers").conversations] == ["conv_1"]


def rows_of(c: sqlite3.Connection) -> list[int]:
    """The numbers of all rows that are searched."""
    return [number for (number,) in c.execute("SELECT rowid FROM searched ORDER BY rowid")]


def test_migrations_are_applied_once_in_order(c: sqlite3.Connection):
    """Each is applied once, whatever it meets the next time, and its name kept."""
    ran: list[str] = []

    def noting(name: str) -> Migration:
        return Migration(name, lambda _c: ran.append(name))

    steps = [noting("001_a"), noting("002_b"), noting("003_c")]
    assert applied(c) == []
    migrate(c, steps[:1])
    migrate(c, steps)
    migrate(c, steps)
    assert ran == applied(c) == ["001_a", "002_b", "003_c"]


def test_a_migration_finds_the_data_of_the_first_schema(c: sqlite3.Connection):
    """A second migration changes the rows that the first schema holds; the others are as they were."""
    load_first(c)
    fill(c)
    before = contents(c)
    migrate(c, [*MIGRATIONS[:1], SECOND])
    assert contents(c) == before
    assert c.execute("SELECT note FROM conversations").fetchall() == [("was Rivers",)]
    assert applied(c) == [*FIRST_NAMES, "002_note"]


def test_a_migration_that_fails_leaves_nothing(c: sqlite3.Connection):
    """What a failed migration had done is undone, its name not kept; mended, it is applied."""
    load_first(c)
    fill(c)
    before = schema(c), contents(c)
    with pytest.raises(sqlite3.OperationalError, match="nowhere"):
        migrate(c, [*MIGRATIONS[:1], Migration("002_note", broken)])
    assert (schema(c), contents(c)) == before
    assert applied(c) == FIRST_NAMES
    assert not c.in_transaction
    migrate(c, [*MIGRATIONS[:1], SECOND])
    assert applied(c) == [*FIRST_NAMES, "002_note"]


def test_a_migration_on_a_full_disk_leaves_nothing(c: sqlite3.Connection):
    """SQLite ends some transactions by itself; the error is the disk's, and nothing is left."""
    load_first(c)
    before = schema(c)
    (pages,) = c.execute("PRAGMA page_count").fetchone()
    c.execute(f"PRAGMA max_page_count={pages + 1}").fetchone()

    def large(c: sqlite3.Connection) -> None:
        c.execute("CREATE TABLE large (blob)")
        c.execute("INSERT INTO large VALUES (zeroblob(100000))")

    with pytest.raises(sqlite3.OperationalError, match="full"):
        migrate(c, [*MIGRATIONS[:1], Migration("002_large", large)])
    assert (schema(c), applied(c)) == (before, FIRST_NAMES)
    assert not c.in_transaction


def test_names_are_numbered():
    """Names are unique, and begin with their place; the first is the last one of 0.1.0."""
    for place, migration in enumerate(MIGRATIONS, start=10):
        assert migration.name.startswith(f"{place:03d}_")
