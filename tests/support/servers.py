"""Real servers for tests: in the test's own loop with the scripted engine, or as a process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog
import uvicorn

from app.api.app import build_app
from app.api.server import Server, http_server, listen
from app.core import ChatRequest, Engine
from app.engine.scripted.engine import Script, ScriptedEngine
from app.runtime import ModelLoader, Runtime
from app.safety.classifiers.bundled_models import Models, load
from app.settings import Settings
from app.stream.token_stream import TokenStream
from tests.support.preloaded import ForkedProcess, Preloaded
from tests.support.sse_client import Response, Stream, fetch, open_stream, until

ROOT = Path(__file__).parents[2]
WAIT_S = 100.0
"""The longest that a process may take for anything here: less than pytest gives a test."""

MakeScript = Script | Callable[[ChatRequest], Script]


def chat(content: str = "hello", **parameters: Any) -> dict[str, Any]:
    """The body of a streaming chat request to the scripted model."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": content}], "stream": True}
    return body | parameters


class PromptServer(Server):
    """Ends as soon as it can: uvicorn takes a tenth of a second to look up, and one to wait for clients."""

    LEAVE_S = 0.1

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.told = asyncio.Event()

    async def main_loop(self) -> None:
        """Serve until told."""
        await self.on_tick(0)
        await self.told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening; connections and requests have a moment to end."""
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.LEAVE_S):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.001)


@dataclass
class Served:
    """A server in the test's loop: its port, and everything behind it."""

    port: int
    runtime: Runtime
    engine: ScriptedEngine
    log: list[dict[str, Any]]
    server: PromptServer = field(repr=False)
    serving: asyncio.Task[None] = field(repr=False)
    _opened: list[Stream] = field(default_factory=list, repr=False)

    @property
    def running(self) -> int:
        """Requests the engine has in hand."""
        return self.engine.load().num_running_reqs

    def stream(self, stream_id: str) -> TokenStream:
        """The server's side of a stream."""
        return self.runtime.streams._streams[stream_id]

    def live(self) -> list[TokenStream]:
        """Streams whose generation has not ended."""
        return list(self.runtime.streams._live.values())

    async def settled(self) -> None:
        """Wait until nothing is generated, and the store has all that follows from it.

        The settlement of a refused or failed answer is queued once its reservation is committed: between the
        two the store's queue is empty.
        """
        journal, database = self.runtime.journal, self.runtime.database
        await until(
            lambda: not (self.live() or journal._settling or journal.num_unsettled or database.queue_depth)
        )

    async def post(self, body: Any, **headers: str) -> Response:
        """POST a chat request and read the whole response."""
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        return await fetch(self.port, "POST", "/api/chat/completions", body, named)

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> Response:
        """Any request, read whole."""
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        return await fetch(self.port, method, path, body, named)

    async def open(self, body: Any = None, **options: Any) -> Stream:
        """A streaming request up to its headers; see sse_client.open_stream."""
        stream = await open_stream(self.port, body, **options)
        self._opened.append(stream)
        return stream

    @property
    def starlette(self) -> Any:
        """The application inside of its layers."""
        app: Any = self.server.config.app
        while hasattr(app, "_app"):
            app = app._app
        return app

    @property
    def connections(self) -> set[Any]:
        """The HTTP protocols of all open connections."""
        return self.server.server_state.connections

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Log lines of that event."""
        return [line for line in self.log if line["event"] == event]

    async def close(self) -> None:
        """Stop as the process does, without waiting for anyone."""
        for stream in self._opened:  # those that a failed test left behind
            stream.connection.close()
        await self.runtime.streams.drain(0)
        self.server.told.set()
        await self.serving
        for connection in list(self.connections):  # a failed test may leave clients that do not read
            connection.transport.abort()
        await self.runtime.aclose()


Serve = Callable[..., Awaitable[Served]]


async def serve_here(
    script: MakeScript,
    settings: Settings,
    send_buffer_bytes: int | None = None,
    engine_type: type[ScriptedEngine] = ScriptedEngine,
    load_models: ModelLoader | None = None,
    ready_engine: Engine | None = None,
) -> Served:
    """A server in this loop; a small send buffer makes a client that does not read felt at once."""
    log = structlog.testing.LogCapture()
    logger = structlog.wrap_logger(None, processors=[log])
    runtime = Runtime(
        settings,
        logger,
        lambda _settings, died: ready_engine or engine_type(script, on_death=died),
        load_models or shipped_models,
    )
    sock = listen(settings)
    if send_buffer_bytes is not None:
        # Accepted connections inherit it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    port = sock.getsockname()[1]
    server = PromptServer(http_server(build_app(runtime), settings, logger, runtime.responses).config)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    await runtime.start()
    await until(lambda: server.started)
    assert ready_engine is not None or isinstance(runtime.engine, ScriptedEngine)
    scripted = cast("ScriptedEngine", runtime.engine)
    return Served(port, runtime, scripted, log.entries, server, serving)


@functools.cache
def shipped_models() -> Models:
    """The classifiers of the product, loaded once."""
    return load()


class ServerProcess:
    """`python -m app serve`: its port, its log lines, its exit status."""

    def __init__(self, process: asyncio.subprocess.Process | ForkedProcess) -> None:
        self.process = process
        self.log: list[dict[str, Any]] = []
        self.noise: list[str] = []
        self._arrived = asyncio.Condition()
        self._reading = asyncio.create_task(self._read_log())

    async def _read_log(self) -> None:
        assert self.process.stderr is not None
        async for raw in self.process.stderr:
            line = raw.decode()
            try:
                self.log.append(json.loads(line))
            except json.JSONDecodeError:
                self.noise.append(line)
            async with self._arrived:
                self._arrived.notify_all()
        async with self._arrived:
            self._arrived.notify_all()

    async def logged(self, event: str, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Wait for a log line of that event and return it."""

        def found() -> dict[str, Any] | None:
            return next((line for line in self.log if line.get("event") == event), None)

        async with asyncio.timeout(timeout_s), self._arrived:
            await self._arrived.wait_for(lambda: found() or self._reading.done())
        line = found()
        assert line is not None, f"no {event!r} in the log: {self.log} {self.noise}"
        return line

    async def port(self, timeout_s: float = WAIT_S) -> int:
        """The port it listens on, once it does."""
        return int((await self.logged("listening", timeout_s))["url"].rpartition(":")[2])

    async def ready(self, timeout_s: float = WAIT_S) -> int:
        """The port, once requests are served."""
        await self.logged("ready", timeout_s)
        return await self.port(timeout_s)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    async def exit_status(self, timeout_s: float = WAIT_S) -> int:
        """Wait for the process to end."""
        async with asyncio.timeout(timeout_s):
            status = await self.process.wait()
            await self._reading
        return status

    async def close(self) -> None:
        """End the process, whatever state it is in."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reading


Spawn = Callable[..., Awaitable[ServerProcess]]


async def start_process(
    tmp_path: Path, *args: str, preloaded: Preloaded | None = None, **env: str
) -> ServerProcess:
    """`python -m app serve` with these flags, in an empty directory, on a free port.

    With `preloaded` it has imported SGLang when it begins.
    """
    command = [sys.executable, "-m", "app", "serve", "--port", "0", "--log-format", "json", *args]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TOKENRING_")}
    environ = {**clean, "PYTHONPATH": str(ROOT), **env}
    create: Callable[..., Awaitable[Any]] = asyncio.create_subprocess_exec
    if preloaded is not None:
        create = partial(ForkedProcess.start, preloaded)
    null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    return ServerProcess(
        await create(*command, cwd=tmp_path, env=environ, stdin=null, stdout=null, stderr=pipe)
    )
