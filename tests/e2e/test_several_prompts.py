"""Several prompts in one request to `/v1/completions`: a few at once, each counted by itself, none kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from app.engine.scripted.engine import Script, scripted_text
from app.intake.several_prompts import MAX_CHOICES_AT_ONCE
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
    """Nobody is there to take the answer in one piece; the prompts after those that ran are not begun."""
    served = await serve(Script(tokens=4000, rate=50))
    stream = served.call("POST", PATH, body(["a"] * (3 * MAX_CHOICES_AT_ONCE), max_tokens=4000))
    asking = asyncio.create_task(stream)
    await until(lambda: [s for s in served.live() if s.last_id > 0])
    asking.cancel()
    await until(lambda: served.running == 0 and served.live() == [])
    await served.runtime.database.write(lambda _: None)  # after what was queued before
    assert 1 <= (await served.call("GET", "/api/usage")).json()["requests"] <= MAX_CHOICES_AT_ONCE


@pytest.mark.parametrize(
    ("n", "at_once"), [(1, MAX_CHOICES_AT_ONCE), (3, MAX_CHOICES_AT_ONCE // 3), (MAX_CHOICES_AT_ONCE + 1, 1)]
)
async def test_a_few_prompts_run_at_once(serve: Serve, n: int, at_once: int):
    """As many as have MAX_CHOICES_AT_ONCE, one at least; their answers stand in the order of the prompts."""
    served = await serve(lambda request: Script(rate=200, tokens=10 + len(request.raw.text)))
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, served.running)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    prompts = ["x" * (1 + (7 * number) % 10) for number in range(128 // n)]
    made = (await served.call("POST", PATH, body(prompts, n=n, max_tokens=100))).json()
    watching.cancel()
    assert most == min(at_once, len(prompts))
    texts = ["".join(scripted_text(0, c, 10 + len(prompt))) for prompt in prompts for c in range(n)]
    assert [choice["text"] for choice in made["choices"]] == texts


async def test_several_prompts_fit_into_a_single_stream_of_the_key(serve: Serve):
    """What there is no room for waits for those before it."""
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


async def test_a_full_server_answers_all_prompts_of_whom_it_has_let_in(serve: Serve):
    """A prompt that is refused beside others of its request is answered after them."""
    served = await serve(Script(rate=400, tokens=20, step_s=0.001, pool=1000), max_queued_requests=1)
    made = await served.call("POST", PATH, body(["a b c"] * 40, max_tokens=400))
    assert made.status == 200
    assert len(made.json()["choices"]) == 40
    assert (await served.call("GET", "/api/usage")).json()["requests"] == 40


async def test_a_prompt_that_is_refused_names_itself(serve: Serve):
    """And nothing is left running."""
    served = await serve(Script(rate=50, tokens=4000, context=100))
    made = await served.call("POST", PATH, body(["a", "a", "x " * 200, "a"], max_tokens=50))
    assert made.status == 400
    assert made.error()["param"] == "prompt[2]"
    await until(lambda: served.running == 0 and served.live() == [])
