"""Token ids over HTTP: the bodies of vLLM's and SGLang's clients, and who may ask for how much."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from app.engine.scripted.engine import Script
from tests.support.servers import Serve, Served, ServerProcess
from tests.support.sse_client import Response, fetch

TEXT = "a ring holds each token once"


async def tokenize(served: Served, **body: Any) -> Response:
    """The answer to a tokenize request."""
    return await served.call("POST", "/tokenize", body)


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_text_becomes_ids_and_ids_become_the_text(serve: Serve, prefix: str):
    """With vLLM's fields, and with SGLang's name of the text."""
    served = await serve(Script(context=4096))
    answer = await served.call("POST", f"{prefix}/tokenize", {"model": "scripted", "prompt": TEXT})
    made = answer.json()
    assert (answer.status, made["count"], made["max_model_len"]) == (200, 6, 4096)
    assert len(made["tokens"]) == 6
    back = await served.call("POST", f"{prefix}/detokenize", {"model": "scripted", "tokens": made["tokens"]})
    assert (back.status, back.json()) == (
        200,
        {"prompt": TEXT, "text": TEXT, "content": TEXT},
    )


async def test_several_texts_are_several_lists(serve: Serve):
    """As SGLang answers them, and back."""
    served = await serve()
    made = (await tokenize(served, prompt=[TEXT, "a ring"])).json()
    assert made["count"] == [6, 2]
    back = await served.call("POST", "/detokenize", {"tokens": made["tokens"]})
    assert back.json()["prompt"] == [TEXT, "a ring"]
    assert (await served.call("POST", "/detokenize", {"tokens": []})).json()["prompt"] == ""


async def test_llama_cpps_names_of_the_fields(serve: Serve):
    """`content` and `add_special`; an error speaks of the name that was sent."""
    served = await serve()
    made = await tokenize(served, content=TEXT, add_special=True, parse_special=True, with_pieces=False)
    assert (made.status, made.json()["count"]) == (200, 6)
    for sent, param in (
        ({"content": 1}, "content"),
        ({"content": "a", "prompt": "a"}, "content"),
        ({"content": "a", "add_special": 1}, "add_special"),
        ({"content": "a", "with_pieces": True}, "with_pieces"),
    ):
        answer = await tokenize(served, **sent)
        assert (answer.status, answer.error()["param"]) == (400, param)


async def test_messages_are_rendered_as_a_chat_request_is(serve: Serve):
    """The count is what the same messages cost as a prompt."""
    served = await serve(Script(tokens=2))
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": TEXT}]
    made = (await tokenize(served, messages=messages, add_generation_prompt=True)).json()
    chat = {"model": "scripted", "messages": messages}
    usage = (await served.call("POST", "/v1/chat/completions", chat)).json()["usage"]
    assert made["count"] == len(made["tokens"]) == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"prompt": []}, "prompt"),
        ("/tokenize", {"prompt": ["a", 1]}, "prompt[1]"),
        ("/tokenize", {"prompt": ["a"] * 1025}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"prompt": "a", "model": 1}, "model"),
        ("/tokenize", {"prompt": "a", "colour": "red"}, "colour"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        (
            "/tokenize",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
                ]
            },
            "messages[0].content[0]",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens[1]"),
        ("/detokenize", {"tokens": [2_000_000_000]}, "tokens"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(serve: Serve, path: str, body: dict[str, Any], param: str):
    """Nothing is ignored, and an id beyond the vocabulary is no crash."""
    served = await serve()
    answer = await served.call("POST", path, body)
    assert (answer.status, answer.error()["param"]) == (400, param)


async def test_the_routes_need_a_key_and_its_model(serve: Serve):
    """As every other route does."""
    served = await serve(api_key="secret")
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert (await served.call("POST", path, body)).status == 401
        unknown = await served.call("POST", path, body | {"model": "no"}, authorization="Bearer secret")
        assert (unknown.status, unknown.error()["code"]) == (404, "model_not_found")
        assert (await served.call("POST", path, body, authorization="Bearer secret")).status == 200


async def test_a_request_counts_in_the_limits_of_its_key(serve: Serve):
    """One request a minute is one, whatever it is for; its tokens count for nothing."""
    served = await serve()
    key = (await served.call("POST", "/api/admin/keys", {"name": "ann", "rpm": 2, "tpm": 100})).json()["key"]
    named = {"authorization": f"Bearer {key}"}
    for status in (200, 200, 429):
        answer = await served.call("POST", "/tokenize", {"prompt": TEXT * 100}, **named)
        assert answer.status == status
    assert answer.headers["x-ratelimit-remaining-tokens"] == "100"


async def test_a_body_is_bounded(serve: Serve):
    """A text that is larger than the body may be is not read."""
    served = await serve(max_body_bytes=4096)
    answer = await tokenize(served, prompt="a" * 5000)
    assert (answer.status, answer.error()["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info_has_what_clients_of_sglang_read(serve: Serve, path: str):
    """The name, the sizes, and no path for who is no admin."""
    served = await serve(Script(context=4096), engine="scripted")
    info = (await served.call("GET", path)).json()
    assert (info["model_path"], info["served_model_name"], info["is_generation"]) == (
        "scripted",
        "scripted",
        True,
    )
    assert (info["max_model_len"], info["has_image_understanding"]) == (4096, False)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_tells_settings_to_admins_only(serve: Serve, path: str):
    """No secret to anybody."""
    served = await serve(api_key="s3cret", cors_origins="https://a.example")
    made = await served.call("POST", "/api/admin/keys", {"name": "ann"}, authorization="Bearer s3cret")
    ann, admin = made.json()["key"], await served.call("GET", path, authorization="Bearer s3cret")
    user = await served.call("GET", path, authorization=f"Bearer {ann}")
    assert user.json().keys() == admin.json().keys() - {"settings", "tokenizer_path"}
    assert user.json()["internal_states"] == []
    assert admin.json()["settings"]["cors_origins"] == "https://a.example"
    assert admin.json()["internal_states"][0]["num_running_reqs"] == 0
    assert "s3cret" not in json.dumps(admin.json())
    assert (await served.call("GET", path)).status == 401


@pytest.mark.sglang
@pytest.mark.timeout(400)  # the first test of a session starts the server
async def test_the_built_in_model_tokenizes_as_its_own_tokenizer_does(sglang_server: ServerProcess):
    """Text and messages to ids and back, by the files that `/model_info` names."""
    port = await sglang_server.port()
    info = (await fetch(port, "GET", "/model_info")).json()
    tokenizer = Tokenizer.from_file(f"{info['tokenizer_path']}/tokenizer.json")
    made = (await fetch(port, "POST", "/tokenize", {"prompt": TEXT})).json()
    assert (made["tokens"], made["max_model_len"]) == (tokenizer.encode(TEXT).ids, info["max_model_len"])
    assert (await fetch(port, "POST", "/detokenize", {"tokens": made["tokens"]})).json()["prompt"] == TEXT
    messages = [{"role": "user", "content": TEXT}]
    rendered = (await fetch(port, "POST", "/tokenize", {"messages": messages})).json()
    chat = {"model": info["served_model_name"], "messages": messages, "max_tokens": 1}
    usage = (await fetch(port, "POST", "/v1/chat/completions", chat)).json()["usage"]
    assert rendered["count"] == usage["prompt_tokens"]
    text = (await fetch(port, "POST", "/detokenize", {"tokens": rendered["tokens"]})).json()["prompt"]
    assert TEXT in text
