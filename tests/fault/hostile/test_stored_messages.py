"""A stored message has the server's keys, whatever its caller sent, and no walk over it is without end."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.store.database import FILE_NAME
from app.store.schema import BEFORE_0_1, MIGRATIONS
from tests.support.servers import Serve, Served, Spawn, chat
from tests.support.sse_client import fetch

PATH = "/api/conversations"
OLD_SCHEMA = Path(__file__).parents[2] / "unit" / "store" / "schema_010.sql"
LOOP = [
    {"role": "user", "content": "m", "id": "L", "parent_id": "L"},
    {"role": "user", "content": "go", "parent_id": "L"},
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
DUMPED = {
    "role": "assistant",
    "content": "Yes.",
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": None,
    "reasoning_content": "PRIVATE",
}
FALSE_PLACE = {"id": "msg_x", "request_id": "chatcmpl-x", "choice": 7, "status": "failed", "usage": {"x": 1}}
HOSTILE_BODIES: list[Any] = [
    {"role": "user", "content": "m", "id": "L", "parent_id": "L"},
    {"role": "user", "content": "go", "parent_id": "L", "tool_calls": None},
    {"role": "assistant", "content": None, "tool_calls": [{"function": None}, 5, CALL], **FALSE_PLACE},
    {"role": "king", "content": {"a": 1}, "padding": "x" * 1_000_000},
    {"role": "user", "content": [5, {"type": "text"}, {"type": "text", "text": "kept"}, {"type": [1]}]},
    [],
    None,
]


async def asked(served: Served, messages: Any, **more: Any) -> dict[str, Any]:
    """Ask in one piece and store; returns the answer."""
    answer = await served.post(chat(messages=messages, stream=False, **more))
    assert answer.status == 200, answer.body
    return answer.json()


async def all_forms(served: Served, conversation_id: str) -> dict[str, Any]:
    """The conversation as it is shown, once every form of it has been answered."""
    path = f"{PATH}/{conversation_id}"
    for form in ("json", "markdown"):
        assert (await served.call("GET", f"{path}/export?format={form}")).status == 200
    shown = await served.call("GET", path)
    assert shown.status == 200
    assert (await served.call("GET", "/healthz")).status == 200
    return shown.json()


async def test_a_message_that_names_itself_its_parent_is_shown_under_the_servers_ids(serve: Serve):
    """The issue's request: exports end, the ids and the tree are the server's, and the next turn goes on."""
    served = await serve()
    conversation_id = (await asked(served, LOOP))["conversation_id"]
    first, second, answer = (await all_forms(served, conversation_id))["messages"]
    assert "L" not in (first["id"], first["parent_id"], second["parent_id"])
    assert (first["parent_id"], second["parent_id"]) == (None, first["id"])
    assert answer["parent_id"] == second["id"]
    await asked(served, [{"role": "user", "content": "more"}], conversation_id=conversation_id)


async def test_what_is_shown_can_be_sent_again(serve: Serve):
    """All messages of a view, as they are, and an answer as an SDK dumps it; neither is believed."""
    served = await serve()
    sent = [
        {"role": "user", "content": "hi"} | FALSE_PLACE,
        DUMPED | FALSE_PLACE,
        {"role": "user", "content": "go"},
    ]
    shown = await all_forms(served, (await asked(served, sent))["conversation_id"])
    question, answer, *_ = shown["messages"]
    for message in (question, answer):
        assert not message.items() & {"id": "msg_x", "request_id": "chatcmpl-x", "status": "failed"}.items()
        assert "choice" not in message
        assert "PRIVATE" not in json.dumps(message)
    again = await asked(served, [*shown["messages"], {"role": "user", "content": "and now?"}])
    assert len((await all_forms(served, again["conversation_id"]))["messages"]) == 6


async def test_an_unknown_key_is_refused_by_name_and_stored_nowhere(serve: Serve):
    """Ten megabytes beside a word are no message."""
    served = await serve(max_body_bytes=64 << 20)
    refused = await served.post(
        chat(messages=[{"role": "user", "content": "hi", "padding": "x" * 10_000_000}], stream=False)
    )
    assert refused.status == 400
    assert refused.json()["error"]["code"] == "unknown_parameter"
    assert refused.json()["error"]["param"] == "messages[0].padding"
    assert (await served.call("GET", PATH)).json()["data"] == []


async def test_a_message_of_two_contents_is_refused(serve: Serve):
    """Which of them counts is no parser's to decide: a proxy may have read the other."""
    served = await serve(max_body_bytes=64 << 20)
    message = b'{"role":"user","content":"benign","content":"other"}'
    refused = await served.post(b'{"model":"scripted","messages":[' + message + b"]}")
    assert refused.refusal() == (400, "invalid_json", "content")


async def test_what_is_dropped_is_not_stored(serve: Serve):
    """A field that is taken for the SDKs' sake costs no room, in a turn that is blocked neither."""
    served = await serve(max_body_bytes=64 << 20)
    bulky = DUMPED | {"annotations": ["x" * 5_000_000], "audio": {"data": "x" * 1_000_000}}
    answer = await asked(
        served, [{"role": "user", "content": "hi"}, bulky, {"role": "user", "content": "go"}]
    )
    await all_forms(served, answer["conversation_id"])
    [[size_bytes]] = await served.runtime.database.read(
        lambda c: c.execute("SELECT sum(length(text) + coalesce(length(body), 0)) FROM messages").fetchall()
    )
    assert size_bytes < 10_000


def old_store(data_dir: Path) -> None:
    """A store of the previous version whose messages hold what their caller sent."""
    with closing(sqlite3.connect(data_dir / FILE_NAME, isolation_level=None)) as c:
        c.executescript(OLD_SCHEMA.read_text("utf-8"))
        c.execute("INSERT INTO keys_version VALUES (0)")
        c.execute("INSERT INTO safety_secret VALUES (zeroblob(32))")
        for name in (*BEFORE_0_1, MIGRATIONS[0].name):
            c.execute("INSERT INTO migrations VALUES (?, '2026-11-20 00:00:00')", (name,))
        c.execute(
            "INSERT INTO conversations (id, owner, title, model, created_at_us, updated_at_us)"
            " VALUES ('conv_old', 'local', 'old', 'scripted', 1, 1)"
        )
        for number, body in enumerate(HOSTILE_BODIES, start=1):
            c.execute(
                "INSERT INTO messages"
                " (seq, id, conversation_seq, parent_seq, role, text, body, created_at_us, status)"
                " VALUES (?1, 'msg_' || ?1, 1, nullif(?1 - 1, 0), ?2, 'text', ?3, 1, 'complete')",
                (number, "assistant" if number % 2 == 0 else "user", orjson.dumps(body)),
            )


async def test_a_store_of_the_previous_version_is_harmless(serve: Serve, tmp_path: Path):
    """Its rows are shown under the server's ids, exported in both forms, and continued."""
    old_store(tmp_path)
    served = await serve(data_dir=tmp_path)
    shown = (await all_forms(served, "conv_old"))["messages"]
    assert [message["id"] for message in shown] == [f"msg_{n}" for n in range(1, len(HOSTILE_BODIES) + 1)]
    assert [message["parent_id"] for message in shown[:3]] == [None, "msg_1", "msg_2"]
    assert {message["status"] for message in shown} == {"complete"}
    known = {
        "id",
        "parent_id",
        "role",
        "content",
        "created_at",
        "status",
        "finish_reason",
        "usage",
        "tool_calls",
    }
    assert {key for message in shown for key in message} <= known
    assert {message["role"] for message in shown} == {"user", "assistant"}
    await asked(
        served, [{"role": "user", "content": "go on"}], conversation_id="conv_old", parent_id=shown[-1]["id"]
    )


async def test_the_operators_export_of_a_hostile_store_ends(spawn: Spawn, tmp_path: Path):
    """`tokenring conversations export` of all tenants, in both formats, beside the server."""
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    old_store(data_dir)
    process = await spawn("", "--data-dir", str(data_dir))
    port = await process.ready()
    body = {"model": "scripted", "messages": LOOP}
    assert (await fetch(port, "POST", "/api/chat/completions", body)).status == 200
    for form in ("json", "markdown"):
        command = ["conversations", "export", "--data-dir", str(data_dir), "--format", form]
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "app", *command], capture_output=True, timeout=30
        )
        assert done.returncode == 0
        assert done.stderr.startswith(b"tokenring: the store is ")
        assert done.stderr.count(b"\n") == 1
        assert b"kept" in done.stdout


async def test_a_huge_conversation_is_shown_page_by_page_and_no_turn_continues_it(serve: Serve):
    """A hundred thousand messages: the view and the exports are whole, the next turn is refused by name."""
    served = await serve()
    conversation_id = (await asked(served, [{"role": "user", "content": "hi"}]))["conversation_id"]
    number = 100_000

    def grow(c: sqlite3.Connection) -> None:
        c.execute(
            "WITH RECURSIVE n (i) AS (SELECT 3 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
            " INSERT INTO messages (seq, id, conversation_seq, parent_seq, role, text, created_at_us, status)"
            " SELECT i, 'msg_' || i, 1, i - 1, 'user', 'word ' || i, 1, 'complete' FROM n",
            (number,),
        )
        c.execute("DELETE FROM unindexed")

    await served.runtime.database.write(grow)
    shown = (await all_forms(served, conversation_id))["messages"]
    assert len(shown) == number
    as_text = await served.call("GET", f"{PATH}/{conversation_id}/export?format=markdown")
    assert as_text.body.count(b"## User") == number - 1
    refused = await served.post(
        chat("more", conversation_id=conversation_id, parent_id=shown[-1]["id"], stream=False)
    )
    assert (refused.status, refused.json()["error"]["code"]) == (400, "conversation_too_long")
    await asked(
        served,
        [{"role": "user", "content": "here"}],
        conversation_id=conversation_id,
        parent_id=shown[9_000]["id"],
    )


@pytest.mark.parametrize("odd", ["%00", "..", "L%0d%0a", "%F0%9F%98%80", "x" * 5000, "' OR 1=1 --"])
async def test_odd_ids_name_nothing(serve: Serve, odd: str):
    """An id with any characters is one that no conversation has."""
    served = await serve()
    path = f"{PATH}/{odd.replace(' ', '%20').replace(chr(39), '%27')}"
    assert (await served.call("GET", path)).status == 404
    assert (await served.call("GET", f"{path}/export")).status == 404
