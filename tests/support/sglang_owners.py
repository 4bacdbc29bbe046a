"""Real SGLang for two owners: what one of them sends, and how the other's stream flows beside it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.preloaded import Preloaded
from tests.support.servers import ROOT, ServerProcess, start_process
from tests.support.sse_client import Response, Stream, fetch, open_stream

CHAT = "/v1/chat/completions"
ADMIN_KEY = "root"
LEAST_SHARE = 0.2
"""Of the tokens per second that a stream has alone; generous, for the machine may be busy."""


def schema(value: Any) -> dict[str, Any]:
    """A response format of this JSON schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


@dataclass
class Node:
    """A server with keys of two owners."""

    server: ServerProcess
    port: int
    hostile: dict[str, str]
    other: dict[str, str]
    _flows: list[Flow] = field(default_factory=list)

    async def ask(self, headers: dict[str, str], **parameters: Any) -> Response:
        """The answer to a chat request with these parameters."""
        return await fetch(self.port, "POST", CHAT, body(**parameters), headers)

    async def flow(self) -> Flow:
        """A long stream of the other key, read as it comes."""
        usage = {"include_usage": True, "continuous_usage_stats": True}
        request = body(ignore_eos=True, max_tokens=7000, stream=True, stream_options=usage)
        stream = await open_stream(self.port, request, headers=self.other)
        flow = Flow(stream)
        self._flows.append(flow)
        return flow


class Flow:
    """A stream, and how many of its tokens have come; an event may have several."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._num_tokens = 0
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self._stream.events():
            if usage := event.json().get("usage"):
                self._num_tokens = usage["completion_tokens"]

    async def rate(self, seconds: float) -> float:
        """Tokens per second in the time that comes."""
        begun = self._num_tokens
        await asyncio.sleep(seconds)
        assert not self._reading.done()
        return (self._num_tokens - begun) / seconds

    async def close(self) -> None:
        """Leave."""
        self._reading.cancel()
        self._stream.connection.close()


def body(**parameters: Any) -> dict[str, Any]:
    """A chat request."""
    message = {"role": "user", "content": "hello"}
    return {"model": "tokenring-builtin", "messages": [message], "max_tokens": 40} | parameters


def made_key(directory: Path, name: str) -> dict[str, str]:
    """The header of a new key."""
    made = subprocess.run(
        [sys.executable, "-m", "app", "keys", "create", "--init", "--name", name],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        check=True,
        text=True,
    )
    return {"authorization": f"Bearer {made.stdout.strip()}"}


@contextlib.asynccontextmanager
async def two_owners(directory: Path, preloaded: Preloaded | None) -> AsyncIterator[Node]:
    """A server with the built-in model that has answered once."""
    hostile, other = made_key(directory, "hostile"), made_key(directory, "other")
    flags = ("--safety", "off", "--resume-grace-s", "0")
    server = await start_process(directory, *flags, preloaded=preloaded, TOKENRING_API_KEY=ADMIN_KEY)
    try:
        node = Node(server, await server.ready(timeout_s=200), hostile, other)
        assert (await node.ask(other)).status == 200
        yield node
        for flow in node._flows:
            await flow.close()
    finally:
        await server.close()
