"""Reads the stream of a remote SGLang: from bytes to server-sent events, from events to increments.

SGLang's `/generate` sends each step's text and ids alone with `incremental_streaming_output`, and
everything so far without it; both are read. Nothing here does input or output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import orjson

from app.core import Counts
from app.engine.grammar.cost import GRAMMAR_ENDED

MAX_EVENT_BYTES = 16 * 1024**2
_DATA = b"data:"
DONE = b"[DONE]"


Fault = Literal[
    "unreachable", "broke_off", "silent", "stalled", "unreadable", "wrong_count", "after_end", "abort"
]
"""The fault of a server:

- `unreachable`: no connection, no headers, or an answer that is no stream
- `broke_off`: the stream ended before the answer did
- `silent`, `stalled`: nothing for too long, in one stream, or in all of them and no health either
- `unreadable`: an event that no SGLang sends
- `wrong_count`: a count that does not fit the ids, or decreases
- `after_end`: more of an answer behind its last event
- `abort`: a request that it did not stop when asked to
"""


class ServerGone(Exception):
    """The server cannot be reached, cut the connection, took too long, or sent what no SGLang sends: `kind`.

    The message never quotes what was received.
    """

    def __init__(self, message: str, kind: Fault) -> None:
        super().__init__(message)
        self.kind = kind


class EventReader:
    """The payloads of `data:` lines in a stream of bytes, whole ones only; bounded memory."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that `data` completes. Raises ServerGone at a line that never ends."""
        *lines, self._rest = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ServerGone("an unterminated event", "unreadable")
        for line in lines:
            if line.startswith(_DATA):
                yield line[len(_DATA) :].strip()


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """One step's logprobs, in the columns that app.engine.sglang.parse reads; its row is 0."""

    output_token_logprobs_val: Sequence[Sequence[float]]
    output_token_logprobs_idx: Sequence[Sequence[int]]
    output_top_logprobs_val: Sequence[Sequence[Sequence[float]]]
    output_top_logprobs_idx: Sequence[Sequence[Sequence[int]]]

    def first(self, count: int) -> LogprobRow:
        """The row of the step's first tokens."""
        return LogprobRow(
            [self.output_token_logprobs_val[0][:count]],
            [self.output_token_logprobs_idx[0][:count]],
            [self.output_top_logprobs_val[0][:count]],
            [self.output_top_logprobs_idx[0][:count]],
        )


@dataclass(frozen=True, slots=True)
class ChoiceStep:
    """The increment that one event adds to a choice. `finish` is SGLang's finish reason."""

    text: str
    token_ids: Sequence[int]
    counts: Counts
    finish: dict[str, Any] | None
    logprobs: LogprobRow | None


class ChoiceReader:
    """The steps of one choice, and its counts so far; `counts.completion_tokens` are those received.

    `prompt_tokens` are the ids that were sent, and billed, whatever the server says. A server that continues
    behind `received_tokens`, whose text has `received_chars`, sends all of it again with its first event.
    """

    def __init__(self, prompt_tokens: int, received_tokens: int = 0, received_chars: int = 0) -> None:
        self.counts = Counts(prompt_tokens, received_tokens)
        self.miscounts_prompt = False
        """True if the server has reported another number."""
        self._received_tokens = received_tokens
        self._text_chars = received_chars
        self._repeated_chars = 0
        """Characters that the server will send again, as it held back a character that was sent before."""

    @property
    def advances(self) -> bool:
        """True if the server has generated anything."""
        return self.counts.completion_tokens > self._received_tokens

    def read(self, payload: bytes) -> ChoiceStep:
        """One event as a step. Raises ServerGone, and Refusal for an event that is an error."""
        try:
            event = orjson.loads(payload)
            if "error" in event:
                raise _refusal(event["error"])
            return self._step(event)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as exc:
            raise ServerGone(f"an event that cannot be read ({type(exc).__name__})", "unreadable") from None

    def _step(self, event: Mapping[str, Any]) -> ChoiceStep:
        meta, token_ids, text = event["meta_info"], event["output_ids"], event["text"]
        finish = meta["finish_reason"]
        if not isinstance(text, str) or not isinstance(token_ids, list):
            raise TypeError
        if finish is not None and ("prompt_tokens" not in meta or finish.get("status_code") is not None):
            # SGLang's answer to an abort in its queue repeats what it sent before, and knows no counts; a
            # refusal's are made up.
            return ChoiceStep("", (), self.counts, finish, None)
        received, completion = self.counts.completion_tokens, int(meta["completion_tokens"])
        fresh = completion - received
        if fresh < 0 or len(token_ids) not in (fresh, completion):
            raise ServerGone("a count that does not fit the ids", "wrong_count")
        if len(token_ids) == completion and received:
            self._repeated_chars = max(self._text_chars - len(text), 0)
            text = text[self._text_chars :]
        elif self._repeated_chars:
            again = text[: self._repeated_chars]
            text, self._repeated_chars = text[len(again) :], self._repeated_chars - len(again)
        self._text_chars += len(text)
        prompt_tokens = self.counts.prompt_tokens
        self.miscounts_prompt = self.miscounts_prompt or int(meta["prompt_tokens"]) != prompt_tokens
        self.counts = Counts(
            prompt_tokens,
            completion,
            min(int(meta.get("cached_tokens") or 0), prompt_tokens),
            min(int(meta.get("reasoning_tokens") or 0), completion),
        )
        token_ids = token_ids[len(token_ids) - fresh :]
        if any(type(token_id) is not int or token_id < 0 for token_id in token_ids):
            raise TypeError
        return ChoiceStep(text, token_ids, self.counts, finish, _logprobs(meta, fresh))


class Refusal(Exception):
    """The server answered with an error of its own: an HTTP status and its words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"refused with status {status}")
        if message.startswith(GRAMMAR_ENDED):  # SGLang gives every abort of its own a 503
            status = HTTPStatus.BAD_REQUEST
        self.status = status
        self.finish = {"type": "abort", "status_code": status, "message": message[:500]}


def _refusal(error: Any) -> Refusal:
    code = error.get("code")
    return Refusal(code if isinstance(code, int) else 500, str(error.get("message") or ""))


def refusal_of(status: int, body: bytes) -> Refusal:
    """The refusal in an answer that is no stream; its words, where it has SGLang's or OpenAI's shape."""
    message = ""
    try:
        document = orjson.loads(body)
        error = document.get("error", document)
        message = str(error.get("message") or "") if isinstance(error, dict) else ""
    except (ValueError, AttributeError):
        pass
    return Refusal(status, message)


def _logprobs(meta: Mapping[str, Any], fresh: int) -> LogprobRow | None:
    tokens = meta.get("output_token_logprobs")
    if not tokens or not fresh:
        return None
    tokens = tokens[-fresh:]
    tops = [top or () for top in (meta.get("output_top_logprobs") or [()] * fresh)[-fresh:]]
    if len(tokens) != fresh or len(tops) != fresh:
        raise ValueError
    return LogprobRow(
        [[entry[0] for entry in tokens]],
        [[entry[1] for entry in tokens]],
        [[[entry[0] for entry in top] for top in tops]],
        [[[entry[1] for entry in top] for top in tops]],
    )
