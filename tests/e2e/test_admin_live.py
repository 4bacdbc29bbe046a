"""Live requests and the load over HTTP: who sees them, what is in them and what never is, and the stop."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from app.core import ChatRequest, KeyTerms, Scope
from app.engine.scripted.engine import Script, ScriptedEngine
from app.pipeline.trace import Trace
from app.store import key_table, keys
from app.store.keys import NewKey
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Connection, until

WORD = "xylophone"


class SmallPool(ScriptedEngine):
    """An engine with room for one answer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._card = dataclasses.replace(self._card, kv_capacity_tokens=1000)


def script(request: ChatRequest) -> Script:
    """Answers to `hold` never end by themselves."""
    held = request.body["messages"][-1]["content"].startswith("hold")
    return Script(tokens=10**6, fault="hang", fault_after=5) if held else Script(tokens=4)


async def key_of(served: Served, name: str, scope: Scope = "chat", **terms: Any) -> NewKey:
    """A key, known to the server."""
    issued = await served.runtime.database.write(
        lambda c: keys.create(c, KeyTerms(name, scope=scope, **terms), key_table.now_us())
    )
    await served.runtime.keys.load()
    return issued


def header(key: NewKey) -> dict[str, str]:
    """The header that sends it."""
    return {"authorization": f"Bearer {key.text}"}


async def get(served: Served, path: str, key: NewKey | None = None) -> Any:
    """What is answered."""
    answer = await served.call("GET", path, **({} if key is None else header(key)))
    assert answer.status == 200, answer.body
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


async def begun(served: Served, content: str, key: NewKey | None = None, **options: Any) -> Connection:
    """A request on its way, whose answer is not read."""
    connection = await Connection.to(served.port)
    body = chat(content, **options)
    await connection.request("POST", "/api/chat/completions", body, None if key is None else header(key))
    return connection


async def test_a_live_request_is_seen_with_its_key_counts_and_readers_and_without_text(serve: Serve):
    """An admin sees another's; nothing of the prompt or the answer is in it."""
    served = await serve(script)
    ann, admin = await key_of(served, "<b>Ann</b>", tier="interactive"), await key_of(served, "ops", "admin")
    connection = await begun(served, f"hold {WORD}", ann)
    await until(lambda: any(live.trace.completion_tokens == 5 for live in served.runtime.live))
    listed = await get(served, "/api/admin/requests", admin)
    [seen] = listed["data"]
    assert (listed["total"], listed["has_more"], listed["ended"], listed["failed"]) == (1, False, [], [])
    assert (seen["owner"], seen["key"], seen["key_name"]) == (ann.key.owner, ann.key.id, "<b>Ann</b>")
    assert (seen["phase"], seen["tier"], seen["model"], seen["n"]) == ("decode", "interactive", "scripted", 1)
    assert (seen["prompt_tokens"], seen["completion_tokens"], seen["readers"]) == (3, 5, 1)
    assert seen["age_s"] >= seen["phase_s"] >= 0
    assert (seen["position"], seen["stops_in_s"], seen["cancelled"]) == (None, None, None)
    load = await get(served, "/api/admin/live", admin)
    answer = served.stream(seen["id"]).in_ring()
    texts = {WORD, *(run.text.decode() for run in answer[0].values())}
    assert len(texts) == 2
    assert not [text for text in texts if text in json.dumps([listed, load])]
    connection.close()


async def test_who_waits_has_a_place_and_who_is_unread_a_time(serve: Serve):
    """The queue in its present order; a client that has left, and until when its answer runs on."""
    served = await serve(script, engine_type=SmallPool, resume_grace_s=40)
    first = await begun(served, "hold", max_tokens=900, ignore_eos=True)
    await until(lambda: any(stream.last_id > 1 for stream in served.live()))
    waiting = [await begun(served, "hello", max_tokens=900, ignore_eos=True) for _ in range(2)]
    await until(lambda: len(served.runtime.backends.large.admission.queue) == 2)
    seen = (await get(served, "/api/admin/requests"))["data"]
    assert [(r["phase"], r["position"]) for r in seen] == [("decode", None), ("queue", 1), ("queue", 2)]
    [model] = (await get(served, "/api/admin/live"))["models"]
    assert model["queued"]["standard"]["requests"] == 2
    assert model["kv"]["max_tokens"] == 1000
    for connection in waiting:
        connection.close()
    first.close()
    await until(lambda: served.runtime.streams.grace_left_s(served.live()[0].request_id))
    [unread] = [r for r in (await get(served, "/api/admin/requests"))["data"] if r["readers"] == 0][:1]
    assert 0 < unread["stops_in_s"] <= 40


async def test_an_admin_stops_a_request_of_another_owner(serve: Serve):
    """Its text is kept and billed as far as it was generated, its client gets its end, the log says who."""
    served = await serve(script)
    ann, admin = await key_of(served, "ann"), await key_of(served, "ops", "admin")
    stream = await served.open(chat("hold"), headers=header(ann))
    await until(lambda: any(live.trace.completion_tokens == 5 for live in served.runtime.live))
    [seen] = (await get(served, "/api/admin/requests", admin))["data"]
    stop = f"/api/admin/requests/{seen['id']}/cancel"
    assert (await served.call("POST", stop, **header(ann))).status == 403
    stopped = await served.call("POST", stop, **header(admin))
    assert stopped.json() == {"id": seen["id"], "object": "admin.request", "cancelled": True}
    assert (await stream.to_end()).done
    await until(lambda: not served.runtime.journal.num_unsettled and not served.live())
    listed = await get(served, "/api/admin/requests", admin)
    [ended] = listed["ended"]
    assert (listed["data"], ended["id"], ended["cancelled"]) == ([], seen["id"], "admin")
    assert (ended["finish_reason"], ended["error"], ended["completion_tokens"]) == ("abort", None, 5)
    usage = await get_usage(served, ann)
    assert (usage["requests"], usage["output_tokens"]) == (1, 5)
    [line] = served.logged("stopped_by_admin")
    assert (line["request_id"], line["by"]) == (seen["id"], admin.key.id)
    again = await served.call("POST", stop, **header(admin))
    assert (again.status, again.json()["error"]["code"]) == (404, "not_found")


async def get_usage(served: Served, key: NewKey) -> Any:
    """The usage of a key's owner."""
    return (await served.call("GET", "/api/usage", **header(key))).json()


async def test_percentiles_are_of_requests_that_ended_and_failures_are_apart(serve: Serve):
    """A refused request has no times; the list says why it was refused."""
    served = await serve(Script(tokens=4, context=100))
    for _ in range(3):
        assert (await served.post(chat("hi", stream=False))).status == 200
    assert (await served.post(chat("word " * 200))).status == 400
    listed, load = await get(served, "/api/admin/requests"), await get(served, "/api/admin/live")
    [model] = load["models"]
    assert (model["ended"], load["failed"], load["ready"], load["state"]) == (3, 1, True, "ready")
    for name in ("queue_s", "ttft_s", "tpot_s", "total_s"):
        assert model[name]["p50"] <= model[name]["p90"] <= model[name]["p99"]
    assert [e["error"] for e in listed["failed"]] == ["context_length_exceeded"]
    assert [e["completion_tokens"] for e in listed["ended"]] == [4, 4, 4]
    assert load["degraded"] == {"step": "normal", "pressure": 0.0}


async def test_a_list_is_bounded_and_narrowed_by_owner_and_key(serve: Serve):
    """An unknown parameter is an error that names those that there are."""
    served = await serve(script)
    ann, admin = await key_of(served, "ann"), await key_of(served, "ops", "admin")
    connections = [await begun(served, "hold", key) for key in (ann, ann, admin)]
    await until(lambda: len(served.runtime.live) == 3)
    for query, number, more in (("limit=2", 2, True), (f"key={ann.key.id}", 2, False), ("owner=x", 0, False)):
        listed = await get(served, f"/api/admin/requests?{query}", admin)
        assert (len(listed["data"]), listed["has_more"]) == (number, more), query
    for query in ("limit=0", "limit=101", "phase=queued"):
        assert (await served.call("GET", f"/api/admin/requests?{query}", **header(admin))).status == 400
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("path", ["live", "requests", "safety/report"])
async def test_only_admin_keys_see_them(serve: Serve, path: str):
    """A key for chats is refused, and so is none."""
    served = await serve()
    ann = await key_of(served, "ann")
    assert (await served.call("GET", f"/api/admin/{path}", **header(ann))).status == 403
    assert (await served.call("GET", f"/api/admin/{path}")).status == 401


async def test_nothing_of_it_is_called_for_a_token(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """A longer answer takes no more of the calls that only admins need."""
    calls: list[str] = []
    served = await serve(lambda request: Script(tokens=int(request.body["messages"][0]["content"])))

    def count(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counting(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, counting)

    for owner, name in ((Trace, "stages"), (Trace, "fields"), (type(served.runtime.live), "tracked")):
        count(owner, name)
    counted = []
    for tokens in ("2", "200"):
        await served.post(chat(tokens, stream=False))
        counted.append(sorted(calls))
        calls.clear()
    assert counted == [["fields", "fields", "tracked"]] * 2


async def test_the_safety_report_is_the_commands(serve: Serve):
    """Computed by a process of its own, over the server's store and with its policy; a wrong day is named."""
    served = await serve(safety="observe")
    assert (await served.post(chat("hi", stream=False))).status == 200
    await served.runtime.database.write(lambda _c: None)
    report = await get(served, "/api/admin/safety/report")
    assert (report["object"], report["mode"]) == ("safety.report", "observe")
    assert [p["name"] for p in report["policies"]][:4] == ["recorded", "observe", "enforce", "strict"]
    wrong = await served.call("GET", "/api/admin/safety/report?from=soon")
    assert (wrong.status, wrong.json()["error"]["param"]) == (400, "from")
