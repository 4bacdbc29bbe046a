"""What a person sees of a start: the stages of it, and a request that can be pasted."""

from __future__ import annotations

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from app.api.startup_text import is_keyless, local_host, log_progress, ready_text, url_of
from app.settings import Settings

URL = "http://127.0.0.1:8000"


def runtime(*, keys: bool = False, model: str = "toy", **settings: Any) -> Any:
    """A runtime that is ready."""
    there = Mock()
    there.keys.empty = not keys
    there.engine.model.id = model
    there.settings = Settings(**settings)
    return there


def curl(text: str) -> list[str]:
    """The words of the one command in a ready text, as a shell reads them."""
    [line] = [line for line in text.splitlines() if line.startswith("  curl ")]
    return shlex.split(line)


def test_the_request_to_try_is_json_for_the_model_that_is_served() -> None:
    """A quote in its name does not end the shell's word."""
    command = curl(ready_text(runtime(model="it's"), URL))
    assert command[1] == f"{URL}/v1/chat/completions"
    assert json.loads(command[-1])["model"] == "it's"


@pytest.mark.parametrize("case", [{"keys": True}, {"api_key": "k"}, {"host": "0.0.0.0"}])
def test_a_server_that_needs_keys_says_so(case: dict[str, Any]) -> None:
    """The request has a key, and the text tells how to make one in this store."""
    text = ready_text(runtime(data_dir=Path("/srv/my data"), **case), URL)
    assert "Authorization: Bearer $KEY" in curl(text)
    assert "keys create --name me --data-dir '/srv/my data'" in text


def test_a_server_without_keys_on_this_machine_asks_for_none() -> None:
    """The request has no key in it."""
    there = runtime()
    assert is_keyless(there)
    assert "Authorization" not in ready_text(there, URL)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", URL),
        ("0.0.0.0", URL),
        ("::", "http://[::1]:8000"),
        ("node7", "http://node7:8000"),
    ],
)
def test_the_address_is_one_that_this_machine_can_connect_to(host: str, url: str) -> None:
    """A wildcard is none."""
    assert url_of(local_host(host), 8000) == url


@pytest.mark.anyio
async def test_a_start_tells_its_stages_until_it_is_over() -> None:
    """Each line has the stage of its moment."""
    there, stages = runtime(), ["importing", "warming up"]
    over = asyncio.Event()

    async def stage() -> str:
        if len(stages) == 1:
            over.set()
        return stages.pop(0) if stages else ""

    there.note_start_stage = stage
    progress = asyncio.create_task(log_progress(there, interval_s=0.001))
    await over.wait()
    progress.cancel()
    lines = [call.kwargs for call in there.log.info.call_args_list]
    assert lines[0] == {"stage": "importing", "elapsed_s": 0}
