"""One chat as a client meets the screens: refused, halted with nothing or with a part, or whole."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from typing import Any

from scripts.benchmarks.driver import RunFailed

BLOCKED, NOTHING, PART, WHOLE, TOO_LONG = "blocked", "nothing", "part", "whole", "too long"
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Fate:
    """What a client got: `tokens` of an answer, which is `text`; whether the prompt was watched."""

    name: str
    tokens: int = 0
    watched: bool | None = None
    text: str = ""

    def against(self, reply: str) -> Fate:
        """The same, checked against what the engine said. Raises RunFailed where it is something else.

        An answer that is halted when all of it is out has come out whole.
        """
        if not reply.startswith(self.text) or (self.name == WHOLE and self.text != reply):
            raise RunFailed(f"{self.name}: {len(self.text)} characters came of a reply of {len(reply)}")
        return replace(self, name=WHOLE) if self.text == reply else self


def ask(port: int, fields: dict[str, Any], prompt: str) -> Fate:
    """Send one streamed chat. Raises RunFailed for what is neither an answer nor a refusal of the screens."""
    body = {
        **fields,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "moderation": {"model": "omni-moderation-latest"},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return _told([json.loads(line[6:]) for line in response if line.startswith(b"data: {")])
    except urllib.error.HTTPError as exc:
        return _refused(exc.code, json.load(exc))


def _refused(status: int, body: dict[str, Any]) -> Fate:
    code = body["error"]["code"]
    if code == "content_filter":
        return Fate(BLOCKED, watched=True)
    if code == "context_length_exceeded":
        return Fate(TOO_LONG)
    raise RunFailed(f"HTTP {status}: {body['error']}")


def _told(chunks: list[dict[str, Any]]) -> Fate:
    fate, text, ended = Fate(WHOLE), [], ""
    for chunk in chunks:
        if "error" in chunk:
            raise RunFailed(f"error event: {chunk['error']}")
        for choice in chunk.get("choices") or ():
            text.append(choice["delta"].get("content") or "")
            ended = choice.get("finish_reason") or ended
        if usage := chunk.get("usage"):
            fate = replace(fate, tokens=usage["completion_tokens"])
        if moderation := chunk.get("moderation"):
            fate = replace(fate, watched=moderation["input"]["results"][0]["watched"])
    if not ended:
        raise RunFailed("the stream did not end")
    fate = replace(fate, text="".join(text))
    if ended != "content_filter":
        return fate
    return replace(fate, name=PART if fate.text else NOTHING)
