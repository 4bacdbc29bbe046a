"""Refusals that come in floods are held, and nothing else is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.api.http.layers import REFUSAL_DELAY_S, REFUSALS_PER_S, LimitHeaders
from app.intake.scope import OWNER, STREAM_ID
from app.metering.limits import Limiter
from tests.support.admissions import run_virtually


async def answered_s(app: LimitHeaders, scope: dict[str, Any]) -> float:
    """How long a request took to be answered."""
    loop, messages = asyncio.get_running_loop(), []
    began_s = loop.time()

    async def send(message: Any) -> None:
        messages.append(message["type"])

    async def receive() -> Any:
        raise AssertionError

    await app(scope, receive, send)
    assert messages == ["http.response.start", "http.response.body"]
    return loop.time() - began_s


def refusing(status: int) -> LimitHeaders:
    """An application that answers with a status, at a time that stands still."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body"})

    return LimitHeaders(app, Limiter(lambda: 0.0))


@pytest.mark.parametrize("status", [400, 401, 404, 429])
def test_refusals_beyond_so_many_a_second_are_held(status: int):
    """All at once they are a second late, together; the first hundred are not."""

    async def main() -> None:
        app = refusing(status)
        assert {await answered_s(app, {}) for _ in range(int(REFUSALS_PER_S))} == {0}
        late_s = await asyncio.gather(*(answered_s(app, {}) for _ in range(100)))
        assert set(late_s) == {REFUSAL_DELAY_S}

    run_virtually(main)


def test_a_flood_without_a_key_holds_no_owners_refusals():
    """Each owner has a hundred a second, and all without a key have as many together."""

    async def main() -> None:
        app = refusing(401)
        late_s = await asyncio.gather(*(answered_s(app, {}) for _ in range(2 * int(REFUSALS_PER_S))))
        assert max(late_s) == REFUSAL_DELAY_S
        for owner in ("ann", "bob"):
            assert await answered_s(app, {OWNER: owner}) == 0

    run_virtually(main)


@pytest.mark.parametrize(
    ("status", "scope"), [(200, {}), (503, {}), (500, {}), (429, {STREAM_ID: "chatcmpl-1"})]
)
def test_nothing_else_is_held(status: int, scope: dict[str, Any]):
    """Not answers, not what a full server says, and no retry slot."""

    async def main() -> None:
        app = refusing(status)
        assert {await answered_s(app, scope) for _ in range(3 * int(REFUSALS_PER_S))} == {0}

    run_virtually(main)
