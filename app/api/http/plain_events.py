"""Event streams without ids, for programs that read `data:` lines only, as load generators do.

`sglang.bench_serving` and `vllm bench serve` read each line of a stream as JSON, less a `data: ` in front.
The events keep their ids in the ring: any other client may attach to the stream and resume it.
"""

from __future__ import annotations

from starlette.requests import Request

from app.errors import BadRequest
from app.stream.reader import FrameSink

HEADER = "x-plain-events"
VALUES = ("0", "1")


def wants_plain(request: Request) -> bool:
    """Whether the request asks for `data:` lines only. Raises BadRequest."""
    sent = request.headers.get(HEADER, "0")
    if sent not in VALUES:
        raise BadRequest(f"{HEADER} must be 1 or 0, got {sent[:40]!r}.", param=HEADER)
    return sent == "1"


class PlainSink:
    """A connection to which frames go without `id:` and `retry:` lines, and no comment goes."""

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink
        self.ready, self.drained, self.abort = sink.ready, sink.drained, sink.abort

    def write(self, *frames: bytes) -> None:
        """See app.stream.reader.FrameSink."""
        data = [frame[at:] for frame in frames if (at := frame.find(b"data: ")) >= 0]
        if data:
            self._sink.write(*data)
