"""What the units of a batch leave to its end is done once, in the batch's transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from app.store.connection import BatchConnection, at_end_of_batch


class Notes:
    """A hook that counts what it was left, and when it ran."""

    def __init__(self) -> None:
        self.left = 0
        self.ran = 0

    def __call__(self, _connection: sqlite3.Connection) -> None:
        """Run."""
        self.ran += 1


@pytest.fixture
def connection() -> Iterator[BatchConnection]:
    """A connection outside a batch."""
    connection = sqlite3.connect(":memory:", factory=BatchConnection)
    yield connection
    connection.close()


def test_units_of_a_batch_share_a_hook(connection: BatchConnection):
    """It is made for the first that wants it, and runs once."""
    connection.begin_batch()
    first, second = at_end_of_batch(connection, Notes), at_end_of_batch(connection, Notes)
    assert first is second
    assert first is not None
    connection.run_hooks()
    connection.run_hooks()
    assert first.ran == 1


def test_outside_a_batch_there_is_no_end_to_wait_for(connection: BatchConnection):
    """Nor on a connection that knows of no batches, nor once the batch was undone."""
    assert at_end_of_batch(connection, Notes) is None
    connection.begin_batch()
    assert at_end_of_batch(connection, Notes) is not None
    connection.end_batch()
    assert at_end_of_batch(connection, Notes) is None
    plain = sqlite3.connect(":memory:")
    assert at_end_of_batch(plain, Notes) is None
    plain.close()
