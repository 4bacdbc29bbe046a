"""The yardstick of `bench path`: a bare ASGI app that sends ready-made frames, yielding after each.

`python -m scripts.benchmarks.frames_app PORT TOKENS` runs it on uvicorn with httptools and uvloop. What it
sends has the shape and size of our own stream; nothing is computed per frame.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

Message = dict[str, Any]
STREAM_HEAD: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")],
}


class FramesApp:
    """Answers POST with the same frames every time, and anything else with 200."""

    def __init__(self, tokens: int) -> None:
        self._messages: list[Message] = [
            {"type": "http.response.body", "body": frame, "more_body": True} for frame in _frames(tokens)
        ]

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["method"] == "POST":
            while (await receive()).get("more_body"):
                pass
        await send(STREAM_HEAD)
        if scope["method"] == "POST":
            for message in self._messages:
                await send(message)
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


def _frames(tokens: int) -> Iterator[bytes]:
    head = {
        "id": "chatcmpl-" + "0" * 32,
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "scripted",
    }
    usage = {"prompt_tokens": 40, "completion_tokens": tokens, "total_tokens": 40 + tokens}
    for number in range(tokens):
        delta = {"content": f"word{number % 10} ", "reasoning_content": None}
        yield _frame(number + 1, {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    yield _frame(tokens + 1, {**head, "choices": [last]})
    yield _frame(tokens + 2, {**head, "choices": [], "usage": usage})
    yield b"id: %d\ndata: [DONE]\n\n" % (tokens + 3)


def _frame(number: int, chunk: dict[str, Any]) -> bytes:
    return b"id: %d\ndata: %s\n\n" % (number, json.dumps(chunk, separators=(",", ":")).encode())


def main() -> None:
    """Serve until stopped."""
    port, tokens = int(sys.argv[1]), int(sys.argv[2])
    uvicorn.run(
        FramesApp(tokens),
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
