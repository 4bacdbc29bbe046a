"""One Idempotency-Key, one generation: at the same time, later, after a refusal."""

from __future__ import annotations

import asyncio

import pytest

from app.core import ChatRequest, Health
from app.engine.scripted.engine import Script, scripted_text
from app.journal.retention import MAX_OUTAGE_S
from tests.support.servers import Serve, chat
from tests.support.sse_client import until

PATH = "/api/chat/completions"
TEXT = "".join(scripted_text(0, 0, 30))


@pytest.mark.parametrize("rate", [0, 300])
async def test_twenty_posts_at_once_are_one_generation(serve: Serve, rate: int):
    """20 simultaneous POSTs with one key run the engine once and all stream the same answer."""
    served = await serve(Script(rate=rate, tokens=30))

    async def post() -> tuple[str, str]:
        async with await served.open(chat(), headers={"idempotency-key": "k"}) as stream:
            transcript = await stream.to_end()
            assert transcript.done
            return stream.id, transcript.content()

    answers = await asyncio.gather(*(post() for _ in range(20)))
    assert len(set(answers)) == 1
    assert answers[0][1] == TEXT
    assert len(served.logged("request")) == 1


async def test_twenty_non_streaming_posts_are_one_generation(serve: Serve):
    """The same for answers in one piece."""
    served = await serve(Script(rate=300, tokens=30))
    body = chat(stream=False)
    answers = await asyncio.gather(*(served.post(body, idempotency_key="k") for _ in range(20)))
    assert {a.status for a in answers} == {200}
    assert len({a.body for a in answers}) == 1
    assert answers[0].json()["choices"][0]["message"]["content"] == TEXT
    assert len(served.logged("request")) == 1


async def test_other_body_under_the_key_is_a_conflict(serve: Serve):
    """A key belongs to one body, byte for byte."""
    served = await serve(Script(tokens=5))
    assert (await served.post(chat("one", stream=False), idempotency_key="k")).status == 200
    refused = await served.post(chat("two", stream=False), idempotency_key="k")
    assert refused.refusal() == (409, "idempotency_key_reused", "Idempotency-Key")
    assert (await served.post(chat("two", stream=False), idempotency_key="l")).status == 200


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_keys_have_a_length(serve: Serve, key: str):
    """An empty or overlong key is refused by name."""
    served = await serve(Script(tokens=5))
    refused = await served.post(chat(), idempotency_key=key)
    assert refused.refusal() == (400, "invalid_value", "Idempotency-Key")


async def test_refused_first_attempt_frees_the_key(serve: Serve):
    """A request that was refused leaves its key unused: it may be sent again, with another body too."""
    served = await serve(Script(tokens=5))
    refused = await served.post(chat(max_tokens=10**6), idempotency_key="k")
    assert refused.refusal()[:2] == (400, "context_length_exceeded")
    answer = await served.post(chat(stream=False), idempotency_key="k")
    assert answer.status == 200


async def test_refusal_for_lack_of_room_frees_the_key(serve: Serve):
    """A key refused with 503 works when there is room again."""
    served = await serve(Script(rate=100, tokens=10**4), max_live_streams=1, resume_grace_s=0)
    async with await served.open(chat("first")) as first:
        refused = await served.post(chat("second"), idempotency_key="k")
        assert refused.status == 503
    await until(lambda: not served.live())
    async with await served.open(chat("second"), headers={"idempotency-key": "k"}) as second:
        await second.read_events(3)
        assert second.id != first.id


async def test_engine_overload_frees_the_key(serve: Serve):
    """A request that the engine had no room for may be sent again under its key."""
    attempts = []

    def script(request: ChatRequest) -> Script:
        attempts.append(request.request_id)
        return Script(tokens=5, fault="overload" if len(attempts) == 1 else "")

    served = await serve(script)
    body = chat(stream=False)
    refused = await served.post(body, idempotency_key="k")
    assert refused.refusal()[:2] == (503, "engine_overloaded")
    assert (await served.post(body, idempotency_key="k")).status == 200


async def test_deleted_answer_frees_the_key(serve: Serve):
    """Deleting what is stored forgets the key with it."""
    served = await serve(Script(tokens=5))
    first = await served.post(chat(stream=False), idempotency_key="k")
    assert (await served.call("DELETE", f"/v1/chat/completions/{first.json()['id']}")).status == 200
    second = await served.post(chat("other", stream=False), idempotency_key="k")
    assert second.status == 200
    assert second.json()["id"] != first.json()["id"]


async def test_deleting_a_live_stream_forgets_its_text(serve: Serve):
    """A stream deleted while it runs ends, and nothing of it is kept once it has."""
    served = await serve(Script(rate=100, tokens=10**4))
    async with await served.open(chat()) as stream:
        await stream.read_events(3)
        await served.call("DELETE", f"/v1/chat/completions/{stream.id}")
        transcript = await stream.to_end()
        assert transcript.done
    await until(lambda: not served.live())
    streams = served.runtime.streams
    assert not streams._finished
    assert not streams._streams
    assert (await served.call("GET", f"{PATH}/{stream.id}")).refusal()[:2] == (404, "stream_not_found")


async def test_a_server_that_takes_no_requests_forgets_answers_all_the_same(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    """By the clock: an hour after their retention, and not before."""
    monkeypatch.setattr("app.journal.retention.SWEEP_S", 0.0)
    served = await serve(Script(tokens=5))
    for key in ("old", "young"):
        assert (await served.post(chat(key, stream=False, store=False), idempotency_key=key)).status == 200
    served.engine._health = Health.STARTING
    assert not served.runtime.ready
    database, kept_us = served.runtime.database, int((300 + MAX_OUTAGE_S) * 1e6)
    for key, age_us in (("old", kept_us), ("young", kept_us - 60_000_000)):
        age = "UPDATE requests SET settled_at_us = settled_at_us - ? WHERE idempotency_key = ?"
        await database.write(lambda c, how=age, of=(age_us, key): c.execute(how, of))

    async def keys() -> set[str]:
        rows = await database.read(lambda c: c.execute("SELECT idempotency_key FROM requests").fetchall())
        return {key for (key,) in rows if key}

    async with asyncio.timeout(10):
        while await keys() != {"young"}:
            await asyncio.sleep(0.01)
