"""The load of `connections`: thousands of slow streams held open by one process and one thread.

`python -m scripts.benchmarks.open_streams` takes its plan as JSON on stdin, opens the streams one after
another over `ramp_s`, prints `open`, watches the gaps between events for `watch_s`, reads all streams
to their end and prints what it saw as JSON. An event's delay is what its gap has over the period. Of the
client's own lag only what is certain is subtracted: the time it spent on other streams since `select`
said that this one was readable.
"""

from __future__ import annotations

import gc
import json
import selectors
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from scripts.benchmarks.stats import percentile

TAIL_BYTES = 700


@dataclass(slots=True)
class StreamsPlan:
    """How many streams, what each sends, and how long each phase takes."""

    host: str
    port: int
    path: str
    body: str
    streams: int
    tokens: int
    period_s: float
    ramp_s: float
    watch_s: float


class _Stream:
    __slots__ = ("ended", "frames", "last_at_s", "sock", "status", "tail")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.status = ""
        self.tail = b""
        self.frames = 0
        self.last_at_s = time.monotonic()
        self.ended = False

    def whole(self, tokens: int) -> bool:
        """Whether it ended with all its tokens counted and `[DONE]`."""
        return b"data: [DONE]" in self.tail and b'"completion_tokens":%d,' % tokens in self.tail

    def fate(self, tokens: int) -> str:
        """What became of it, in words that can be counted."""
        if self.whole(tokens):
            return "whole"
        if not self.ended:
            return f"unfinished after {self.status or 'no answer'}"
        return f"cut after {self.status or 'no answer'}"


class OpenStreams:
    """Opens the streams, reads them, keeps the delays seen while watching."""

    def __init__(self, plan: StreamsPlan) -> None:
        self._plan = plan
        self._selector = selectors.DefaultSelector()
        self._streams: list[_Stream] = []
        self._watching = False
        self._delays_s: list[float] = []
        self._own_lags_s: list[float] = []

    def open_all(self) -> None:
        """Open the streams evenly over the ramp, reading those already open."""
        plan = self._plan
        started_at_s = time.monotonic()
        for number in range(plan.streams):
            due_at_s = started_at_s + plan.ramp_s * number / plan.streams
            self._read_until(due_at_s)
            self._open()

    def watch(self) -> None:
        """Keep the delays of all events for `watch_s`, from when each stream has shown its rhythm."""
        self._read_until(time.monotonic() + 2 * self._plan.period_s)
        self._watching = True
        self._read_until(time.monotonic() + self._plan.watch_s)
        self._watching = False

    def finish(self) -> None:
        """Read every stream to its end, or for as long as the tokens take."""
        deadline_s = time.monotonic() + self._plan.tokens * self._plan.period_s + 30
        while self._selector.get_map() and time.monotonic() < deadline_s:
            self._read_until(time.monotonic() + 0.5)

    def report(self) -> dict[str, Any]:
        """Delivery, and the delays in milliseconds with and without the client's own lag."""
        net_s = [max(0.0, a - b) for a, b in zip(self._delays_s, self._own_lags_s, strict=True)]
        return {
            "streams": len(self._streams),
            "fates": dict(Counter(stream.fate(self._plan.tokens) for stream in self._streams)),
            "frames": sum(stream.frames for stream in self._streams),
            "events_watched": len(net_s),
            "delay_p50_ms": percentile(net_s, 50) * 1e3,
            "delay_p99_ms": percentile(net_s, 99) * 1e3,
            "delay_max_ms": max(net_s, default=float("nan")) * 1e3,
            "delay_with_client_lag_p99_ms": percentile(self._delays_s, 99) * 1e3,
            "client_lag_p99_ms": percentile(self._own_lags_s, 99) * 1e3,
            "load_cpu_s": time.process_time(),
        }

    def _open(self) -> None:
        plan = self._plan
        body = plan.body.encode()
        head = (
            f"POST {plan.path} HTTP/1.1\r\nHost: {plan.host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        sock = socket.create_connection((plan.host, plan.port))
        sock.sendall(head.encode() + body)
        sock.setblocking(False)
        stream = _Stream(sock)
        self._streams.append(stream)
        self._selector.register(sock, selectors.EVENT_READ, stream)

    def _read_until(self, until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0:
            ready = self._selector.select(left_s)
            readable_at_s = time.monotonic()
            for key, _ in ready:
                self._read(key.data, readable_at_s)

    def _read(self, stream: _Stream, readable_at_s: float) -> None:
        try:
            payload = stream.sock.recv(1 << 16)
        except ConnectionError:
            payload = b""
        now_s = time.monotonic()
        if not payload:
            self._close(stream)
            return
        stream.status = stream.status or payload[9:12].decode("latin-1")
        # A frame's end may be cut in two by the read.
        frames = payload.count(b"\n\n") + (stream.tail.endswith(b"\n") and payload.startswith(b"\n"))
        stream.tail = (stream.tail + payload)[-TAIL_BYTES:]
        if frames:
            if self._watching:
                self._delays_s.append(now_s - stream.last_at_s - self._plan.period_s)
                self._own_lags_s.append(now_s - readable_at_s)
            stream.frames += frames
            stream.last_at_s = now_s
        if stream.tail.endswith(b"\r\n0\r\n\r\n"):
            self._close(stream)

    def _close(self, stream: _Stream) -> None:
        stream.ended = True
        self._selector.unregister(stream.sock)
        stream.sock.close()


def main() -> None:
    """Run one plan from stdin; see the module's docstring for the protocol."""
    load = OpenStreams(StreamsPlan(**json.loads(sys.stdin.readline())))
    gc.disable()
    load.open_all()
    print("open", flush=True)
    load.watch()
    print("watched", flush=True)
    load.finish()
    print(json.dumps(load.report()), flush=True)


if __name__ == "__main__":
    main()
