"""Streams as the store keeps them, and a client that reads a stream without a socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.api.openai.chat_completion import ChunkWire
from app.core import ChatRequest, Usage
from app.store.events import StoredStream
from app.stream.replay import stream_facts
from app.stream.ring import Ring
from app.stream.token_stream import TokenStream
from tests.support.sse_client import SSEParser, Transcript

BIG = 10**9
USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=3, reasoning_tokens=2, withheld_tokens=1)
OPENAI_USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 4,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 2, "withheld_tokens": 1},
}


def asked(**fields: Any) -> ChatRequest:
    """A request as the routes make it."""
    return ChatRequest("chatcmpl-1", "local", "llama", {"messages": []}, 1_790_000_000, **fields)


def opened(request: ChatRequest) -> TokenStream:
    """The live stream of a request that has been admitted."""
    ring = Ring(BIG, logprobs=request.logprobs, counts=request.continuous_usage)
    stream = TokenStream(request, ChunkWire(request), ring)
    stream.open(request.n)
    return stream


def stored(request: ChatRequest, segments: Sequence[bytes], **fields: Any) -> StoredStream:
    """The request's settled row with these segments."""
    row: dict[str, Any] = {
        "request_seq": 1,
        "request_id": request.request_id,
        "owner": request.owner,
        "model": request.model,
        "created_at_us": request.created_at_unix_s * 1_000_000,
        "state": "settled",
        "finish": "stop",
        "usage": USAGE,
        "reconciled": False,
        "stream": stream_facts(request),
        "segments": list(segments),
    }
    return StoredStream(**row | fields)


def frames(stream: TokenStream, after: int = 0) -> list[bytes]:
    """What a reader is sent that attaches now, to the last event."""
    reader = stream.attach(after)
    sent, cursor = [], after
    while cursor != stream.last_id:
        cursor, frame = stream.frame_after(cursor)
        sent.append(frame)
    reader.close()
    return sent


def understood(sent: Sequence[bytes], transcript: Transcript | None = None) -> Transcript:
    """What a client makes of frames, after what it knew before."""
    transcript = transcript or Transcript()
    for event in SSEParser().feed(b"".join(sent)):
        transcript.add(event)
    transcript.check_ids()
    return transcript
