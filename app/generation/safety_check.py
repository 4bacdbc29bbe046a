"""One request, screened: verdicts on its prompt, a screen over its answer, events of both."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from structlog.typing import FilteringBoundLogger

from app.core import ChatRequest, Counts, Engine, Key, Prompt
from app.errors import BadRequest, ContentFiltered, ReplayExpired
from app.generation.history import LoadedTurn
from app.generation.request_safety import AnswerScreen, RequestSafety
from app.generation.safety_recorder import RequestRecords, SafetyRecorder, as_enforced
from app.log import where
from app.messages import count_media
from app.safety import moderation
from app.safety.counters import SafetyCounters
from app.safety.guard.tier import GuardTier
from app.safety.policies.policy import Policies, Policy
from app.safety.policies.policy_prompt import PolicyPrompt
from app.safety.prompt.prompt_screen import PromptScreen
from app.safety.prompt.remembered import Judged, JudgedTexts
from app.safety.stream.second_stage import SecondStage
from app.safety.stream.steering import Steering, steering_of
from app.safety.stream.stream_screen import Screening, StreamScreen
from app.safety.text.turns import Message, Turns, conversation_of, read_request, text_of
from app.safety.verdict import ScreenBusy, ScreenFailed, Verdict, as_state, from_state, stricter
from app.store import conversations, safety_events
from app.store.database import Database
from app.store.safety_events import SafetyEvent, Subject
from app.stream.token_stream import TokenStream
from app.stream.transcript import answers
from app.threads.owner_threads import LARGE_BYTES


class SafetyService:
    """The screens and the policy of a server, and where their verdicts are kept."""

    def __init__(
        self,
        prompts: PromptScreen,
        streams: StreamScreen,
        policies: Policies,
        counters: SafetyCounters,
        *,
        database: Database,
        log: FilteringBoundLogger,
        recorder: SafetyRecorder,
        second_stage: SecondStage,
        guard: Callable[[], GuardTier | None] = lambda: None,
        fail_open: bool = False,
    ) -> None:
        self.prompts = prompts
        self.streams = streams
        self.policies = policies
        self.counters = counters
        self.recorder = recorder
        self._second_stage = second_stage
        self.guard = guard
        self.fail_open = fail_open
        self.policy_prompt = PolicyPrompt()
        self.judged = Judged()
        self._database = database
        self._log = log
        self._secret: bytes | None = None

    async def start(self) -> None:
        """Read the installation's secret; the store is open. Raises StorageUnavailable."""
        self._secret = await self._database.read(safety_events.secret)

    async def aclose(self) -> None:
        """Queue what is recorded and not written yet, and end the screens' threads; the store is open."""
        self.recorder.flush()
        self.prompts.close()
        self._second_stage.close()

    def of(self, request: ChatRequest, key: Key | None) -> RequestSafety:
        """What a request made with `key` goes through."""
        return ScreenedRequest(self, request, key)

    def broke(self, request_id: str, exc: Exception) -> None:
        """Count and log a stream screen that threw; what it screens is let pass if the server fails open."""
        passed = self.fail_open and not isinstance(exc, ScreenBusy)
        self.counters.failed("stream", "error", passed=passed)
        self._log.error("screen_broke", request_id=request_id, error=where(exc), passed=passed)

    def keep(self, check: ScreenedRequest, verdict: Verdict, subject: Subject, text: str) -> None:
        """Store a verdict that did something, and the turn it refused where nothing else stores that."""
        if verdict.action is None:
            return
        request, refused = check.request, check.refused_turn if verdict.blocked else None
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


class ScreenedRequest:
    """One request, screened."""

    def __init__(self, service: SafetyService, request: ChatRequest, key: Key | None) -> None:
        self.rid = request.request_id
        self.request = request
        self.key = key
        self.refused_turn: conversations.NewTurn | None = None
        self._service = service
        self._records = RequestRecords(service.recorder, None if key is None else key.id)
        level = None if key is None else key.terms.safety
        self._policy: Policy = service.policies.current.at_level(level)
        self._verdict: Verdict | None = None
        self._judged: JudgedTexts = service.judged.of(request.owner, self._policy.hash)
        self._turns = Turns([], [])
        self._steering = Steering()
        self._guarded: Sequence[Message] = ()
        self._unread: Verdict | None = None
        """The verdict of the n-grams, while the full one is to be made yet."""
        self._screening: Screening | None = None
        self._reading: asyncio.Task[Verdict] | None = None
        self._text = ""
        self._strict = False
        """Whether the model is to be strict."""

    @property
    def undecided(self) -> bool:
        """See RequestSafety."""
        return self._reading is not None and not self._reading.done()

    async def prescreen(self, turn: LoadedTurn) -> None:
        """See RequestSafety."""
        service, body = self._service, turn.request.body
        guard = service.guard()
        _check_images(self._policy, body["messages"])
        self._steering = steering_of(body, body["messages"], is_raw=turn.request.raw is not None)
        await self._read_texts(turn, guarded=guard is not None)
        turns = self._turns
        self._policy = policy = self._policy.after(turn.strikes)
        newest = body["messages"][-1]
        self._text = text_of(newest.get("content"))
        again = self._judged.is_any_recorded(turns.recent[:-1])
        self._records.begin(self._text, newest.get("role"), again=again)
        scored = turn.request.moderated
        verdict, sure = service.prompts.prescreen(turns, policy, turn.strikes, scored=scored)
        watched = self._judged.watched_by(turns.recent)
        if watched is not None:
            verdict, sure = stricter(verdict, watched), False
        # Most prompts that the full verdict watches are in doubt by now, short of the n-grams' threshold.
        self._strict = verdict.watched or policy.in_doubt(verdict.scores)
        if sure and guard is None:
            self._decide(verdict)
            return
        if verdict.watched:
            self.refused_turn = turn.stored_turn
        self._verdict = verdict
        self._unread = verdict

    def state(self) -> Mapping[str, Any]:
        """See RequestSafety."""
        verdict = self._verdict
        return {} if verdict is None else {"verdict": as_state(verdict), "strict": self._strict}

    async def resume(self, turn: LoadedTurn, state: Mapping[str, Any]) -> None:
        """See RequestSafety. A prompt that was not judged before is watched at least."""
        body = turn.request.body
        self._steering = steering_of(body, body["messages"], is_raw=turn.request.raw is not None)
        await self._read_texts(turn, guarded=False)
        self._policy = policy = self._policy.after(turn.strikes)
        if state:
            verdict = from_state(state["verdict"])
        else:
            verdict, _ = self._service.prompts.prescreen(self._turns, policy, turn.strikes)
            verdict = replace(verdict, action="watch")
        self._verdict, self._strict = verdict, state.get("strict", True)
        newest = body["messages"][-1]
        text = text_of(newest.get("content"))
        self._records.resume(text, newest.get("role"), watched=verdict.watched)

    async def _read_texts(self, turn: LoadedTurn, *, guarded: bool) -> None:
        """Find what is to be read; of a large request in a thread. Raises ScreenFailed."""
        body, judged, stored = turn.request.body, self._judged, turn.from_store

        def read() -> tuple[Turns, Sequence[Message]]:
            turns = read_request(body, judged, stored)
            judged.watched_by(turns.recent)  # hashes them now, as they will be looked up on the loop
            return turns, conversation_of(body, judged, stored) if guarded else ()

        if turn.num_bytes <= LARGE_BYTES:
            self._turns, self._guarded = read()
        else:
            in_thread = self._service.prompts.in_thread
            self._turns, self._guarded = await in_thread(turn.request.owner, turn.num_bytes, read)

    def start_full_screen(self) -> None:
        """See RequestSafety."""
        if self._unread is None:
            return
        quick, self._unread = self._unread, None
        self._reading = asyncio.create_task(self._read(quick), name=f"prompt-{self.rid}")
        self._reading.add_done_callback(_seen)

    async def _read(self, quick: Verdict) -> Verdict:
        """The full verdict, of the guard too where there is one; both read at once."""
        service, policy, guard = self._service, self._policy, self._service.guard()
        full = partial(service.prompts.full_verdict, self._turns, policy, owner=self.request.owner)
        if guard is None:
            return stricter(quick, await full())
        judging = asyncio.create_task(guard.judge(policy, self._guarded, watched=quick.watched))
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

    async def await_verdict(self) -> None:
        """See RequestSafety."""
        if self._reading is not None:
            self._decide(await asyncio.shield(self._reading))

    def _decide(self, verdict: Verdict) -> None:
        """Take a verdict for the last word, keep it, and refuse if that is what it says."""
        self._verdict = verdict
        if verdict.stage != "guard":  # which counts for itself
            self._service.counters.judged(verdict)
        self._service.counters.would_act(as_enforced(verdict, self._policy))
        self._service.keep(self, verdict, "prompt", self._text)
        if self._records.prompt(verdict, self._policy):
            self._judged.add_recorded(self._turns.recent[-1:])
        self._text = ""
        if verdict.blocked:
            message = self._policy.notice(verdict, self.rid)
            raise ContentFiltered(message, moderation.of_blocked_prompt(verdict))
        if verdict.unread:
            return
        self._judged.add_passed(self._turns.users)
        if not verdict.watched:
            self._judged.add_answers(self._turns.answers)
        elif not self._strict:  # too late for this turn's prompt; see `render`
            self._judged.add_watched(self._turns.recent[-1:], verdict)

    async def render(self, engine: Engine, request: ChatRequest) -> Prompt:
        """See RequestSafety. What only the full verdict watches gets the strict text a turn later."""
        if self._unread is not None and self._unread.watched:
            await self._judge_now()
        text = self._policy.alignment(watched=self._strict)
        if text is None:
            return await engine.render(request)
        return await self._service.policy_prompt.render(engine, request, text)

    async def _judge_now(self) -> None:
        """Judge a prompt that may well be refused before the engine computes it, and before it is stored."""
        self.start_full_screen()
        try:
            await self.await_verdict()
        finally:
            self.refused_turn = None

    def open_screen(self) -> AnswerScreen:
        """See RequestSafety."""
        service, verdict = self._service, self._verdict
        broke = partial(service.broke, self.rid)
        try:
            assert verdict is not None
            self._screening = service.streams.for_request(
                self.request.n,
                verdict.watched,
                verdict.harm,
                self._policy,
                owner=self.request.owner,
                steering=self._steering,
                scores_wanted=self.request.moderated,
                on_broken=broke,
                fail_open=service.fail_open,
            )
        except Exception as exc:  # noqa: BLE001  # whatever it is, nothing goes on unscreened
            passes = False
            with contextlib.suppress(Exception):  # a failure that cannot even be counted lets nothing pass
                broke(exc)
                passes = service.fail_open
            self._screening = Screening(broken=True, fail_open=passes)
        return self._screening

    def ended(
        self, screen: AnswerScreen | None, counts: Mapping[int, Counts], withheld_tokens: int
    ) -> Mapping[str, Any] | None:
        """See RequestSafety."""
        screening = self._screening
        if screen is None or screening is None:
            return None
        assert self._verdict is not None
        prompt = as_enforced(self._verdict, self._policy)
        halted = screening.halted
        verdicts = screening.verdicts()
        if screening.broken:
            if not self.request.moderated:
                return None
            failed = moderation.failed("safety_unavailable", "The stream screen failed; this was let pass.")
            return moderation.moderation(moderation.results([prompt]), failed)
        for choice, peak in enumerate(screening.peaks()):
            ended_it = halted if choice == screening.halted_choice else None
            judged = self._records.answer(peak, self._policy, ended_it)
            if judged is not None and self._policy.observing:
                self._service.counters.would_act(judged)
        if halted is not None:
            self._halted(screening, halted, counts, withheld_tokens)
            body = moderation.of_answer(self._scored(prompt), verdicts)
            return {**body, "message": self._policy.notice(halted, self.rid)}
        for verdict in verdicts:
            self._service.counters.judged(verdict)
            if verdict.action == "flag":
                self._service.keep(self, verdict, "answer", "")
        return moderation.of_answer(prompt, verdicts) if self.request.moderated else None

    def _halted(
        self, screening: Screening, halted: Verdict, counts: Mapping[int, Counts], withheld_tokens: int
    ) -> None:
        """The lag is known now: how far the engine came before it stopped."""
        choice = screening.halted_choice
        generated = 0 if choice is None else counts.get(choice, Counts()).completion_tokens
        late = replace(halted, lag_tokens=max(halted.lag_tokens, generated - screening.hit_at))
        counters = self._service.counters
        counters.judged(late)
        counters.halted(leaked_tokens=screening.leaked_tokens, dropped_tokens=withheld_tokens)
        self._service.keep(self, late, "answer", screening.take_withheld_text())

    def _scored(self, verdict: Verdict) -> Verdict:
        """A verdict on the prompt with the scores that it was let pass without, where they can be had."""
        if verdict.scores:
            return verdict
        with contextlib.suppress(ScreenFailed):  # of an answer that has been halted, which stands
            return replace(
                verdict, scores=self._service.prompts.ngram_verdict(self._turns, self._policy).scores
            )
        return verdict

    def close(self, stream: TokenStream) -> None:
        """See RequestSafety."""
        if self._reading is not None:
            self._reading.cancel()
        screening = self._screening
        if screening is None or screening.broken or screening.halted is not None:
            return
        with contextlib.suppress(ReplayExpired):  # the beginning of a very long one is not held any more
            for answer in answers(*stream.whole()).values():
                self._judged.add_released(answer.message)


def _check_images(policy: Policy, messages: Sequence[Message]) -> None:
    """Refuse what no screen reads, if that is what the policy says. Raises BadRequest."""
    if policy.images != "refuse":
        return
    for number, message in enumerate(messages):
        if count_media(message.get("content")):
            raise BadRequest(
                f"messages[{number}] has an image, and this server's policy refuses images: no safety screen"
                " reads them. Send the request without it.",
                code="images_refused",
                param="messages",
            )


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # nobody may be waiting any more
