"""Usage over HTTP: what was generated is what is billed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.core import KeyTerms, Usage
from app.engine.scripted.engine import Script
from app.store.keys import create
from app.store.ledger import Price
from app.store.usage import differences
from tests.support.ledgers import at, settled
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import open_stream, until

PRICES = ({"model": "scripted", "input": "0.5", "cached_input": "0.05", "output": "1.5"},)
USAGE = Usage(1000, 2000, 400, 300, 100)


@pytest.fixture
async def served(serve: Serve, tmp_path: Path) -> Served:
    """A server in open mode whose store has four requests of November 2021, three of the local owner."""
    served = await serve(Script(tokens=5), data_dir=tmp_path, prices=PRICES)
    for day, model, owner in (
        ("2021-11-20", "llama", "local"),
        ("2021-11-20", "qwen", "local"),
        ("2021-11-21", "llama", "local"),
        ("2021-11-21", "llama", "other"),
    ):
        fields = {"created_at_us": at(day), "model": model, "owner": owner, "price": Price(500, 50, 1500)}
        await served.runtime.database.write(lambda c, fields=fields: settled(c, USAGE, **fields))
    return served


def of(number: int) -> dict[str, Any]:
    """What that many of these requests add up to."""
    return {
        "requests": number,
        "input_tokens": 1000 * number,
        "cached_tokens": 400 * number,
        "output_tokens": 2000 * number,
        "reasoning_tokens": 300 * number,
        "withheld_tokens": 100 * number,
        "cost_usd": round(0.00317 * number, 6),
        "cost_micro_usd": 3170 * number,
    }


async def test_a_month(served: Served):
    """A month's usage has the counts and cost of the owner asked for, and no one else's."""
    answer = await served.call("GET", "/api/usage?period=2021-11&owner=local")
    assert (answer.status, answer.json()) == (
        200,
        {
            "object": "usage",
            "period": "2021-11",
            "from": "2021-11-01",
            "to": "2021-11-30",
            **of(3),
            "budget_usd": None,
            "groups": [],
        },
    )


@pytest.mark.parametrize(
    ("query", "number"),
    [
        ("period=2021-11-20", 2),
        ("from=2021-11-21&to=2021-12-24", 1),
        ("from=2021-11-01&to=2021-11-21", 3),
        ("period=2021-10", 0),
    ],
)
async def test_other_periods(served: Served, query: str, number: int):
    """A day, or from a day to a day, both included."""
    answer = (await served.call("GET", f"/api/usage?owner=local&{query}")).json()
    assert of(number).items() <= answer.items()


async def test_groups(served: Served):
    """Groups add up to the whole, and each says what it is of."""
    answer = (await served.call("GET", "/api/usage?period=2021-11&group_by=day,model,owner")).json()
    assert answer["groups"] == [
        {"day": "2021-11-20", "model": "llama", "owner": "local", **of(1)},
        {"day": "2021-11-20", "model": "qwen", "owner": "local", **of(1)},
        {"day": "2021-11-21", "model": "llama", "owner": "local", **of(1)},
        {"day": "2021-11-21", "model": "llama", "owner": "other", **of(1)},
    ]
    assert of(4).items() <= answer.items()


@pytest.mark.parametrize(
    ("query", "param", "words"),
    [
        ("period=november", "period", "2026-11 or 2026-11-20"),
        ("period=2021-11&from=2021-11-01", "period", "either"),
        ("to=2021-11-01", "from", "needs"),
        ("group_by=week", "group_by", "day, model, owner, key, metadata.NAME"),
        ("groupby=day", "groupby", "group_by"),
    ],
)
async def test_what_is_wrong_is_named(served: Served, query: str, param: str, words: str):
    """A parameter that cannot be read is a 400 that names it and what is allowed."""
    answer = await served.call("GET", f"/api/usage?{query}")
    assert answer.status == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


async def test_who_sees_whose(served: Served):
    """An admin sees everyone's usage or that of one key; a chat key that of its owner, and its budget."""
    database = served.runtime.database
    admin = await database.write(lambda c: create(c, KeyTerms("root", scope="admin"), 1))
    other = await database.write(lambda c: create(c, KeyTerms("a", budget_micro_usd=2_500_000), 1, "other"))
    await served.runtime.keys.load()

    async def requests(text: str, query: str = "") -> tuple[object, ...]:
        path = f"/api/usage?period=2021-11{query}"
        answer = await served.call("GET", path, authorization=f"Bearer {text}")
        if answer.status == 200:
            return answer.json()["requests"], answer.json()["budget_usd"]
        return answer.refusal()[:2]

    assert await requests(admin.text) == (4, None)
    assert await requests(admin.text, "&owner=local") == (3, None)
    assert await requests(admin.text, "&owner=nobody") == (0, None)
    assert await requests(admin.text, "&key=none") == (4, None)
    assert await requests(admin.text, f"&key={other.key.id}") == (0, 2.5)
    assert await requests(admin.text, "&key=nobody") == (0, None)
    for query in ("", "&owner=other"):
        assert await requests(other.text, query) == (1, 2.5)
    assert await requests(other.text, f"&key={other.key.id}") == (0, 2.5)
    for query in ("&owner=local", f"&key={admin.key.id}", "&key=nobody", "&key=none"):
        assert await requests(other.text, query) == (403, "forbidden")


async def test_a_team_is_charged_by_key_and_project(served: Served):
    """A request is billed to its key and to the names that it gave, in the report and in the log."""
    database = served.runtime.database
    issued = await database.write(lambda c: create(c, KeyTerms("laptop"), 1, "team"))
    await served.runtime.keys.load()
    auth = {"authorization": f"Bearer {issued.text}"}
    for metadata in ({"project": "alpha", "note": "x"}, {"project": "beta"}, {}):
        assert (await served.post(chat(stream=False, metadata=metadata), **auth)).status == 200
    answer = await served.call("GET", "/api/usage?group_by=key,metadata.project", **auth)
    assert [
        (g["key"], g["key_name"], g["owner"], g["metadata.project"], g["requests"])
        for g in answer.json()["groups"]
    ] == [(issued.key.id, "laptop", "team", project, 1) for project in (None, "alpha", "beta")]
    lines = [line for line in served.log if line["event"] == "request"]
    assert [line["key"] for line in lines] == [issued.key.id] * 3
    assert await database.read(differences) == []


async def test_a_wrong_key_sees_nothing(serve: Serve, tmp_path: Path):
    """Usage is for those who have a key."""
    served = await serve(Script(), data_dir=tmp_path, api_key="right")
    assert (await served.call("GET", "/api/usage", authorization="Bearer wrong")).status == 401
    assert (await served.call("GET", "/api/usage", authorization="Bearer right")).status == 200


async def test_an_answer_is_billed_as_it_said(served: Served):
    """This month's usage is that of the answers given: their own counts, at the price in force."""
    answer = (await served.post(chat(stream=False))).json()["usage"]
    now = (await served.call("GET", "/api/usage")).json()
    assert now["period"] == f"{datetime.now(UTC):%Y-%m}"
    assert (now["requests"], now["input_tokens"], now["output_tokens"]) == (1, answer["prompt_tokens"], 5)
    assert now["cost_micro_usd"] == (answer["prompt_tokens"] * 500_000 + 5 * 1_500_000) // 1000


async def test_models_show_the_price_in_force(served: Served):
    """The model list says what 1,000 tokens cost now."""
    [model] = (await served.call("GET", "/api/models")).json()["data"]
    assert model["price_usd_per_1k"] == {"input": "0.5", "cached_input": "0.05", "output": "1.5"}


async def test_a_failed_answer_that_reached_nobody_costs_its_prompt_alone(serve: Serve):
    """The same key generates a new one, and by its id there is the error alone. Who read its events pays."""
    served = await serve(Script(tokens=20, rate=100, fault="fail", fault_after=10), prices=PRICES)
    path, body = "/v1/chat/completions", chat("hello", stream=False)

    async def output() -> tuple[int, int, int]:
        await served.settled()
        usage = (await served.call("GET", "/api/usage")).json()
        return usage["requests"], usage["output_tokens"], usage["withheld_tokens"]

    failed = [await served.call("POST", path, body, idempotency_key="k") for _ in range(2)]
    assert [answer.status for answer in failed] == [500, 500]
    assert await output() == (2, 20, 20)
    for answer in failed:
        events = await served.call(
            "GET", f"{path}/{answer.headers['x-request-id']}", accept="text/event-stream"
        )
        assert (events.body.count(b"data: "), b"engine_failed" in events.body) == (2, True)

    waiting = asyncio.create_task(served.call("POST", path, body))
    (stream,) = await until(served.live)
    async with await open_stream(served.port, stream_id=stream.request_id) as reader:
        assert (await reader.to_end()).content()
    assert (await waiting).status == 500
    assert await output() == (3, 30, 20)
