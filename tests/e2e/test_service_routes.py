"""The routes that clients and load generators of vLLM, SGLang and OpenAI look for before they begin."""

from __future__ import annotations

from importlib import metadata

import openai
import pytest

from app.api.app import HEALTH_PATHS
from app.engine.scripted.engine import Script
from scripts.api_document.document import OPERATIONS
from tests.support.servers import Serve, Spawn, chat
from tests.support.sse_client import Connection, fetch

PLAIN_GETS = [path for (method, path) in OPERATIONS if method == "GET" and "{" not in path]


@pytest.mark.parametrize("path", HEALTH_PATHS)
async def test_health_routes_are_200_without_a_key_when_requests_can_be_served(serve: Serve, path: str):
    """The status is that of readiness, and nothing else is told to who has no key."""
    served = await serve(api_key="secret")
    answer = await served.call("GET", path)
    assert (answer.status, answer.json()) == (200, {"status": "ready", "phase": "ready"})


@pytest.mark.parametrize("path", HEALTH_PATHS)
async def test_health_routes_are_503_once_the_engine_has_died(serve: Serve, path: str):
    """A load generator that begins now learns that it would be refused, and when to come back."""
    served = await serve()
    served.engine.die("test")
    answer = await served.call("GET", path)
    assert (answer.status, answer.json()["status"]) == (503, "not_ready")
    assert int(answer.headers["retry-after"]) > 0


async def test_health_routes_are_503_while_the_model_loads(spawn: Spawn):
    """The port answers before requests can be served; liveness is 200 all the time."""
    process = await spawn("start_s=30")
    port = await process.port()
    statuses = [(await fetch(port, "GET", path)).status for path in (*HEALTH_PATHS, "/healthz")]
    assert statuses == [503] * len(HEALTH_PATHS) + [200]


async def test_the_version_is_that_of_the_package(serve: Serve):
    """It needs no key, as the OpenAPI document that has it too."""
    served = await serve(api_key="secret")
    assert (await served.call("GET", "/version")).json() == {"version": metadata.version("tokenring")}


async def test_the_model_list_has_the_context_length_and_the_root(serve: Serve):
    """Clients of vLLM and SGLang read both; OpenAI's SDK takes the list and a single model."""
    served = await serve(Script(context=4096))
    (model,) = (await served.call("GET", "/v1/models")).json()["data"]
    assert (model["id"], model["root"], model["max_model_len"]) == ("scripted", "scripted", 4096)
    assert (await served.call("GET", "/v1/models/scripted")).json() == model
    assert (await served.call("GET", "/api/models")).json()["data"][0].items() >= model.items()
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none") as client:
        assert [m.id async for m in client.models.list()] == ["scripted"]
        assert (await client.models.retrieve("scripted")).owned_by == "tokenring"


async def test_a_slash_at_the_end_of_a_path_is_ignored(serve: Serve):
    """For every method, without a redirect; what is no route stays none."""
    served = await serve(Script(tokens=2))
    for path in PLAIN_GETS:
        assert (await served.call("GET", path + "/")).status == 200, path
    answer = await served.call("POST", "/v1/chat/completions/", chat(stream=False))
    assert (answer.status, answer.json()["object"]) == (200, "chat.completion")
    assert (await served.call("GET", "/v1/models/scripted/")).json()["id"] == "scripted"
    assert (await served.call("GET", "/v1/nothing/")).status == 404
    assert (await served.call("PUT", "/v1/models/")).headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", PLAIN_GETS)
async def test_head_is_get_without_a_body(serve: Serve, path: str):
    """The status and the type of the body are those that GET has."""
    served = await serve()
    got = await served.call("GET", path)
    async with await Connection.to(served.port) as connection:
        await connection.request("HEAD", path)
        head = await connection.response()
        await connection.request("GET", "/healthz")  # what follows on the connection is its answer
        assert (await connection.response()).status == 200
    assert head.status == got.status
    assert head.headers["content-type"] == got.headers["content-type"]
