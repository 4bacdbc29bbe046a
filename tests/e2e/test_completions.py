"""`/v1/completions`: prompts without a template, resumed, screened, limited and billed as chat is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from app.core import ChatRequest
from app.engine.scripted.engine import Script, scripted_text
from tests.support.screens import BLOCKED, HARM, Piece, SpeakingEngine, speaking, word_models, words
from tests.support.servers import Serve, Served, ServerProcess, Spawn
from tests.support.sse_client import Response, Stream, fetch, open_stream

PATH = "/v1/completions"
PROMPT = "a ring holds each token"
SCRIPT = Script(tokens=12)
TEXT = "".join(scripted_text(0, 0, 12))
EVENTS = {"accept": "text/event-stream"}


def body(prompt: Any = PROMPT, **parameters: Any) -> dict[str, Any]:
    """A request to the scripted model."""
    return {"model": "scripted", "prompt": prompt, **parameters}


async def complete(served: Served, prompt: Any = PROMPT, **parameters: Any) -> Response:
    """The answer in one piece."""
    return await served.call("POST", PATH, body(prompt, **parameters))


async def ids_of(served: Served, text: str) -> list[int]:
    """The text as token ids."""
    token_ids: list[int] = (await served.call("POST", "/tokenize", {"prompt": text})).json()["tokens"]
    return token_ids


async def opened(served: Served, prompt: Any = PROMPT, **parameters: Any) -> Stream:
    """A stream up to its headers."""
    return await served.open(body(prompt, stream=True, **parameters), path=PATH)


async def attached(served: Served, stream_id: str, after: int) -> Stream:
    """The same stream after an event."""
    return await served.open(stream_id=stream_id, after=after, path=PATH, headers=EVENTS)


@pytest.fixture
async def sdk(serve: Serve) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's SDK with a server of twelve words."""
    served = await serve(SCRIPT)
    url = f"http://127.0.0.1:{served.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_openais_sdk_gets_a_completion(sdk: openai.AsyncOpenAI):
    """As an object of its own type, with sixteen tokens where it does not say how many."""
    made = await sdk.completions.create(model="scripted", prompt=PROMPT)
    assert (made.object, made.choices[0].text, made.choices[0].finish_reason) == (
        "text_completion",
        TEXT,
        "stop",
    )
    assert made.id.startswith("cmpl-")
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (5, 12, 17)
    short = await sdk.completions.create(model="scripted", prompt=PROMPT, max_tokens=3)
    assert (short.choices[0].text, short.choices[0].finish_reason) == (
        "".join(scripted_text(0, 0, 3)),
        "length",
    )
    assert short.choices[0].model_extra == {"matched_stop": None}


async def test_openais_sdk_streams_a_completion(sdk: openai.AsyncOpenAI):
    """With usage at the end, and every choice by its index."""
    stream = await sdk.completions.create(
        model="scripted", prompt=PROMPT, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    for index in range(2):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(part.text for part in parts) == "".join(scripted_text(0, index, 12))
        assert parts[-1].finish_reason == "stop"
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 24)


async def test_several_prompts_are_answered_in_their_order(sdk: openai.AsyncOpenAI):
    """Texts or ids; `n` choices of each; usage is that of all together."""
    made = await sdk.completions.create(model="scripted", prompt=[PROMPT, "one two"], n=2)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in made.choices] == [
        "".join(scripted_text(0, i % 2, 12)) for i in range(4)
    ]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (7, 48)
    by_ids = await sdk.completions.create(model="scripted", prompt=[[1, 2, 3], [4]])
    assert by_ids.usage is not None
    assert (len(by_ids.choices), by_ids.usage.prompt_tokens) == (2, 4)


async def test_token_ids_are_the_prompt(serve: Serve):
    """They are read as they are: no template, and no tokenizer between."""
    served = await serve(SCRIPT)
    made = (await complete(served, await ids_of(served, PROMPT), max_tokens=4)).json()
    assert made["usage"]["prompt_tokens"] == 5
    assert made["choices"][0]["text"] == "".join(scripted_text(0, 0, 4))


async def test_a_stop_string_ends_the_text(serve: Serve):
    """And is not a part of it."""
    served = await serve(SCRIPT)
    stop = scripted_text(0, 0, 12)[4].strip()
    (choice,) = (await complete(served, stop=stop)).json()["choices"]
    assert choice["text"] == TEXT.split(stop)[0]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)


async def test_a_stream_resumes_after_its_last_event(serve: Serve):
    """Nothing is lost and nothing comes twice."""
    served = await serve(Script(tokens=30, rate=100))
    async with await opened(served, max_tokens=30) as stream:
        await stream.read_events(6)
        seen = stream.transcript
    async with await attached(served, stream.id, seen.last_id) as again:
        again.transcript = seen
        await again.to_end()
    assert seen.content() == "".join(scripted_text(0, 0, 30))
    assert (seen.finish_reasons, seen.done) == ({0: "stop"}, True)


async def test_a_stream_survives_its_server(spawn: Spawn):
    """After `kill -9` the next process replays what was checkpointed, in the same form, and tells the end."""
    process = await spawn("rate=100,tokens=4000", "--data-dir", "data")
    asked = body(stream=True, max_tokens=4000)
    async with await open_stream(await process.ready(), asked, path=PATH) as stream:
        await stream.read_events(250)
        process.process.kill()
    await process.exit_status()
    again = await (await spawn("", "--data-dir", "data")).ready()
    async with await open_stream(again, stream_id=stream.id, path=PATH, headers=EVENTS) as replay:
        transcript = await replay.to_end()
    assert transcript.content()
    assert "".join(scripted_text(0, 0, 4000)).startswith(transcript.content())
    assert [error["code"] for error in transcript.errors] == ["interrupted"]


async def test_a_finished_stream_is_an_answer_and_a_replay(serve: Serve):
    """By its id, as JSON or as events; as a chat completion it does not exist."""
    served = await serve(SCRIPT)
    async with await opened(served) as stream:
        transcript = await stream.to_end()
    answer = await served.call("GET", f"{PATH}/{stream.id}")
    assert (answer.json()["object"], answer.json()["choices"][0]["text"]) == ("text_completion", TEXT)
    async with await attached(served, stream.id, 4) as rest:
        replayed = await rest.to_end()
    assert 0 < len(replayed.content()) < len(TEXT)
    assert transcript.content().endswith(replayed.content())
    assert replayed.ids[0] > 4
    assert (await served.call("GET", f"/v1/chat/completions/{stream.id}")).status == 404
    deleted = await served.call("DELETE", f"{PATH}/{stream.id}")
    assert deleted.json() == {"id": stream.id, "object": "text_completion.deleted", "deleted": True}
    assert (await served.call("GET", f"{PATH}/{stream.id}")).status == 404


async def test_a_chat_answer_is_no_completion(serve: Serve):
    """An id leads to the answer under the route that made it."""
    served = await serve(SCRIPT)
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "a"}]}
    made = (await served.call("POST", "/v1/chat/completions", chat)).json()
    assert (await served.call("GET", f"{PATH}/{made['id']}")).status == 404


async def test_a_stream_is_cancelled(serve: Serve):
    """The engine stops, and the stream says so."""
    served = await serve(Script(tokens=4000, rate=100))
    async with await opened(served, max_tokens=4000) as stream:
        await stream.read_events(3)
        cancelled = await served.call("POST", f"{PATH}/{stream.id}/cancel")
        transcript = await stream.to_end()
    assert cancelled.json() == {"id": stream.id, "object": "text_completion", "cancelled": True}
    assert transcript.finish_reasons == {0: "stop"}


async def test_an_idempotency_key_finds_the_same_completion(serve: Serve):
    """And is refused for several prompts, whose answers have no single stream."""
    served = await serve(SCRIPT)
    first, second = [
        (await served.call("POST", PATH, body(), idempotency_key="k1")).json()["id"] for _ in range(2)
    ]
    assert first == second
    several = await served.call("POST", PATH, body(["a", "b"]), idempotency_key="k2")
    assert several.refusal() == (400, "invalid_value", "Idempotency-Key")


async def test_plain_events_have_data_lines_only(serve: Serve):
    """For load generators that read nothing else; the stream can be picked up by its ids all the same."""
    served = await serve(Script(tokens=12, rate=50), heartbeat_s=0.01)
    answer = await served.call("POST", PATH, body(stream=True), x_plain_events="1")
    lines = [line for line in answer.body.decode().split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    *chunks, done = [line.removeprefix("data: ") for line in lines]
    texts = [choice["text"] for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert ("".join(texts), done) == (TEXT, "[DONE]")
    async with await attached(served, answer.headers["x-request-id"], 0) as stream:
        assert (await stream.to_end()).content() == TEXT
    wrong = await served.call("POST", PATH, body(stream=True), x_plain_events="yes")
    assert wrong.refusal() == (400, "invalid_value", "x-plain-events")
    assert served.live() == []


@pytest.mark.parametrize("as_ids", [False, True], ids=["text", "ids"])
async def test_a_blocked_prompt_is_refused(serve: Serve, tmp_path: Path, as_ids: bool):
    """As text and as token ids: the screen reads what the ids say, and the engine hears nothing."""
    served = await serve(SCRIPT, load_models=lambda: word_models(tmp_path / "models"), safety="on")
    harmful = f"tell me of {BLOCKED} things"
    answer = await complete(served, await ids_of(served, harmful) if as_ids else harmful)
    assert answer.refusal() == (400, "content_filter", "prompt")
    assert answer.json()["moderation"]["input"]["results"][0]["flagged"]
    blocked = await complete(served, ["harmless words", harmful])
    assert blocked.refusal() == (400, "content_filter", "prompt[1]")


async def test_a_harmful_answer_is_halted(serve: Serve, tmp_path: Path):
    """Mid-stream, as a chat answer is, with OpenAI's moderation object."""
    served = await serve(
        SCRIPT,
        engine_type=speaking(f"first {HARM} then"),
        load_models=lambda: word_models(tmp_path / "models"),
        safety="on",
    )
    made = (await complete(served)).json()
    assert made["choices"][0]["finish_reason"] == "content_filter"
    assert HARM not in made["choices"][0]["text"]
    assert made["moderation"]["output"]["results"][0]["flagged"]
    both = (await complete(served, ["one", "two"])).json()
    assert "moderation" not in both
    flagged = [c["moderation"]["output"]["results"][0]["flagged"] for c in both["choices"]]
    assert flagged == [True, True]


async def test_a_span_that_begins_in_the_prompt_and_ends_in_the_answer_is_halted(
    serve: Serve, tmp_path: Path
):
    """A completion goes on with its prompt, so both are read together."""
    policy = tmp_path / "policy.toml"
    policy.write_text('hard_list = ["Project Nightingale"]')
    served = await serve(
        SCRIPT,
        engine_type=speaking(lambda _request, _choice: words("ingale is it")),
        load_models=lambda: word_models(tmp_path / "models"),
        safety="on",
        safety_policy=str(policy),
    )
    made = (await complete(served, "the name is Project Night")).json()
    assert made["choices"][0]["finish_reason"] == "content_filter"
    assert "ingale" not in made["choices"][0]["text"]


def entry(token: str) -> dict[str, Any]:
    """OpenAI's `logprobs.content` of one token, with itself as the only alternative."""
    alone = {"token": token, "logprob": -0.5, "bytes": list(token.encode())}
    return {**alone, "top_logprobs": [alone]}


async def test_logprobs_have_the_older_shape(serve: Serve):
    """Lists by token, with offsets in the text in an answer in one piece."""

    def speech(request: ChatRequest, _choice: int) -> list[Piece]:
        assert (request.body["logprobs"], request.body["top_logprobs"]) == (True, 1)
        return [piece._replace(logprobs=[entry(piece.text)]) for piece in words("one two three")]

    served = await serve(SCRIPT, engine_type=speaking(speech))
    assert isinstance(served.engine, SpeakingEngine)
    (choice,) = (await complete(served, logprobs=1)).json()["choices"]
    tokens = [piece.text for piece in words("one two three")]
    assert choice["logprobs"] == {
        "tokens": tokens,
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{token: -0.5} for token in tokens],
        "text_offset": [0, len(tokens[0]), len(tokens[0] + tokens[1])],
    }
    async with await opened(served, logprobs=1) as stream:
        chunks = [event.json() async for event in stream.events() if event.data != "[DONE]"]
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [token for part in parts for token in part["tokens"]] == tokens
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == "".join(tokens)


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [2_000_000_000]}, "prompt"),
        ({"prompt": [[1], [2_000_000_000]]}, "prompt[1]"),
        ({"prompt": [[5], [5] * 200]}, "prompt[1]"),
        ({"prompt": ["a", "a " * 200]}, "prompt[1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": ["a", "b"], "stream": True}, "stream"),
        ({"prompt": [5] * 200}, "prompt"),
        ({"prompt": "a " * 200}, "prompt"),
        ({"max_tokens": 500}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"tools": []}, "tools"),
        ({"priority": 1}, "priority"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(serve: Serve, parameters: dict[str, Any], param: str):
    """Before anything is generated; nothing is ignored."""
    served = await serve(Script(tokens=12, context=128))
    answer = await served.call("POST", PATH, body() | parameters)
    assert (answer.status, answer.error()["param"]) == (400, param)
    assert served.live() == []


async def test_what_asks_for_nothing_is_taken(serve: Serve):
    """SDKs and load generators send defaults."""
    served = await serve(SCRIPT)
    defaults = {"best_of": 1, "echo": False, "suffix": "", "logprobs": None, "stop": None, "ignore_eos": True}
    answer = await complete(served, **defaults, user="ann", service_tier="auto", repetition_penalty=1.0)
    assert answer.status == 200


@pytest.mark.sglang
@pytest.mark.timeout(400)  # the first test of a session starts the server
async def test_the_built_in_model_goes_on_from_a_prompt(sglang_server: ServerProcess):
    """Text and ids give the same greedy text; a stream gives it too; logprobs are those of its tokens."""
    port = await sglang_server.port()
    prompt = "What is Tokenring?"
    token_ids = (await fetch(port, "POST", "/tokenize", {"prompt": prompt})).json()["tokens"]
    url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "tokenring-builtin", "temperature": 0, "max_tokens": 12}
        whole = await client.completions.create(prompt=prompt, logprobs=2, **asked)
        by_ids = await client.completions.create(prompt=[token_ids, token_ids], **asked)
        stream = await client.completions.create(prompt=prompt, stream=True, **asked)
        streamed = "".join([c.text async for chunk in stream for c in chunk.choices])
    text = whole.choices[0].text
    assert text
    assert [choice.text for choice in by_ids.choices] == [text, text]
    assert streamed == text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(token_ids)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.tokens) == whole.usage.completion_tokens
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
