"""Parameters over HTTP, with the scripted engine: what is taken, what is refused, what answers have."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.scripted.engine import Script
from tests.support.servers import Serve, chat
from tests.support.sse_client import fetch

V1 = "/v1/chat/completions"


def ask(**parameters: Any) -> dict[str, Any]:
    """A request that is answered in one piece."""
    return chat(stream=False, **parameters)


@pytest.mark.parametrize("model", [None, "", "default"])
async def test_the_only_model_needs_no_name(serve: Serve, model: str | None):
    """A client that leaves the choice to the server gets the model that there is, under its name."""
    served = await serve(Script(tokens=2))
    body = {name: value for name, value in ask(model=model).items() if value is not None}
    answer = await fetch(served.port, "POST", V1, body)
    assert (answer.status, answer.json()["model"]) == (200, "scripted")
    assert (await served.post(ask(model="gpt-4o"))).refusal() == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("model", "refusal"),
    [
        (None, (400, "missing_parameter", "model")),
        ("", (404, "model_not_found", "model")),
        ("default", (404, "model_not_found", "model")),
    ],
)
async def test_one_of_two_models_is_named(serve: Serve, model: str | None, refusal: tuple[int, str, str]):
    """With two models the server does not choose unless it is asked to, by `auto`."""
    served = await serve(Script(tokens=2), small_model="scripted:tokens=4")
    assert (await served.post(ask(model=model))).refusal() == refusal


async def test_an_answer_has_null_where_it_has_nothing(serve: Serve):
    """Clients read `reasoning_content` and `matched_stop` without asking whether they are there."""
    served = await serve(Script(tokens=3))
    choice = (await served.post(ask())).json()["choices"][0]
    assert choice["message"]["reasoning_content"] is None
    assert choice["matched_stop"] is None
    text = choice["message"]["content"]
    stopped = (await served.post(ask(stop=text.strip().split()[-1]))).json()["choices"][0]
    assert stopped["matched_stop"] == text.strip().split()[-1]


async def test_an_answer_is_taken_as_it_was_given(serve: Serve):
    """The choice of an answer, nulls and all, is the next request's message."""
    served = await serve(Script(tokens=3, reasoning=1))
    first = (await served.post(ask())).json()["choices"][0]["message"]
    assert first["reasoning_content"]
    history = [*ask()["messages"], first, {"role": "user", "content": "more"}]
    assert (await served.post(ask(messages=history))).status == 200


async def test_a_strict_server_refuses_what_has_no_effect(serve: Serve):
    """The setting turns silence into a refusal by name; otherwise the parameter is taken."""
    strict = await serve(Script(tokens=2), strict_parameters=True)
    assert (await strict.post(ask(verbosity="low"))).refusal() == (400, "unsupported_parameter", "verbosity")
    assert (await strict.post(ask(guided_regex="a"))).status == 200
    lenient = await serve(Script(tokens=2))
    assert (await lenient.post(ask(verbosity="low", service_tier="flex", num_ctx=4096))).status == 200


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}, "foo": 1}]}, "tools[0].foo"),
        ({"response_format": {"type": "json_object", "foo": 1}}, "response_format.foo"),
        ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo"),
        ({"structured_outputs": {"foo": 1}}, "structured_outputs.foo"),
    ],
)
async def test_a_nested_field_is_refused_by_its_path(serve: Serve, sent: dict[str, Any], param: str):
    """Whatever the engine, no field within a parameter is dropped in silence."""
    served = await serve(Script(tokens=2))
    assert (await served.post(ask(**sent))).refusal() == (400, "unknown_parameter", param)


async def test_an_answer_to_a_limit_of_llama_cpp_is_as_long(serve: Serve):
    """`n_predict` is the limit of the answer, also for what is reserved."""
    served = await serve(Script(tokens=9))
    answer = (await served.post(ask(n_predict=3))).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"
