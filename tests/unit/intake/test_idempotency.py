"""One request of an idempotency key at a time; other keys and other owners are not held up."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from app.core import ANY_BODY, IdempotencyKey
from app.intake.idempotency import IdempotencyKeys


class Store:
    """No stream in memory, and in the store the one that `key` has made."""

    key = "stored"

    def find_by_key(self, _owner: str, _key: IdempotencyKey) -> None:
        """Nothing in memory."""

    async def find_id_by_key(self, _owner: str, key: IdempotencyKey) -> str | None:
        return "chatcmpl-1" if key.key == self.key else None

    def slot(self, _owner: str) -> asyncio.Lock:
        """A turn to read the store."""
        return asyncio.Lock()

    async def find_or_continue(self, owner: str, request_id: str, *_: Any) -> tuple[str, str]:
        """What is found by an id."""
        return owner, request_id


def keys() -> IdempotencyKeys:
    """Keys over that store."""
    store = cast(Any, Store())
    return IdempotencyKeys(store, store, store, store)


async def test_requests_of_a_key_are_one_after_the_other():
    """The second begins when the first is over; those of other owners and keys, and without one, at once."""
    known, entered = keys(), []

    async def request(owner: str, key: IdempotencyKey | None, until: asyncio.Event) -> None:
        async with known.lock(owner, key):
            entered.append((owner, None if key is None else key.key))
            await until.wait()

    key, over, later = IdempotencyKey("k", b"1"), asyncio.Event(), asyncio.Event()
    others = [
        ("ann", IdempotencyKey("k", b"2")),
        ("bob", key),
        ("ann", IdempotencyKey("l", b"1")),
        ("ann", None),
    ]
    tasks = [asyncio.create_task(request("ann", key, over))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(request(owner, other, later)) for owner, other in others]
    for _ in range(5):
        await asyncio.sleep(0)
    assert entered == [("ann", "k"), ("bob", "k"), ("ann", "l"), ("ann", None)]
    over.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert entered[4:] == [("ann", "k")]
    later.set()
    await asyncio.gather(*tasks)
    del tasks
    assert not known._locks


async def test_a_stored_stream_is_found_by_its_key():
    """By its head alone it is known; with its body it is found."""
    known = keys()
    assert await known.is_known("ann", "stored")
    assert not await known.is_known("ann", "fresh")
    found = await known.find_stream("ann", IdempotencyKey("stored", ANY_BODY), cast(Any, None), 0)
    assert found == ("ann", "chatcmpl-1")
    assert await known.find_stream("ann", None, cast(Any, None), 0) is None
