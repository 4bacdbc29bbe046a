"""An answer that continues at another server: its ids so far, and the text of those that follow.

A server that never saw the answer is sent it as a longer prompt. It then knows neither the half of a
character that the answer ends in, nor a stop string that has begun, and counts from 0. So from the cut on,
text and counts are made here, of the ids, as SGLang's detokenizer and scheduler make them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import EngineFailed

CONTEXT_TOKENS = 5
"""Tokens that are decoded before new ones, whose text may depend on them; as in SGLang."""
STEPS_KEPT = 64
"""Steps back in which the end of a character is looked for; a character has four tokens at most."""
BROKEN = "\ufffd"
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
PENALTIES: Mapping[str, float] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling parameters that look at what was generated, with the values that have no effect."""

CONTINUED_IDS_KEY = "continued_ids"
"""The key in `custom_params` for our scheduler (app.engine.sglang.patches.continued_requests)."""

Decode = Callable[[Sequence[int]], str]
Finish = dict[str, Any]


def restarted(message: str) -> EngineFailed:
    """The error of an answer that cannot continue elsewhere."""
    return EngineFailed(message, code="engine_restarted")


@dataclass(frozen=True, slots=True)
class TextRules:
    """The rules by which the ids of one request become its text, and end it.

    `decode` makes the text that is handed over. `decode_all` also spells special tokens out: there SGLang
    looks for `stops`, within the last `stop_tokens` and one more. `keeps_stop` leaves a stop in the text.
    `end_ids` end the answer. `think_end_ids` end its reasoning; empty where no reasoning is counted.
    """

    decode: Decode
    decode_all: Decode
    max_tokens: int
    stops: Sequence[str] = ()
    stop_tokens: int = 0
    keeps_stop: bool = False
    end_ids: frozenset[int] = frozenset()
    think_end_ids: Sequence[int] = ()


class Received:
    """The ids of a choice from its first server, and the characters received after each late step."""

    __slots__ = ("_steps", "num_chars", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_chars = 0
        self._steps = deque([(0, 0)], STEPS_KEPT)

    def add(self, token_ids: Sequence[int], text: str) -> None:
        """Note a step."""
        self.token_ids.extend(token_ids)
        self.num_chars += len(text)
        self._steps.append((len(self.token_ids), self.num_chars))

    def continued(self, rules: TextRules, prompt_ids: Sequence[int]) -> ContinuedText:
        """The text behind what was received. Raises EngineFailed where its place is not known."""
        context = prompt_ids[-CONTEXT_TOKENS:]
        for num_ids, num_chars in reversed(self._steps):
            end = len(context) + num_ids
            if not rules.decode(_window([*context, *self.token_ids], end)).endswith(BROKEN):
                pending_chars = self.num_chars - num_chars
                return ContinuedText(rules, context, self.token_ids, num_ids, pending_chars)
        raise restarted("The engine was restarted within an incomplete character.")


class ContinuedText:
    """The text of a choice from one token on. `token_ids` are all of the choice's.

    At first `num_decoded` of them have their text handed over, and `num_sent_chars` of that of the others.
    """

    def __init__(
        self,
        rules: TextRules,
        context: Sequence[int],
        token_ids: Sequence[int] = (),
        num_decoded: int = 0,
        num_sent_chars: int = 0,
    ) -> None:
        self._rules = rules
        self._ids = [*context, *token_ids]
        self._first = len(context)
        self._read = self._first + num_decoded
        self._window_start = max(self._read - CONTEXT_TOKENS, 0)
        self._sent_chars = num_sent_chars
        self._cut = len(self._ids)
        self._thought_tokens = _end_of(rules.think_end_ids, token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids so far."""
        return self._ids[self._first :]

    @property
    def num_tokens(self) -> int:
        """The number of ids so far."""
        return len(self._ids) - self._first

    @property
    def left_tokens(self) -> int:
        """The number of ids that may follow."""
        return self._rules.max_tokens - self.num_tokens

    @property
    def thinks(self) -> bool:
        """True if the next token belongs to the reasoning."""
        return bool(self._rules.think_end_ids) and self._thought_tokens is None

    @property
    def reasoning_tokens(self) -> int:
        """The tokens of the reasoning, with its end."""
        if not self._rules.think_end_ids:
            return 0
        return self.num_tokens if self._thought_tokens is None else self._thought_tokens

    def cut(self) -> None:
        """Note that a server has been lost: the next one sees nothing of what was received until now."""
        self._cut = len(self._ids)

    def take(self, token_id: int, finish: Finish | None) -> tuple[str, Finish | None]:
        """The text that a token adds, and its finish reason, which may be a stop that spans the cut."""
        self._ids.append(token_id)
        if self.thinks and _end_of(self._rules.think_end_ids, self._ids[-len(self._rules.think_end_ids) :]):
            self._thought_tokens = self.num_tokens
        finish = self._stop_across_cut() or finish
        return (self._text() if finish is None else self._last_text(finish)), finish

    def end(self, finish: Finish) -> str:
        """The text that is left where the answer ends without another token."""
        return self._last_text(finish)

    def end_by_token(self, token_id: int) -> Finish | None:
        """The finish reason that a token has by itself, if it is next."""
        if token_id in self._rules.end_ids:
            return {"type": "stop", "matched": token_id}
        return {"type": "length", "length": self._rules.max_tokens} if self.left_tokens <= 1 else None

    # --- as SGLang's detokenizer

    def _fresh(self, end: int) -> str:
        """The text of the ids before `end` that are not fully handed over; its last character may be half."""
        context = self._rules.decode(self._ids[self._window_start : self._read])
        return self._rules.decode(self._ids[self._window_start : end])[len(context) :]

    def _text(self) -> str:
        """The text that can be handed over: nothing behind the last whole character."""
        fresh = self._fresh(len(self._ids))
        whole = fresh.rstrip(BROKEN)
        text = whole[self._sent_chars :]
        self._sent_chars = max(self._sent_chars, len(whole))
        if fresh and whole == fresh:
            self._window_start, self._read, self._sent_chars = self._read, len(self._ids), 0
        return text

    def _last_text(self, finish: Finish) -> str:
        """All that is left, without the stop that ended it."""
        matched, kept = finish.get("matched"), self._rules.keeps_stop
        is_token = isinstance(matched, int) and not kept and self._ids[-1:] == [matched]
        text = self._fresh(len(self._ids) - is_token)[self._sent_chars :]
        if not isinstance(matched, str) or not matched:
            return text
        tail = self._rules.decode(self._ids[-self._rules.stop_tokens - 1 - CONTEXT_TOKENS :])
        tail = tail if len(tail) >= len(text) else text
        start, stop = len(tail) - len(text), tail.find(matched)
        if stop < 0:
            return text
        return tail[start : max(start, stop + len(matched) * kept)]

    # --- as SGLang's scheduler

    def _stop_across_cut(self) -> Finish | None:
        """The stop string that the new tokens complete and older ones began; a later one the server sees."""
        rules = self._rules
        window = rules.stop_tokens + 1
        if not rules.stops or len(self._ids) - self._cut >= window:
            return None
        text = rules.decode_all(self._ids[max(len(self._ids) - window, self._first) :])
        matched = next((stop for stop in rules.stops if stop in text), None)
        return None if matched is None else {"type": "stop", "matched": matched}


def replay(
    rules: TextRules, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> tuple[ContinuedText, str, Finish | None]:
    """The text behind the ids of an earlier run, the text of these, and the end, if one of them is the end.

    Blocks for some 10 us a token.
    """
    continued = ContinuedText(rules, prompt_ids[-CONTEXT_TOKENS:])
    texts, finish = [], None
    for token_id in token_ids:
        continued.cut()
        text, finish = continued.take(token_id, continued.end_by_token(token_id))
        texts.append(text)
        if finish is not None:
            break
    continued.cut()
    return continued, "".join(texts), finish


def check_resumable(sampling: Mapping[str, Any]) -> None:
    """Raise EngineFailed for a request whose state lives in its server alone."""
    if any(sampling.get(name) for name in GRAMMARS):
        what = "the form that its answer must have"
    elif any(sampling.get(name, neutral) not in (None, neutral) for name, neutral in PENALTIES.items()):
        what = "its penalties"
    else:
        return
    raise restarted(f"The model's server was lost in mid-answer, and {what} cannot be moved to another.")


def resumed_body(body: Mapping[str, Any], text: ContinuedText) -> dict[str, Any]:
    """The body of `/generate` that continues behind the ids so far."""
    sampling = dict(body["sampling_params"])
    sampling["max_new_tokens"] = text.left_tokens
    sampling["min_new_tokens"] = max((sampling.get("min_new_tokens") or 0) - text.num_tokens, 0)
    changed = {"sampling_params": sampling, "input_ids": [*body["input_ids"], *text.token_ids]}
    if body.get("require_reasoning"):
        return {**body, **changed, "require_reasoning": text.thinks}
    return {**body, **changed}


def carried_body(body: Mapping[str, Any], token_ids: Sequence[int]) -> dict[str, Any]:
    """The body of `/generate` for a server that runs our scheduler, which continues the answer as its own."""
    sampling = body["sampling_params"]
    custom = {**(sampling.get("custom_params") or {}), CONTINUED_IDS_KEY: list(token_ids)}
    return {**body, "sampling_params": {**sampling, "custom_params": custom}}


def _window(ids: Sequence[int], end: int) -> Sequence[int]:
    return ids[max(end - CONTEXT_TOKENS, 0) : end]


def _end_of(sequence: Sequence[int], ids: Sequence[int]) -> int | None:
    """The position behind the first occurrence of a sequence in ids; None without one."""
    width = len(sequence)
    if not width:
        return None
    return next(
        (end for end in range(width, len(ids) + 1) if list(ids[end - width : end]) == list(sequence)), None
    )
