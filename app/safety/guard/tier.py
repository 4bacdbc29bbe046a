"""The guard tier: a language model that judges conversations, through the `Engine` protocol.

`Guard` asks and reads, and knows no policy; `GuardTier` makes verdicts and decides what a failure means.
The engine that runs the model is composed in `app.engine_factory.build_guard`, started and closed there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from app.core import ChatRequest, Delta, Engine
from app.safety.counters import Failure, SafetyCounters
from app.safety.guard.reading import Entry, combined, fitted, scored, settled, turns_for
from app.safety.guard.templates import GuardFormat, Question
from app.safety.policies.policy import Policy
from app.safety.text.turns import Message
from app.safety.verdict import Reading, Scores, ScreenFailed, Verdict

TIMEOUT_S = 5.0
"""Seconds that the first release may wait for a verdict; a 1B model on a GPU takes some 30 ms."""
TOP_LOGPROBS = 20
TEMPLATE_TOKENS = 700
"""Kept free for a format's own words: the longest, Qwen3Guard's, has 2,000 characters."""
CHARS_PER_TOKEN = 2
"""A cautious guess; a prompt that takes more is refused by the engine, which is a failure."""
MIN_ROOM_CHARS = 1_000


class GuardFailed(Exception):
    """The guard gave no verdict: it took too long, its engine failed, or its output cannot be read."""

    def __init__(self, why: Failure) -> None:
        super().__init__(why)
        self.why = why


class Guard:
    """A guard model behind an engine: `score` is how sure it is of each harm, by its own probabilities."""

    def __init__(self, engine: Engine, form: GuardFormat, *, timeout_s: float = TIMEOUT_S) -> None:
        self._engine = engine
        self._form = form
        self._timeout_s = timeout_s
        self._reading: set[asyncio.Task[_Answer]] = set()
        self._unwanted: set[str] = set()

    async def score(self, conversation: Sequence[Message]) -> Scores:
        """The scores of the last turn by category, a prompt or an answer to it.

        All questions are asked at once. A turn longer than the model's context is asked about in
        slices. Raises GuardFailed.
        """
        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as asking:
                asked = [asking.create_task(self._ask(m, q)) for m, q in self._asked(conversation)]
        except TimeoutError as exc:
            raise GuardFailed("timeout") from exc
        except Exception as exc:
            raise GuardFailed("error") from exc
        return combined([task.result() for task in asked])

    async def aclose(self) -> None:
        """Stop what is still being asked, and read it to its end; the engine is its owner's to close."""
        while self._reading:
            for task in list(self._reading):
                self._abandon(task.get_name())
            await asyncio.wait(self._reading)

    def _asked(self, conversation: Sequence[Message]) -> Iterator[tuple[list[dict[str, str]], Question]]:
        """The messages and the question of each prompt."""
        room = (self._engine.model.max_prompt_tokens - TEMPLATE_TOKENS) * CHARS_PER_TOKEN
        turns = turns_for(conversation, whole=self._form.whole_conversation)
        answer = turns[-1]["role"] == "assistant"
        for messages in fitted(turns, max(room, MIN_ROOM_CHARS)):
            for question in self._form.answer_questions if answer else self._form.prompt_questions:
                yield messages, question

    async def _ask(self, messages: list[dict[str, str]], question: Question) -> Scores:
        body: dict[str, Any] = {
            "messages": messages,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
            "regex": self._form.regex,
            "chat_template_kwargs": {
                "judges_answer": messages[-1]["role"] == "assistant",
                "guideline": question.guideline,
            },
        }
        request = ChatRequest(
            request_id=f"guard-{secrets.token_hex(16)}",
            owner="guard",
            model=self._engine.model.id,
            body=body,
            created_at_unix_s=0,
            max_tokens=self._form.max_tokens,
            logprobs=True,
        )
        answer = await self._answer(request)
        return scored(self._form, question, answer.entries, answer.text)

    async def _answer(self, request: ChatRequest) -> _Answer:
        """The whole answer, read in a task of its own: a cancelled caller must not close it unread."""
        task = asyncio.create_task(self._read(request), name=request.request_id)
        self._reading.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                self._abandon(request.request_id)
            raise

    async def _read(self, request: ChatRequest) -> _Answer:
        rid, answer = request.request_id, _Answer()
        prompt = await self._engine.render(request)
        if rid in self._unwanted:
            return answer
        deltas = self._engine.generate(rid, prompt)
        try:
            async for delta in deltas:
                answer.add(delta)
                if delta.finish_reason is None and settled(self._form, answer.text):
                    self._engine.abort(rid)
        finally:
            self._engine.pop_emitted_tokens(rid)  # the engine keeps its count until it is asked
        return answer

    def _abandon(self, rid: str) -> None:
        self._unwanted.add(rid)
        self._engine.abort(rid)

    def _forget(self, task: asyncio.Task[_Answer]) -> None:
        self._reading.discard(task)
        self._unwanted.discard(task.get_name())
        if not task.cancelled():
            task.exception()  # retrieved: no task may await it


@dataclasses.dataclass(slots=True)
class _Answer:
    text: str = ""
    entries: list[Entry] = dataclasses.field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.entries += delta.logprobs or ()


class GuardTier:
    """The guard's verdicts under a policy, and its failures: a watched request fails closed."""

    def __init__(self, guard: Guard, counters: SafetyCounters, *, fail_open: bool) -> None:
        self._guard = guard
        self._counters = counters
        self._fail_open = fail_open

    async def judge(
        self, policy: Policy, conversation: Sequence[Message], *, watched: bool
    ) -> Verdict | None:
        """The verdict on the conversation's last turn; None when the guard failed and fails open.

        Run as a task beside `engine.generate` and awaited before the first release; cancelling it
        stops the guard. Raises ScreenFailed when it failed and the prompt is on *watch*, or
        `safety_fail_open` is not set.
        """
        try:
            scores = await self._guard.score(conversation)
        except GuardFailed as failure:
            passed = self._fail_open and not watched
            self._counters.failed("guard", failure.why, passed=passed)
            if passed:
                return None
            raise ScreenFailed from failure
        verdict = policy.judge([Reading("guard", scores)])  # an answer's too: a guard has one scale for both
        self._counters.judged(verdict)
        return verdict

    async def aclose(self) -> None:
        """Stop what the guard is still asked."""
        await self._guard.aclose()
