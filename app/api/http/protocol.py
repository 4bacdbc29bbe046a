"""HTTP/1.1 on one connection: uvicorn's protocol, with bounds and our error body where it has none.

uvicorn answers broken HTTP in plain text, takes headers of any size, and waits without end for the rest of
an unread body. Here a connection either answers a request, or is closed after a time:

    waits for            | closed after       | the time begins
    its first head       | HEAD_TIMEOUT_S     | when it is open
    another request      | uvicorn's 5 s      | when it has answered
    the rest of a head   | HEAD_TIMEOUT_S     | with any byte after an answer
    the rest of a body   | body_timeout_s     | when a handler reads it (app.intake.bodies)
    the rest of a body   | DRAIN_S            | when it was answered unread
    its answer to be read | twice stall_timeout_s | when the client reads no more of it
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.api.http.connections import Connections
from app.errors import HeadersTooLarge, InvalidHTTP, ServingError, Unavailable
from app.intake.scope import CONNECTION

MAX_HEAD_BYTES = 64 * 1024
"""Bytes of request line and headers together; nginx and Node allow less by default."""

MAX_HEADERS = 256
"""Greatest number of header fields; browsers send about 30."""

HEAD_TIMEOUT_S = 30.0
"""Seconds that a request's head may take to arrive, and a fresh connection to begin one."""

DRAIN_S = 2.0
"""Seconds that the rest of a body is read and dropped once its request was answered."""

_FRAMING_PER_BYTE = 8
"""Bytes of chunk sizes for one of a body; a chunk of a single byte has five."""

_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]{0,5})?")
"""RFC 9110, section 7.2: no user, no path."""

_LINGER_S = 2.0
_HAS_TCP_INFO = sys.platform == "linux"
_LAST_DATA_RECV = slice(52, 56)
"""`tcpi_last_data_recv` of Linux's `struct tcp_info`, in milliseconds."""


class Connection:
    """A request's connection, past ASGI: frames go out in one call, not through every layer.

    It is the `FrameSink` of a reader (app.stream.reader). Its transport buffers what the client has not read.

    The response is started and ended the usual way; in between, each frame is one HTTP chunk.
    """

    __slots__ = ("_chunked", "_flow", "_on_left", "_transport", "allow_closing", "left")

    def __init__(
        self, transport: asyncio.Transport, flow: FlowControl, allow_closing: Callable[[], None]
    ) -> None:
        self._transport = transport
        self.allow_closing = allow_closing
        """Lets the connection be closed where others need it, though its client waits for an answer."""
        self._flow = flow
        self._chunked = True
        self._on_left: Callable[[], None] | None = None
        self.left = False
        """True if the client left before its answer was complete."""

    def send_unchunked(self) -> None:
        """Send frames as they are from now on: HTTP/1.0 has no chunks."""
        self._chunked = False

    def ready(self) -> bool:
        """True if the transport's buffer of unsent bytes is under its high-water mark."""
        return not self._flow.write_paused

    def write(self, *frames: bytes) -> None:
        """Write frames as one HTTP chunk, in one system call."""
        if not self._transport.is_closing():
            data = frames[0] if len(frames) == 1 else b"".join(frames)
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def caught_up(self) -> None:
        """Wait until the connection accepts frames."""
        await self._flow.drain()

    def unread_s(self) -> float:
        """Seconds since the client's last bytes arrived; 0 where the system does not say.

        While the event loop is busy with others a request waits in its socket, where only the kernel sees it.
        """
        try:
            sock = self._transport.get_extra_info("socket")
            if sock is None or not _HAS_TCP_INFO:
                return 0.0
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV.stop)
        except (OSError, ValueError):  # not TCP, or closed: uvloop finds no descriptor then
            return 0.0
        return int.from_bytes(info[_LAST_DATA_RECV], sys.byteorder) / 1000

    def on_left(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` when the client leaves, or now if it has left. Replaces an earlier callback."""
        if self._on_left is None:  # after a large body reading is paused, and the end would not be seen
            self._flow.resume_reading()
        self._on_left = callback
        if self.left:
            self.leave()

    def leave(self) -> None:
        """Note that the client has left."""
        self.left = True
        if self._on_left is not None:
            self._on_left()

    def abort(self) -> None:
        """Cut the connection; closing the usual way waits for a client that does not read."""
        self._transport.abort()


class Unchunked:
    """The application for an HTTP/1.0 client: an answer of unknown length ends with the connection."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_unchunked(message: Message) -> None:
            if message["type"] == "http.response.start" and not _has_length(message):
                self._cycle.chunked_encoding = False
                scope["extensions"][CONNECTION].send_unchunked()
            await send(message)

        await self._app(scope, receive, send_unchunked)


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, which hands the application its connection and bounds what a client may send."""

    _head_bytes: int | None = 0
    """Bytes of an unfinished head, without the read in which it began; None between heads."""
    _refused = False
    _timer: asyncio.TimerHandle | None = None
    """Timer that closes the connection: a head or the rest of a body is late, or a refusal was sent."""
    _framing_bytes = 0
    """Bytes beside a body's own that may still arrive: chunk sizes, their extensions, trailers."""

    _running: RequestResponseCycle | None = None
    """The request that is being answered; uvicorn's `cycle` is the last one read, and may wait behind it."""
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        *args: Any,
        connections: Connections,
        stall_timeout_s: float = math.inf,
        on_refused: Callable[[int], None] = lambda _status: None,
        **kwargs: Any,
    ) -> None:
        """`on_refused` receives the status of each answer that the application does not give."""
        super().__init__(*args, **kwargs)
        self._on_refused = on_refused
        self._connections = connections
        # Twice the time, so that a reader of a stream is cut, and logged, by the registry.
        self._stall_timeout_s = 2 * stall_timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Start the timer for the first request's head. Later heads have uvicorn's keep-alive timer."""
        super().connection_made(transport)
        address = "" if self.client is None else self.client[0]
        if not self._connections.accept(transport, address, transport.get_extra_info("socket").fileno()):
            self._refused = True
            self._send_error(transport, _no_room())
            transport.close()
            return
        self._close_in(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks: a timer holds the connection, and with it all of its last request."""
        self._connections.remove(self.transport)
        self._leave_pipelined()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn 0.54 leaves it running where the client has reset
        self._stop_timer()

    def _leave_pipelined(self) -> None:
        """Tell the running request that its client has left, and begin no other; uvicorn tells the last."""
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
            connection: Any = self._running.scope["extensions"][CONNECTION]
            connection.leave()

    def pause_writing(self) -> None:
        """The client does not read: close the connection in time, or at once if others need it."""
        super().pause_writing()
        self._connections.stalled(self.transport)
        if self._stall_timer is None and self._stall_timeout_s < math.inf:
            self._stall_timer = self.loop.call_later(self._stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again, or has gone."""
        super().resume_writing()
        self._connections.flowing(self.transport)
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def data_received(self, data: bytes) -> None:
        """Parse, unless the connection is already being closed."""
        if self._refused:
            return
        head_bytes_before = self._head_bytes
        self._framing_bytes -= len(data)
        super().data_received(data)
        self._bound(head_bytes_before, len(data))

    def _bound(self, head_bytes_before: int | None, num_bytes: int) -> None:
        """Bound what is unfinished after a read; `head_bytes_before` was the head's size."""
        if self._refused:
            return
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            self._close_in(HEAD_TIMEOUT_S)
        if self._head_bytes is None:
            if self._framing_bytes < 0:
                self._refuse(InvalidHTTP("The body has more chunk sizes and trailers than content."))
            return
        # One header line reaches the parser's callbacks only once it is whole: count here too.
        if head_bytes_before is not None:
            self._head_bytes = head_bytes_before + num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_headers_too_large())

    def on_message_begin(self) -> None:
        """Put the connection into the request's scope."""
        super().on_message_begin()
        self._head_bytes = 0
        self._close_in(HEAD_TIMEOUT_S)
        # Without this protocol: a cycle would keep all of its last request for the garbage collector.
        allow_closing = partial(self._connections.stalled, self.transport)
        extensions: dict[str, Any] = {CONNECTION: Connection(self.transport, self.flow, allow_closing)}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        """Start the application, unless the head is over the limit, or one before it was refused."""
        if self._refused:
            return
        head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse(_headers_too_large())
            return
        hosts = [value for name, value in self.headers if name == b"host"]
        problem = _wrong_host(self.url, hosts)
        if problem is not None and (hosts or self.parser.get_http_version() != "1.0"):
            self._refuse(InvalidHTTP(problem))
            return
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:  # otherwise a request before it is being answered
            self._connections.reading(self.transport)
        super().on_headers_complete()
        self._head_bytes = None
        self._framing_bytes = 2 * MAX_HEAD_BYTES
        self._stop_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a field of the head; trailers, which the parser reports the same way, are dropped."""
        if self._head_bytes is not None:
            super().on_header(name, value.rstrip(b" \t"))  # RFC 9110, 5.5: no part of the value

    def on_body(self, body: bytes) -> None:
        """Keep a chunk of the body."""
        if not self._refused:
            self._framing_bytes += (1 + _FRAMING_PER_BYTE) * len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The body has arrived. If its request was answered before, the connection takes the next request."""
        if self._refused:
            return
        super().on_message_complete()
        if self.cycle.response_complete:
            self._stop_timer()
        else:
            self._connections.answering(self.transport)

    def on_response_complete(self) -> None:
        """Wait for the next request; give the rest of this request's body `DRAIN_S` seconds."""
        super().on_response_complete()
        cycle = self.cycle
        if cycle.response_complete and not self.transport.is_closing():
            self._connections.idle(self.transport)
            if cycle.more_body:
                self._close_in(DRAIN_S)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = Unchunked(app, cycle)
        super()._start_asgi_task(cycle, app)

    def _close_in(self, delay_s: float) -> None:
        """Close the connection after `delay_s`, unless it will be sooner, or a request begins."""
        if self._timer is None:
            self._timer = self.loop.call_later(delay_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        """Answer broken HTTP with our error body."""
        self._refuse(InvalidHTTP("This is not an HTTP/1.1 request."))

    def _unsupported_upgrade_warning(self) -> None:
        """Do nothing: a request for an upgrade is answered as HTTP/1.1 (RFC 9110, section 7.8)."""

    def _refuse(self, error: ServingError) -> None:
        """Answer with `error` and close; in the midst of another answer, only close."""
        if self._refused:
            return
        self._refused = True
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            answering = cycle.response_started or not cycle.more_body
            cycle.disconnected = True
            cycle.message_event.set()
            if answering:
                self.transport.close()
                return
        self._send_error(self.transport, error)
        # Closed with unread bytes, the kernel would reset the connection and lose the answer.
        self.transport.write_eof()
        self._stop_timer()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _send_error(self, transport: asyncio.Transport, error: ServingError) -> None:
        self._on_refused(error.status)
        transport.write(_response(error))


def _wrong_host(target: bytes, hosts: list[bytes]) -> str | None:
    """The fault of a request's `Host` (RFC 9112, section 3.2); None without one."""
    if len(hosts) != 1:
        return f"An HTTP/1.1 request has one Host header; this one has {len(hosts)}."
    if _HOST.fullmatch(hosts[0].strip()) is None:
        return "The Host header is a name or an address, and a port."
    scheme, separator, rest = target.partition(b"://")
    if separator and scheme.lower() in (b"http", b"https"):
        authority = re.split(rb"[/?#]", rest, maxsplit=1)[0]
        if authority.lower() != hosts[0].strip().lower():
            return "The request's target and its Host header name different servers."
    return None


def _has_length(message: Message) -> bool:
    return any(name.lower() == b"content-length" for name, _ in message["headers"])


def _no_room() -> Unavailable:
    return Unavailable("All connections of the server are in use; try again.", retry_after_s=2)


def _headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(
        f"The request line and headers are over {MAX_HEAD_BYTES} bytes, or more than {MAX_HEADERS} fields;"
        " send less."
    )


def _response(error: ServingError) -> bytes:
    body = orjson.dumps(error.as_body())
    retry = b"" if error.retry_after_s is None else b"retry-after: %d\r\n" % error.retry_after_s
    return (
        STATUS_LINE[error.status]
        + b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
        + retry
        + b"\r\n"
        + body
    )
