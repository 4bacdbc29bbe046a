"""The examples of docs/api.md, as they stand there, against a server that keeps dropping its clients."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from pathlib import Path

import pytest

from app.engine.scripted.engine import Script, scripted_text
from scripts.support.openai_environments import NODE_DIRECTORY
from tests.support.sdks import command_of
from tests.support.servers import ROOT, Serve, Served
from tests.support.sse_client import until

SCRIPT = Script(tokens=12, rate=60)
TEXT = "".join(scripted_text(0, 0, 12))


def examples(language: str, port: int) -> str:
    """All blocks of a language in docs/api.md, for the scripted model at `port`."""
    text = (ROOT / "docs/api.md").read_text("utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    code = "\n".join(blocks).replace("http://127.0.0.1:8000", f"http://127.0.0.1:{port}")
    return code.replace("tokenring-builtin", "scripted")


async def output(*command: str, cwd: Path) -> str:
    """What a program prints; it must succeed and write no error."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, "")
    return out.decode()


async def cut_once(served: Served, after: int) -> None:
    """Cut the connection of the only reader once it is past event `after`."""

    def reading() -> bool:
        readers = [r for s in served.live() for r in s.readers if r.outlet and r.cursor > after]
        for reader in readers:
            assert reader.outlet is not None
            reader.outlet.abort()
        return bool(readers)

    await until(reading, timeout_s=30)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl(serve: Serve, tmp_path: Path):
    """Every curl example works, in the order in which they stand."""
    served = await serve(SCRIPT)
    out = await output("bash", "-ec", examples("sh", served.port), cwd=tmp_path)
    assert out.count('"status":"') == 2 + 4, "alive, ready, and a conversation of four messages"
    assert out.count("data: [DONE]") == 4
    assert out.count("retry: 1000") == 3, "two streams from their start, one left after five lines"
    assert out.count('"completion_tokens":12') == 2 + 2 + 2, "two more answers, once more in the conversation"
    assert out.count('"title":"About Tokenring"') == 2, "renamed and restored"
    assert "# About Tokenring" in out
    assert '"cancelled":false' in out, "it had finished before"
    assert '"deleted":true' in out
    assert len(served.runtime.streams._finished) == 3


async def test_python(serve: Serve, tmp_path: Path):
    """The Python example prints the whole text once, though its connection is cut."""
    served = await serve(SCRIPT)
    program = output(sys.executable, "-c", examples("python", served.port), cwd=tmp_path)
    running = asyncio.create_task(program)
    await cut_once(served, after=4)
    assert await running == TEXT


@pytest.mark.timeout(300)  # the package may have to be installed first
async def test_event_source(serve: Serve):
    """The browser example prints the whole text once, though its connection is cut."""
    node, _ = command_of("node")
    served = await serve(SCRIPT)
    page = 'import { EventSource } from "eventsource";\n' + examples("js", served.port)
    running = asyncio.create_task(output(node, "--input-type=module", "-e", page, cwd=NODE_DIRECTORY))
    await cut_once(served, after=4)
    printed = await running
    assert "".join(line for line in printed.split("\n") if line) == TEXT.replace("\n", "")
