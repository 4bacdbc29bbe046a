"""What the engine tests share: asking an engine, and reading an answer to its end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from app.core import ChatRequest, Counts, Delta, Engine, Prompt

_numbers = itertools.count(1)


def fresh_rid() -> str:
    """A request id of the fixed length, never used before."""
    return f"{next(_numbers):032x}"


def chat(content: Any = "How do I resume a stream?", **body: Any) -> ChatRequest:
    """A request of one user message; `n` and `max_tokens` go where the API layer puts them."""
    n, max_tokens = body.pop("n", 1), body.pop("max_tokens", 16)
    messages = body.pop("messages", [{"role": "user", "content": content}])
    logprobs = bool(body.get("logprobs"))
    request = {"messages": messages, **body}
    return ChatRequest(fresh_rid(), "owner", "model", request, 0, n, max_tokens, logprobs=logprobs)


@dataclass
class Answer:
    """Everything one generation gave, by choice."""

    prompt: Prompt
    deltas: list[Delta]

    def of(self, choice: int = 0) -> list[Delta]:
        return [delta for delta in self.deltas if delta.choice == choice]

    def text(self, choice: int = 0, channel: str = "text") -> str:
        return "".join(delta.text for delta in self.of(choice) if delta.channel == channel)

    def token_ids(self, choice: int = 0) -> list[int]:
        return [token_id for delta in self.of(choice) for token_id in delta.token_ids]

    def counts(self, choice: int = 0) -> Counts:
        return self.of(choice)[-1].counts

    def finish_reason(self, choice: int = 0) -> str | None:
        return self.of(choice)[-1].finish_reason

    def logprobs(self, choice: int = 0) -> list[Any]:
        return [entry for delta in self.of(choice) for entry in delta.logprobs or ()]


async def ask(engine: Engine, request: ChatRequest, abort_after: int | None = None) -> Answer:
    """The whole answer; with `abort_after`, aborted once that many tokens have come."""
    prompt = await engine.render(request)
    deltas: list[Delta] = []
    if abort_after == 0:
        stream = engine.generate(request.request_id, prompt)
        engine.abort(request.request_id)
    else:
        stream = engine.generate(request.request_id, prompt)
    async for delta in stream:
        deltas.append(delta)
        if abort_after and delta.finish_reason is None and _tokens(deltas) >= abort_after:
            engine.abort(request.request_id)
    return Answer(prompt, deltas)


def _tokens(deltas: Iterable[Delta]) -> int:
    return sum(len(delta.token_ids) for delta in deltas)
