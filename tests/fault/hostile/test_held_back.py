"""A caller who chooses where an answer begins, ends or how it is written gets no listed span out of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.engine.scripted.engine import Script
from tests.support.screens import Piece, policy_file, speaking, word_models
from tests.support.servers import Serve, chat
from tests.support.sse_client import fetch

SPAN = "canary song 42"


@pytest.mark.parametrize(
    ("prefix", "pieces", "asked"),
    [
        ("It is: canary so", ["ng", " 42", " and on"], {"continue_final_message": True}),
        ("It is: canary&#32;", ["song", " 42", " and on"], {"continue_final_message": True}),
        ("", ['{"a": "', "\\u00", "63anary so", 'ng 42"}'], {"response_format": {"type": "json_object"}}),
        ("", ["&#99;an", "**ary** s", "ong 42"], {}),
        ("", ["say canary", " song "], {"min_tokens": 2, "logit_bias": {"2": 100}}),
    ],
)
async def test_a_span_stays_in_whatever_the_caller_chose(
    serve: Serve, tmp_path: Path, prefix: str, pieces: list[str], asked: dict[str, object]
) -> None:
    """The beginning is the caller's, the escapes are its client's to undo, the end is forced."""
    models = word_models(tmp_path / "models")
    server = await serve(
        Script(),
        engine_type=speaking(lambda _request, _choice: [Piece(piece) for piece in pieces]),
        safety="on",
        safety_policy=policy_file(tmp_path, hard_list=[SPAN]),
        load_models=lambda: models,
    )
    messages = [{"role": "user", "content": "Say it."}]
    messages += [{"role": "assistant", "content": prefix}] if prefix else []
    body = chat(**asked, messages=messages, stream=False)
    answer = await fetch(server.port, "POST", "/v1/chat/completions", body)
    assert answer.status == 200
    text = answer.json()["choices"][0]["message"]["content"] or ""
    assert not [word for word in ("song", "ng 42", "anary", "42") if word in text]
