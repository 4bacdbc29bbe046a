"""A restart of the server with real SGLang: every greedy stream goes on to the text of an undisturbed run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fault.test_restart import bills, returned, rows, stop
from tests.support.preloaded import Preloaded
from tests.support.servers import chat, start_process
from tests.support.sse_client import Stream, Transcript, open_stream

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

TOKENS = 1200
"""More than a second of each of 16 streams."""
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "list",
        "schema": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 40},
    },
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"words": {"type": "array", "items": {"type": "string"}, "minItems": 40}},
            "required": ["words"],
        },
    },
}
KINDS: list[dict[str, Any]] = [
    *([{}] * 10),
    {"n": 2},
    {"stop": ["a string that never comes"]},
    {"logprobs": True},
    {"response_format": SCHEMA, "ignore_eos": False},
    {"tools": [TOOL], "tool_choice": "required", "ignore_eos": False},
    {"store": False},
]


def body(number: int, **parameters: Any) -> dict[str, Any]:
    """A greedy request."""
    usual = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "model": "tokenring-builtin"}
    usage = {"stream_options": {"include_usage": True}}
    return chat(f"Tell me a long story about ring {number}.", **usual | usage | parameters)


async def test_sixteen_streams_go_on_after_a_restart(tmp_path: Path, preloaded: Preloaded | None) -> None:
    """With choices, a schema, a tool and log probabilities among them; each request is billed once."""
    bodies = [body(number, **parameters) for number, parameters in enumerate(KINDS)]
    process = await start_process(tmp_path, "--drain-timeout-s", "1", "--safety", "on", preloaded=preloaded)
    try:
        port = await process.ready(timeout_s=250)
        streams: list[Stream] = [await open_stream(port, request) for request in bodies]
        await asyncio.gather(*(stream.read_events(5) for stream in streams))
        await stop(process, streams)
    finally:
        await process.close()
    cut = {stream.id: stream.transcript.last_id for stream in streams if not stream.transcript.done}
    assert len(cut) == len(bodies)
    process = await start_process(tmp_path, "--safety", "on", preloaded=preloaded)
    try:
        port = await process.ready(timeout_s=250)
        resumed: list[Transcript] = await asyncio.gather(*(returned(port, stream) for stream in streams))
        again = [await open_stream(port, request) for request in bodies]
        whole = await asyncio.gather(*(stream.to_end() for stream in again))
        for stream in again:
            stream.connection.close()
        process.terminate()
        assert await process.exit_status(60) == 0
    finally:
        await process.close()
    for number, (transcript, reference) in enumerate(zip(resumed, whole, strict=True)):
        assert transcript.errors == [], number
        assert transcript.done
        assert transcript.text == reference.text, number
        assert transcript.finish_reasons == reference.finish_reasons
        assert transcript.usage is not None
        assert reference.usage is not None
        assert transcript.usage["completion_tokens"] == reference.usage["completion_tokens"]
        assert transcript.usage["prompt_tokens"] == reference.usage["prompt_tokens"]
    settled = bills(tmp_path)
    assert {stream.id for stream in streams} < set(settled)
    assert {bill[0] for bill in settled.values()} == {"settled"}
    assert len(settled) == 2 * len(bodies)
    assert rows(tmp_path, "SELECT * FROM suspended") == []
    assert not [line for line in process.log if line["event"] in ("ledger_differs", "not_suspended")]
