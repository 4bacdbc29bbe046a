"""Stored streams, found and deleted: what its owner has had deleted does not come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from app.core import Counts, Delta
from app.engine.scripted.engine import Script
from app.generation.journal import Journal
from app.generation.journal_entry import stream_facts
from app.metering.audit import LedgerAudit
from app.metering.pricing import PriceTable
from app.metering.traffic import Traffic
from app.store import events
from app.store.conversations import NewMessage, NewTurn, add_turn, ensure
from app.store.database import Database
from app.stream.archive import Archive
from app.stream.token_stream import DELETED, TokenStream
from tests.support.ledgers import reserved
from tests.support.replays import BIG, asked, opened
from tests.support.servers import Serve, chat

TURN = NewTurn(
    "conv_1",
    "local",
    "llama",
    "hi",
    True,
    None,
    [NewMessage("msg_1", "user", "hi")],
    ["msg_2"],
    1,
)
ID = "chatcmpl-1"


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """An open, empty store."""
    database = Database(tmp_path)
    await database.open()
    yield database
    await database.aclose()


def speaking() -> TokenStream:
    """A live stream that has said something."""
    stream = opened(asked())
    stream.append(Delta(0, "text", "confidential", (1,), Counts()))
    return stream


async def checkpointed(database: Database, *, damaged: bool = False) -> int:
    """The row of a turn that is checkpointed and not settled; its seq."""
    stream = speaking()
    first_id, piece = stream.dump(0)

    def unit(c) -> int:
        request_seq = reserved(c, request_id=ID, stream=stream_facts(stream.request))
        conversation_seq = ensure(c, TURN)
        c.execute("UPDATE requests SET conversation_seq = ?", (conversation_seq,))
        add_turn(c, TURN, conversation_seq, request_seq)
        events.append(c, request_seq, first_id, piece[:-1] if damaged else piece)
        return request_seq

    return await database.write(unit)


async def answer(database: Database) -> tuple[str, str]:
    """Status and text of the turn's answer."""
    return await database.read(
        lambda c: c.execute("SELECT status, text FROM messages WHERE id = 'msg_2'").fetchone()
    )


async def reconciled(database: Database) -> int:
    """What the next start does."""
    log = structlog.wrap_logger(None, processors=[structlog.testing.LogCapture()])
    return await Journal(
        database, PriceTable({}), LedgerAudit(log), Traffic(), log=log, retention_s=300
    ).reconcile()


async def test_deleted_before_it_is_settled_stays_deleted_after_a_crash(database: Database):
    """Not even a checkpoint that came after the deletion brings a word of it back."""
    request_seq = await checkpointed(database)
    await Archive(database, BIG).erase("local", ID)
    _, piece = speaking().dump(0)
    await database.write(lambda c: events.append(c, request_seq, 1, piece))
    assert await reconciled(database) == 1
    assert await answer(database) == ("deleted", "")
    assert await database.read(lambda c: events.segments(c, request_seq)) == []
    tokens = await database.read(lambda c: c.execute("SELECT total_tokens FROM conversations").fetchone())
    assert tokens == (10,), "counts stay"


async def test_another_owner_deletes_nothing(database: Database):
    """A request is erased for its owner only."""
    await checkpointed(database)
    await Archive(database, BIG).erase("someone", ID)
    await reconciled(database)
    assert await answer(database) == ("interrupted", "confidential")


async def test_damaged_checkpoint_does_not_keep_the_server_from_starting(database: Database):
    """The request is settled as it was counted; its answer is empty."""
    await checkpointed(database, damaged=True)
    assert await reconciled(database) == 1
    assert await answer(database) == ("interrupted", "")


@pytest.mark.parametrize("end", [lambda stream: stream.cancel("cancelled"), lambda stream: stream.close()])
async def test_deletion_counts_after_a_stop_and_after_the_end(end):
    """What was stopped or has ended may be yet to be settled: the settlement must know."""
    stream = speaking()
    end(stream)
    stream.cancel(DELETED)
    assert stream.cancelled == DELETED


async def test_request_cancelled_before_its_prompt_is_rendered_leaves_no_row(serve: Serve, monkeypatch):
    """Nobody waits for it any more: nothing is reserved, and its key is free."""
    served = await serve(Script(tokens=3))
    render, rendering, go_on = served.engine.render, asyncio.Event(), asyncio.Event()

    async def slowly(request):
        rendering.set()
        await go_on.wait()
        return await render(request)

    monkeypatch.setattr(served.engine, "render", slowly)
    asking = asyncio.create_task(served.post(chat(), idempotency_key="k"))
    await rendering.wait()
    served.live()[0].cancel("cancelled")
    go_on.set()
    assert (await asking).error()["code"] == "cancelled"
    rows = await served.runtime.database.read(lambda c: c.execute("SELECT count(*) FROM requests").fetchone())
    assert rows == (0,)
    assert (await served.post(chat(), idempotency_key="k")).status == 200
