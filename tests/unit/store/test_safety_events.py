"""Safety events: kept without text, listed newest first by page and filter, outliving what they are about."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace

import pytest

from app.errors import BadRequest
from app.store.safety_events import FILTERS, SafetyEvent, add, hmac_of, page, secret
from app.store.schema import MIGRATIONS, migrate

EVENT = SafetyEvent(
    at_us=1_000,
    request_id="req_1",
    owner="ann",
    key_id="tr-1",
    model="llama",
    subject="prompt",
    stage="encoder",
    action="block",
    category="S2",
    score=0.91,
    threshold=0.62,
    policy_hash="0123456789abcdef",
    scores={"S1": 0.01, "S2": 0.91},
    lag_tokens=3,
    text_hmac=b"\x01" * 32,
)


@pytest.fixture
def c() -> Iterator[sqlite3.Connection]:
    """An empty store in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection, MIGRATIONS)
    yield connection
    connection.close()


def test_an_event_comes_back_as_it_went_in(c):
    """Every field, rounded where a float has more digits than anybody reads."""
    add(c, EVENT)
    add(c, replace(EVENT, key_id=None, category=None, text_hmac=None, scores={"S1": 1 / 3}, score=1 / 3))
    [(_, second), (_, first)] = page(c, 10).events
    assert first == EVENT
    assert (second.key_id, second.category, second.text_hmac) == (None, None, None)
    assert (second.score, second.scores) == (0.333333, {"S1": 0.333333})


def test_pages_neither_shift_nor_repeat(c):
    """Newest first; a page goes on where the one before ended, whatever came meanwhile."""
    places = [add(c, replace(EVENT, at_us=at_us)) for at_us in range(5)]
    first = page(c, 2)
    add(c, EVENT)
    second = page(c, 2, first.next_cursor)
    third = page(c, 2, second.next_cursor)
    assert [seq for seq, _ in first.events + second.events + third.events] == places[::-1]
    assert third.next_cursor is None


@pytest.mark.parametrize("name", FILTERS)
def test_a_list_is_narrowed_by_each_filter(c, name):
    """Each filter leaves the events that have its value."""
    other = "answer" if name == "subject" else "other"
    add(c, EVENT)
    place = add(c, replace(EVENT, **{name: other}))
    assert [seq for seq, _ in page(c, 10, only={name: other}).events] == [place]


def test_what_is_no_filter_is_refused(c):
    """A name that is no filter reaches no SQL."""
    with pytest.raises(KeyError):
        page(c, 10, only={"scores": "x"})


def test_a_list_is_narrowed_to_a_time(c):
    """From a time on, up to another that is not included."""
    for at_us in range(5):
        add(c, replace(EVENT, at_us=at_us))
    assert [event.at_us for _, event in page(c, 10, from_us=1, until_us=3).events] == [2, 1]


@pytest.mark.parametrize("cursor", ["", "x", "-1", "1; DROP", "9" * 30, "\u0661"])
def test_a_cursor_that_no_page_had_is_refused(c, cursor):
    """It is the caller's mistake, with its own code."""
    with pytest.raises(BadRequest) as caught:
        page(c, 10, cursor)
    assert caught.value.code == "invalid_cursor"


def test_the_hash_tells_texts_apart_only_with_the_key(c):
    """The same text has the same hash in one installation, and another one elsewhere."""
    key = secret(c)
    assert len(key) == 32
    assert hmac_of(key, "a") == hmac_of(key, "a")
    assert hmac_of(key, "a") != hmac_of(key, "b")
    assert hmac_of(key, "a") != hmac_of(b"other", "a")
    assert len(hmac_of(key, "\ud800")) == 32


def test_each_installation_has_a_key_of_its_own(c):
    """The key is made with the table."""
    other = sqlite3.connect(":memory:", isolation_level=None)
    migrate(other, MIGRATIONS)
    assert secret(c) != secret(other)
    other.close()
