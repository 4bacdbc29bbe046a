"""The session of a screened request: verdicts on its prompt, a screen over its answer, events of both."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from app.concurrency.owner_threads import LARGE_BYTES
from app.core import ChatRequest, Counts, Engine, Key, Prompt
from app.errors import BadRequest, ContentFiltered
from app.messages import count_media
from app.safety import moderation
from app.safety.policies.policy import Policy
from app.safety.prompt.remembered import JudgedTexts
from app.safety.session.recorder import RequestRecords, as_enforced
from app.safety.session.service import SafetyService
from app.safety.session.session import AnswerScreen, PastTurns, SafetySession, SessionOf
from app.safety.stream.answer_context import AnswerContext, answer_context_of
from app.safety.stream.stream_screen import Screening
from app.safety.text.turns import Message, Turns, conversation_of, read_request, text_of
from app.safety.verdict import ScreenFailed, Verdict, as_state, from_state, stricter
from app.store.conversations import NewTurn


class ScreenedSession(SafetySession):
    """Safety along one screened request; see SafetySession for its steps."""

    def __init__(self, service: SafetyService, request: ChatRequest, key: Key | None) -> None:
        super().__init__(request, key)
        self._service = service
        self._records = RequestRecords(service.recorder, None if key is None else key.id)
        level = None if key is None else key.terms.safety
        self._policy: Policy = service.policies.current.at_level(level)
        self._judged: JudgedTexts = service.judged.of(request.owner, self._policy.hash)
        self._turns = Turns([], [])
        self._answer_context = AnswerContext()
        self._guarded: Sequence[Message] = ()
        self._refused_turn: NewTurn | None = None
        """The turn that is to be stored if its prompt is refused; None where the journal stores it."""
        self._verdict: Verdict | None = None
        self._unread: Verdict | None = None
        """The verdict of the n-grams, while the full one is yet to be made."""
        self._reading: asyncio.Task[Verdict] | None = None
        self._screening: Screening | None = None
        self._text = ""
        self._strict = False
        """True if the model is to be strict."""

    @property
    def undecided(self) -> bool:
        return self._reading is not None and not self._reading.done()

    # The prompt

    async def prescreen(self, request: ChatRequest, past: PastTurns, turn: NewTurn | None) -> None:
        service, guard = self._service, self._service.guard()
        _check_images(self._policy, request.body["messages"])
        role = await self._read_texts(request, past, guarded=guard is not None)
        turns, policy = self._turns, self._policy
        self._records.begin(self._text, role, again=self._judged.is_any_recorded(turns.recent[:-1]))
        verdict, sure = service.prompts.prescreen(turns, policy, past.strikes, scored=request.moderated)
        watched = self._judged.watched_by(turns.recent)
        if watched is not None:
            verdict, sure = stricter(verdict, watched), False
        # Most prompts that the full verdict watches are in doubt by now, short of the n-grams' threshold.
        self._strict = verdict.watched or policy.is_uncertain(verdict.scores)
        if sure and guard is None:
            self._decide(verdict)
            return
        if verdict.watched:
            self._refused_turn = turn
        self._verdict = self._unread = verdict

    def state(self) -> Mapping[str, Any]:
        verdict = self._verdict
        return {} if verdict is None else {"verdict": as_state(verdict), "strict": self._strict}

    async def restore(self, request: ChatRequest, past: PastTurns, state: Mapping[str, Any]) -> None:
        """Restore a suspended session. A prompt that was not judged then is watched at least."""
        role = await self._read_texts(request, past, guarded=False)
        if state:
            verdict = from_state(state["verdict"])
        else:
            verdict, _ = self._service.prompts.prescreen(self._turns, self._policy, past.strikes)
            verdict = replace(verdict, action="watch")
        self._verdict, self._strict = verdict, state.get("strict", True)
        self._records.begin(self._text, role, watched=verdict.watched)

    async def _read_texts(self, request: ChatRequest, past: PastTurns, *, guarded: bool) -> object:
        """Find what is to be read; of a large request in a thread. Returns the newest message's role.

        Raises ScreenFailed.
        """
        body, judged, newest = request.body, self._judged, request.body["messages"][-1]

        def read() -> tuple[Turns, Sequence[Message]]:
            turns = read_request(body, judged, past.from_store)
            judged.watched_by(turns.recent)  # hashes them now, as they will be looked up on the loop
            return turns, conversation_of(body, judged, past.from_store) if guarded else ()

        self._answer_context = answer_context_of(body, body["messages"], is_raw=request.raw is not None)
        if past.num_bytes <= LARGE_BYTES:
            self._turns, self._guarded = read()
        else:
            in_thread = self._service.prompts.in_thread
            self._turns, self._guarded = await in_thread(request.owner, past.num_bytes, read)
        self._policy = self._policy.after(past.strikes)
        self._text = text_of(newest.get("content"))
        return newest.get("role")

    def start_full_screen(self) -> None:
        if self._unread is not None:
            ngrams, self._unread = self._unread, None
            self._reading = asyncio.create_task(self._read(ngrams), name=f"prompt-{self.rid}")
            self._reading.add_done_callback(_retrieve)

    async def _read(self, ngrams: Verdict) -> Verdict:
        """The full verdict, of the guard too where there is one; both read at once."""
        service, policy, guard = self._service, self._policy, self._service.guard()
        full = partial(service.prompts.full_verdict, self._turns, policy, owner=self.request.owner)
        if guard is None:
            return stricter(ngrams, await full())
        judging = asyncio.create_task(guard.judge(policy, self._guarded, watched=ngrams.watched))
        try:
            verdict = stricter(ngrams, await full())
            if verdict.blocked:
                return verdict
            guarded = await judging
        finally:
            judging.cancel()
            judging.add_done_callback(_retrieve)
        if guarded is None:
            if verdict.watched:  # a failed guard fails open for unwatched requests only
                raise ScreenFailed
            return verdict
        return stricter(verdict, guarded)

    async def await_verdict(self) -> None:
        if self._reading is not None:
            self._decide(await asyncio.shield(self._reading))

    def _decide(self, verdict: Verdict) -> None:
        """Make a verdict final: keep it, and refuse if it blocks."""
        self._verdict = verdict
        if verdict.stage != "guard":  # which counts for itself
            self._service.counters.judged(verdict)
        self._service.counters.would_act(as_enforced(verdict, self._policy))
        self._service.store_verdict(self, verdict, "prompt", self._text, self._refused_turn)
        if self._records.record_prompt(verdict, self._policy):
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
        """Render the prompt under its policy. Watched by the full verdict only, it is strict a turn later.

        A prompt that may well be refused is judged before the engine computes it, and before it is stored.
        """
        if self._unread is not None and self._unread.watched:
            self.start_full_screen()
            try:
                await self.await_verdict()
            finally:
                self._refused_turn = None
        text = self._policy.alignment(watched=self._strict)
        if text is None:
            return await engine.render(request)
        return await self._service.policy_prompt.render(engine, request, text)

    # The answer

    def open_screen(self) -> AnswerScreen:
        service, verdict = self._service, self._verdict
        broke = partial(service.screen_broke, self.rid)
        try:
            assert verdict is not None
            self._screening = service.streams.for_request(
                self.request.n,
                verdict.watched,
                verdict.harm,
                self._policy,
                owner=self.request.owner,
                context=self._answer_context,
                scores_wanted=self.request.moderated,
                on_broken=broke,
                fail_open=service.fail_open,
            )
        except Exception as exc:  # noqa: BLE001  # any error: nothing is released unscreened
            passes = False
            with contextlib.suppress(Exception):  # a failure that cannot even be counted lets nothing pass
                broke(exc)
                passes = service.fail_open
            self._screening = Screening(broken=True, fail_open=passes)
        return self._screening

    def conclude(
        self, screen: AnswerScreen | None, counts: Mapping[int, Counts], withheld_tokens: int
    ) -> Mapping[str, Any] | None:
        screening, counters, policy = self._screening, self._service.counters, self._policy
        if screen is None or screening is None:
            return None
        assert self._verdict is not None
        prompt = as_enforced(self._verdict, policy)
        halted = screening.halted
        verdicts = screening.verdicts()
        if screening.broken:
            if not self.request.moderated:
                return None
            failed = moderation.failed(
                "safety_unavailable", "The stream screen failed; the answer passed unscreened."
            )
            return moderation.moderation(moderation.results([prompt]), failed)
        for choice, peak in enumerate(screening.peaks()):
            ended_it = halted if choice == screening.halted_choice else None
            judged = self._records.record_answer(peak, policy, ended_it)
            if judged is not None and policy.observing:
                counters.would_act(judged)
        if halted is not None:
            self._halted(screening, halted, counts, withheld_tokens)
            body = moderation.of_answer(self._scored(prompt), verdicts)
            return {**body, "message": policy.notice(halted, self.rid)}
        for verdict in verdicts:
            counters.judged(verdict)
            if verdict.action == "flag":
                self._service.store_verdict(self, verdict, "answer", "")
        return moderation.of_answer(prompt, verdicts) if self.request.moderated else None

    def _halted(
        self, screening: Screening, halted: Verdict, counts: Mapping[int, Counts], withheld_tokens: int
    ) -> None:
        """Account for a halt. Its lag is known now: the tokens that the engine made before it stopped."""
        choice = screening.halted_choice
        generated = 0 if choice is None else counts.get(choice, Counts()).completion_tokens
        late = replace(halted, lag_tokens=max(halted.lag_tokens, generated - screening.hit_at))
        counters = self._service.counters
        counters.judged(late)
        counters.halted(leaked_tokens=screening.leaked_tokens, dropped_tokens=withheld_tokens)
        self._service.store_verdict(self, late, "answer", screening.take_withheld_text())

    def _scored(self, verdict: Verdict) -> Verdict:
        """A verdict on the prompt with the scores that were missing when it passed, where available."""
        if not verdict.scores:
            with contextlib.suppress(ScreenFailed):  # of an answer that has been halted, which stands
                scores = self._service.prompts.ngram_verdict(self._turns, self._policy).scores
                return replace(verdict, scores=scores)
        return verdict

    def close(self, released: Iterable[Mapping[str, Any]]) -> None:
        if self._reading is not None:
            self._reading.cancel()
        screening = self._screening
        if screening is not None and not screening.broken and screening.halted is None:
            for message in released:
                self._judged.add_released(message)


def session_of(service: SafetyService | None) -> SessionOf:
    """Makes the sessions of requests; without a service, those of a server with safety off."""
    return SafetySession if service is None else partial(ScreenedSession, service)


def _check_images(policy: Policy, messages: Sequence[Message]) -> None:
    """Refuse what no screen reads, if the policy says so. Raises BadRequest."""
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


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # retrieved: no task may await it
