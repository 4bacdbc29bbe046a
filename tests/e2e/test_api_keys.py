"""Keys over HTTP: every route with every wrong key, a key's life, beside commands, at the first start."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from app.core import KeyTerms
from app.engine.scripted.engine import Script, scripted_text
from app.store import key_table, keys
from app.store.keys import NewKey
from app.store.opening import holder
from tests.support.screens import word_models
from tests.support.servers import Serve, Served, Spawn, chat
from tests.support.sse_client import Connection, Response, fetch, until

CANARY = "canary-51d0"
ADMIN_KEYS = "/api/admin/keys"
TEXT = re.compile(r"tr-[0-9a-f]{12}-[0-9a-f]{64}")
PUBLIC = {"/healthz", "/readyz", "/health", "/health_generate", "/ping", "/version", "/openapi.json"} | {
    "/",
    "/console/{version}/{path:path}",
    "/api/sign-in",
    "/api/sign-in/oidc",
}
"""Routes that want no key. Every other one must refuse a wrong one."""
BODIES = {
    "/tokenize": {"prompt": "hello"},
    "/v1/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [104]},
    "/v1/detokenize": {"tokens": [104]},
}
"""Requests to routes that keep nothing."""
FOR_ADMINS = ("/api/admin/", "/metrics")
EVERYONES = {
    "/api/me",
    "/api/models",
    "/v1/models",
    "/v1/models/{id:path}",
    "/api/moderations",
    "/v1/moderations",
    "/api/usage",
    "/api/prefixes",
    "/api/conversations",
    "/v1/completions",
    *BODIES,
    "/model_info",
    "/get_model_info",
    "/server_info",
    "/get_server_info",
}
"""Routes on which each key gets an answer of its own. Every other one must refuse another owner's key."""


def bearer(text: str) -> dict[str, str]:
    """The header that sends a key."""
    return {"authorization": f"Bearer {text}"}


OWN_GRAMMARS = {
    "regex": {"regex": "[a-z]+"},
    "ebnf": {"ebnf": 'root ::= "a"'},
    "response_format": {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
    "guided_regex": {"guided_regex": "[a-z]+"},
    "guided_choice": {"guided_choice": ["yes", "no"]},
    "structured_outputs": {"structured_outputs": {"grammar": 'root ::= "a"'}},
    "grammar": {"grammar": 'root ::= "a"'},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


async def made(served: Served, name: str, **terms: Any) -> NewKey:
    """A key, known to the server."""
    owner = terms.pop("owner", None)
    at_us = key_table.now_us()
    issued = await served.runtime.database.write(
        lambda c: keys.create(c, KeyTerms(name, **terms), at_us, owner)
    )
    await served.runtime.keys.load()
    return issued


@dataclass
class World:
    """A server with keys of every kind, and what ann has on it."""

    served: Served
    ann: NewKey
    bob: NewKey
    admin: NewKey
    refused: dict[str, dict[str, str]]
    """Headers that let nobody in, by what they are."""
    stream_id: str
    conversation_id: str

    def routes(self) -> Iterator[tuple[str, str]]:
        """Every method and path that the application has."""
        for route in self.served.starlette.routes:
            for method in sorted(route.methods):
                yield method, route.path

    async def call(self, method: str, path: str, headers: dict[str, str]) -> Response:
        """A request for what is ann's: her stream, conversation or key, her idempotency key."""
        id_ = {"conversations": self.conversation_id, "keys": self.ann.key.id, "models": "scripted"}
        part = next((name for name in id_ if f"/{name}/" in path), "")
        path = re.sub(r"\{id.*?\}", id_.get(part, self.stream_id), path)
        body: Any = None
        if method == "PATCH":
            body = {"title": "mine"}
        elif path.endswith("/moderations"):
            body = {"input": "hello"}
        elif path in BODIES:
            body = BODIES[path]
        elif path.endswith("/v1/completions"):
            body = {"model": "scripted", "prompt": "hello", "max_tokens": 2}
        elif (method, path) == ("POST", "/api/conversations"):  # an import, which is the caller's own
            body = {"title": "mine", "messages": [{"role": "user", "content": "hello"}]}
        elif method == "POST":
            body = chat("hello", conversation_id=self.conversation_id, stream=False)
            headers = {**headers, "idempotency-key": "ann-1"}
        async with await Connection.to(self.served.port) as connection:
            await connection.request(method, path, body, headers)
            return await connection.response()


@pytest.fixture
async def world(serve: Serve, tmp_path: Path) -> World:
    """Ann has a conversation, a stream, usage and a key; bob and the admin have a key each."""
    served = await serve(Script(tokens=8), load_models=partial(word_models, tmp_path / "models"), safety="on")
    ann, bob = await made(served, CANARY), await made(served, "bob")
    admin = await made(served, "admin", scope="admin")
    expired, revoked = await made(served, "expired", expires_at_us=1), await made(served, "revoked")
    rotated = await made(served, "rotated", scope="admin")
    write = served.runtime.database.write
    await write(lambda c: keys.revoke(c, revoked.key.id, 1))
    await write(lambda c: keys.rotate(c, rotated.key.id, 1, 0))
    await served.runtime.keys.load()
    refused = {"no key": {}, "no scheme": {"authorization": ann.text}, "a query": {"cookie": ann.text}}
    for name, text in {
        "unknown": f"tr-000000000000-{'0' * 64}",
        "wrong secret": f"{ann.key.id}-{'0' * 64}",
        "an id": ann.key.id,
        "expired": expired.text,
        "revoked": revoked.text,
        "rotated away": rotated.text,
    }.items():
        refused[name] = bearer(text)
    headers = {**bearer(ann.text), "idempotency_key": "ann-1"}
    answer = await served.post(chat(CANARY, stream=False), **headers)
    assert answer.status == 200
    conversation_id = answer.headers["x-conversation-id"]
    return World(served, ann, bob, admin, refused, answer.headers["x-request-id"], conversation_id)


async def test_every_route_refuses_who_has_no_valid_key(world: World):
    """No key, a wrong, expired, revoked or replaced one: 401 on every route but the two probes'."""
    walked = 0
    messages = set()
    for method, path in world.routes():
        for name, headers in world.refused.items():
            if path in PUBLIC:
                continue
            answer = await world.call(method, path, headers)
            assert answer.status == 401, (method, path, name)
            walked += 1
            if method != "HEAD" and answer.error()["code"] == "invalid_api_key":
                messages.add(json.dumps(answer.error()))
    assert len(messages) == 1, "they cannot be told apart"
    assert walked > 200


async def test_no_route_shows_an_owner_s_data_to_another(world: World):
    """Another owner's key, an admin's too, gets 404 for what is ann's, and lists without it."""
    said = "".join(scripted_text(0, 0, 8))
    for method, path in world.routes():
        for other in (world.bob, world.admin):
            if path in PUBLIC or (other is world.admin and path.startswith(FOR_ADMINS)):
                continue
            answer = await world.call(method, path, bearer(other.text))
            where = (method, path, other.key.terms.name, answer.body)
            text = answer.body.decode()
            assert CANARY not in text, where
            assert said not in text, where
            if path in EVERYONES:
                made = (method, path) == ("POST", "/api/conversations")
                assert answer.status == (201 if made else 200), where
                assert not {world.stream_id, world.conversation_id, world.ann.key.id} & set(
                    re.findall(r"[\w-]+", text)
                ), where
            else:
                assert answer.status == (403 if path.startswith(FOR_ADMINS) else 404), where
    await check_untouched(world)


async def check_untouched(world: World) -> None:
    """What is ann's is as it was, and hers."""
    ann = bearer(world.ann.text)
    whole = (await world.served.call("GET", f"/api/conversations/{world.conversation_id}", **ann)).json()
    assert [m["content"] for m in whole["messages"]] == [CANARY, "".join(scripted_text(0, 0, 8))]
    assert whole["title"] == CANARY
    path = f"/v1/chat/completions/{world.stream_id}"
    assert (await world.served.call("GET", path, **ann)).status == 200
    assert (await world.served.call("GET", "/api/usage", **ann)).json()["requests"] == 1
    assert world.served.runtime.keys.get(world.ann.key.id) == world.ann.key


async def test_usage_of_others_is_not_shown(world: World):
    """Bob's usage is nothing, an admin's all; bob asking for ann's by name is 403."""
    call = world.served.call
    assert (await call("GET", "/api/usage", **bearer(world.bob.text))).json()["requests"] == 0
    everyones = await call("GET", "/api/usage?group_by=key,model", **bearer(world.admin.text))
    assert [group["key"] for group in everyones.json()["groups"]] == [world.ann.key.id]
    asked = await call("GET", f"/api/usage?key={world.ann.key.id}", **bearer(world.bob.text))
    assert asked.refusal() == (403, "forbidden", "key")


async def test_chat_keys_are_403_on_admin_routes(world: World):
    """A chat key is refused by its scope, whatever it asks for there."""
    walked = [
        (method, path, (await world.call(method, path, bearer(world.ann.text))).status)
        for method, path in world.routes()
        if path.startswith(FOR_ADMINS)
    ]
    assert len(walked) >= 8
    assert {status for *_, status in walked} == {403}


async def test_no_secret_gets_out(world: World):
    """No key is in the log, in metrics, in the list of keys, or in the files of the store."""
    await world.served.call("GET", "/metrics?" + world.ann.text, **bearer(world.ann.text))
    metrics = await world.served.call("GET", "/metrics", **bearer(world.admin.text))
    listed = await world.served.call("GET", ADMIN_KEYS, **bearer(world.admin.text))
    files = [path.read_bytes() for path in world.served.runtime.database.path.parent.iterdir()]
    for issued in (world.ann, world.bob, world.admin):
        secret = issued.text.rpartition("-")[2]
        assert secret not in json.dumps(world.served.log)
        assert secret not in metrics.body.decode() + listed.body.decode()
        assert issued.key.secrets[0].digest.hex() not in listed.body.decode()
        assert not any(secret.encode() in content for content in files)


async def test_owners_share_what_they_own(world: World):
    """A second key of ann's sees her stream, her conversation and her usage."""
    second = await made(world.served, "phone", owner=world.ann.key.owner)
    phone = bearer(second.text)
    path = f"/api/conversations/{world.conversation_id}"
    assert (await world.served.call("GET", path, **phone)).status == 200
    assert (await world.served.call("GET", f"/v1/chat/completions/{world.stream_id}", **phone)).status == 200
    assert (await world.served.call("GET", "/api/usage", **phone)).json()["requests"] == 1


# The life of a key, over HTTP


async def test_the_life_of_a_key(serve: Serve):
    """Made, used, changed, rotated and revoked over HTTP; each change is in force when it is answered."""
    served = await serve(Script(tokens=2), api_key="root")
    root = bearer("root")

    async def admin(method: str, path: str = "", body: Any = None) -> Response:
        return await served.call(method, ADMIN_KEYS + path, body, **root)

    async def status(text: str) -> int:
        return (await served.call("GET", "/v1/models", **bearer(text))).status

    answer = await admin("POST", "", {"name": "laptop", "rpm": 60, "budget_usd": 2.5, "tier": "batch"})
    assert answer.status == 201
    assert answer.headers["cache-control"] == "no-store"
    key = answer.json()
    assert TEXT.fullmatch(key["key"])
    assert key["key"].startswith(f"{key['id']}-")
    assert (key["owner"], key["scope"], key["status"]) == (key["id"], "chat", "active")
    assert (key["rpm"], key["budget_usd"], key["models"], key["expires_at"]) == (60, 2.5, None, None)
    assert (key["tier"], key["weight"]) == ("batch", 1.0)
    assert await status(key["key"]) == 200

    changed = (await admin("PATCH", f"/{key['id']}", {"rpm": None, "name": "desk", "weight": 2})).json()
    assert (changed["name"], changed["rpm"], changed["budget_usd"]) == ("desk", None, 2.5)
    assert (changed["weight"], served.runtime.keys.get(key["id"]).terms.weight) == (2.0, 2.0)
    assert "key" not in changed

    rotated = (await admin("POST", f"/{key['id']}/rotate")).json()
    assert rotated["old_secrets_end_at"] - key["created_at"] in range(86_400, 86_460)
    assert [await status(text) for text in (key["key"], rotated["key"])] == [200, 200]
    last = (await admin("POST", f"/{key['id']}/rotate", {"overlap_s": 0})).json()
    assert [await status(text) for text in (key["key"], rotated["key"], last["key"])] == [401, 401, 200]

    revoked = (await admin("DELETE", f"/{key['id']}")).json()
    assert revoked["status"] == "revoked"
    assert await status(last["key"]) == 401
    assert [k["id"] for k in (await admin("GET")).json()["data"]] == [key["id"]]
    for method, path in (("PATCH", ""), ("POST", "/rotate")):
        assert (await admin(method, f"/{key['id']}{path}", {})).refusal() == (409, "conflict", None)
    assert (await admin("DELETE", f"/{key['id']}")).json() == revoked, "it stays as it was"


@pytest.mark.parametrize(("method", "path"), [("PATCH", ""), ("DELETE", ""), ("POST", "/rotate")])
async def test_an_unknown_key_is_404(serve: Serve, method: str, path: str):
    """What is to be done to a key that there is not is refused, and nothing made."""
    served = await serve(api_key="root")
    answer = await served.call(method, f"{ADMIN_KEYS}/tr-000000000000{path}", {}, **bearer("root"))
    assert answer.refusal() == (404, "key_not_found", None)
    assert served.runtime.keys.empty


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_parameter", "name"),
        ({"name": ""}, "invalid_value", "name"),
        ({"name": 5}, "invalid_type", "name"),
        ({"name": "\x1b[2J"}, "invalid_value", "name"),
        ({"name": "a", "key": "mine"}, "unknown_parameter", "key"),
        ({"name": "a", "owner": " ann"}, "invalid_value", "owner"),
        ({"name": "a", "scope": "root"}, "invalid_value", "scope"),
        ({"name": "a", "tier": None}, "invalid_type", "tier"),
        ({"name": "a", "weight": 0.05}, "invalid_value", "weight"),
        ({"name": "a", "weight": 101}, "invalid_value", "weight"),
        ({"name": "a", "weight": "2"}, "invalid_type", "weight"),
        ({"name": "a", "weight": None}, "invalid_type", "weight"),
        ({"name": "a", "degrade": "never"}, "invalid_value", "degrade"),
        ({"name": "a", "grammars": "none"}, "invalid_value", "grammars"),
        ({"name": "a", "rpm": 0}, "invalid_value", "rpm"),
        ({"name": "a", "tpm": 1.5}, "invalid_type", "tpm"),
        ({"name": "a", "max_streams": True}, "invalid_type", "max_streams"),
        ({"name": "a", "budget_usd": "five"}, "invalid_value", "budget_usd"),
        ({"name": "a", "budget_usd": 0.0000001}, "invalid_value", "budget_usd"),
        ({"name": "a", "budget_usd": -1}, "invalid_value", "budget_usd"),
        ({"name": "a", "models": []}, "invalid_value", "models"),
        ({"name": "a", "models": ["a", 5]}, "invalid_type", "models[1]"),
        ({"name": "a", "expires_at": "soon"}, "invalid_value", "expires_at"),
        ({"name": "a", "expires_at": 1}, "invalid_value", "expires_at"),
        ({"name": "a", "expires_at": 10**15}, "invalid_value", "expires_at"),
    ],
)
async def test_a_key_that_cannot_be_is_refused(serve: Serve, body: Any, code: str, param: str):
    """A term that cannot be read is a 400 that names it, and no key is made."""
    served = await serve(api_key="root")
    answer = await served.call("POST", ADMIN_KEYS, body, **bearer("root"))
    assert answer.refusal() == (400, code, param)
    assert served.runtime.keys.empty


async def test_models_that_a_key_may_not_use_are_not_there(serve: Serve):
    """They are 404, and in no list; the others are served."""
    served = await serve(Script(tokens=2))
    other, this = (
        await made(served, "a", models=("other",)),
        await made(served, "b", models=("scripted", "x")),
    )
    for issued, seen, status in ((other, [], 404), (this, ["scripted"], 200)):
        key = bearer(issued.text)
        for path in ("/api/models", "/v1/models"):
            assert [m["id"] for m in (await served.call("GET", path, **key)).json()["data"]] == seen
        assert (await served.call("GET", "/v1/models/scripted", **key)).status == status
        assert (await served.post(chat(stream=False), **key)).status == status
    for model in ("scripted", "other", "nothing"):
        refused = await served.post(chat(model=model), **bearer(other.text))
        assert refused.refusal() == (404, "model_not_found", "model")
        assert "scripted" not in refused.error()["message"].replace(repr(model), "")


async def test_a_stream_outlives_its_key(serve: Serve):
    """Revoked in the middle of a stream, a key can begin and attach to nothing; what flows flows on."""
    served = await serve(Script(tokens=40, rate=50))
    issued = await made(served, "a")
    key = bearer(issued.text)
    async with await served.open(chat(), headers=key) as stream:
        await stream.read_events(3)
        await served.runtime.database.write(lambda c: keys.revoke(c, issued.key.id, 1))
        await served.runtime.keys.load()
        assert (await served.post(chat(), **key)).status == 401
        assert (await served.call("GET", f"/api/chat/completions/{stream.id}", **key)).status == 401
        assert (await stream.to_end()).content() == "".join(scripted_text(0, 0, 40))


# Beside commands, and at the start


def command(served: Served, *argv: str) -> list[str]:
    """The arguments of a command over the server's store."""
    return ["keys", *argv, "--data-dir", str(served.runtime.settings.data_dir)]


async def test_the_server_sees_what_commands_do(serve: Serve, capsys: pytest.CaptureFixture[str]):
    """A key made beside the server is let in, and ends open mode; revoked, it is refused: within a second."""
    assert key_table.POLL_S <= 0.5
    served = await serve()
    assert (await served.call("GET", "/api/conversations")).status == 200
    assert await asyncio.to_thread(main, command(served, "create", "--name", "a", "--json")) == 0
    key = json.loads(capsys.readouterr().out)
    await until(lambda: not served.runtime.keys.empty)
    assert (await served.call("GET", "/api/conversations")).refusal()[:2] == (401, "missing_api_key")
    assert (await served.call("GET", "/api/conversations", **bearer(key["key"]))).status == 200
    assert await asyncio.to_thread(main, command(served, "revoke", key["id"])) == 0
    await until(lambda: served.logged("keys_changed")[1:])
    assert (await served.call("GET", "/api/conversations", **bearer(key["key"]))).status == 401
    assert (await served.call("GET", "/api/conversations")).status == 401


async def test_open_mode_is_said(spawn: Spawn):
    """On loopback without keys the log warns, nothing is printed, and no key is made."""
    process = await spawn("tokens=2")
    port = await process.ready()
    assert (await process.logged("open_mode"))["level"] == "warning"
    assert (await fetch(port, "GET", ADMIN_KEYS)).json()["data"] == []
    assert process.noise == []


async def test_the_first_start_others_can_reach_makes_an_admin_key(spawn: Spawn, tmp_path: Path):
    """It is printed once, is in neither log nor store, and without it nobody is let in."""
    process = await spawn("tokens=2", "--host", "0.0.0.0")
    port = await process.ready()
    [text] = TEXT.findall("".join(process.noise))
    assert text not in json.dumps(process.log)
    assert (await process.logged("first_key"))["key"] == text[: keys.ID_CHARS]
    assert (await fetch(port, "GET", "/api/usage")).status == 401
    assert (await fetch(port, "POST", "/api/chat/completions", chat(), bearer("none"))).status == 401
    [key] = (await fetch(port, "GET", ADMIN_KEYS, None, bearer(text))).json()["data"]
    assert (key["scope"], key["owner"]) == ("admin", "local")
    process.terminate()
    assert await process.exit_status() == 0
    for path in (tmp_path / "data").iterdir():
        assert text.rpartition("-")[2].encode() not in path.read_bytes()
    again = await spawn("tokens=2", "--host", "0.0.0.0")
    port = await again.ready()
    assert again.noise == []
    assert (await fetch(port, "GET", ADMIN_KEYS, None, bearer(text))).status == 200


async def test_with_a_key_of_the_settings_none_is_made(spawn: Spawn):
    """TOKENRING_API_KEY is enough on any address."""
    process = await spawn("tokens=2", "--host", "0.0.0.0", TOKENRING_API_KEY="root")
    port = await process.ready()
    assert process.noise == []
    assert (await fetch(port, "GET", ADMIN_KEYS, None, bearer("root"))).json()["data"] == []
    assert (await fetch(port, "GET", ADMIN_KEYS)).status == 401


@pytest.mark.parametrize("param", OWN_GRAMMARS)
async def test_a_key_of_schemas_sends_no_grammar_of_its_own(serve: Serve, param: str):
    """It is 403 by the parameter's name; schemas pass, and any other key may send grammars."""
    served = await serve(Script(tokens=2))
    bound, free = await made(served, "bound", grammars="schemas"), await made(served, "free")
    refused = await served.post(chat(**OWN_GRAMMARS[param]), **bearer(bound.text))
    assert refused.refusal() == (403, "grammar_forbidden", param)
    assert (await served.post(chat(response_format=SCHEMA), **bearer(bound.text))).status == 200
    assert (await served.post(chat(guided_json={}), **bearer(bound.text))).status == 200
    assert (await served.post(chat(**OWN_GRAMMARS[param]), **bearer(free.text))).status == 200


# Commands beside the server


async def test_a_server_says_which_models_it_has_loaded(serve: Serve, tmp_path: Path):
    """A command beside it can warn of others; the small model is there once it has started."""
    await serve(Script(), data_dir=tmp_path, small_model="scripted")

    def models() -> list[str]:
        server = holder(tmp_path)
        assert server is not None
        return [*server.models]

    await until(lambda: models() == ["scripted", "scripted-small"])
