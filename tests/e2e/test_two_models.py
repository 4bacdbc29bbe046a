"""Two models in one server, both scripted: names, `auto`, what keys may use, the small one's end."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote

import pytest

from app.core import KeyTerms, ModelCard
from app.engine.scripted.engine import Script, ScriptedEngine
from app.engine.supervise import SupervisedEngine
from app.errors import EngineNotReady
from app.store import key_table, keys
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import until

SMALL, LARGE = "scripted-small", "scripted"
EASY = "Who wrote Faust?"
HARD = "Prove this theorem, then write a Python function for it."


@pytest.fixture
async def two(serve: Serve) -> Served:
    """A server with both there, and prices that tell them apart."""
    served = await serve(Script(tokens=8), small_model="scripted:tokens=4", prices=PRICES, safety="off")
    await there(served)
    return served


PRICES = (
    {"model": LARGE, "input": "10", "output": "10"},
    {"model": SMALL, "input": "1", "output": "1"},
)


def standby(served: Served) -> SupervisedEngine:
    """What stands behind the small model."""
    assert served.runtime.small_engine is not None
    return served.runtime.small_engine


def kill_small(served: Served, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """End the small model's engine; it starts again once the event is set."""
    engine, start_it = small_engine(served), asyncio.Event()
    start = engine.start

    async def start_when_told() -> None:
        await start_it.wait()
        await start()

    monkeypatch.setattr(engine, "start", start_when_told)
    engine.die("killed")
    return start_it


def small_engine(served: Served) -> ScriptedEngine:
    """The engine of the small model."""
    engine = standby(served).engine
    assert isinstance(engine, ScriptedEngine)
    return engine


async def there(served: Served) -> None:
    """Wait until the small model can be asked."""
    await until(lambda: standby(served).state == "ready")


async def bearer(served: Served, *models: str, **terms: Any) -> dict[str, str]:
    """The header of a new key that may use these models."""
    issued = await served.runtime.database.write(
        lambda c: keys.create(c, KeyTerms("k", models=models or None, **terms), key_table.now_us())
    )
    await served.runtime.keys.load()
    return {"authorization": f"Bearer {issued.text}"}


def ask(content: str = EASY, model: str = "auto", **more: Any) -> dict[str, Any]:
    """A request that is answered in one piece."""
    return chat(content, model=model, stream=False, **more)


async def test_each_answers_under_its_own_name(two: Served) -> None:
    """And nothing is said of a choice that was not the server's."""
    for model, tokens in ((LARGE, 8), (SMALL, 4)):
        answer = await two.post(ask(model=model))
        assert (answer.json()["model"], answer.json()["usage"]["completion_tokens"]) == (model, tokens)
        assert not {"x-route-reason", "x-served-model", "x-degraded"} & set(answer.headers)


async def test_auto_goes_to_either_and_says_why(two: Served) -> None:
    """In headers, in `model` of answers and chunks, in the counters; billed as what served it."""
    easy, hard = await two.post(ask()), await two.post(ask(HARD))
    assert (easy.json()["model"], easy.headers["x-served-model"]) == (SMALL, SMALL)
    assert easy.headers["x-route-reason"] == "small; simple"
    assert (hard.json()["model"], hard.headers["x-served-model"]) == (LARGE, LARGE)
    assert hard.headers["x-route-reason"].startswith("large; math; code=")
    stream = await two.open(chat(HARD, model="auto"))
    assert stream.head.headers["x-served-model"] == LARGE
    chunks = [event.json() async for event in stream.events() if event.data != "[DONE]"]
    assert {chunk["model"] for chunk in chunks} == {LARGE}
    router = two.runtime.router
    assert router is not None
    assert router.routed == {SMALL: {"simple": 1}, LARGE: {"math": 2}}
    usage = (await two.call("GET", "/api/usage?group_by=model")).json()
    assert {row["model"]: row["requests"] for row in usage["groups"]} == {SMALL: 1, LARGE: 2}


async def test_who_comes_back_and_is_refused_is_told_too(two: Served) -> None:
    """As whoever attaches: which model the answer is of, and why."""
    headers, body = {"idempotency_key": "k"}, chat(EASY, model="auto")
    first = await two.post(body, **headers)
    refused = await two.post(body, last_event_id="999", **headers)
    assert (first.status, refused.status) == (200, 400)
    assert refused.headers["x-route-reason"] == first.headers["x-route-reason"] == "small; simple"


async def test_both_are_measured(two: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each under its name; what was chosen by its reason; whether it is there."""
    for content in (EASY, HARD, EASY):
        await two.post(ask(content))
    text = (await two.call("GET", "/metrics")).body.decode()
    for line in (
        f'tokenring_routed_total{{model="{SMALL}",reason="simple"}} 2.0',
        f'tokenring_routed_total{{model="{LARGE}",reason="math"}} 1.0',
        f'tokenring_requests_total{{model="{SMALL}",outcome="stop"}} 2.0',
        f'tokenring_model_ready{{model="{SMALL}"}} 1.0',
        f'tokenring_engine_running_requests{{model="{SMALL}"}} 0.0',
        "tokenring_degraded_step 0.0",
    ):
        assert line in text.splitlines()
    kill_small(two, monkeypatch)
    text = (await two.call("GET", "/metrics")).body.decode()
    assert f'tokenring_model_ready{{model="{SMALL}"}} 0.0' in text.splitlines()
    assert f'tokenring_model_ready{{model="{LARGE}"}} 1.0' in text.splitlines()


async def test_the_caller_may_choose_the_size(two: Served) -> None:
    """`x-route`, and nothing else than what it can be."""
    assert (await two.post(ask(HARD), x_route="small")).headers["x-route-reason"] == "small; asked"
    assert (await two.post(ask(), x_route="large")).headers["x-served-model"] == LARGE
    assert (await two.post(ask(), x_route="medium")).refusal() == (400, "invalid_value", "x-route")
    assert (await two.post(ask(), x_no_degrade="?")).refusal() == (400, "invalid_value", "x-no-degrade")


async def test_who_attaches_is_told_too(two: Served) -> None:
    """By id, and by the same Idempotency-Key, which is not routed again."""
    first = await two.post(ask(), idempotency_key="one")
    again = await two.post(ask(), idempotency_key="one")
    attached = await two.call("GET", f"/api/chat/completions/{first.headers['x-request-id']}")
    for answer in (first, again, attached):
        assert answer.headers["x-served-model"] == SMALL
        assert answer.headers["x-route-reason"] == "small; simple"
    assert two.runtime.router is not None
    assert two.runtime.router.routed[SMALL].total() == 1


async def test_a_conversation_stays_with_the_large_model(two: Served) -> None:
    """Once that has answered in it; with the small one it goes on by what is asked."""
    begun = await two.post(ask(HARD))
    conversation = begun.headers["x-conversation-id"]
    after = await two.post(ask("thanks", conversation_id=conversation))
    assert after.headers["x-route-reason"] == "large; conversation"
    easy = (await two.post(ask())).headers["x-conversation-id"]
    assert (await two.post(ask("thanks", conversation_id=easy))).headers["x-served-model"] == SMALL
    shown = (await two.call("GET", f"/api/conversations/{easy}")).json()
    assert shown["model"] == SMALL
    assert (await two.post(ask(conversation_id="conv_none"))).refusal()[0] == 404


async def test_both_are_listed_with_their_state(two: Served) -> None:
    """Under both APIs; `auto` is no model, and may be asked for."""
    listed = (await two.call("GET", "/api/models")).json()["data"]
    assert [(m["id"], m["state"], m["degraded"]) for m in listed] == [
        (LARGE, "ready", False),
        (SMALL, "ready", False),
    ]
    assert [m["price_usd_per_1k"]["output"] for m in listed] == ["10", "1"]
    names = [m["id"] for m in (await two.call("GET", "/v1/models")).json()["data"]]
    assert names == [LARGE, SMALL]
    for name in (*names, "auto"):
        assert (await two.call("GET", f"/v1/models/{name}")).json()["id"] == name
    assert (await two.post(ask(model="none"))).refusal() == (404, "model_not_found", "model")
    detail = (await two.call("GET", "/readyz")).json()
    assert (detail["small_model"]["model"], detail["small_model"]["state"]) == (SMALL, "ready")


@pytest.mark.parametrize("mine", [SMALL, LARGE])
async def test_a_key_has_its_own_models_only(two: Served, mine: str) -> None:
    """By name, by `auto`, and in the lists."""
    headers, other = await bearer(two, mine), LARGE if mine == SMALL else SMALL
    for content in (EASY, HARD):
        answer = await two.post(ask(content), **headers)
        assert (answer.headers["x-served-model"], answer.json()["model"]) == (mine, mine)
        assert answer.headers["x-route-reason"].endswith("; key")
    assert (await two.post(ask(), x_route="large" if mine == SMALL else "small", **headers)).json()[
        "model"
    ] == mine
    assert (await two.post(ask(model=other), **headers)).refusal() == (404, "model_not_found", "model")
    listed = (await two.call("GET", "/api/models", **headers)).json()["data"]
    assert [m["id"] for m in listed] == [mine]
    neither = await bearer(two, "else")
    assert (await two.post(ask(), **neither)).refusal() == (404, "model_not_found", "model")


async def test_a_name_may_be_in_any_language(serve: Serve) -> None:
    """In headers it is percent-encoded, in bodies as it is."""
    served = await serve(small_model="scripted", small_served_model_name="klein/ß-小")
    await there(served)
    answer = await served.post(ask())
    assert answer.json()["model"] == unquote(answer.headers["x-served-model"]) == "klein/ß-小"


async def test_a_refusal_says_who_would_have_answered(two: Served) -> None:
    """Whatever it is refused for, once that is decided."""
    headers = await bearer(two, tpm=1)
    refused = await two.post(ask(), **headers)
    assert refused.refusal()[:2] == (429, "rate_limit_exceeded")
    assert (refused.headers["x-served-model"], refused.headers["x-route-reason"]) == (SMALL, "small; simple")


async def test_without_a_small_model_there_is_no_auto(serve: Serve) -> None:
    """It is a model that is not served, as any other."""
    served = await serve()
    assert (await served.post(ask())).refusal() == (404, "model_not_found", "model")
    assert "small_model" not in (await served.call("GET", "/readyz")).json()


class Loading(ScriptedEngine):
    """One that does not know its model yet, as a server that loads it."""

    @property
    def model(self) -> ModelCard:
        raise EngineNotReady("The engine is starting.", retry_after_s=5)


async def test_the_small_one_may_take_its_time(serve: Serve) -> None:
    """The large one serves meanwhile, and `auto` is answered by it; the small one's name is known."""
    served = await serve(small_model="scripted:start_s=1000")
    small_engine(served).__class__ = Loading
    assert (await served.post(ask())).headers["x-route-reason"] == "large; alone"
    refused = await served.post(ask(model=SMALL))
    assert refused.refusal()[:2] == (503, "engine_not_ready")
    assert "retry-after" in refused.headers
    ready = await served.call("GET", "/readyz")
    assert (ready.status, ready.json()["small_model"]["state"]) == (200, "starting")
    listed = (await served.call("GET", "/api/models")).json()["data"]
    assert [(m["id"], m["state"], m["context_length"]) for m in listed][1] == (SMALL, "not_ready", None)


async def test_the_small_one_s_death_leaves_the_large_serving(
    two: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else ends; it is started again, and answers."""
    start_it = kill_small(two, monkeypatch)
    ready = await two.call("GET", "/readyz")
    assert (ready.status, ready.json()["small_model"]["state"]) == (200, "down: killed")
    assert (await two.post(ask())).headers["x-route-reason"] == "large; alone"
    assert (await two.post(ask(model=SMALL))).status == 503
    start_it.set()
    await there(two)
    assert (await two.post(ask())).headers["x-route-reason"] == "small; simple"
    assert not two.runtime.engine_ended.is_set()
    await until(lambda: two.logged("small_model"))


async def test_the_small_one_s_new_start_is_why_its_cache_is_empty(
    two: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefix report says so, and not that there was no room."""
    system = " ".join(f"rule{i}" for i in range(100))

    async def asked(number: int) -> None:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{number} is what?"}]
        assert (await two.post(ask(model=SMALL, messages=messages))).status == 200

    for number in range(3):
        await asked(number)
    start_it = kill_small(two, monkeypatch)
    await until(lambda: [line for line in two.logged("small_model") if line["state"] == "down: killed"])
    start_it.set()
    await there(two)
    await asked(4)
    assert +two.runtime.prefixes.breaks == {"restarted": 1}


async def test_the_small_one_serves_while_the_large_is_away(two: Served) -> None:
    """`auto` and its own name; the large one's is refused."""
    two.engine._health = type(two.engine.health())("starting")
    assert (await two.post(ask(HARD))).headers["x-route-reason"] == "small; alone"
    assert (await two.post(ask(model=SMALL))).status == 200
    assert (await two.post(ask(model=LARGE))).refusal()[:2] == (503, "engine_not_ready")
    assert (await two.call("GET", "/readyz")).status == 503
