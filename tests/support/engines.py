"""What the engine tests share: asking an engine, and reading an answer to its end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from app.core import ChatRequest, Counts, Delta, Engine, Prompt, RawPrompt

_numbers = itertools.count(1)


def fresh_rid() -> str:
    """A request id of the fixed length, never used before."""
    return f"{next(_numbers):032x}"


def engine_args(**arguments: Any) -> dict[str, Any]:
    """SGLang's arguments for an engine of the suite; beside a GPU `scripts/gpu_check` has some of its own."""
    return arguments | json.loads(os.environ.get("GPU_CHECK_ENGINE_ARGS", "{}"))


def chat(content: Any = "How do I resume a stream?", **body: Any) -> ChatRequest:
    """A request of one user message; what the stages before put beside the body goes there."""
    n, max_tokens, past = body.pop("n", 1), body.pop("max_tokens", 16), body.pop("past", ())
    salt = body.pop("salt", "")
    messages = body.pop("messages", [{"role": "user", "content": content}])
    logprobs = bool(body.get("logprobs"))
    request = {"messages": messages, **body}
    made = ChatRequest(fresh_rid(), "owner", "model", request, 0, n, max_tokens, logprobs=logprobs, past=past)
    return made.with_placement(cache_salt=salt)


def raw(text: str, token_ids: list[int] | None = None, **body: Any) -> ChatRequest:
    """A request of a prompt without a template."""
    preface = body.pop("preface", "")
    return dataclasses.replace(chat(text, **body), raw=RawPrompt(text, token_ids, preface))


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

    def run(self, choice: int = 0) -> list[int]:
        """The prompt's ids and the answer's, as the next turn has them in its past."""
        return [*self.prompt.token_ids, *self.token_ids(choice)]

    def counts(self, choice: int = 0) -> Counts:
        return self.of(choice)[-1].counts

    def finish_reason(self, choice: int = 0) -> str | None:
        return self.of(choice)[-1].finish_reason

    def logprobs(self, choice: int = 0) -> list[Any]:
        return [entry for delta in self.of(choice) for entry in delta.logprobs or ()]


def next_turn(
    answer: Answer, question: str = "And then?", said: str | None = None, **body: Any
) -> ChatRequest:
    """The turn after `answer`, with what was said in `past`; `said` replaces the answer's text."""
    asked = body.pop("asked", "How do I resume a stream?")
    messages = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answer.text() if said is None else said},
        {"role": "user", "content": question},
    ]
    return chat(messages=messages, past=[answer.run()], **body)


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
