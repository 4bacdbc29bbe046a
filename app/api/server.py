"""The life of the process: bind, answer, start the engine, serve, drain, close."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from structlog.typing import FilteringBoundLogger

from app.api.app import build_app
from app.api.http.auth import check_api_key
from app.api.http.connections import Connections
from app.api.http.protocol import Protocol
from app.api.startup_text import FIRST_KEY, command, is_keyless, local_host, log_progress, ready_text, url_of
from app.core import LOCAL_OWNER, KeyTerms
from app.errors import EngineFailed
from app.log import configure
from app.metering.traffic import ResponseCounts
from app.runtime import Runtime
from app.safety.policies.policy_file import PolicyError
from app.settings import EXIT_CONFIG, Settings, SettingsError
from app.store.key_table import now_us
from app.store.keys import create_first
from app.store.opening import StoreRefused

EXIT_OK = 0
EXIT_ENGINE_LOST = 3
"""The engine did not start, or was lost too often; a restart may mend that."""
START_ENDS_S = 5.0
"""Seconds that a start which is given up has to close what it has opened."""
BACKLOG = 4096
GC_THRESHOLDS = (10_000, 10, 500)
"""Thresholds of the garbage collector: new containers per young collection, young ones per older."""


class Server(uvicorn.Server):
    """uvicorn's server, without its signal handlers: the signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def listen(settings: Settings) -> socket.socket:
    """The listening socket. Raises SettingsError: in use, or not ours."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Inherited by connections: an answer complete but unread must not be kept for ever.
        # Twice the time, so that a reader of a stream is cut, and logged, by the registry.
        stall_ms = min(int(settings.stall_timeout_s * 2000), 2**31 - 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
    try:
        sock.bind((settings.host, settings.port))
        # From here on a client waits instead of being refused: "listening" is logged before uvicorn runs.
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise SettingsError(
            f"cannot listen on {settings.host}:{settings.port}: {exc.strerror};"
            " choose another --host or --port, or stop the program that has it."
        ) from exc
    return sock


def http_server(
    app: ASGIApp, settings: Settings, log: FilteringBoundLogger, responses: ResponseCounts
) -> Server:
    """The HTTP server over `app`."""
    connections = Connections(log, settings.max_connections, settings.max_connections_per_address)
    config = uvicorn.Config(
        app,
        http=cast(
            "type[asyncio.Protocol]",
            partial(
                Protocol,
                connections=connections,
                stall_timeout_s=settings.stall_timeout_s,
                on_refused=responses.add,
            ),
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=5,
        backlog=BACKLOG,
    )
    return Server(config)


async def serve(
    settings: Settings, sock: socket.socket, *, explain: Callable[[], None] = lambda: None
) -> int:
    """Serve until a signal or the engine's end; returns the exit status. Raises SettingsError, StoreRefused.

    `explain` is called, in a thread, when the start fails, before the reason is logged.

    Own signal handlers are installed first: SGLang's children report their death by SIGQUIT, and
    its own handlers would kill the process (sglang 0.5.20, Engine).
    """
    log = configure(settings.log_level, settings.log_format)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    try:
        runtime = Runtime(settings, log)
    except SettingsError:
        explain()
        raise
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, _on_stop_signal, stop, runtime)
    on_terminal = sys.stderr.isatty()
    loop.add_signal_handler(signal.SIGHUP, _on_hangup, stop, runtime, on_terminal)
    _raise_file_limit(settings, log)
    server = http_server(build_app(runtime), settings, log, runtime.responses)
    serving = asyncio.create_task(server.serve(sockets=[sock]), name="http")
    host, port = sock.getsockname()[:2]
    _set_gc_thresholds()
    log.info("listening", url=url_of(host, port))
    local_url = url_of(local_host(host), port)
    starting = asyncio.create_task(_start(runtime, local_url, explain), name="start")
    status = EXIT_CONFIG  # the store, if what follows raises
    try:
        status = await _wait_for_end(runtime, starting, stop)
        if status == EXIT_OK:
            await runtime.drain()
    finally:
        starting.cancel()
        server.should_exit = True
        await serving
        await runtime.aclose()
        # It closes what it has opened of the store, whose threads report to this loop.
        await asyncio.wait([starting], timeout=START_ENDS_S)
        log.info("stopped", status=status)
    return status


async def _start(runtime: Runtime, url: str, explain: Callable[[], None]) -> None:
    """Log whether requests need a key, then start the runtime. Raises what `Runtime.start` does.

    `url` is the server's address as this machine's clients write it.
    """
    progress = asyncio.create_task(log_progress(runtime), name="progress")
    try:
        await runtime.open_store()
        check_api_key(runtime.settings.api_key, runtime.keys)
        if is_keyless(runtime):
            hint = "there are no API keys; requests from this machine need none"
            runtime.log.warning("open_mode", hint=hint)
        elif runtime.keys.empty and not runtime.settings.api_key:
            await _make_first_key(runtime)
        await runtime.start()
        if sys.stderr.isatty() and runtime.settings.log_format != "json":
            sys.stderr.write(ready_text(runtime, url))
            sys.stderr.flush()
    except (EngineFailed, SettingsError, StoreRefused):
        await asyncio.to_thread(explain)
        raise
    finally:
        progress.cancel()


async def _make_first_key(runtime: Runtime) -> None:
    """Make the first admin key of a server on a network, and print it. Only its hash is stored."""
    terms = KeyTerms("first admin key", scope="admin")
    issued = await runtime.database.write(lambda c: create_first(c, terms, now_us(), LOCAL_OWNER))
    await runtime.keys.load()
    if issued is not None:  # None: a command has just made one
        sys.stderr.write(FIRST_KEY.format(host=runtime.settings.host, key=issued.text, command=command()))
        sys.stderr.flush()
        runtime.log.warning("first_key", key=issued.key.id, hint="an admin key was made and printed once")


def _on_stop_signal(stop: asyncio.Event, runtime: Runtime) -> None:
    """The first signal lets live streams finish; a second signal ends them at once."""
    if stop.is_set():
        runtime.streams.stop_waiting()
    stop.set()


def _on_hangup(stop: asyncio.Event, runtime: Runtime, on_terminal: bool) -> None:  # noqa: FBT001  # add_signal_handler passes by position
    """SIGHUP: read the policy file again. If the terminal was closed, stop."""
    if on_terminal and not sys.stderr.isatty():
        _on_stop_signal(stop, runtime)
        return
    try:
        runtime.reload_policy()
    except PolicyError as exc:
        runtime.log.error("policy_refused", reason=str(exc), hint="the policy stays as it was")


def _set_gc_thresholds() -> None:
    """Make full garbage collections rare.

    The objects of a request are freed by reference counts alone (tests/fault/test_nothing_leaks.py). With
    10,000 streams a full collection would stop all of them for more than a second.
    """
    gc.set_threshold(*GC_THRESHOLDS)


def _raise_file_limit(settings: Settings, log: FilteringBoundLogger) -> None:
    """Raise the limit of open files as far as the system allows, because a connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < settings.max_live_streams:
        log.warning(
            "open_files_limit_low",
            limit=hard,
            hint="fewer connections than max_live_streams; raise ulimit -n",
        )


async def _wait_for_end(runtime: Runtime, starting: asyncio.Task[None], stop: asyncio.Event) -> int:
    """Wait for a signal, or for the engine's end. Returns the exit status."""
    stopped = asyncio.create_task(stop.wait())
    ended = asyncio.create_task(runtime.engine_ended.wait())
    waiting: set[asyncio.Task[bool] | asyncio.Task[None]] = {stopped, ended, starting}
    try:
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if stopped in done:
                return EXIT_OK
            if ended in done:
                return EXIT_ENGINE_LOST
            try:
                starting.result()
            except EngineFailed as error:
                runtime.start_failed(error.message)
                return EXIT_ENGINE_LOST
    finally:
        stopped.cancel()
        ended.cancel()
