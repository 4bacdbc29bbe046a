"""The engine fails, hangs or dies: every client is told the truth, and told once."""

from __future__ import annotations

import asyncio

import openai
import pytest

from app.core import ChatRequest
from app.engine.scripted.engine import Script, scripted_text
from tests.support.servers import Serve, chat
from tests.support.sse_client import until

PATH = "/api/chat/completions"


def by_content(**scripts: Script):
    """A script per message content; all others get the plain one."""
    return lambda request: scripts.get(request.body["messages"][0]["content"], Script(tokens=20))


async def test_failure_in_mid_stream_is_an_event(serve: Serve):
    """An answer that breaks ends in an error event, then [DONE]; what came before stands."""
    served = await serve(Script(tokens=50, fault="fail", fault_after=10))
    async with await served.open(chat()) as stream:
        transcript = await stream.to_end()
    assert transcript.content() == "".join(scripted_text(0, 0, 10))
    assert [e["code"] for e in transcript.errors] == ["engine_failed"]
    assert transcript.done
    assert not transcript.finish_reasons
    assert served.running == 0
    assert served.logged("request")[0]["error"] == "engine_failed"


async def test_failure_is_replayed_to_who_returns(serve: Serve):
    """A reader that attaches after the failure sees the same text and the same error."""
    served = await serve(Script(tokens=50, fault="fail", fault_after=10))
    async with await served.open(chat()) as stream:
        first = await stream.to_end()
    async with await served.open(stream_id=stream.id) as again:
        second = await again.to_end()
    assert (second.content(), second.errors) == (first.content(), first.errors)


async def test_failure_of_one_request_leaves_the_others(serve: Serve):
    """A request that fails takes no other with it."""
    served = await serve(by_content(bad=Script(tokens=50, fault="fail", fault_after=5)))
    bodies = [chat("bad" if i % 2 else "good") for i in range(10)]
    streams = [await served.open(body) for body in bodies]
    transcripts = await asyncio.gather(*(s.to_end() for s in streams))
    for i, (stream, transcript) in enumerate(zip(streams, transcripts, strict=True)):
        stream.connection.close()
        assert bool(transcript.errors) == bool(i % 2)
        assert transcript.done
    assert (await served.call("GET", "/readyz")).status == 200


async def test_openai_sdk_raises_on_a_broken_stream(serve: Serve):
    """OpenAI's client yields the text so far, then raises its APIError with our message."""
    served = await serve(Script(tokens=50, fault="fail", fault_after=10))
    url = f"http://127.0.0.1:{served.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        chunks = await client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        seen: list[str] = []

        async def read() -> None:
            async for chunk in chunks:
                seen.append(chunk.choices[0].delta.content or "")  # noqa: PERF401  # kept when it raises

        with pytest.raises(openai.APIError, match="scripted engine failed"):
            await read()
    assert "".join(seen) == "".join(scripted_text(0, 0, 10))


async def test_hanging_engine_can_be_cancelled(serve: Serve):
    """A generation that says nothing more is stopped by DELETE, and its text is kept."""
    served = await serve(Script(tokens=50, fault="hang", fault_after=10), heartbeat_s=0.05)
    async with await served.open(chat()) as stream:
        await stream.read_events(11)
        await until(lambda: served.running == 1)
        await served.call("DELETE", f"{PATH}/{stream.id}")
        transcript = await stream.to_end()
    assert transcript.content() == "".join(scripted_text(0, 0, 10))
    assert transcript.finish_reasons == {0: "stop"}
    assert transcript.done
    assert served.running == 0


async def test_hanging_engine_hears_the_grace_period(serve: Serve):
    """A client that gives up on a hanging generation frees the engine."""
    served = await serve(Script(fault="hang", fault_after=3), resume_grace_s=0.1)
    stream = await served.open(chat())
    await stream.read_events(3)
    stream.connection.reset()
    await until(lambda: served.running == 0)


async def test_dead_engine_is_not_ready(serve: Serve):
    """When the engine dies all streams end in an error, the server is not ready and refuses work."""
    served = await serve(by_content(die=Script(fault="die", fault_after=5), slow=Script(rate=1, tokens=99)))
    slow = [await served.open(chat("slow")) for _ in range(3)]
    deadly = await served.open(chat("die"))
    for stream in (*slow, deadly):
        async with stream:
            transcript = await stream.to_end()
        assert [e["code"] for e in transcript.errors] == ["engine_failed"]
        assert transcript.done
    ready = await served.call("GET", "/readyz")
    assert ready.status == 503
    assert ready.json()["phase"].startswith("dead")
    assert (await served.call("GET", "/healthz")).status == 200
    refused = await served.post(chat())
    assert refused.refusal() == (503, "engine_not_ready", None)
    assert served.runtime.engine_ended.is_set()


async def test_unforeseen_engine_exception_is_our_fault(serve: Serve):
    """An exception that is no ServingError ends the stream in a plain error and stays out of the log."""
    secret = "words of the prompt"

    def script(request: ChatRequest) -> Script:
        if request.body["messages"][0]["content"] == "break":
            raise RuntimeError(secret)
        return Script(tokens=5)

    served = await serve(script)
    answer = await served.post(chat("break"))
    assert answer.refusal() == (500, "internal_error", None)
    assert secret not in repr(served.log)
    assert served.logged("pipeline_broke")
    assert (await served.post(chat("go on", stream=False))).status == 200


async def test_live_streams_are_limited(serve: Serve):
    """Over the limit a request is refused before anything starts; a place freed is a place."""
    served = await serve(Script(rate=100, tokens=10**4), max_live_streams=2, resume_grace_s=0)
    async with await served.open(chat()), await served.open(chat()) as second:
        refused = await served.post(chat())
        assert refused.refusal() == (503, "too_many_streams", None)
        assert int(refused.headers["retry-after"]) > 0
        await served.call("DELETE", f"{PATH}/{second.id}")
        await until(lambda: len(served.live()) == 1)
        async with await served.open(chat()) as third:
            await third.read_events(2)


async def test_admission_keeps_time_after_it_broke(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """What is wrong is logged, and the next quarter of a second has its turn."""
    served = await serve()
    admission = served.runtime.backends.large.admission
    polls: list[float] = []

    def broken() -> None:
        polls.append(0.0)
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(admission, "poll", broken)
    await until(lambda: len(polls) > 1)
    assert len(served.logged("admission_broke")) >= 1
    monkeypatch.undo()
    assert (await served.post(chat())).status == 200
