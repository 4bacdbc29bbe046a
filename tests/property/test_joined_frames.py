"""A frame of several tokens tells a client what a frame for each token does, wherever the loop was late."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.core import ChatRequest, Counts, Delta
from tests.property.test_replay_anywhere import deltas, requests
from tests.support.replays import OPENAI_USAGE, opened, understood
from tests.support.sse_client import SSEParser

WAYS = st.sampled_from(["in time", "late", "unread"])


class Client:
    """A sink whose client reads when it is told."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.reads = asyncio.Event()

    def ready(self) -> bool:
        """See FrameSink."""
        return self.reads.is_set()

    def write(self, *sent: bytes) -> None:
        """See FrameSink."""
        self.frames.extend(sent)

    async def caught_up(self) -> None:
        """See FrameSink."""
        await self.reads.wait()

    def abort(self) -> None:
        """See FrameSink."""


async def sent(request: ChatRequest, said: list[Delta], ways: list[str]) -> list[bytes]:
    """The frames of a client. After each delta the loop turns, or is late, or the client does not read."""
    stream, client = opened(request), Client()
    client.reads.set()
    following = asyncio.create_task(stream.attach().follow(client, b""))
    await asyncio.sleep(0)
    for delta, way in zip(said, ways, strict=True):
        if way == "unread":
            client.reads.clear()
        else:
            client.reads.set()
        stream.append(delta)
        if way != "late":
            await asyncio.sleep(0)
    client.reads.set()
    for choice in range(2):
        stream.append(Delta(choice, "text", "", (), Counts(), "stop"))
    if request.include_usage:
        stream.extra_chunk("usage", OPENAI_USAGE)
    stream.close()
    await following
    return client.frames


def told(frames: list[bytes]) -> dict[str, Any]:
    """All that a client makes of frames, but for how they were cut."""
    transcript = understood(frames)
    known = {name: value for name, value in vars(transcript).items() if name not in ("ids", "num_events")}
    logprobs: dict[int, list[Any]] = {}
    counts: dict[int | None, Any] = {}
    for event in SSEParser().feed(b"".join(frames)):
        if event.data.startswith('{"id"'):
            counts[event.id] = json.loads(event.data).get("usage")
            for choice in json.loads(event.data)["choices"]:
                entries = (choice.get("logprobs") or {}).get("content", [])
                logprobs.setdefault(choice["index"], []).extend(entries)
    return known | {"logprobs": logprobs, "last_id": transcript.last_id, "counts": counts}


@given(request=requests, said=deltas, data=st.data())
def test_any_lateness_tells_the_same(request, said, data):
    """Text, reasoning, calls, logprobs, finish reasons, usage, the last id, and the counts at each id."""
    ways = data.draw(st.lists(WAYS, min_size=len(said), max_size=len(said)))
    single = told(asyncio.run(sent(request, said, ["in time"] * len(said))))
    joined = told(asyncio.run(sent(request, said, ways)))
    at_each, at_some = single.pop("counts"), joined.pop("counts")
    assert joined == single
    assert at_some.items() <= at_each.items()
