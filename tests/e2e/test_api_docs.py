"""The examples of the docs, as they stand there, against real servers with the scripted engine."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from app.engine.scripted.engine import Script, scripted_text
from scripts.support.openai_environments import NODE_DIRECTORY
from tests.support.sdks import command_of
from tests.support.servers import ROOT, Serve, Served, ServerProcess
from tests.support.sse_client import until

SCRIPT = Script(tokens=12, rate=60)
TEXT = "".join(scripted_text(0, 0, 12))
REFUSED = '{"error":'

CURL: Mapping[str, Mapping[str, int]] = {
    "../README": {"data: [DONE]": 1, "retry: 1000": 1},
    "quick-start": {"data: [DONE]": 1, '"object":"chat.completion"': 1, '"conversation_id":"conv_': 1},
    "api": {
        '"finish_reason":"stop"': 5,
        "data: [DONE]": 1,
        '"completion_tokens":12': 5,
        '"object":"list"': 2,
    },
    "resume": {
        "data: [DONE]": 3,
        "retry: 1000": 2,  # a stream from its start, and one that is left after five lines
        '"cancelled":false': 1,  # it had finished before
        '"deleted":true': 1,
    },
    "conversations": {
        '"object":"chat.completion"': 3,
        '"title":"About Tokenring"': 3,  # renamed, exported and restored
        "# About Tokenring": 1,
        '"deleted":true': 1,
    },
    "completions": {'"object":"text_completion"': 1, '"completion_tokens":12': 1},
    "service-routes": {
        '"flagged":': 2 + 2,
        '"type":"moderation_results"': 2,
        '"object":"usage"': 2,
        '"status":"': 2,
        '"max_model_len":': 3,
        "# TYPE tokenring_": 20,
    },
    "admin-api": {
        '"status":"active"': 2 + 1 + 1,
        '"status":"revoked"': 1,
        '"rpm":null,"tpm":20000': 3,
        '"old_secrets_end_at":1': 1,
        '"object":"safety.policy"': 1,
        REFUSED: 1,  # the request that it stops is nobody's
    },
    "limits": {
        "HTTP/1.1 200 OK": 2,
        "HTTP/1.1 429 Too Many Requests": 1,
        "x-ratelimit-remaining-requests: 0": 2,
        "retry-after: ": 1,
        REFUSED: 1,
    },
    "errors": {REFUSED: 1, '"code":"invalid_value"': 1},
    "parameters": {'"finish_reason":"stop"': 1},
}
"""By page of docs/: what the outputs of its curl examples contain, and how often at least."""


def blocks(page: str, language: str) -> list[str]:
    """All blocks of a language in a page of docs/."""
    text = (ROOT / f"docs/{page}.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def at(port: int, code: str) -> str:
    """An example for the server at `port`."""
    return code.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{port}")


def here(code: str, port: int) -> str:
    """The same for the scripted model."""
    return at(port, code).replace("tokenring-builtin", "scripted")


PYTHON = [(page, i) for page in CURL for i, _ in enumerate(blocks(page, "python"))]


async def output(*command: str, cwd: Path, **variables: str) -> str:
    """What a program prints; it must succeed and write no error."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env=os.environ | variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, "")
    return out.decode()


async def cut_once(served: Served, after: int) -> None:
    """Cut the connection of the only reader once it is past event `after`."""

    def reading() -> bool:
        readers = [r for s in served.live() for r in s.readers if r.sink and r.cursor > after]
        for reader in readers:
            assert reader.sink is not None
            reader.sink.abort()
        return bool(readers)

    await until(reading, timeout_s=30)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("api_key", ["", "right"], ids=["open", "with-a-key"])
@pytest.mark.parametrize("page", CURL)
async def test_the_curl_examples_work_in_their_order(page: str, api_key: str, serve: Serve, tmp_path: Path):
    """Each is answered as the page says, before the first key and after it; none is refused unsaid."""
    served = await serve(SCRIPT, safety="on", api_key=api_key)
    script = here("\n".join(blocks(page, "sh")), served.port)
    key = {"KEY": api_key} if api_key else {}
    out = await output("bash", "-ec", script, cwd=tmp_path, **key)
    for text, least in CURL[page].items():
        assert out.count(text) >= least, f"{text}\n{out}"
    assert out.count(REFUSED) == CURL[page].get(REFUSED, 0), out


def test_every_page_with_curl_is_tried():
    """A page whose commands ask for more than health is one of those above."""
    pages = {"../README", *(path.stem for path in (ROOT / "docs").glob("*.md"))}
    assert {page for page in pages if any("$URL" in block for block in blocks(page, "sh"))} == set(CURL)


@pytest.mark.parametrize("page", CURL)
def test_a_page_names_its_key_once_and_shows_errors(page: str):
    """`KEY=` is above the first request, and can come from the terminal; no flag swallows an error."""
    code = "".join(blocks(page, "sh"))
    assert re.findall(r"^KEY=.*?(?= #|$)", code, re.MULTILINE) == ["KEY=${KEY:-none} "]
    assert code.index("KEY=") < code.index("curl")
    for command in re.findall(r"curl [^|]*", code):
        flags = re.findall(r"(?<= )-(\w+)", command.partition("$URL")[0])
        assert not any("f" in letters for letters in flags), command
        assert flags[0].startswith("sS") or "headers.txt" in command, command


@pytest.mark.sglang
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(
    "page",
    [
        "../README",
        "quick-start",
        "api",
        "completions",
        "conversations",
        "parameters",
        "resume",
        "service-routes",
    ],
)
async def test_the_built_in_model_refuses_no_curl_example(
    page: str, sglang_server: ServerProcess, tmp_path: Path
):
    """What the scripted engine lets pass is no parameter that real SGLang refuses."""
    script = at(await sglang_server.port(), "\n".join(blocks(page, "sh")))
    assert REFUSED not in await output("bash", "-ec", script, cwd=tmp_path)


@pytest.mark.parametrize(("page", "index"), PYTHON)
async def test_the_python_examples_work(page: str, index: int, serve: Serve, tmp_path: Path):
    """Each prints the answer, or the error that the page shows."""
    served = await serve(SCRIPT)
    out = await output(sys.executable, "-c", here(blocks(page, "python")[index], served.port), cwd=tmp_path)
    told = {("errors", 0): "400 invalid_value max_tokens", ("resume", 2): "'cancelled': True"}
    assert told.get((page, index), TEXT) in out


@pytest.mark.parametrize("index", [0, 1])
async def test_the_python_examples_survive_a_lost_connection(index: int, serve: Serve, tmp_path: Path):
    """Each prints the whole text once, though its connection is cut."""
    served = await serve(SCRIPT)
    example = here(blocks("resume", "python")[index], served.port)
    running = asyncio.create_task(output(sys.executable, "-c", example, cwd=tmp_path))
    await cut_once(served, after=4)
    assert await running == TEXT


@pytest.mark.timeout(300)  # the package may have to be installed first
async def test_the_event_source_survives_a_lost_connection(serve: Serve):
    """The browser example prints the whole text once, though its connection is cut."""
    node, _ = command_of("node")
    served = await serve(SCRIPT)
    page = 'import { EventSource } from "eventsource";\n' + here(blocks("resume", "js")[0], served.port)
    running = asyncio.create_task(output(node, "--input-type=module", "-e", page, cwd=NODE_DIRECTORY))
    await cut_once(served, after=4)
    printed = await running
    assert "".join(line for line in printed.split("\n") if line) == TEXT.replace("\n", "")


@pytest.mark.timeout(300)  # the package may have to be installed first
async def test_the_node_sdk_example_works(serve: Serve):
    """It prints the whole text."""
    node, _ = command_of("node")
    served = await serve(SCRIPT)
    example = here(blocks("api", "js")[0], served.port)
    assert await output(node, "--input-type=module", "-e", example, cwd=NODE_DIRECTORY) == TEXT
