"""The screens and the policy of a server, and where their verdicts are kept."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from structlog.typing import FilteringBoundLogger

from app.log import safe_traceback
from app.safety.classifiers.bundled_models import Models
from app.safety.counters import SafetyCounters
from app.safety.guard.tier import GuardTier
from app.safety.policies.policy import Policies
from app.safety.policies.policy_prompt import PolicyPrompt
from app.safety.prompt.prompt_screen import PromptScreen, prompt_threads
from app.safety.prompt.remembered import Judged
from app.safety.session.recorder import SafetyRecorder, submit_or_log
from app.safety.session.session import SafetySession
from app.safety.stream.answer_encoder import AnswerEncoder
from app.safety.stream.stream_screen import StreamScreen
from app.safety.verdict import ScreenBusy, Verdict
from app.settings import Settings
from app.store import conversations, safety_events
from app.store.conversations import NewTurn
from app.store.database import Database
from app.store.safety_events import SafetyEvent, Subject


class SafetyService:
    """The parts that the sessions of all requests share (app.safety.session.screened)."""

    def __init__(
        self,
        settings: Settings,
        models: Models,
        counters: SafetyCounters,
        *,
        database: Database,
        log: FilteringBoundLogger,
        guard: Callable[[], GuardTier | None],
    ) -> None:
        """Raises SettingsError."""
        self.fail_open = settings.safety_fail_open
        self._answer_encoder = AnswerEncoder(models.reviewer, counters)
        self.prompts = PromptScreen(
            models.prompts,
            counters,
            sure_below=models.sure_below,
            threads=prompt_threads(len(os.sched_getaffinity(0))),
            fail_open=self.fail_open,
        )
        self.streams = StreamScreen(models.answers, self._answer_encoder.review, counters.hold_back.observe)
        self.policies = Policies.of(settings, models.directory)
        self.counters = counters
        self.recorder = SafetyRecorder(database, log, settings.safety_records_days)
        self.guard = guard
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
        self._answer_encoder.close()

    def screen_broke(self, request_id: str, exc: Exception) -> None:
        """Count and log a stream screen that failed; its answer passes if the server fails open."""
        passed = self.fail_open and not isinstance(exc, ScreenBusy)
        self.counters.failed("stream", "error", passed=passed)
        self._log.error("screen_broke", request_id=request_id, error=safe_traceback(exc), passed=passed)

    def store_verdict(
        self,
        session: SafetySession,
        verdict: Verdict,
        subject: Subject,
        text: str,
        refused_turn: NewTurn | None = None,
    ) -> None:
        """Store a verdict that did something, and the turn that it blocked where the journal does not."""
        if verdict.action is None:
            return
        request = session.request
        event = SafetyEvent(
            at_us=time.time_ns() // 1000,
            request_id=request.request_id,
            owner=request.owner,
            key_id=None if session.key is None else session.key.id,
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

        def unit(connection: Any) -> None:
            safety_events.add(connection, event)
            if refused_turn is not None and verdict.blocked:
                conversations.add_blocked_turn(connection, refused_turn)

        submit_or_log(self._database, self._log, unit, "safety_event_lost", request_id=request.request_id)
