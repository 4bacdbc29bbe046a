"""Conversations that were held elsewhere: imported over HTTP, and continued under the same screens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.core import KeyTerms
from app.engine.scripted.engine import Script
from app.store import key_table, keys
from tests.support.screens import BLOCKED, HARM, speaking, word_models
from tests.support.servers import Serve, Served, chat

SCRIPT = Script(tokens=5, seed=1)
PATH = "/api/conversations"
QUESTION = {"role": "user", "content": "What is a ring?"}
ANSWER = {"role": "assistant", "content": "A buffer."}


async def imported(served: Served, *messages: dict[str, Any], **headers: str) -> str:
    """The id of a conversation of these messages."""
    answer = await served.call("POST", PATH, {"messages": list(messages)}, **headers)
    assert answer.status == 201, answer.body
    conversation_id: str = answer.json()["id"]
    return conversation_id


def tree(shown: dict[str, Any]) -> list[Any]:
    """What an import keeps of each message, and the index of its parent."""
    places = {m["id"]: i for i, m in enumerate(shown["messages"])}
    names = ("role", "content", "created_at", "status", "finish_reason")
    return [(*(m[name] for name in names), places.get(m["parent_id"])) for m in shown["messages"]]


async def test_an_export_is_imported_as_it_is(serve: Serve):
    """Equal messages and branches, without a bill; the next turn continues them."""
    served = await serve(SCRIPT)
    first = (await served.post(chat(stream=False))).json()
    path = f"{PATH}/{first['conversation_id']}"
    question = (await served.call("GET", path)).json()["messages"][0]["id"]
    again = chat(stream=False, conversation_id=first["conversation_id"], parent_id=question, messages=[])
    assert (await served.post(again)).status == 200
    billed = (await served.call("GET", "/api/usage")).json()
    exported = (await served.call("GET", path + "/export")).json()
    made = await served.call("POST", PATH, exported)
    assert made.status == 201
    shown = (await served.call("GET", f"{PATH}/{made.json()['id']}")).json()
    assert tree(shown) == tree(exported)
    assert shown["title"] == exported["title"]
    assert (await served.call("GET", "/api/usage")).json() == billed
    turn = await served.post(chat("And now?", stream=False, conversation_id=shown["id"]))
    assert turn.status == 200
    assert len((await served.call("GET", f"{PATH}/{shown['id']}")).json()["messages"]) == 5


async def test_it_belongs_to_its_caller(serve: Serve):
    """Another owner finds it in no list, and nothing in a body changes that."""
    served = await serve(SCRIPT)
    people = {}
    for owner in ("ann", "bob"):
        made = await served.runtime.database.write(
            lambda c, owner=owner: keys.create(c, KeyTerms(owner), key_table.now_us(), owner)  # type: ignore[misc]
        )
        people[owner] = {"authorization": f"Bearer {made.text}"}
    await served.runtime.keys.load()
    conversation_id = await imported(served, QUESTION, ANSWER, **people["ann"])
    assert (await served.call("GET", f"{PATH}/{conversation_id}", **people["bob"])).status == 404
    assert (await served.call("GET", PATH, **people["bob"])).json()["data"] == []
    assert (await served.call("POST", PATH, {"messages": [QUESTION]})).status == 401
    refused = await served.call("POST", PATH, {"messages": [QUESTION], "owner": "bob"}, **people["ann"])
    assert refused.error()["param"] == "owner"


async def test_its_words_are_found(serve: Serve):
    """At once."""
    served = await serve(SCRIPT)
    conversation_id = await imported(served, QUESTION, ANSWER)
    found = (await served.call("GET", f"{PATH}?q=buffer")).json()["data"]
    assert [c["id"] for c in found] == [conversation_id]


async def test_too_large_an_import_is_refused(serve: Serve):
    """Nothing of it is stored."""
    served = await serve(SCRIPT, max_body_bytes=10_000)
    large = await served.call("POST", PATH, {"messages": [{**QUESTION, "content": "x" * 10_000}]})
    assert (large.status, large.error()["code"]) == (413, "body_too_large")
    wrong = await served.call("POST", PATH, {"messages": [QUESTION, {"role": "root", "content": ""}]})
    assert (wrong.status, wrong.error()["param"]) == (400, "messages[1].role")
    assert (await served.call("GET", PATH)).json()["data"] == []


@pytest.mark.parametrize(
    "messages",
    [
        ({**QUESTION, "content": f"a {BLOCKED} thing"}, ANSWER),
        (QUESTION, {**ANSWER, "content": f"a {HARM} {BLOCKED} thing"}),
        ({"role": "system", "content": f"Speak of {BLOCKED} things."}, QUESTION, ANSWER),
    ],
)
async def test_screens_read_what_was_imported(serve: Serve, tmp_path: Path, messages: tuple[Any, ...]):
    """As they read a request that holds the same messages: no import is a way around them."""
    models = word_models(tmp_path / "models", lambda _text: None)
    served = await serve(SCRIPT, engine_type=speaking("fine"), load_models=lambda: models, safety="on")
    next_one = {"role": "user", "content": "And now?"}
    sent = await served.post(chat(stream=False, messages=[*messages, next_one]))
    conversation_id = await imported(served, *messages)
    turn = await served.post(chat(stream=False, conversation_id=conversation_id, messages=[next_one]))
    assert turn.status == sent.status == 400
    assert turn.error()["code"] == sent.error()["code"] == "content_filter"
    harmless = await imported(served, QUESTION, ANSWER)
    passed = await served.post(chat(stream=False, conversation_id=harmless, messages=[next_one]))
    assert passed.status == 200
