"""The response that sends a stream as server-sent events.

Frames go to the `Connection` of app.api.http.protocol, whose transport buffers them. `StreamRegistry`
(app.stream.registry) decides when a heartbeat is due, and cuts clients that do not read.

A heartbeat is a comment line without a blank line after it, as clients' parsers need it (checked against
OpenAI's SDKs, tests/e2e).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson
from starlette.types import Receive, Scope, Send

from app.errors import ReplayExpired
from app.intake.client import Client
from app.intake.scope import CONNECTION
from app.stream.reader import FrameSink, Reader

PING = b": ping\n"


class PlainSink:
    """A connection to which frames go without `id:` and `retry:` lines, and no comment goes.

    For programs that read each line of a stream as JSON, less a `data: ` in front, as `sglang.bench_serving`
    and `vllm bench serve` do. The events keep their ids in the ring: other clients may attach to the stream.
    """

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink
        self.ready, self.caught_up, self.abort = sink.ready, sink.caught_up, sink.abort

    def write(self, *frames: bytes) -> None:
        """Send the `data:` lines of frames."""
        data = [frame[at:] for frame in frames if (at := frame.find(b"data: ")) >= 0]
        if data:
            self._sink.write(*data)


class EventStream:
    """An ASGI response that follows a reader to the end of its stream."""

    def __init__(
        self,
        reader: Reader,
        client: Client,
        headers: Mapping[str, str],
        *,
        on_end: Callable[[], None],
        data_lines_only: bool = False,
    ) -> None:
        """`on_end` is called once, when the response is over. With `data_lines_only` it has no event ids."""
        self._reader = reader
        self._data_lines_only = data_lines_only
        self._on_end = on_end
        self._client = client
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-store",
            # Buffering proxies (nginx) would hold tokens back.
            "x-accel-buffering": "no",
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; returns when it ends or the client leaves."""
        reader = self._reader
        sink: FrameSink = scope["extensions"][CONNECTION]
        if self._data_lines_only:
            sink = PlainSink(sink)
        self._client.on_gone(reader.close)
        headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self._headers.items()]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if scope["method"] != "HEAD":
                await self._follow(sink)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._client.stop()
            self._on_end()

    async def _follow(self, sink: FrameSink) -> None:
        try:
            await self._reader.follow(sink, PING)
        except ReplayExpired as error:
            sink.write(b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(error.as_body()))
        await self._reader.caught_up(sink)
