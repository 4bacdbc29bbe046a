"""Conversations on real SGLang: the next turn finds the last one in the prefix cache, token for token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.servers import ServerProcess
from tests.support.sse_client import fetch

pytestmark = pytest.mark.sglang

PATH = "/api/chat/completions"


async def say(port: int, content: str, **more: Any) -> dict[str, Any]:
    """One turn, answered in one piece."""
    messages = [{"role": "user", "content": content}]
    body = {"model": "tokenring-builtin", "messages": messages, "temperature": 0, **more}
    answer = await fetch(port, "POST", PATH, body)
    assert answer.status == 200, answer.json()
    return answer.json()


async def test_second_turn_is_cached_token_for_token(sglang_server: ServerProcess):
    """Turn 2 reports at least the whole of turn 1's prompt and answer as cached, less the template's tail."""
    port = await sglang_server.port()
    first = await say(port, "Say hello. " + "The ring of tokens turns. " * 20, max_tokens=40)
    second = await say(port, "And again?", conversation_id=first["conversation_id"], max_tokens=8)
    usage = first["usage"]
    told = usage["prompt_tokens"] + usage["completion_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= told - 2


async def test_third_turn_is_cached_too(sglang_server: ServerProcess):
    """Spliced prompts are spliced again; an answer that was cut at max_tokens is no exception."""
    port = await sglang_server.port()
    first = await say(port, "What is Tokenring?", max_tokens=12)
    conversation_id = first["conversation_id"]
    second = await say(port, "How do I start it?", conversation_id=conversation_id, max_tokens=60)
    third = await say(port, "Thanks!", conversation_id=conversation_id, max_tokens=4)
    usage = second["usage"]
    told = usage["prompt_tokens"] + usage["completion_tokens"]
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] >= told - 2


async def test_regenerated_answer_is_a_branch(sglang_server: ServerProcess):
    """The same question answered again shares its prompt in the cache, and both answers are kept."""
    port = await sglang_server.port()
    first = await say(port, "What is Last-Event-ID for? " * 12, max_tokens=20)
    conversation = (await fetch(port, "GET", f"/api/conversations/{first['conversation_id']}")).json()
    asked = conversation["messages"][0]["id"]
    body = {
        "model": "tokenring-builtin",
        "messages": [],
        "conversation_id": conversation["id"],
        "parent_id": asked,
        "temperature": 0,
        "max_tokens": 20,
    }
    again = (await fetch(port, "POST", PATH, body)).json()
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 2
    kept = (await fetch(port, "GET", f"/api/conversations/{conversation['id']}")).json()["messages"]
    assert [m["role"] for m in kept] == ["user", "assistant", "assistant"]
    assert kept[1]["parent_id"] == kept[2]["parent_id"] == asked
