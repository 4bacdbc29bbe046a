"""Keys' limits over HTTP: what is refused, what it says, and what it never reaches."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.core import ChatRequest, KeyTerms, Prompt
from app.engine.scripted.engine import Script, ScriptedEngine, scripted_text
from app.engine.scripted.service import Run
from app.store import key_table, keys
from app.store.keys import NewKey
from tests.support.sdks import Case, Sdk, refused, said
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Transcript, fetch, open_stream, until

CHAT = "/api/chat/completions"
PRICES = ({"model": "scripted", "input": "1000", "output": "1000"},)
"""A dollar a token."""


class Spied(ScriptedEngine):
    """Keeps every request that reached rendering."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rendered: list[ChatRequest] = []

    async def render(self, request: ChatRequest) -> Prompt:
        """See Engine.render."""
        self.rendered.append(request)
        return await super().render(request)


class Begun(ScriptedEngine):
    """Stops each answer after a few tokens until a test lets all of them go on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.go_on = asyncio.Event()
        self._pauses: Counter[int] = Counter()

    async def _pause(self, run: Run, duration_s: float) -> None:
        await super()._pause(run, duration_s)
        self._pauses[id(run)] += 1
        if self._pauses[id(run)] > 5:
            await self.go_on.wait()


def spied(served: Served) -> list[ChatRequest]:
    """What reached rendering."""
    assert isinstance(served.engine, Spied)
    return list({request.request_id: request for request in served.engine.rendered}.values())


async def made(served: Served, name: str, **terms: Any) -> NewKey:
    """A key, known to the server."""
    at_us, owner = key_table.now_us(), terms.pop("owner", None)
    issued = await served.runtime.database.write(
        lambda c: keys.create(c, KeyTerms(name, **terms), at_us, owner)
    )
    await served.runtime.keys.load()
    return issued


def bearer(issued: NewKey) -> dict[str, str]:
    """The header that sends a key."""
    return {"authorization": f"Bearer {issued.text}"}


def limits_in(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers about limits, by their last two words."""
    prefix = "x-ratelimit-"
    return {name.removeprefix(prefix): value for name, value in headers.items() if name.startswith(prefix)}


async def test_a_key_at_its_limit_is_429_and_another_is_not(serve: Serve):
    """OpenAI's body and headers, an honest Retry-After, nothing rendered; the other key is served."""
    served = await serve(Script(tokens=4), engine_type=Spied)
    ann, bob = await made(served, "ann", tpm=600, rpm=100), await made(served, "bob", tpm=600)
    first = await served.post(chat("hello", stream=False), **bearer(ann))
    assert first.status == 200
    running = await served.open(chat("hello", max_tokens=580), headers=bearer(bob))
    await running.to_end()
    begun = len(spied(served))

    answer = await served.post(chat("word " * 300, stream=False, max_tokens=100), **bearer(ann))
    assert answer.refusal() == (429, "rate_limit_exceeded", None)
    assert answer.error()["type"] == "tokens"
    assert answer.headers["x-request-id"].startswith("req_")
    assert "retry-after" in answer.headers
    assert (await served.post(chat("a b " * 250, stream=False, max_tokens=4), **bearer(bob))).status == 200
    assert len(spied(served)) == begun + 1
    assert limits_in(answer.headers)["limit-tokens"] == "600"
    assert limits_in(answer.headers)["limit-requests"] == "100"


async def test_refused_requests_never_reach_rendering(serve: Serve):
    """Of 500 at once, as many are rendered as fit; the others are 429 and are told when to come."""
    served = await serve(Script(tokens=100, rate=50), engine_type=Spied)
    ann = await made(served, "ann", tpm=10_000)
    answers = await asyncio.gather(
        *(served.post(chat("hello", stream=False, max_tokens=90), **bearer(ann)) for _ in range(500))
    )
    ok = [answer for answer in answers if answer.status == 200]
    limited = [answer for answer in answers if answer.status == 429]
    assert len(ok) + len(limited) == 500
    # 100 each by the estimate, and 92 once they are rendered.
    assert len(spied(served)) == len(ok)
    assert 100 <= len(ok) <= 10_000 // 92
    assert sum(answer.json()["usage"]["total_tokens"] for answer in ok) <= 10_000
    for answer in limited:
        assert 1 <= int(answer.headers["retry-after"]) <= 66
        assert "x-should-retry" not in answer.headers
    tokens = served.runtime.limiter.refused["standard"]["tokens"]
    assert tokens == len(limited)


async def test_limits_are_in_every_answer_to_the_key(serve: Serve):
    """Streams, attaching, lists and refusals; not in those to other keys, or to none."""
    served = await serve(Script(tokens=4), api_key="root")
    ann, bob = await made(served, "ann", tpm=10_000, rpm=50), await made(served, "bob", max_streams=5)
    headers = bearer(ann)
    stream = await served.open(chat("hello"), headers=headers)
    told = limits_in(stream.head.headers)
    assert told["limit-tokens"] == "10000"
    assert told["remaining-requests"] == "49"
    assert 9000 < int(told["remaining-tokens"]) < 10_000
    assert told["reset-tokens"].endswith("s")
    await stream.to_end()
    await until(lambda: not served.live())
    attached = await served.call("GET", f"{CHAT}/{stream.id}", **headers)
    assert attached.status == 200
    # The scripted prompt is 2 tokens, and the answer 4: the rest was given back.
    assert limits_in(attached.headers)["remaining-tokens"] == "9994"
    for method, path, status in (
        ("GET", "/api/models", 200),
        ("GET", "/v1/chat/completions/chatcmpl-none", 404),
        ("GET", "/metrics", 403),
        ("POST", CHAT, 400),
    ):
        answer = await served.call(method, path, {} if method == "POST" else None, **headers)
        assert (answer.status, len(limits_in(answer.headers))) == (status, 6)
    for other in (bearer(bob), {"authorization": "Bearer root"}, {}):
        assert not limits_in((await served.call("GET", "/api/models", **other)).headers)


async def test_an_attach_by_idempotency_key_costs_nothing(serve: Serve):
    """The second POST of a key is no second request, even where there would be no room for one."""
    served = await serve(Script(tokens=4))
    ann = await made(served, "ann", rpm=1, tpm=300, max_streams=1)
    headers = bearer(ann) | {"idempotency-key": "one"}
    for _ in range(3):
        assert (await served.post(chat("hello", stream=False), **headers)).status == 200
    assert (await served.post(chat("hello", stream=False), **bearer(ann))).status == 429
    # Streams and lists are no requests of the limit's.
    assert (await served.call("GET", "/api/models", **bearer(ann))).status == 200


async def test_a_key_of_a_refused_request_is_free_again(serve: Serve):
    """Refused after rendering, the same Idempotency-Key may be sent again."""
    served = await serve(Script(tokens=4))
    ann = await made(served, "ann", tpm=3000)
    held = await served.runtime.database.read(lambda _c: served.runtime.keys.get(ann.key.id))
    lease = served.runtime.limiter.begin(held)
    lease.charge(ChatRequest("r", "ann", "scripted", MANY, 0))
    # Its words are single letters: the estimate by bytes is below what rendering finds.
    headers = bearer(ann) | {"idempotency-key": "one"}
    body = chat("a " * 2600, stream=False)
    served.runtime.limiter.count_text = lambda _text: 1
    answer = await served.post(body, **headers)
    assert answer.refusal() == (429, "rate_limit_exceeded", None)
    assert served.runtime.limiter.refused["standard"]["tokens_rendered"] == 1
    assert answer.headers["x-request-id"].startswith("chatcmpl-")
    lease.release({})
    assert (await served.post(body, **headers)).status == 200


MANY = {"messages": [{"role": "user", "content": "word " * 300}]}


async def test_too_large_is_no_matter_of_time(serve: Serve):
    """No Retry-After, and the SDKs are told not to try again."""
    served = await serve(Script(tokens=4), engine_type=Spied)
    ann = await made(served, "ann", tpm=100)
    answer = await served.post(chat("word " * 200, stream=False), **bearer(ann))
    assert answer.refusal() == (429, "rate_limit_exceeded", None)
    assert "too large" in answer.error()["message"]
    assert "retry-after" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"
    assert not spied(served)


async def test_generations_at_once(serve: Serve):
    """One stream at a time: a second is 429 while the first runs, whoever reads it, and not after."""
    served = await serve(Script(tokens=1000, rate=200))
    ann, bob = await made(served, "ann", max_streams=1), await made(served, "bob")
    stream = await served.open(chat("hello"), headers=bearer(ann))
    answer = await served.post(chat("hello", stream=False), **bearer(ann))
    assert answer.refusal() == (429, "rate_limit_exceeded", None)
    assert int(answer.headers["retry-after"]) >= 1
    assert (await served.post(chat("hello", stream=False, max_tokens=2), **bearer(bob))).status == 200
    await served.call("DELETE", f"{CHAT}/{stream.id}", **bearer(ann))
    await stream.to_end()
    await until(lambda: not served.live())
    assert (await served.post(chat("hello", stream=False, max_tokens=2), **bearer(ann))).status == 200


async def refused_400(served: Served, headers: dict[str, str]) -> int:
    """A request that rendering refuses."""
    return (await served.post(chat("hello", max_tokens=40_000, stream=False), **headers)).status


async def failed_500(served: Served, headers: dict[str, str]) -> int:
    """A request whose engine fails at once."""
    return (await served.post(chat("fail", stream=False), **headers)).status


async def left(served: Served, headers: dict[str, str]) -> int:
    """A request whose client leaves."""
    stream = await open_stream(served.port, chat("slow"), headers=headers)
    await served.call("DELETE", f"{CHAT}/{stream.id}", **headers)
    await stream.to_end()
    stream.connection.close()
    return 200


@pytest.mark.parametrize(("end", "status"), [(refused_400, 400), (failed_500, 500), (left, 200)])
async def test_every_outcome_gives_back_what_was_not_used(serve: Serve, end: Any, status: int):
    """Refused, failed or cancelled: no tokens are kept but those used, and no place among the streams."""

    def script(request: ChatRequest) -> Script:
        word = request.body["messages"][0]["content"]
        if word == "fail":
            return Script(fault="fail")
        return Script(tokens=1000, rate=100) if word == "slow" else Script(tokens=4)

    served = await serve(script)
    ann = await made(served, "ann", tpm=10_000, max_streams=1)
    assert await end(served, bearer(ann)) == status
    await until(lambda: not served.live())
    remaining = limits_in((await served.call("GET", "/api/models", **bearer(ann))).headers)[
        "remaining-tokens"
    ]
    assert int(remaining) > 9_900
    assert (await served.post(chat("hello", stream=False), **bearer(ann))).status == 200


async def test_a_server_without_room_charges_nothing(serve: Serve):
    """503 before the generation began is no request of the key's."""
    served = await serve(Script(tokens=1000, rate=100), max_live_streams=1)
    ann = await made(served, "ann", tpm=10_000, rpm=10, max_streams=5)
    await served.open(chat("hello"), headers=bearer(ann))
    before = limits_in((await served.call("GET", "/api/models", **bearer(ann))).headers)
    answer = await served.post(chat("hello"), **bearer(ann))
    assert answer.status == 503
    for kind in ("requests", "tokens"):
        assert limits_in(answer.headers)[f"remaining-{kind}"] == before[f"remaining-{kind}"]


async def test_an_answer_ends_where_its_request_has_used_a_whole_minute(serve: Serve):
    """finish_reason length, a field that says why, and the key waits for the next minute."""
    served = await serve(Script(tokens=900))
    ann = await made(served, "ann", tpm=400)
    answer = await served.post(chat("hello", stream=False), **bearer(ann))
    assert answer.status == 200
    body = answer.json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] - body["usage"].get("withheld_tokens", 0) == 400
    assert body["budget"]["code"] == "rate_limit_exceeded"
    assert "400 tokens" in body["budget"]["message"]
    answer = await served.post(chat("hello", stream=False), **bearer(ann))
    assert answer.status == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 66
    assert limits_in(answer.headers)["remaining-tokens"] == "0"


async def test_an_underestimate_is_paid_as_debt(serve: Serve):
    """Long answers where short ones were expected: a minute's debt at most, and the key waits for it."""
    served = await serve(Script(tokens=900, rate=500))
    ann = await made(served, "ann", tpm=600)
    answers = await asyncio.gather(
        *(served.post(chat("hello", stream=False), **bearer(ann)) for _ in range(2))
    )
    assert [answer.status for answer in answers] == [200, 200]
    used = sum(answer.json()["usage"]["total_tokens"] for answer in answers)
    assert 600 < used <= 2 * 600 + 2
    answer = await served.post(chat("hello", stream=False), **bearer(ann))
    assert answer.status == 429
    assert int(answer.headers["retry-after"]) > 60
    assert limits_in(answer.headers)["remaining-tokens"] == "0"


async def test_a_changed_limit_holds_from_the_next_request(serve: Serve):
    """Raised over HTTP, it is in force when that is answered."""
    served = await serve(Script(tokens=4), api_key="root")
    ann = await made(served, "ann", rpm=1)
    assert (await served.post(chat("a", stream=False), **bearer(ann))).status == 200
    assert (await served.post(chat("a", stream=False), **bearer(ann))).status == 429
    path = f"/api/admin/keys/{ann.key.id}"
    changed = await served.call("PATCH", path, {"rpm": 2}, authorization="Bearer root")
    assert (changed.status, changed.json()["rpm"]) == (200, 2)
    assert (await served.post(chat("a", stream=False), **bearer(ann))).status == 200


# A month's budget


async def test_a_budget_that_is_used_up_is_429(serve: Serve):
    """OpenAI's insufficient_quota, of the owner's spending with any key; another owner is served."""
    served = await serve(Script(tokens=4), engine_type=Spied, prices=PRICES)
    ann = await made(served, "ann", budget_micro_usd=6_000_000, owner="ann")
    phone = await made(served, "phone", budget_micro_usd=100_000_000, owner="ann")
    bob = await made(served, "bob", budget_micro_usd=6_000_000)
    # 2 prompt tokens and 4 of the answer.
    assert (await served.post(chat("hello", stream=False), **bearer(ann))).status == 200
    answer = await served.post(chat("hello", stream=False), **bearer(ann))
    assert answer.refusal() == (429, "insufficient_quota", None)
    assert answer.error()["type"] == "insufficient_quota"
    assert "$6" in answer.error()["message"]
    assert "retry-after" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"
    assert len(spied(served)) == 1
    for other in (phone, bob):
        assert (await served.post(chat("hello", stream=False), **bearer(other))).status == 200
    usage = (await served.call("GET", "/api/usage", **bearer(ann))).json()
    assert (usage["budget_usd"], usage["cost_usd"]) == (6.0, 12.0)


async def test_a_used_up_budget_lets_a_known_key_attach(serve: Serve):
    """What was paid for can be read again."""
    served = await serve(Script(tokens=4), prices=PRICES)
    ann = await made(served, "ann", budget_micro_usd=1)
    headers = bearer(ann) | {"idempotency-key": "one"}
    for _ in range(2):
        assert (await served.post(chat("hello", stream=False), **headers)).status == 200
    headers["idempotency-key"] = "two"
    assert (await served.post(chat("hello", stream=False), **headers)).status == 429


# SDKs and metrics


@pytest.mark.timeout(300)
async def test_sdks_raise_their_rate_limit_error(sdk: Sdk, serve: Serve):
    """RateLimitError with status and code, whichever limit it is."""
    served = await serve(Script(tokens=4), prices=PRICES)
    spent = await made(served, "spent", budget_micro_usd=1)
    assert (await served.post(chat("hello", stream=False), **bearer(spent))).status == 200
    small, busy = await made(served, "small", tpm=5), await made(served, "busy", rpm=1)
    assert (await served.post(chat("hello", stream=False), **bearer(busy))).status == 200
    for issued, code in (
        (small, "rate_limit_exceeded"),
        (busy, "rate_limit_exceeded"),
        (spent, "insufficient_quota"),
    ):
        case: Case = refused("429", "RateLimitError", 429, code, api_key=issued.text)
        seen = await sdk.run(served.port, case)
        assert case.check(seen), (sdk.version, seen)


@pytest.mark.timeout(300)
async def test_sdks_read_a_stream_that_ends_at_the_budget(sdk: Sdk, serve: Serve):
    """The chunk that says why disturbs none of them."""
    served = await serve(Script(tokens=4, rate=1000), prices=PRICES)
    # 3 prompt tokens and 2 of the answer.
    ann = await made(served, "ann", budget_micro_usd=5_000_000)
    text = "".join(scripted_text(0, 0, 2))
    case = Case("budget", "stream", said(text, finish="length"), api_key=ann.text)
    seen = await sdk.run(served.port, case)
    assert case.check(seen), (sdk.version, seen)


async def test_refusals_are_counted_by_tier_and_reason(serve: Serve):
    """And by nothing that names a key; all begin at 0."""
    served = await serve(Script(tokens=4), api_key="root")
    ann = await made(served, "ann", tpm=5, tier="batch")
    await served.post(chat("hello", stream=False), **bearer(ann))
    answer = await fetch(served.port, "GET", "/metrics", None, {"authorization": "Bearer root"})
    text = answer.body.decode()
    assert 'tokenring_limited_requests_total{reason="too_large",tier="batch"} 1.0' in text
    assert 'tokenring_limited_requests_total{reason="budget",tier="standard"} 0.0' in text
    assert ann.key.id not in text


async def read(served: Served, issued: NewKey) -> tuple[Transcript, list[dict[str, Any]]]:
    """A stream to its end, and its chunks without choices."""
    stream = await served.open(chat("hello"), headers=bearer(issued))
    data = [event.data async for event in stream.events()]
    await until(lambda: not served.live())
    chunks = [json.loads(text) for text in data if text != "[DONE]"]
    return stream.transcript, [chunk for chunk in chunks if not chunk["choices"]]


async def test_a_stream_ends_at_the_token_that_reaches_the_budget(serve: Serve):
    """finish_reason length, a chunk that says why, and a bill of what was released."""
    served = await serve(Script(tokens=500, rate=2000), prices=PRICES)
    ann = await made(served, "ann", budget_micro_usd=12_000_000)
    transcript, [notice] = await read(served, ann)
    # 2 prompt tokens and 10 of the answer.
    assert transcript.content() == "".join(scripted_text(0, 0, 10))
    assert transcript.finish_reasons == {0: "length"}
    assert notice["budget"]["code"] == "insufficient_quota"
    assert "$12 " in notice["budget"]["message"]
    usage = (await served.call("GET", "/api/usage", **bearer(ann))).json()
    assert usage["cost_usd"] == 12.0
    assert usage["output_tokens"] - usage["withheld_tokens"] == 10
    assert not served.runtime.balance.differs
    assert (await served.post(chat("hello"), **bearer(ann))).refusal()[1] == "insufficient_quota"


async def test_an_answer_in_one_piece_ends_there_too(serve: Serve):
    """With the same finish_reason and notice, for all choices, and kept so."""
    served = await serve(Script(tokens=500, rate=2000), prices=PRICES)
    ann = await made(served, "ann", budget_micro_usd=12_000_000)
    answer = (await served.post(chat("hello", stream=False, n=2), **bearer(ann))).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert [choice["message"]["content"] for choice in answer["choices"]] == [
        "".join(scripted_text(0, choice, 5)) for choice in (0, 1)
    ]
    assert answer["budget"]["code"] == "insufficient_quota"
    path = f"/api/conversations/{answer['conversation_id']}"
    message = (await served.call("GET", path, **bearer(ann))).json()["messages"][-1]
    assert (message["status"], message["finish_reason"]) == ("complete", "length")


async def test_streams_of_an_owner_share_the_budget(serve: Serve):
    """Together they spend it, and a token each at most beyond it: all have begun before it is reached."""
    served = await serve(Script(tokens=500, rate=1000), engine_type=Begun, prices=PRICES)
    assert isinstance(served.engine, Begun)
    ann = await made(served, "ann", budget_micro_usd=60_000_000)
    answers = [asyncio.create_task(read(served, ann)) for _ in range(4)]
    await until(lambda: [stream.last_id > 3 for stream in served.live()] == [True] * 4)
    served.engine.go_on.set()
    await asyncio.gather(*answers)
    usage = (await served.call("GET", "/api/usage", **bearer(ann))).json()
    assert 60 <= usage["cost_usd"] <= 60 + 4
    assert not served.runtime.balance.differs


async def test_an_answer_within_the_budget_is_not_cut(serve: Serve):
    """A dollar is left."""
    served = await serve(Script(tokens=10), prices=PRICES)
    ann = await made(served, "ann", budget_micro_usd=13_000_000)
    transcript, notices = await read(served, ann)
    assert (transcript.finish_reasons, notices) == ({0: "stop"}, [])


async def test_what_was_spent_before_the_start_counts(serve: Serve, tmp_path: Path):
    """The month's spending is the ledger's, whichever process wrote it."""
    served = await serve(Script(tokens=4), prices=PRICES, data_dir=tmp_path)
    ann = await made(served, "ann", budget_micro_usd=6_000_000)
    assert (await served.post(chat("hello", stream=False), **bearer(ann))).status == 200
    await served.close()
    again = await serve(Script(tokens=4), prices=PRICES, data_dir=tmp_path)
    assert (await again.post(chat("hello", stream=False), **bearer(ann))).status == 429
