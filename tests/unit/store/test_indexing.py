"""The full-text index is written later than the rows, and is that of the rows all the same."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from app.store import indexing
from app.store.conversation_list import match_all
from app.store.database import Database
from tests.support.conversing import Chats


def found(chats: Chats, word: str) -> int:
    """Rows that the index finds for a word."""
    query = match_all(word, chats.owner)
    (number,) = chats.c.execute("SELECT count(*) FROM search WHERE search MATCH ?", (query,)).fetchone()
    return number


def check_sound(chats: Chats) -> None:
    """Raises where the index is not that of the rows, once no answer is in progress."""
    chats.c.execute("UPDATE messages SET status = 'interrupted' WHERE status = 'in_progress'")
    while not indexing.index(chats.c):
        pass
    chats.c.execute("INSERT INTO search (search, rank) VALUES ('integrity-check', 1)")


def test_an_answer_in_progress_is_indexed_once_it_has_ended():
    """Until then there is nothing to find, and it is not lost."""
    chats = Chats()
    answers = chats.begin("conv_1", "Where?")
    assert indexing.index(chats.c)
    chats.finish(answers, "In the savanna.")
    assert indexing.index(chats.c)
    assert found(chats, "savanna") == 1


def test_a_row_is_found_once_it_is_indexed():
    """Not before; and each row is indexed once."""
    chats = Chats()
    chats.finish(chats.begin("conv_1", "Where do zebras live?", title="A title"), "In the savanna.")
    assert found(chats, "zebras") == 0
    assert indexing.index(chats.c)
    assert (found(chats, "zebras"), found(chats, "savanna"), found(chats, "title")) == (1, 1, 1)
    before = chats.c.total_changes
    assert indexing.index(chats.c)
    assert chats.c.total_changes == before


@pytest.mark.parametrize("seed", range(20))
def test_the_index_is_that_of_the_rows(seed: int):
    """Whatever is written, changed and deleted before and after it is indexed."""
    rng = random.Random(seed)
    chats = Chats()
    for number in range(60):
        conversation = f"conv_{rng.randrange(6)}"
        match rng.randrange(5):
            case 0 | 1:
                chats.turn(conversation, asked=f"question {number}", answered=f"answer {number}")
            case 2:
                chats.c.execute(
                    "UPDATE messages SET text = text || ' more' WHERE seq % 6 = ?", (rng.randrange(6),)
                )
            case 3:
                chats.begin(conversation, f"unanswered {number}")
                chats.c.execute("DELETE FROM messages WHERE seq = (SELECT min(seq) FROM messages)")
            case _:
                chats.c.execute("UPDATE conversations SET title = ? WHERE seq % 4 = 1", (conversation,))
        if rng.random() < 0.3:
            indexing.index(chats.c)
    check_sound(chats)


def test_a_unit_indexes_so_much_text_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch):
    """It holds the writer: what is left is due the next time."""
    chats = Chats()
    chats.turn(asked="first " * 40, answered="second")
    monkeypatch.setattr(indexing, "LIMIT_CHARS", 100)
    assert not indexing.index(chats.c)
    while not indexing.index(chats.c):
        pass
    assert found(chats, "second") == 1
    check_sound(chats)


async def test_all_that_is_due_is_indexed_a_unit_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """And no more units than whoever asks may wait for."""
    monkeypatch.setattr(indexing, "LIMIT", 1)
    database = Database(tmp_path)
    await database.open()

    def fill(c: sqlite3.Connection) -> None:
        chats = Chats(c)
        for number in range(3):
            chats.turn(asked=f"question {number}")

    def num_due(c: sqlite3.Connection) -> int:
        due: int = c.execute("SELECT count(*) FROM unindexed").fetchone()[0]
        return due

    await database.write(fill)
    due = await database.read(num_due)
    await indexing.index_all(database, 2)
    assert await database.read(num_due) == due - 2
    await indexing.index_all(database)
    assert await database.read(num_due) == 0
    await database.aclose()
