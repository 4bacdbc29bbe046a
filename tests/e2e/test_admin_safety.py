"""Safety over HTTP for admins: events by page and filter, the policy in force, its reload, the metrics."""

from __future__ import annotations

import asyncio
import io
import re
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.api.server import _on_hangup
from app.store import safety_events
from app.store.safety_events import SafetyEvent
from tests.support.screens import word_models
from tests.support.servers import Serve, Served, Spawn
from tests.support.sse_client import fetch

SAFETY = "/api/admin/safety"
EVENT = SafetyEvent(
    at_us=1_790_000_000_000_000,
    request_id="req_1",
    owner="ann",
    key_id=None,
    model="scripted",
    subject="prompt",
    stage="encoder",
    action="block",
    category="S11",
    score=0.9,
    threshold=0.6,
    policy_hash="0123456789abcdef",
    scores={"S11": 0.9},
    text_hmac=b"\x01\xff",
)


@pytest.fixture
def safety() -> str:
    """Off, where a test does not say; with models of words where it does."""
    return "off"


async def served_with(serve: Serve, tmp_path: Path, text: str = "") -> tuple[Served, Path]:
    """A server whose policy is a file with this text, and the file."""
    path = tmp_path / "policy.toml"
    path.write_text(text)
    models = partial(word_models, tmp_path / "models")
    return await serve(load_models=models, safety="on", safety_policy=str(path)), path


async def add(served: Served, **changes: Any) -> None:
    """An event like EVENT."""
    await served.runtime.database.write(lambda c: safety_events.add(c, replace(EVENT, **changes)))


async def listed(served: Served, query: str = "") -> dict[str, Any]:
    """The list as it is answered."""
    answer = await served.call("GET", SAFETY + query)
    assert answer.status == 200
    body: dict[str, Any] = answer.json()
    return body


async def test_events_are_listed_with_the_policy(serve, tmp_path):
    """Each with what was decided and why; beside them the policy, its hash and its thresholds."""
    served, path = await served_with(serve, tmp_path)
    await add(served)
    body = await listed(served)
    [event] = body["data"]
    assert event == {
        "id": "safety-1",
        "object": "safety.event",
        "created_at": 1_790_000_000,
        "request_id": "req_1",
        "owner": "ann",
        "key": None,
        "model": "scripted",
        "subject": "prompt",
        "stage": "encoder",
        "action": "block",
        "category": "S11",
        "category_name": "self_harm",
        "score": 0.9,
        "threshold": 0.6,
        "scores": {"S11": 0.9},
        "policy_hash": "0123456789abcdef",
        "lag_tokens": 0,
        "text_hmac": "01ff",
    }
    assert (body["has_more"], body["next_cursor"]) == (False, None)
    policy = body["policy"]
    assert (policy["path"], policy["hash"]) == (str(path), served.runtime.policies.current.hash)
    assert policy["categories"]["S4"]["thresholds"]["block"] == 0.6


async def test_a_list_goes_on_by_its_cursor(serve, tmp_path):
    """Page after page, newest first."""
    served, _ = await served_with(serve, tmp_path)
    for i in range(5):
        await add(served, request_id=f"req_{i}")
    seen, cursor = [], ""
    while True:
        body = await listed(served, f"?limit=2{cursor}")
        seen += [event["request_id"] for event in body["data"]]
        if not body["has_more"]:
            break
        cursor = f"&cursor={body['next_cursor']}"
    assert seen == ["req_4", "req_3", "req_2", "req_1", "req_0"]


@pytest.mark.parametrize(
    "query",
    [
        "subject=answer",
        "stage=stream",
        "action=watch",
        "category=S2",
        "category=non_violent_crimes",
        "owner=bob",
        "key=tr-1",
        "request_id=req_9",
        "model=other",
        "policy_hash=ff",
        "from=2026-10-01",
    ],
)
async def test_a_list_is_narrowed(serve, tmp_path, query):
    """Each filter leaves the one event that is otherwise in all."""
    served, _ = await served_with(serve, tmp_path)
    await add(served)
    other = {
        "at_us": 1_791_000_000_000_000,
        "subject": "answer",
        "stage": "stream",
        "action": "watch",
        "category": "S2",
        "owner": "bob",
        "key_id": "tr-1",
        "request_id": "req_9",
        "model": "other",
        "policy_hash": "ff",
    }
    await add(served, **other)
    assert [event["id"] for event in (await listed(served, f"?{query}"))["data"]] == ["safety-2"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("cursor=x", "cursor"),
        ("action=stop", "action"),
        ("stage=last", "stage"),
        ("category=S14", "category"),
        ("subject=text", "subject"),
        ("from=then", "from"),
        ("text=secret", "text"),
    ],
)
async def test_a_wrong_query_is_named(serve, query, param):
    """400, naming the parameter."""
    served = await serve()
    answer = await served.call("GET", f"{SAFETY}?{query}")
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_a_reload_is_answered_with_the_policy(serve, tmp_path):
    """The file as it is now is in force; a wrong one is 400 with what is wrong, and changes nothing."""
    served, path = await served_with(serve, tmp_path)
    before = served.runtime.policies.current.hash
    path.write_text("block_fpr = 0.02")
    answer = await served.call("POST", SAFETY + "/reload")
    assert answer.status == 200
    after = answer.json()["hash"]
    assert after == served.runtime.policies.current.hash != before
    path.write_text('[categories.S4]\naction = "off"')
    answer = await served.call("POST", SAFETY + "/reload")
    assert (answer.status, answer.json()["error"]["param"]) == (400, "safety_policy")
    assert "cannot be loosened" in answer.json()["error"]["message"]
    assert served.runtime.policies.current.hash == after


async def test_without_safety_there_is_no_policy(serve):
    """With `safety` off, events can still be listed, and there is nothing to reload."""
    served = await serve(safety="off")
    assert (await listed(served))["policy"] is None
    assert (await served.call("POST", SAFETY + "/reload")).status == 409


async def test_a_hangup_is_no_end(spawn: Spawn):
    """SIGHUP reads the policy again; the server goes on."""
    process = await spawn()
    await process.port()
    process.process.send_signal(signal.SIGHUP)
    answer = await fetch(await process.port(), "GET", "/healthz")
    assert answer.status == 200
    assert process.process.returncode is None


async def test_a_hangup_reads_the_policy(serve, tmp_path):
    """The log says which policy is in force, or why the file was refused."""
    served, path = await served_with(serve, tmp_path)
    stop = asyncio.Event()
    path.write_text("block_fpr = 0.02")
    _on_hangup(stop, served.runtime, on_terminal=False)
    path.write_text("block_fpr = 2")
    _on_hangup(stop, served.runtime, on_terminal=False)
    lines = [line for line in served.log if line["event"].startswith("policy_")]
    assert [line["event"] for line in lines] == ["policy_reloaded", "policy_refused"]
    assert lines[0]["policy_hash"] == served.runtime.policies.current.hash
    assert "block_fpr" in lines[1]["reason"]
    assert not stop.is_set()


async def test_a_closed_terminal_ends_the_server(serve, monkeypatch):
    """Where it was started on a terminal that is no longer one, a hangup is the terminal's."""
    served, stop = await serve(), asyncio.Event()
    monkeypatch.setattr("sys.stderr", io.StringIO())
    _on_hangup(stop, served.runtime, on_terminal=True)
    assert stop.is_set()


async def test_the_metrics_count_verdicts(serve, tmp_path):
    """By stage, category and action; failures, hold-back and tokens beside them."""
    served, _ = await served_with(serve, tmp_path)
    counters, rules = served.runtime.safety_counters, served.runtime.policies.current
    counters.judged(rules.judge_prompt({"S2": 0.9}, "encoder"))
    counters.failed("guard", "timeout", passed=False)
    counters.halted(leaked_tokens=2, dropped_tokens=9)
    counters.hold_back.observe(0.004)
    text = (await served.call("GET", "/metrics")).body.decode()
    for line in (
        'tokenring_safety_verdicts_total{action="block",category="S2",stage="encoder"} 1.0',
        'tokenring_safety_failures_total{outcome="refused",reason="timeout",stage="guard"} 1.0',
        "tokenring_safety_leaked_tokens_total 2.0",
        "tokenring_safety_dropped_tokens_total 9.0",
        "tokenring_safety_hold_back_seconds_count 1.0",
    ):
        assert re.search(f"^{re.escape(line)}$", text, re.MULTILINE), line
