"""What one streamed chat completion showed: whether it was whole, and its TTFT, TPOT, ITL and frames."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from scripts.benchmarks.sse import Frame, Read, parse_answer


@dataclass(slots=True)
class StreamResult:
    """One request as its client saw it; `error` is empty when every token came and `[DONE]` ended it.

    A content frame is a data event with text, reasoning or tool arguments in it: the role, finish
    and usage frames that servers send in different ways are not counted.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    e2e_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    content_frames: int = 0
    data_frames: int = 0
    text_sha256: str = ""
    error: str = ""
    itl_s: list[float] = field(default_factory=list)


def stream_result(sent_at_s: float, reads: Sequence[Read], *, expected_tokens: int) -> StreamResult:
    """Judge a recorded stream: its times from `sent_at_s`, whole only with `expected_tokens` in its usage."""
    try:
        answer = parse_answer(reads)
    except ValueError as exc:
        return StreamResult(error=str(exc))
    if answer.status != 200:
        return StreamResult(error=f"HTTP {answer.status}: {answer.body_head[:200]!r}")
    if not answer.frames or answer.frames[-1].data != b"[DONE]":
        return StreamResult(error="the stream did not end with [DONE]")
    return _judge(sent_at_s, answer.frames[:-1], expected_tokens)


def _judge(sent_at_s: float, frames: Sequence[Frame], expected_tokens: int) -> StreamResult:
    result = StreamResult(data_frames=len(frames) + 1)
    content_at_s: list[float] = []
    digest = hashlib.sha256()
    for frame in frames:
        chunk: dict[str, Any] = json.loads(frame.data)
        if "error" in chunk:
            result.error = f"error event: {chunk['error']}"
            return result
        if text := _content(chunk):
            content_at_s.append(frame.at_s)
            digest.update(text.encode())
        if usage := chunk.get("usage"):
            result.prompt_tokens = usage["prompt_tokens"]
            result.completion_tokens = usage["completion_tokens"]
            result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    result.content_frames = len(content_at_s)
    result.text_sha256 = digest.hexdigest()
    if result.completion_tokens != expected_tokens:
        result.error = f"{result.completion_tokens} tokens in the usage, {expected_tokens} asked for"
    elif not content_at_s:
        result.error = "no content at all"
    else:
        _fill_times(result, sent_at_s, content_at_s)
    return result


def _fill_times(result: StreamResult, sent_at_s: float, content_at_s: Sequence[float]) -> None:
    result.ttft_s = content_at_s[0] - sent_at_s
    result.e2e_s = content_at_s[-1] - sent_at_s
    result.tpot_s = (result.e2e_s - result.ttft_s) / max(1, result.completion_tokens - 1)
    result.itl_s = [later - earlier for earlier, later in pairwise(content_at_s)]


def _content(chunk: dict[str, Any]) -> str:
    parts = []
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        parts += [delta.get("content") or "", delta.get("reasoning_content") or ""]
        parts += [call["function"].get("arguments") or "" for call in delta.get("tool_calls") or ()]
    return "".join(parts)
