"""The store that `bench store` builds is one that the product could have written."""

import sqlite3

import pytest

from app.store.conversation_list import page
from app.store.conversations import branch
from app.store.usage import differences, usage
from scripts.benchmarks.store_rows import OWNER, fill

REQUESTS, CONVERSATIONS, LONG = 3000, 1500, 40


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """What is in a small one, and a connection to it."""
    path = tmp_path_factory.mktemp("store") / "tokenring.db"
    what = fill(path, REQUESTS, 5, CONVERSATIONS, LONG)
    connection = sqlite3.connect(path)
    yield what, connection
    connection.close()


def test_its_books_balance(filled):
    """The daily sums are those of the rows, all of them within the month that is asked for."""
    _, connection = filled
    assert differences(connection) == []
    [october] = usage(connection, 20261001, 20261031, ())
    assert october.sums.requests == REQUESTS + LONG // 2


def test_every_conversation_is_listed_and_continues(filled):
    """Each with its title and three messages in one line of descent."""
    what, connection = filled
    listed = page(connection, OWNER, CONVERSATIONS + 10, None).conversations
    assert len(listed) == CONVERSATIONS + 1
    assert len(branch(connection, OWNER, listed[-1]["id"], None).messages) == 3
    long = branch(connection, OWNER, what.long_conversation_id, None)
    assert (len(long.messages), len(long.runs)) == (LONG, LONG // 2)
    assert len(page(connection, OWNER, 10_000, what.middle_cursor).conversations) == CONVERSATIONS // 2 + 1


def test_each_kind_of_word_is_as_frequent_as_its_name_says(filled):
    """Common ones are in most conversations, rare ones in a few, and one in none."""
    what, connection = filled
    hits = {
        kind: len(page(connection, OWNER, CONVERSATIONS, None, words=words).conversations)
        for kind, words in what.probes.items()
    }
    assert hits["a common word"] > 0.9 * CONVERSATIONS
    assert hits["two common words"] > 0.5 * CONVERSATIONS
    assert hits["the beginning of most words"] > 0.5 * CONVERSATIONS
    assert 0 < hits["a rare word"] <= 10
    assert 0 < hits["a rare and a common word"] <= hits["a rare word"]
    assert hits["two words seldom together"] < hits["a word between"] < 0.5 * CONVERSATIONS
    assert hits["a word that nobody wrote"] == 0
