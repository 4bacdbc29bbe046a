"""The prefix report and the abuse flags over HTTP: who sees what, and that text is for its owner alone."""

from __future__ import annotations

import time
from typing import Any

import pytest

from app.core import ChatRequest, Counts, Key, KeyTerms, Prompt, Scope, Usage
from app.engine.scripted.engine import Script
from app.store import key_table, keys, ledger, safety_events
from app.store.keys import NewKey
from app.store.ledger import Price, Reservation, Settlement
from app.store.safety_events import SafetyEvent
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Connection

RULES = " ".join(f"rule{n}" for n in range(60))
CLOCKS = [f"Time: 10:0{minute}. {RULES}" for minute in range(3)]


async def made(served: Served, name: str, scope: Scope = "chat") -> NewKey:
    """A key, known to the server."""
    terms = KeyTerms(name, scope=scope)
    issued = await served.runtime.database.write(lambda c: keys.create(c, terms, key_table.now_us()))
    await served.runtime.keys.load()
    return issued


def saw(served: Served, text: str, owner: str, key_id: str | None = None) -> None:
    """The report is told of a request whose prompt was not cached."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "hi"}]
    request = ChatRequest("req_1", owner, "scripted", {"messages": messages}, 0)
    prompt = Prompt(list(range(200)), 10, None)
    served.runtime.prefixes.record(request, prompt, Counts(200, 1, 0), key_id=key_id)


async def listed(served: Served, path: str, key: NewKey | None = None) -> list[dict[str, Any]]:
    """A list as it is answered."""
    headers = {} if key is None else {"authorization": f"Bearer {key.text}"}
    answer = await served.call("GET", path, **headers)
    assert answer.status == 200, answer.body
    assert answer.headers["cache-control"] == "no-store"
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


async def test_prefixes_are_listed_with_their_breaks(serve: Serve):
    """What was expected and obtained, where the prompt varies, and each break with cause and position."""
    served = await serve()
    for text in CLOCKS:
        saw(served, text, "local")
    [one] = await listed(served, "/api/admin/prefixes")
    assert (one["object"], one["owner"], one["key"], one["model"]) == ("prefix", "local", None, "scripted")
    assert (one["requests"], one["cached_tokens"], one["hit_rate"]) == (3, 0, 0.0)
    assert one["expected_tokens"] > 300
    assert one["characters"] == len(CLOCKS[0])
    assert one["breaks"] == {"system": 2}
    assert one["varies"] == {"kind": "clock", "position": 6, "length": 5}
    broken = one["last_breaks"][0]
    assert (broken["cause"], broken["what"], broken["unit"]) == ("system", "clock", "character")
    assert (broken["position"], broken["length"], broken["cached_tokens"]) == (6, 5, 0)
    assert "rule" not in str(one)


async def test_text_is_for_its_owner_who_asks(serve: Serve):
    """An admin key sees where another's prompt varies, never the text; the owner sees both on request."""
    served = await serve()
    ann, admin = await made(served, "ann"), await made(served, "admin", "admin")
    for text in CLOCKS:
        saw(served, text, ann.key.owner, ann.key.id)
        saw(served, text, admin.key.owner, admin.key.id)
    [own] = await listed(served, "/api/prefixes?text=true", ann)
    assert own["varies"]["text"] == "10:02"
    assert [b["text"] for b in own["last_breaks"]] == ["10:02", "10:01"]
    [silent] = await listed(served, "/api/prefixes", ann)
    assert "text" not in silent["varies"]
    found = await listed(served, "/api/admin/prefixes?text=true", admin)
    shown = {one["owner"]: "text" in one["varies"] for one in found}
    assert shown == {ann.key.owner: False, admin.key.owner: True}
    [only] = await listed(served, f"/api/admin/prefixes?key={ann.key.id}&limit=1", admin)
    assert only["key"] == ann.key.id
    assert await listed(served, "/api/admin/prefixes?owner=nobody", admin) == []


async def test_wrong_parameters_are_refused(serve: Serve):
    """By name."""
    served = await serve()
    for path in ("/api/admin/prefixes?text=yes", "/api/prefixes?text=1"):
        assert (await served.call("GET", path)).refusal() == (400, "invalid_value", "text")
    for path in ("/api/prefixes?owner=ann", "/api/admin/abuse?key=x"):
        assert (await served.call("GET", path)).refusal()[:2] == (400, "unknown_parameter")


async def test_abuse_is_listed_and_counted(serve: Serve):
    """Flags from the ledger, the events and the addresses; the metric has them, and the key is served on."""
    served = await serve()
    now_us = time.time_ns() // 1000
    day_us = 86_400 * 1_000_000

    def write(c: Any) -> None:
        for number, ago in enumerate((4, 3, 2, 1, 0)):
            at_us = now_us - ago * day_us
            seq = ledger.reserve(
                c, Reservation(f"r{number}", "ann", "scripted", at_us, 10, 10, Price(), b"{}"), None
            )
            tokens = 10**6 if ago == 0 else 1000
            ledger.settle(c, Settlement(seq, Usage(tokens, 10), "stop", at_us))
        for number in range(6):
            safety_events.add(
                c,
                SafetyEvent(
                    now_us, f"b{number}", "bob", "tr-b", "m", "prompt", "encoder", "block", "S2", 1, 0.5, "p"
                ),
            )

    await served.runtime.database.write(write)
    for network in range(12):
        key = Key("tr-c", "cem", KeyTerms("cem"), 0)
        served.runtime.abuse.addresses.record(key, f"10.0.{network}.1")
    flags = await listed(served, "/api/admin/abuse")
    assert [(flag["kind"], flag["owner"], flag["key"]) for flag in flags] == [
        ("spike", "ann", None),
        ("blocks", "bob", "tr-b"),
        ("addresses", "cem", "tr-c"),
    ]
    assert flags[0]["tokens"] == 1_000_010
    assert flags[1]["categories"] == {"S2": 6}
    assert flags[2]["networks"] == 12
    assert [flag["owner"] for flag in await listed(served, "/api/admin/abuse?owner=bob")] == ["bob"]
    metrics = (await served.call("GET", "/metrics")).body.decode()
    for kind in ("spike", "blocks", "addresses"):
        assert f'tokenring_abuse_flags{{kind="{kind}"}} 1.0' in metrics


async def test_a_key_of_many_networks_is_flagged_and_served_on(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """Chat requests tell from where each key is used: ten networks are a flag, which only admins see."""
    served = await serve(Script(tokens=2))
    monkeypatch.setattr("app.metering.abuse.FRESH_S", 0.0)
    ann, bob, admin = (
        await made(served, "ann"),
        await made(served, "bob"),
        await made(served, "admin", "admin"),
    )

    async def ask(key: NewKey, address: str) -> int:
        async with await Connection.to(served.port, address=address) as connection:
            headers = {"authorization": f"Bearer {key.text}"}
            await connection.request("POST", "/api/chat/completions", chat(stream=False), headers)
            return (await connection.response()).status

    for network in range(9):
        assert await ask(ann, f"127.0.{network}.1") == 200
        assert await ask(bob, f"127.0.0.{network + 1}") == 200
    assert await listed(served, "/api/admin/abuse", admin) == []
    assert await ask(ann, "127.0.9.1") == 200
    [flag] = await listed(served, "/api/admin/abuse", admin)
    assert (flag["kind"], flag["owner"], flag["key"]) == ("addresses", ann.key.owner, ann.key.id)
    assert flag["networks"] == 10
    assert "127." not in str(flag)
    assert await ask(ann, "127.0.10.1") == 200
    answer = await served.call("GET", "/api/admin/abuse", authorization=f"Bearer {ann.text}")
    assert answer.status == 403


async def test_breaks_are_counted_by_cause(serve: Serve):
    """Every cause is there from the start."""
    served = await serve()
    saw(served, CLOCKS[0], "local")
    saw(served, CLOCKS[1], "local")
    metrics = (await served.call("GET", "/metrics")).body.decode()
    assert 'tokenring_prefix_break_total{cause="system"} 1.0' in metrics
    assert 'tokenring_prefix_break_total{cause="evicted"} 0.0' in metrics
