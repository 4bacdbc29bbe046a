"""HTTP/1.1 on one connection: uvicorn's protocol, with bounds and our error body where it has none.

uvicorn answers what is not HTTP in plain text and takes headers of any size.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import orjson
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.api.sse import CONNECTION
from app.errors import HeadersTooLarge, InvalidHTTP, ServingError

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; nginx and Node allow less by default."""

HEAD_TIMEOUT_S = 30.0
"""How long a request's head may take to arrive, and a fresh connection to begin one."""

_LINGER_S = 2.0
_TELLS_TIMES = sys.platform == "linux"
_LAST_DATA_RECV = slice(52, 56)
"""`tcpi_last_data_recv` of Linux's `struct tcp_info`, in milliseconds."""


class Connection:
    """A request's connection, past ASGI: frames go out in one call, not through every layer.

    The response is started and ended the usual way; in between, each frame is one HTTP chunk.
    """

    __slots__ = ("_flow", "_transport")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    def ready(self) -> bool:
        """See app.stream.Outlet."""
        return not self._flow.write_paused

    def write(self, *frames: bytes) -> None:
        """See app.stream.Outlet. One HTTP chunk, one system call."""
        if not self._transport.is_closing():
            data = frames[0] if len(frames) == 1 else b"".join(frames)
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def drained(self) -> None:
        """See app.stream.Outlet."""
        await self._flow.drain()

    def unread_s(self) -> float:
        """For how long the client's last bytes have been here; 0 where the system does not say.

        While the event loop is busy with others a request waits in its socket, where only the kernel sees it.
        """
        sock = self._transport.get_extra_info("socket")
        if sock is None or not _TELLS_TIMES:
            return 0.0
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECV.stop)
        except OSError:  # closed, or not TCP
            return 0.0
        return int.from_bytes(info[_LAST_DATA_RECV], sys.byteorder) / 1000

    def abort(self) -> None:
        """Cut the connection; closing the usual way waits for a client that does not read."""
        self._transport.abort()


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, which hands the application its connection and bounds the headers."""

    _head_bytes: int | None = 0
    """Bytes of an unfinished head, not counting the read it began in; None outside of one."""
    _refused = False
    _timer: asyncio.TimerHandle | None = None
    """When the connection is closed: for want of a head, or because it was refused."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Give the client time for its first request's head; later ones have uvicorn's keep-alive."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks: a timer holds the connection, and with it all of its last request."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn 0.54 leaves it running where the client has reset
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        """Parse, unless the connection is already being closed."""
        if self._refused:
            return
        before = self._head_bytes
        super().data_received(data)
        if self._head_bytes is None or self._refused:
            return
        # One header line reaches the parser's callbacks only once it is whole: count here too.
        if before is not None:
            self._head_bytes = before + len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(_headers_too_large())

    def on_message_begin(self) -> None:
        """Put the connection into the request's scope."""
        super().on_message_begin()
        self._head_bytes = 0
        self._await_head()
        extensions: dict[str, Any] = {CONNECTION: Connection(self.transport, self.flow)}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        """Start the application, unless the head is over the limit, or one before it was refused."""
        if self._refused:
            return
        head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if head_bytes > MAX_HEAD_BYTES:
            self._refuse(_headers_too_large())
            return
        super().on_headers_complete()
        self._head_bytes = None
        self._stop_timer()

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in our own words."""
        self._refuse(InvalidHTTP("This is not an HTTP/1.1 request."))

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: who asks for an upgrade gets HTTP/1.1 (RFC 9110, section 7.8)."""

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
        self.transport.write(_response(error))
        # Closed with unread bytes, the kernel would reset the connection and lose the answer.
        self.transport.write_eof()
        self._stop_timer()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)


def _headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"The request line and headers are over {MAX_HEAD_BYTES} bytes; send less.")


def _response(error: ServingError) -> bytes:
    body = orjson.dumps(error.as_body())
    return (
        STATUS_LINE[error.status]
        + b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        + body
    )
