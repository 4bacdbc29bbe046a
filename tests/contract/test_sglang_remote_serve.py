"""`tokenring serve --engine remote` in front of SGLang's own server: one chat, its limits, its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.engine.sglang.args import BUILTIN_MODEL
from tests.support.servers import ServerProcess, start_process
from tests.support.sse_client import fetch

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.fixture
async def front(remote_engine: Any, tmp_path: Path) -> Any:
    """A server of ours whose engine is another process's."""
    process = await start_process(
        tmp_path,
        *("--engine", "remote", "--remote-url", remote_engine._pool.servers[0].url),
        *("--remote-tokenizer", str(BUILTIN_MODEL), "--safety", "off"),
        TOKENRING_REMOTE_API_KEY=remote_engine._options.api_key,
    )
    yield process
    process.terminate()
    await process.exit_status()


async def test_a_chat_through_a_remote_engine_is_streamed_and_billed(front: ServerProcess) -> None:
    """Readiness, the model's card, a stream with usage and ids, and a refusal all come through."""
    port = await front.ready(120)
    models = json.loads((await fetch(port, "GET", "/api/models")).body)["data"]
    assert models[0]["context_length"] == 8192
    messages = [{"role": "user", "content": "How do I resume a stream?"}]
    body = {"model": models[0]["id"], "messages": messages, "max_tokens": 12, "ignore_eos": True}
    told = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = (await fetch(port, "POST", "/api/chat/completions", body | told)).body.decode()
    assert '"completion_tokens":12' in streamed
    assert streamed.endswith("data: [DONE]\n\n")
    refused = await fetch(port, "POST", "/api/chat/completions", body | {"max_tokens": 100_000})
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (400, "context_length_exceeded")
