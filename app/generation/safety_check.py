"""Safety along one request's way: a verdict on its prompt, a screen over its answer, an event of both.

    check.look ──▶ the fast verdict, at once
    check.render ──▶ the prompt, with the operator's words in front where the policy has some
    check.read ──▶ the full verdict begins, in a thread, beside the prefill: rendering has a thread too,
                   and of two only one runs Python at a time
    check.verdict ──▶ waits for the full one: nothing is told or released before it
    check.way_out ──▶ what every delta goes through; see `WayOut`

`Check` is that of a server with safety off: it asks nothing and costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from structlog.typing import FilteringBoundLogger

from app.core import ChatRequest, Counts, Engine, Prompt
from app.errors import ContentFiltered, ReplayExpired
from app.generation.history import Asked
from app.log import where
from app.safety import moderation
from app.safety.counters import SafetyCounters
from app.safety.guard.tier import GuardTier
from app.safety.policies.policy import Policies, Policy
from app.safety.policies.policy_prompt import Aligned
from app.safety.screens.fail_closed import WayOut
from app.safety.screens.prompt_screen import PromptScreen
from app.safety.screens.remembered import Judged, JudgedTexts
from app.safety.screens.stream_screen import Screening, StreamScreen
from app.safety.screens.stream_terms import Steering, steering_of
from app.safety.text.turns import Message, Turns, conversation_of, read_request, text_of
from app.safety.verdict import ScreenFailed, Verdict, stricter
from app.store import conversations, safety_events
from app.store.database import Database
from app.store.keys import Key
from app.store.safety_events import SafetyEvent, Subject
from app.stream.token_stream import TokenStream
from app.stream.transcript import answers

HEAD_START_S = 0.0003
"""What the engine gets before the encoder reads beside it: its processes wake one after the other, and where
cores are few each of them waits for whoever has begun."""


class Checks(Protocol):
    """Makes the check of each request."""

    def of(self, request: ChatRequest, key: Key | None) -> Check:
        """The check of a request made with `key`."""
        ...


class Check:
    """What safety has to say to one request. This one is of a server without it: nothing."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.rid = request.request_id
        """The engine's id of the generation in progress."""

    @property
    def undecided(self) -> bool:
        """Whether `verdict` has to be waited for."""
        return False

    def look(self, asked: Asked) -> None:
        """Judge the prompt at a glance. Raises ContentFiltered, ScreenFailed."""

    def read(self) -> None:
        """Begin to read the prompt, unless the glance was enough; a second call does nothing."""

    async def render(self, engine: Engine, request: ChatRequest) -> Prompt:
        """The prompt as the model is to read it. Raises what `Engine.render` does."""
        return await engine.render(request)

    async def verdict(self) -> None:
        """Wait until the prompt may be answered. Raises ContentFiltered, ScreenFailed."""

    @property
    def begins_anew(self) -> bool:
        """Whether the verdict asks for other words in front of the prompt than it was rendered with."""
        return False

    def again(self) -> None:
        """Take another id for a second generation; they are used once."""
        self.rid = f"{self.rid[:-1]}~"

    def way_out(self) -> WayOut | None:
        """What the answer's deltas go through; None for nothing."""
        return None

    def broke(self, exc: Exception) -> None:
        """Count and log that there is no way out because `way_out` threw; nothing will be released."""

    def ended(
        self, way: WayOut | None, counts: Mapping[int, Counts], withheld_tokens: int
    ) -> dict[str, Any] | None:
        """Account for an answer that has ended; the `moderation` object to tell, if there is one."""
        del way, counts, withheld_tokens
        unjudged = moderation.not_judged()
        return moderation.moderation(unjudged, unjudged) if self.request.moderated else None

    def close(self, stream: TokenStream) -> None:
        """Stop what is still being read of the prompt, and remember what was released in `stream`."""


class NoChecks:
    """Makes no checks: safety is off."""

    def of(self, request: ChatRequest, key: Key | None) -> Check:
        """See Checks."""
        del key
        return Check(request)


class Screen:
    """The screens and the policy of a server, and where their verdicts are kept."""

    def __init__(
        self,
        prompts: PromptScreen,
        streams: StreamScreen,
        policies: Policies,
        counters: SafetyCounters,
        database: Database,
        log: FilteringBoundLogger,
        *,
        guard: GuardTier | None = None,
        fail_open: bool = False,
    ) -> None:
        self.prompts = prompts
        self.streams = streams
        self.policies = policies
        self.counters = counters
        self.guard = guard
        self.fail_open = fail_open
        self.aligned = Aligned()
        self.judged = Judged()
        self._database = database
        self._log = log
        self._secret: bytes | None = None

    async def start(self) -> None:
        """Read the installation's secret; the store is open. Raises StorageUnavailable."""
        self._secret = await self._database.read(safety_events.secret)

    def of(self, request: ChatRequest, key: Key | None) -> Check:
        """See Checks."""
        return ScreenedCheck(self, request, key)

    def broke(self, request_id: str, exc: Exception, *, passed: bool | None = None) -> None:
        """Count and log a stream screen that threw; what it screens is let pass if the server fails open."""
        passed = self.fail_open if passed is None else passed
        self.counters.failed("stream", "error", passed=passed)
        self._log.error("screen_broke", request_id=request_id, error=where(exc), passed=passed)

    def keep(self, check: ScreenedCheck, verdict: Verdict, subject: Subject, text: str) -> None:
        """Store a verdict that did something, and the turn it refused where nothing else stores that."""
        if verdict.action is None:
            return
        request, refused = check.request, check.refused_turn
        event = SafetyEvent(
            at_us=time.time_ns() // 1000,
            request_id=request.request_id,
            owner=request.owner,
            key_id=None if check.key is None else check.key.id,
            model=request.model,
            subject=subject,
            stage=verdict.stage,
            action=verdict.action,
            category=verdict.category,
            score=verdict.score,
            threshold=verdict.threshold,
            policy_hash=verdict.policy_hash,
            scores=verdict.scores,
            lag_tokens=verdict.lag_tokens,
            text_hmac=safety_events.hmac_of(self._secret, text) if self._secret and text else None,
        )
        self._submit(event, refused)

    def _submit(self, event: SafetyEvent, refused: conversations.NewTurn | None) -> None:
        def unit(connection: Any) -> None:
            safety_events.add(connection, event)
            if refused is not None:
                conversations.add_blocked_turn(connection, refused)

        def written(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and (exc := done.exception()) is not None:
                self._log.error("safety_event_lost", request_id=event.request_id, error=where(exc))

        try:
            self._database.submit(unit).add_done_callback(written)
        except Exception as exc:  # noqa: BLE001  # the request's own end must not depend on it
            self._log.error("safety_event_lost", request_id=event.request_id, error=where(exc))


class ScreenedCheck(Check):
    """What safety has to say to one request."""

    @property
    def undecided(self) -> bool:
        """See Check."""
        return self._reading is not None and not self._reading.done()

    def __init__(self, screen: Screen, request: ChatRequest, key: Key | None) -> None:
        super().__init__(request)
        self.key = key
        self.refused_turn: conversations.NewTurn | None = None
        self._screen = screen
        level = None if key is None else key.terms.safety
        self._policy: Policy = screen.policies.current.tightened(level)
        self._verdict: Verdict | None = None
        self._known: JudgedTexts = screen.judged.of(request.owner, self._policy.hash)
        self._turns = Turns([], [])
        self._steering = Steering()
        self._guarded: Sequence[Message] = ()
        self._unread: Verdict | None = None
        """What is still to be read looked like this at a glance."""
        self._way: WayOut | None = None
        self._reading: asyncio.Task[Verdict] | None = None
        self._rendered_with: str | None = None
        self._text = ""

    def look(self, asked: Asked) -> None:
        """See Check."""
        body = asked.request.body
        self._steering = steering_of(body, body["messages"])
        self._turns = turns = read_request(body, self._known, asked.stored)
        if self._screen.guard is not None:
            self._guarded = conversation_of(body, self._known, asked.stored)
        self._policy = policy = self._policy.after(asked.strikes)
        self._text = text_of(body["messages"][-1].get("content"))
        scored = asked.request.moderated
        verdict, sure = self._screen.prompts.glance(turns, policy, asked.strikes, scored=scored)
        if verdict.blocked:
            self.refused_turn = asked.turn
        if verdict.blocked or (sure and self._screen.guard is None):
            self._decide(verdict)
            return
        self._verdict = verdict
        self._unread = verdict

    def read(self) -> None:
        """See Check."""
        if self._unread is None:
            return
        verdict, self._unread = self._unread, None
        self._reading = asyncio.create_task(self._read(verdict), name=f"prompt-{self.rid}")
        self._reading.add_done_callback(_seen)

    async def _read(self, quick: Verdict) -> Verdict:
        """The full verdict, of the guard too where there is one; both read at once."""
        screen, policy = self._screen, self._policy
        full = partial(screen.prompts.full, self._turns, policy, head_start_s=HEAD_START_S)
        if screen.guard is None:
            return stricter(quick, await full())
        judging = asyncio.create_task(screen.guard.judge(policy, self._guarded, watched=quick.watched))
        try:
            verdict = stricter(quick, await full())
            if verdict.blocked:
                return verdict
            guarded = await judging
        finally:
            judging.cancel()
            judging.add_done_callback(_seen)
        if guarded is None:
            if verdict.watched:  # that the guard failed is let pass for others only
                raise ScreenFailed
            return verdict
        return stricter(verdict, guarded)

    async def verdict(self) -> None:
        """See Check."""
        if self._reading is None:
            return
        self._decide(await asyncio.shield(self._reading))

    def _decide(self, verdict: Verdict) -> None:
        """Take a verdict for the last word, keep it, and refuse if that is what it says."""
        self._verdict = verdict
        if verdict.stage != "guard":  # which counts for itself
            self._screen.counters.judged(verdict)
        self._screen.keep(self, verdict, "prompt", self._text)
        self._text = ""
        if verdict.blocked:
            message = self._policy.notice(verdict.category)
            raise ContentFiltered(message, moderation.of_blocked_prompt(verdict))
        if not verdict.unread:
            self._known.add_passed(self._turns.users)
            self._known.add_answers(() if verdict.watched else self._turns.answers)

    async def render(self, engine: Engine, request: ChatRequest) -> Prompt:
        """See Check."""
        self._rendered_with = text = self._alignment()
        if text is None:
            return await engine.render(request)
        return await self._screen.aligned.render(engine, request, text)

    def _alignment(self) -> str | None:
        return self._policy.alignment(watched=self._verdict is not None and self._verdict.watched)

    @property
    def begins_anew(self) -> bool:
        """See Check."""
        return self._alignment() != self._rendered_with

    def way_out(self) -> WayOut:
        """See Check."""
        assert self._verdict is not None
        screen, request, verdict = self._screen, self.request, self._verdict
        n, harm = request.n, verdict.harm
        begin = partial(screen.streams.for_request, n, verdict.watched, harm, self._policy, self._steering)
        self._way = WayOut(begin, partial(screen.broke, request.request_id), fail_open=screen.fail_open)
        return self._way

    def broke(self, exc: Exception) -> None:
        """See Check."""
        self._screen.broke(self.request.request_id, exc, passed=False)

    def ended(
        self, way: WayOut | None, counts: Mapping[int, Counts], withheld_tokens: int
    ) -> dict[str, Any] | None:
        """See Check."""
        assert self._verdict is not None
        if way is None:
            return None
        halted = way.halted
        verdicts = way.verdicts(scored=self.request.moderated or halted is not None)
        if way.broken:
            if not self.request.moderated:
                return None
            failed = moderation.failed("safety_unavailable", "The stream screen failed; this was let pass.")
            return moderation.moderation(moderation.results([self._verdict]), failed)
        if halted is not None:
            self._halted(way.screening, halted, counts, withheld_tokens)
            said = moderation.of_answer(self._scored(self._verdict), verdicts)
            return {**said, "message": self._policy.notice(halted.category)}
        for verdict in verdicts:
            self._screen.counters.judged(verdict)
            if verdict.action == "flag":
                self._screen.keep(self, verdict, "answer", "")
        return dict(moderation.of_answer(self._verdict, verdicts)) if self.request.moderated else None

    def _halted(
        self, screening: Screening, halted: Verdict, counts: Mapping[int, Counts], withheld_tokens: int
    ) -> None:
        """The lag is known now: how far the engine came before it stopped."""
        choice = screening.halted_choice
        generated = 0 if choice is None else counts.get(choice, Counts()).completion_tokens
        late = replace(halted, lag_tokens=max(halted.lag_tokens, generated - screening.hit_at))
        counters = self._screen.counters
        counters.judged(late)
        counters.halted(leaked_tokens=screening.leaked_tokens, dropped_tokens=withheld_tokens)
        self._screen.keep(self, late, "answer", screening.take_withheld_text())

    def _scored(self, verdict: Verdict) -> Verdict:
        """A verdict on the prompt with the scores that it was let pass without, where they can be had."""
        if verdict.scores:
            return verdict
        with contextlib.suppress(ScreenFailed):  # of an answer that has been halted, which stands
            return replace(verdict, scores=self._screen.prompts.fast(self._turns, self._policy).scores)
        return verdict

    def close(self, stream: TokenStream) -> None:
        """See Check."""
        if self._reading is not None:
            self._reading.cancel()
        way = self._way
        if way is None or way.broken or way.halted is not None:
            return
        with contextlib.suppress(ReplayExpired):  # the beginning of a very long one is not held any more
            for answer in answers(*stream.whole()).values():
                self._known.add_released(answer.message)


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # nobody may be waiting any more
