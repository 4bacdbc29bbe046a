"""Who shares cached prompts over HTTP: all keys, or with `isolation = owner` those of one owner."""

from __future__ import annotations

import pytest

from app.core import TIERS, ChatRequest, KeyTerms, Prompt, Tier
from app.engine.scripted.engine import Script, ScriptedEngine
from app.routing.backend import PRIORITIES
from app.store import key_table, keys
from app.store.keys import NewKey
from tests.support.servers import Serve, Served, chat

SECRET = " ".join(f"clause{n}" for n in range(100))


class Noting(ScriptedEngine):
    """Keeps the priorities that it was given."""

    priorities: list[int]

    async def render(self, request: ChatRequest) -> Prompt:
        """See Engine.render."""
        self.priorities = [*getattr(self, "priorities", ()), request.placement.priority]
        return await super().render(request)


async def made(served: Served, name: str, owner: str | None = None, tier: Tier = "standard") -> NewKey:
    """A key, known to the server."""
    terms, at_us = KeyTerms(name, tier=tier), key_table.now_us()
    issued = await served.runtime.database.write(lambda c: keys.create(c, terms, at_us, owner))
    await served.runtime.keys.load()
    return issued


async def cached_part(served: Served, key: NewKey, text: str = SECRET) -> float:
    """Which part of a prompt the answer says was cached."""
    answer = await served.post(chat(text, stream=False), authorization=f"Bearer {key.text}")
    usage = answer.json()["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached / float(usage["prompt_tokens"])


@pytest.mark.parametrize(("isolation", "shared"), [("installation", True), ("owner", False)])
async def test_another_owner_learns_what_was_cached_only_where_all_share(
    serve: Serve, isolation: str, shared: bool
):
    """Bob finds what ann left, or with isolation nothing; another key of ann's finds it either way."""
    served = await serve(Script(tokens=2), isolation=isolation)
    ann, bob = await made(served, "ann", "ann"), await made(served, "bob", "bob")
    phone = await made(served, "ann's phone", "ann")
    assert await cached_part(served, ann) == 0
    assert (await cached_part(served, bob) > 0.8) is shared
    assert await cached_part(served, phone) > 0.8


async def test_each_owner_pays_the_shared_prompt_once(serve: Serve):
    """With isolation ten owners compute it ten times; their next requests find it."""
    served = await serve(Script(tokens=2), isolation="owner")
    people = [await made(served, f"p{n}", f"p{n}") for n in range(10)]
    first = [await cached_part(served, key) for key in people]
    second = [await cached_part(served, key) for key in people]
    assert max(first) == 0
    assert min(second) > 0.8


async def test_the_engine_is_told_the_tier(serve: Serve):
    """As a priority: a request of a batch key may be set aside for an interactive one's, and for no other."""
    served = await serve(Script(tokens=2), engine_type=Noting)
    for tier in TIERS:
        await cached_part(served, await made(served, tier, tier=tier))
    assert isinstance(served.engine, Noting)
    assert served.engine.priorities == [PRIORITIES[tier] for tier in TIERS] == [20, 10, 0]
