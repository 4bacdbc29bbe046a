"""Several prompts in one request to `/v1/completions`: served in turn, each counted by itself, none kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from app.engine.scripted.engine import Script, scripted_text
from tests.support.servers import Serve
from tests.support.sse_client import until

PATH = "/v1/completions"
SCRIPT = Script(tokens=12)
TEXT = "".join(scripted_text(0, 0, 12))


def body(prompts: Sequence[str], **parameters: Any) -> dict[str, Any]:
    """A request to the scripted model."""
    return {"model": "scripted", "prompt": prompts, **parameters}


async def test_each_prompt_counts_in_the_limits_and_on_the_bill(serve: Serve):
    """Two prompts are two requests of the key, and of the ledger."""
    served = await serve(SCRIPT)
    key = (await served.call("POST", "/api/admin/keys", {"name": "ann", "rpm": 3})).json()["key"]
    named = {"authorization": f"Bearer {key}"}
    assert (await served.call("POST", PATH, body(["a", "b"]), **named)).status == 200
    usage = (await served.call("GET", "/api/usage", **named)).json()
    assert (usage["requests"], usage["input_tokens"], usage["output_tokens"]) == (2, 2, 24)
    refused = await served.call("POST", PATH, body(["a", "b"]), **named)
    assert (refused.status, refused.error()["code"]) == (429, "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert served.running == 0 or [s.cancelled for s in served.live()] == ["disconnect"]


async def test_a_client_that_leaves_stops_all_prompts(serve: Serve):
    """Nobody is there to take the answer in one piece; the prompts after the one that ran are not begun."""
    served = await serve(Script(tokens=4000, rate=50))
    stream = served.call("POST", PATH, body(["a", "b", "c"], max_tokens=4000))
    asking = asyncio.create_task(stream)
    await until(lambda: [s for s in served.live() if s.last_id > 0])
    asking.cancel()
    await until(lambda: served.running == 0 and served.live() == [])
    await served.runtime.database.write(lambda _: None)  # after what was queued before
    assert (await served.call("GET", "/api/usage")).json()["requests"] == 1


async def test_several_prompts_run_one_after_another(serve: Serve):
    """However many they are, they need a single stream of the key's."""
    served = await serve(SCRIPT)
    key = (await served.call("POST", "/api/admin/keys", {"name": "ann", "max_streams": 1})).json()["key"]
    made = await served.call("POST", PATH, body(["a", "b", "c"]), authorization=f"Bearer {key}")
    assert (made.status, [choice["text"] for choice in made.json()["choices"]]) == (200, [TEXT] * 3)


async def test_the_answer_to_several_prompts_is_not_kept(serve: Serve):
    """Their caller knows one id, so that none of them could be deleted later but the first."""
    served = await serve(SCRIPT)
    made = (await served.call("POST", PATH, body(["a", "b"]))).json()
    assert (await served.call("GET", f"{PATH}/{made['id']}")).status == 404
    assert served.live() == []
