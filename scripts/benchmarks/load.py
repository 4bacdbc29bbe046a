"""The load generator: one process, one thread, plain sockets; `python -m scripts.benchmarks.load`.

A line of JSON on stdin is the plan. It opens its connections, prints `ready`, waits for a line, sends,
records every read with its time and nothing else, prints `done`, and only then parses what it
recorded and prints the results as one JSON line. So its own CPU stays small while the clock runs,
and the caller knows both ends of the measured span.
"""

from __future__ import annotations

import gc
import json
import selectors
import socket
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.benchmarks.sse import Read
from scripts.benchmarks.streams import stream_result

READ_BYTES = 1 << 18
LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class LoadPlan:
    """Requests to send, in order, over `streams` kept-alive connections, each one request at a time.

    `output_tokens` has what each of `bodies` must bring. A reader with `awake` never sleeps: the server's
    write then costs no wake-up of a process on another core.
    """

    host: str
    port: int
    path: str
    bodies: list[str]
    output_tokens: list[int]
    streams: int
    timeout_s: float = 300.0
    headers: str = ""
    """More lines of each request's head, each with its CRLF."""
    awake: bool = False


@dataclass(slots=True)
class _Exchange:
    body_index: int
    sent_at_s: float
    reads: list[Read] = field(default_factory=list)


@dataclass(slots=True)
class _Connection:
    sock: socket.socket
    exchange: _Exchange
    tail: bytes = b""


def main() -> None:
    """Run one plan from stdin; see the module's docstring for the protocol."""
    plan = LoadPlan(**json.loads(sys.stdin.readline()))
    generator = LoadGenerator(plan)
    print("ready", flush=True)
    sys.stdin.readline()
    gc.disable()
    generator.run()
    print("done", flush=True)
    print(json.dumps(generator.report()), flush=True)


class LoadGenerator:
    """Closed loop: each connection sends its next request when its last one has ended."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._selector = selectors.DefaultSelector()
        self._waiting = deque(range(len(plan.bodies)))
        self._exchanges: list[_Exchange] = []
        self._requests = [_request_bytes(plan, body) for body in plan.bodies]
        self._sockets = [
            socket.create_connection((plan.host, plan.port))
            for _ in range(min(plan.streams, len(plan.bodies)))
        ]
        self._started_at_s = self._ended_at_s = self._cpu_s = 0.0

    def run(self) -> None:
        """Send everything and record until the last stream has ended."""
        cpu_before_s = time.process_time()
        self._started_at_s = time.monotonic()
        for sock in self._sockets:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._send_next(sock)
            sock.setblocking(False)
        deadline_s = self._started_at_s + self._plan.timeout_s
        while self._selector.get_map() and time.monotonic() < deadline_s:
            for key, _ in self._selector.select(timeout=0.0 if self._plan.awake else 1.0):
                self._read(key.data)
        self._ended_at_s = time.monotonic()
        self._cpu_s = time.process_time() - cpu_before_s

    def report(self) -> dict[str, Any]:
        """Results per request, in the plan's order, and the span and CPU of the run."""
        results = {
            exchange.body_index: stream_result(
                exchange.sent_at_s,
                exchange.reads,
                expected_tokens=self._plan.output_tokens[exchange.body_index],
            )
            for exchange in self._exchanges
        }
        return {
            "wall_s": self._ended_at_s - self._started_at_s,
            "load_cpu_s": self._cpu_s,
            "reads": sum(len(exchange.reads) for exchange in self._exchanges),
            "requests": [asdict(results[index]) for index in sorted(results)],
        }

    def _send_next(self, sock: socket.socket) -> None:
        index = self._waiting.popleft()
        exchange = _Exchange(index, time.monotonic())
        self._exchanges.append(exchange)
        sock.setblocking(True)
        sock.sendall(self._requests[index])
        sock.setblocking(False)
        connection = _Connection(sock, exchange)
        try:
            self._selector.register(sock, selectors.EVENT_READ, connection)
        except KeyError:
            self._selector.modify(sock, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        try:
            payload = connection.sock.recv(READ_BYTES)
        except ConnectionError:
            payload = b""
        connection.exchange.reads.append(Read(time.monotonic(), payload))
        connection.tail = (connection.tail + payload)[-len(LAST_CHUNK) :]
        # Exact for streams: SSE data escapes CR and LF, so no other place of the body reads like this.
        ended = connection.tail == LAST_CHUNK
        if ended and self._waiting:
            self._send_next(connection.sock)
        elif ended or not payload or self._refused(connection):
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def _refused(self, connection: _Connection) -> bool:
        """Whether the answer is an error: its length is not parsed here, the connection is given up."""
        reads = connection.exchange.reads
        return len(reads) == 1 and not reads[0].payload.startswith(b"HTTP/1.1 200")


def _request_bytes(plan: LoadPlan, body: str) -> bytes:
    payload = body.encode()
    head = (
        f"POST {plan.path} HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\nAccept: text/event-stream\r\n"
        f"{plan.headers}Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


if __name__ == "__main__":
    main()
