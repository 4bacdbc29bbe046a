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
    """Answers POST with as many of its frames as `max_tokens` asks for, anything else with a model list."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._messages = [_message(frame) for frame in _content_frames(tokens)]

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["method"] != "POST":
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b'{"data": [{"id": "ready-made"}]}'})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        tokens = json.loads(body or b"{}").get("max_tokens", self._tokens)
        await send(STREAM_HEAD)
        for frame in self._messages[:tokens]:
            await send(frame)
            await asyncio.sleep(0)
        await send(_message(b"".join(_end_frames(tokens))))
        await send({"type": "http.response.body", "body": b""})


def _message(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


def _head() -> dict[str, Any]:
    return {
        "id": "chatcmpl-" + "0" * 32,
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "scripted",
    }


def _content_frames(tokens: int) -> Iterator[bytes]:
    for number in range(tokens):
        delta = {"content": f"word{number % 10} ", "reasoning_content": None}
        yield _frame(
            number + 1, {**_head(), "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        )


def _end_frames(tokens: int) -> Iterator[bytes]:
    usage = {"prompt_tokens": 40, "completion_tokens": tokens, "total_tokens": 40 + tokens}
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    yield _frame(tokens + 1, {**_head(), "choices": [last]})
    yield _frame(tokens + 2, {**_head(), "choices": [], "usage": usage})
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
