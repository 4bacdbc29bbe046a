"""Conversations over HTTP: kept, continued, found, renamed, deleted, restored, taken away."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from app.engine.scripted.engine import Script, scripted_text
from tests.support.conversing import Chats
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import until

SCRIPT = Script(tokens=5, seed=1)
TEXT = "".join(scripted_text(1, 0, 5))
PATH = "/api/conversations"


async def said(served: Served, content: Any = "hello", **parameters: Any) -> dict[str, Any]:
    """The answer of one turn."""
    parameters.setdefault("messages", [{"role": "user", "content": content}])
    answer = await served.post(chat(stream=False, **parameters))
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json()
    return body


async def got(served: Served, path: str, **options: Any) -> dict[str, Any]:
    """The JSON at a path under /api/conversations."""
    answer = await served.call(options.pop("method", "GET"), PATH + path, **options)
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json()
    return body


async def refused(served: Served, path: str, method: str = "GET", body: Any = None) -> tuple[int, str, str]:
    """Status, code and parameter of a refusal."""
    answer = await served.call(method, PATH + path, body)
    error = answer.error()
    return answer.status, error["code"], error["param"]


async def test_conversation_is_listed_and_shown(serve: Serve):
    """Two turns of a conversation are one entry of the list and four messages, with their usage."""
    served = await serve(SCRIPT)
    first = await said(served, "What is a ring?")
    second = await said(served, "And a token?", conversation_id=first["conversation_id"])
    listed = await got(served, "")
    [entry] = listed["data"]
    assert (listed["object"], listed["has_more"], listed["next_cursor"]) == ("list", False, None)
    assert (entry["id"], entry["title"]) == (first["conversation_id"], "What is a ring?")
    assert entry["total_tokens"] == first["usage"]["total_tokens"] + second["usage"]["total_tokens"]
    shown = await got(served, f"/{entry['id']}")
    messages = shown.pop("messages")
    assert {**shown, "in_progress": False} == entry
    assert [(m["role"], m["content"]) for m in messages] == [
        ("user", "What is a ring?"),
        ("assistant", TEXT),
        ("user", "And a token?"),
        ("assistant", TEXT),
    ]
    assert [m["parent_id"] for m in messages] == [None, *(m["id"] for m in messages[:3])]
    answer = messages[3]
    assert (answer["id"], answer["request_id"]) == (second["message_id"], second["id"])
    assert (answer["status"], answer["finish_reason"]) == ("complete", "stop")
    assert answer["usage"] == second["usage"]


@pytest.mark.parametrize("text", ["a\0b\0", "😀\U0010ffff", "\u202eright\u200fleft\u2066", "e\u0301\r\n\x1b"])
async def test_text_comes_back_byte_for_byte(serve: Serve, text: str):
    """In the message, in the title when it is set, and in the export."""
    served = await serve(SCRIPT)
    path = "/" + (await said(served, text))["conversation_id"]
    assert (await got(served, path))["messages"][0]["content"] == text
    assert (await got(served, path, method="PATCH", body={"title": text}))["title"] == text
    assert (await got(served, path + "/export"))["messages"][0]["content"] == text
    file = await served.call("GET", PATH + path + "/export?format=markdown")
    assert text in file.body.decode()


async def test_lone_surrogate_is_refused(serve: Serve):
    """Half a character can be stored nowhere."""
    served = await serve(SCRIPT)
    path = "/" + (await said(served))["conversation_id"]
    raw = b'{"title": "\\ud800"}'
    assert (await refused(served, path, "PATCH", raw))[:2] == (400, "invalid_json")


async def test_content_parts_come_back_as_sent(serve: Serve):
    """A list of parts stays one, and its text is found."""
    served = await serve(SCRIPT)
    parts = [{"type": "text", "text": "a heron"}, {"type": "text", "text": "and an owl"}]
    conversation_id = (await said(served, parts))["conversation_id"]
    assert (await got(served, f"/{conversation_id}"))["messages"][0]["content"] == parts
    assert [c["id"] for c in (await got(served, "?q=owl"))["data"]] == [conversation_id]


async def test_regenerated_answer_is_a_branch(serve: Serve):
    """Both answers stay below the same question."""
    served = await serve(SCRIPT)
    first = await said(served)
    conversation_id = first["conversation_id"]
    question, answer = (await got(served, f"/{conversation_id}"))["messages"]
    again = await said(served, conversation_id=conversation_id, parent_id=question["id"], messages=[])
    messages = (await got(served, f"/{conversation_id}"))["messages"]
    assert [m["id"] for m in messages] == [question["id"], answer["id"], again["message_id"]]
    assert messages[2]["parent_id"] == question["id"]


async def test_pages_and_search(serve: Serve):
    """Pages join without gap or repeat; a search has pages too."""
    served = await serve(SCRIPT)
    ids = [(await said(served, f"bird number {i}"))["conversation_id"] for i in range(5)]
    for query in ("?limit=2", "?limit=2&q=bird"):
        seen, more = [], query
        while more:
            listed = await got(served, more)
            seen += [c["id"] for c in listed["data"]]
            cursor = listed["next_cursor"]
            assert listed["has_more"] == (cursor is not None)
            more = f"{query}&cursor={quote(cursor)}" if cursor else ""
        assert seen == ids[::-1]
    assert [c["id"] for c in (await got(served, "?q=number+3"))["data"]] == [ids[3]]
    assert (await got(served, "?q=" + quote('"*( AND')))["data"] == []
    assert len((await got(served, "?q=+"))["data"]) == 5


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("limit=0", "invalid_value", "limit"),
        ("limit=101", "invalid_value", "limit"),
        ("limit=x", "invalid_value", "limit"),
        ("cursor=x", "invalid_cursor", "cursor"),
        ("cursor=", "invalid_cursor", "cursor"),
        ("q=" + "x" * 1001, "invalid_value", "q"),
        ("order=asc", "unknown_parameter", "order"),
    ],
)
async def test_bad_query_is_refused(serve: Serve, query: str, code: str, param: str):
    """What cannot be honoured is named."""
    served = await serve(SCRIPT)
    assert await refused(served, f"?{query}") == (400, code, param)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_parameter", "title"),
        ({"title": " "}, "invalid_value", "title"),
        ({"title": "x" * 201}, "invalid_value", "title"),
        ({"title": 5}, "invalid_type", "title"),
        ({"title": None}, "invalid_type", "title"),
        ({"title": "x", "model": "y"}, "unknown_parameter", "model"),
    ],
)
async def test_bad_title_is_refused(serve: Serve, body: dict[str, Any], code: str, param: str):
    """A title has 1 to 200 characters, and nothing else can be changed."""
    served = await serve(SCRIPT)
    path = "/" + (await said(served))["conversation_id"]
    assert await refused(served, path, "PATCH", body) == (400, code, param)


async def test_deleted_conversation_is_hidden_until_restored(serve: Serve):
    """Routes, list, search and streams know nothing of it; restored, it goes on."""
    served = await serve(SCRIPT)
    first = await said(served, "a heron")
    conversation_id = first["conversation_id"]
    path = f"/{conversation_id}"
    deleted = await got(served, path, method="DELETE")
    assert deleted == {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
    gone = (404, "conversation_not_found", "conversation_id")
    assert await refused(served, path) == await refused(served, path, "DELETE") == gone
    assert await refused(served, path, "PATCH", {"title": "x"}) == gone
    assert await refused(served, path + "/export") == gone
    assert (await got(served, ""))["data"] == (await got(served, "?q=heron"))["data"] == []
    assert (await served.post(chat(conversation_id=conversation_id))).error()["code"] == gone[1]
    stream = await served.call("GET", f"/api/chat/completions/{first['id']}")
    assert stream.error()["code"] == "stream_not_found"
    assert (await got(served, path + "/restore", method="POST"))["id"] == conversation_id
    await said(served, conversation_id=conversation_id)
    assert len((await got(served, path))["messages"]) == 4
    assert (await served.call("GET", f"/api/chat/completions/{first['id']}")).status == 200


async def test_deletion_stops_what_is_being_answered(serve: Serve):
    """The engine stops; what was said comes back when the conversation is restored."""
    served = await serve(Script(tokens=10_000, rate=100))
    stream = await served.open(chat())
    await stream.read_events(5)
    path = "/" + stream.head.headers["x-conversation-id"]
    await got(served, path, method="DELETE")
    await stream.to_end()
    await until(lambda: not served.live())
    await got(served, path + "/restore", method="POST")
    answer = (await got(served, path))["messages"][-1]
    assert (answer["status"], answer["finish_reason"]) == ("cancelled", "stop")
    assert answer["content"]


async def test_answer_in_progress_shows_what_it_has_said(serve: Serve):
    """The view follows the live stream."""
    served = await serve(Script(tokens=10_000, rate=100))
    stream = await served.open(chat())
    await stream.read_events(5)
    answer = (await got(served, "/" + stream.head.headers["x-conversation-id"]))["messages"][-1]
    assert (answer["status"], answer["usage"]) == ("in_progress", None)
    assert "".join(scripted_text(0, 0, 10_000)).startswith(answer["content"])
    assert answer["content"]
    assert answer["request_id"] == stream.head.headers["x-request-id"]
    [entry] = (await got(served, ""))["data"]
    assert entry["in_progress"] is True


async def test_another_owner_s_conversation_is_not_found(serve: Serve):
    """Whatever the route, and it is in no list."""
    served = await serve(SCRIPT)
    await served.runtime.database.write(lambda c: Chats(c, owner="other").turn("conv_theirs"))
    gone = (404, "conversation_not_found", "conversation_id")
    assert await refused(served, "/conv_theirs") == gone
    assert await refused(served, "/conv_theirs", "PATCH", {"title": "x"}) == gone
    assert await refused(served, "/conv_theirs", "DELETE") == gone
    assert await refused(served, "/conv_theirs/restore", "POST") == gone
    assert await refused(served, "/conv_theirs/export") == gone
    assert (await got(served, ""))["data"] == (await got(served, "?q=hello"))["data"] == []


async def test_export_is_a_file(serve: Serve):
    """It is named after the title, and has the type of its format."""
    served = await serve(SCRIPT)
    path = "/" + (await said(served, 'What is "a ring"?'))["conversation_id"]
    as_json = await served.call("GET", PATH + path + "/export")
    assert as_json.json() == await got(served, path)
    assert as_json.headers["content-disposition"] == 'attachment; filename="What-is-a-ring.json"'
    as_text = await served.call("GET", PATH + path + "/export?format=markdown")
    assert as_text.headers["content-type"] == "text/markdown; charset=utf-8"
    assert (
        f'# What is "a ring"?\n\n## User\n\nWhat is "a ring"?\n\n## Assistant\n\n{TEXT}'
        in as_text.body.decode()
    )
    assert await refused(served, path + "/export?format=pdf") == (400, "invalid_value", "format")
