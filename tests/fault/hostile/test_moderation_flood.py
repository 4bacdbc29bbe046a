"""Floods of texts to be moderated: metered, in turn with other callers', and out of chat's way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.api.routes.moderations import MAX_WAITING
from app.core import KeyTerms
from app.engine.scripted.engine import Script
from app.store import key_table, keys
from app.store.keys import NewKey
from tests.support.clocks import unhindered_s
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Connection, Response, until

MODERATIONS = "/v1/moderations"
WORDS = "please tell me how one would go about the baking of bread number "
SOON_S = 15.0
"""Ample for one text beside a flood: it waits for one slice of each other caller, some 0.05 s each."""


@pytest.fixture
def safety() -> str:
    """Real classifiers: their thread is what is fought for."""
    return "on"


async def made(served: Served, name: str, **terms: Any) -> dict[str, str]:
    """The header of a key that the server knows."""
    at_us = key_table.now_us()
    issued: NewKey = await served.runtime.database.write(
        lambda c: keys.create(c, KeyTerms(name, **terms), at_us)
    )
    await served.runtime.keys.load()
    return {"authorization": f"Bearer {issued.text}"}


def many_texts(seed: int) -> list[str]:
    """1,024 texts that no screen has read before, of a million characters together."""
    return [f"{seed} {number} {WORDS * 14}{number}" for number in range(1_024)]


def long_text(seed: int) -> str:
    """One text of nearly a million characters."""
    return "".join(f"{WORDS}{seed} {number} " for number in range(12_000))


async def start(served: Served, given: Any, headers: dict[str, str]) -> Connection:
    """A request for moderation on its way."""
    connection = await Connection.to(served.port)
    await connection.request("POST", MODERATIONS, {"input": given}, headers)
    return connection


async def timed(answering: Any) -> tuple[Response, float]:
    """An answer, and how long it took but for the time that other programs had the CPU."""
    began_s = unhindered_s()
    answer = await answering
    return answer, unhindered_s() - began_s


@pytest.mark.parametrize("flood", ["many texts", "one long text", "both, of two owners"])
async def test_a_word_is_moderated_beside_a_flood(serve: Serve, flood: str):
    """Another key's word, its answer in chat, and /healthz do not wait for a flood to end."""
    served = await serve(Script(tokens=4))
    ann, bob, eve = [await made(served, name) for name in ("ann", "bob", "eve")]
    cases: dict[str, list[tuple[Any, Any]]] = {
        "many texts": [(ann, many_texts(1)), (ann, many_texts(2))],
        "one long text": [(ann, long_text(1)), (ann, long_text(2))],
        "both, of two owners": [(ann, many_texts(3)), (ann, long_text(3)), (eve, long_text(4))],
    }
    flooding = [await start(served, given, headers) for headers, given in cases[flood]]
    await until(lambda: num_begun(served) > 0)
    for number in range(3):
        word = {"input": f"flower{number}"}
        answer, took_s = await timed(served.call("POST", MODERATIONS, word, **bob))
        assert (answer.status, took_s < SOON_S) == (200, True), took_s
        answer, took_s = await timed(served.post(chat(f"a tulip, {number}", stream=False), **bob))
        assert (answer.status, took_s < SOON_S) == (200, True), took_s
    answer, took_s = await timed(served.call("GET", "/healthz"))
    assert (answer.status, took_s < SOON_S) == (200, True), took_s
    # And the flood is still on: nobody's word waited for its end.
    assert num_begun(served) > 0
    for connection in flooding:
        connection.close()
    await until(lambda: not num_begun(served))


def num_begun(served: Served) -> int:
    """Moderations in progress."""
    return sum("moderation" in task.get_name() for task in asyncio.all_tasks())


async def test_a_client_that_leaves_frees_its_place(serve: Serve):
    """Those that wait behind it too: the next request of the same key has its turn."""
    served = await serve(Script(tokens=4))
    ann = await made(served, "ann")
    flooding = [await start(served, many_texts(seed), ann) for seed in (5, 6, 7)]
    await until(lambda: num_begun(served) == 3)
    for connection in flooding:
        connection.close()
    answer, took_s = await timed(served.call("POST", MODERATIONS, {"input": "orchid"}, **ann))
    assert (answer.status, took_s < SOON_S) == (200, True), took_s
    await until(lambda: not num_begun(served))


async def test_moderations_are_requests_and_tokens_of_the_key(serve: Serve):
    """rpm by the request, tpm by its texts; a batch that is refused has cost a request."""
    served = await serve(Script(tokens=4))
    ann = await made(served, "ann", rpm=4, tpm=2_000)
    answer = await served.call("POST", MODERATIONS, {"input": ["a rose", "a lily"]}, **ann)
    assert answer.status == 200
    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert 1_950 < left < 1_992
    assert answer.headers["x-ratelimit-remaining-requests"] == "3"
    answer = await served.call("POST", MODERATIONS, {"input": many_texts(8)}, **ann)
    assert answer.refusal() == (429, "rate_limit_exceeded", None)
    assert (answer.error()["type"], answer.headers["x-should-retry"]) == ("tokens", "false")
    assert (await served.call("POST", MODERATIONS, {"input": 5}, **ann)).status == 400
    assert (await served.call("POST", MODERATIONS, {"input": WORDS * 20}, **ann)).status == 200
    answer = await served.call("POST", MODERATIONS, {"input": "a rose"}, **ann)
    assert (answer.status, answer.error()["type"]) == (429, "requests")


async def test_a_callers_line_is_bounded(serve: Serve):
    """A request behind hundreds of long texts is 429 with a time to return; another key is served."""
    served = await serve(Script(tokens=4))
    ann, bob = await made(served, "ann"), await made(served, "bob")
    flooding = [await start(served, long_text(9), ann)]
    await until(lambda: num_begun(served) == 1)
    flooding += [await start(served, f"{WORDS * 80}{number}", ann) for number in range(MAX_WAITING - 1)]
    await until(lambda: num_begun(served) == MAX_WAITING, timeout_s=60)
    answer = await served.call("POST", MODERATIONS, {"input": "daisy"}, **ann)
    assert answer.refusal() == (429, "rate_limit_exceeded", None)
    assert int(answer.headers["retry-after"]) >= 1
    assert (await served.call("POST", MODERATIONS, {"input": "daisy"}, **bob)).status == 200
    for connection in flooding:
        connection.close()
    await until(lambda: not num_begun(served))
