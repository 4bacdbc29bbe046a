"""The composition root: what the process consists of, opened in order, closed in reverse."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection
from functools import partial

from structlog.typing import FilteringBoundLogger

from app.admission.admit import Admission
from app.admission.estimates import FILE as PROFILE_FILE
from app.admission.estimates import ThroughputProfile
from app.admission.tuning import AdmissionTuning
from app.core import Engine, Health
from app.engine.supervise import history_of, start_stage_of
from app.engine_factory import (
    OnDeath,
    build_engine,
    build_guard,
    build_guard_engine,
    build_small_engine,
    check_child_args,
    check_names,
)
from app.errors import Draining, EngineNotReady, UnknownModel
from app.journal.history import History
from app.journal.journal import Journal
from app.journal.reconcile import reconcile
from app.journal.retention import Retention
from app.log import safe_traceback
from app.metering.abuse import AbuseWatch
from app.metering.audit import LedgerAudit
from app.metering.budgets import Budgets
from app.metering.estimate import TextCounter, prompt_estimate
from app.metering.gpus import Gpus
from app.metering.limits import Limiter
from app.metering.pricing import PriceTable
from app.metering.reads import Reads
from app.metering.traffic import ITL_S, LOOP_LAG_S, Histogram, ResponseCounts, Traffic
from app.pipeline.live import LiveRequests, LoadHistory, LoadSample
from app.pipeline.serve import Pipeline
from app.pipeline.spans import Spans
from app.prefix_report.report import PrefixReport
from app.resume.suspensions import Suspensions
from app.routing.backend import Backend, Backends
from app.routing.degraded_mode import Step, degrade_of
from app.routing.pressure import pressure_of
from app.routing.router import AUTO, Router
from app.safety.classifiers.bundled_models import Models, load
from app.safety.counters import HOLD_BACK_S, SafetyCounters
from app.safety.guard.tier import GuardTier
from app.safety.policies.policy import Policy
from app.safety.session.screened import session_of
from app.safety.session.service import SafetyService
from app.safety.session.session import SessionOf
from app.settings import Settings
from app.store.database import Database
from app.store.key_table import KeyTable
from app.store.purge import Purge
from app.stream.archive import Archive
from app.stream.registry import StreamRegistry
from app.stream.token_stream import SHUTDOWN, SUSPENDED

NONSTREAM_RING_FACTOR = 8
"""Ring of a whole answer, in multiples of `stream_bytes`."""
_START_RETRY_S = 5
PRESSURE_POLL_S = 1.0
"""Seconds between two looks at the queue for degraded mode."""


EngineFactory = Callable[[Settings, OnDeath], Engine]


ModelLoader = Callable[[], Models]


class Runtime:
    """Everything that lives as long as the process; HTTP is put in front of it."""

    def __init__(
        self,
        settings: Settings,
        log: FilteringBoundLogger,
        make_engine: EngineFactory | None = None,
        load_models: ModelLoader | None = None,
    ) -> None:
        self.settings = settings
        self.log = log
        self.phase = "starting: the engine loads the model"
        self._started = False
        self._stage = "opening the store"
        """The stage of the start; empty while the engine reports its own."""
        self.engine_ended: asyncio.Event = asyncio.Event()
        self.engine = (make_engine or build_engine)(settings, self._engine_died)
        self.restarts = history_of(self.engine)
        self.small_engine = build_small_engine(settings)
        """None without `small_model`; so is the router."""
        self.streams = StreamRegistry(settings, log)
        self._text_counter = TextCounter()
        self.backends, self.router = self._build_backends()
        self.degrade = degrade_of(settings)
        """None with `degrade` off."""
        self.database = Database(settings.data_dir)
        self.keys = KeyTable(self.database, log)
        self._watching: asyncio.Task[None] | None = None
        self.prices = PriceTable.parse(settings.prices)
        self.archive = Archive(self.database, NONSTREAM_RING_FACTOR * settings.stream_bytes)
        self.history = History(self.database)
        self.traffic = Traffic()
        self.responses = ResponseCounts()
        self.balance = LedgerAudit(log)
        self.limiter = Limiter(count_text=self._text_counter, grace_left_s=self.streams.grace_left_s)
        self.reads = Reads(self.limiter, settings.max_reads_per_s)
        self.budgets = Budgets(self.database, self.limiter)
        self.abuse = AbuseWatch(self.database)
        self.prefixes = PrefixReport(log)
        self.restarts.attach(log, lambda: self.prefixes.restarted(self.engine.model.id))
        self.num_reconciled = 0
        """Requests that a dead process had left open and this one's start has settled."""
        self.journal, self.suspensions = self._build_journal()
        self.purge = Purge(self.database, log, settings.purge_after_days)
        self.loop_lag = Histogram(LOOP_LAG_S)
        self.live, self.load_history = LiveRequests(), LoadHistory()
        self._background: list[asyncio.Task[None]] = []
        self.safety_counters = SafetyCounters(Histogram(HOLD_BACK_S))
        self.safety = self.build_safety(load_models or load)
        """None with `safety` off; so is the next."""
        self.policies = None if self.safety is None else self.safety.policies
        self.guard_engine = build_guard_engine(settings, self._guard_died)
        self.guard: GuardTier | None = None
        """None without `safety_guard_model`, and until its engine has started."""
        self.gpus = Gpus()
        self.spans = Spans(settings.otlp_endpoint) if settings.otlp_endpoint else None
        self.pipeline = self.build_pipeline(session_of(self.safety))

    def _build_journal(self) -> tuple[Journal, Suspensions]:
        """The journal, and the requests that an earlier process has suspended."""
        settings, log, settled = self.settings, self.log, self.budgets.add_bill
        retention = Retention(self.database, settings.retention_s, lambda: self.ready)
        journal = Journal(
            self.database,
            self.prices,
            self.balance,
            self.traffic,
            log=log,
            retention=retention,
            on_settled=settled,
        )
        timeout_s, is_live = settings.suspend_timeout_s, self.streams.is_live
        return journal, Suspensions(
            self.database, journal, log, timeout_s, is_live=is_live, on_settled=settled
        )

    def build_pipeline(self, session_of: SessionOf) -> Pipeline:
        """The way of a request through these parts, with this safety along it."""
        return Pipeline(
            backends=self.backends,
            history=self.history,
            journal=self.journal,
            suspensions=self.suspensions,
            traffic=self.traffic,
            session_of=session_of,
            prefixes=self.prefixes,
            live=self.live,
            log=self.log,
            on_ended=None if self.spans is None else self.spans.record,
        )

    def _build_backends(self) -> tuple[Backends, Router | None]:
        """The models, and what chooses between them where there are two."""
        large = self._backend(self.engine)
        if self.small_engine is None:
            return Backends(large), None
        small = self._backend(self.small_engine.engine, self.small_engine.name)
        return Backends(large, small), Router(small, large)

    def _backend(self, engine: Engine, name: str = "") -> Backend:
        """An engine, and the way into it."""
        settings, streams, tuning = self.settings, self.streams, AdmissionTuning()
        admission = Admission(
            engine,
            settings,
            ThroughputProfile(settings.data_dir / PROFILE_FILE, tuning),
            tuning,
            count_prompt=partial(prompt_estimate, count=self._text_counter),
            itl=Histogram(ITL_S),
            abort_unread=lambda: streams.abort_unread(engine.model.id),
        )
        return Backend(engine, admission, name, self.retry_after_s)

    def build_safety(self, load_models: ModelLoader) -> SafetyService | None:
        """The screens and their policy; None with `safety` off. Raises SettingsError."""
        if self.settings.safety == "off":
            return None
        return SafetyService(
            self.settings,
            load_models(),
            self.safety_counters,
            database=self.database,
            log=self.log,
            guard=lambda: self.guard,
        )

    async def open_store(self) -> None:
        """Open the store and read its keys; a second call does nothing. Raises StoreRefused."""
        if self._watching is None:
            await self.database.open()
            await self.keys.load()
            self._watching = asyncio.create_task(self.keys.watch(), name="keys")

    async def start(self) -> None:
        """Open the store, start the background tasks and the engine; returns when requests can be served.

        Raises StoreRefused, EngineFailed.
        """
        await self.open_store()
        if self.safety is not None:
            await self.safety.start()
            self._warn_of_policy(self.safety.policies.current)
        self.num_reconciled = await reconcile(self.database)
        if self.num_reconciled:
            hint = "a process ended without settling them"
            self.log.warning("reconciled", requests=self.num_reconciled, hint=hint)
        await self.suspensions.open()
        self.streams.start()
        self.journal.start()
        self._background = [
            asyncio.create_task(self.purge.run(), name="purge"),
            asyncio.create_task(self.suspensions.run(), name="suspensions"),
            *(
                asyncio.create_task(self._run_admission(backend.admission), name="admission")
                for backend in self.backends
            ),
            asyncio.create_task(self._watch_pressure(), name="pressure"),
            asyncio.create_task(self.gpus.run(), name="gpus"),
        ]
        started_s = asyncio.get_running_loop().time()
        await asyncio.to_thread(check_child_args, self.settings)
        self._stage = ""
        await self.engine.start()
        if self.small_engine is not None:
            check_names(self.engine.model.id, self.small_engine.name)
            self._stage = "starting the small model"
            await self.small_engine.start()
        if self.guard_engine is not None:
            self._stage = "starting the guard model"
            await self.guard_engine.start()
            self.guard = build_guard(self.settings, self.guard_engine, self.safety_counters)
        # In a thread: a large vocabulary takes half a second.
        exact = await asyncio.to_thread(lambda: self._text_counter.use(self.engine.tokenizer_json()))
        for backend in self.backends:
            backend.admission.restart()
        self.phase, self._started = "ready", True
        self._note_models()
        took_s = asyncio.get_running_loop().time() - started_s
        card = self.engine.model
        self.log.info(
            "ready",
            model=card.id,
            context_length=card.context_length,
            kv_capacity_tokens=card.kv_capacity_tokens,
            engine_start_s=round(took_s, 2),
            data_dir=str(self.settings.data_dir),
            prompt_estimates="merges" if exact else "bytes",
        )

    def _note_models(self) -> None:
        """Let the commands beside the server know which models there are."""
        self.database.note_models([backend.id for backend in self.backends if backend.ready])

    async def note_start_stage(self) -> str:
        """The current stage of the start, in words, noted in `phase`."""
        stage = self._stage or await asyncio.to_thread(start_stage_of, self.engine)
        if self.phase.startswith("starting"):
            self.phase = f"starting: {stage}"
        return stage

    def start_failed(self, reason: str) -> None:
        """The engine did not start, and will not."""
        self.phase = f"dead: {reason}"
        self.log.error("engine_start_failed", reason=reason)

    def _engine_died(self, reason: str) -> None:
        """Called by the engine, on the loop, when it cannot continue."""
        self.phase = f"dead: {reason}"
        self.log.error("engine_died", reason=reason)
        self.backends.large.admission.refuse_waiting(
            lambda: EngineNotReady("The engine died; send the request again.", retry_after_s=_START_RETRY_S)
        )
        self.engine_ended.set()

    def _guard_died(self, reason: str) -> None:
        """Called by the guard's engine: until its server is back every verdict is a failure (GuardTier)."""
        self.log.error("guard_died", reason=reason)

    @property
    def ready(self) -> bool:
        """True if new requests are taken."""
        return self.phase == "ready" and self.engine.health() is Health.READY

    @property
    def state(self) -> str:
        """The phase, in words; an engine that is served elsewhere may be away for a while in any of them."""
        if self.phase == "ready" and self.engine.health() is not Health.READY:
            reason = self.restarts.reason
            return "waiting: the engine cannot be reached" if reason is None else f"restarting: {reason}"
        return self.phase

    async def _watch_pressure(self) -> None:
        """Move degraded mode by the large model's queue, log the small model, time the loop; for ever."""
        small, state, failures = self.small_engine, "starting", 0
        while True:
            due_s = time.monotonic() + min(PRESSURE_POLL_S, self.settings.degrade_rise_s / 2)
            await asyncio.sleep(due_s - time.monotonic())
            lag_s = max(0.0, time.monotonic() - due_s)
            self.loop_lag.observe(lag_s)
            try:
                self.load_history.observe(lag_s, self._load_now)
                self._poll_pressure()
            except Exception as exc:  # noqa: BLE001  # the next look may be better
                self.log.error("pressure_watch_failed", error=safe_traceback(exc))
            if small is not None and small.num_failures != failures:
                failures = small.num_failures
                self.prefixes.restarted(small.name)  # long before another one answers
            if small is not None and small.state != state:
                state = small.state
                self.log.info("small_model", model=small.name, state=state)
                self._note_models()

    def _load_now(self, at_unix_s: float) -> LoadSample:
        """The load of all models together."""
        waiting = sum(len(backend.admission.queue) for backend in self.backends)
        loads = [backend.engine.load() for backend in self.backends if backend.ready]
        running = sum(load.num_running_reqs for load in loads)
        used_tokens = sum(load.used_tokens for load in loads)
        return LoadSample(at_unix_s, running, waiting, used_tokens, self.live.generated_tokens)

    def _poll_pressure(self) -> None:
        mode = self.degrade
        if mode is None:
            return
        previous, admission = mode.step, self.backends.large.admission
        mode.observe(pressure_of(admission, time.monotonic()))
        admission.load_shedder.degraded(refuses=mode.step is Step.REFUSE)
        if mode.step is not previous:
            self.log.warning("degraded", step=mode.step.label, pressure=round(mode.pressure, 2))

    def check_ready(self) -> None:
        """Raise EngineNotReady unless requests can be served now, by any model."""
        # What starts after the engine, as the guard, must be there too: nothing goes unscreened meanwhile.
        if not self._started or not any(backend.ready for backend in self.backends):
            raise EngineNotReady(
                f"The server cannot take requests yet ({self.state}); try again.",
                retry_after_s=self.retry_after_s(),
            )

    def retry_after_s(self) -> int:
        """Seconds until the engine may be there: the rest of its restart, if it is being restarted."""
        return _START_RETRY_S if self.restarts.reason is None else self.restarts.retry_after_s()

    def check_model(self, name: str, allowed: Collection[str] | None = None) -> None:
        """Raise UnknownModel unless a request may name this model, or `auto` where there are two."""
        served = [backend.id for backend in self.backends]
        usable = [backend.id for backend in self.backends.allowed(allowed)]
        if name in usable or (name == AUTO and self.router is not None and usable):
            return
        if allowed is not None:
            raise UnknownModel(
                f"The model {name!r} is not served to this key; GET /api/models lists those that are.",
                param="model",
            )
        raise UnknownModel(
            f"The model {name!r} is not served here; this server has {' and '.join(map(repr, served))}.",
            param="model",
        )

    def reload_policy(self) -> Policy | None:
        """Take the policy file as it is now; None with `safety` off.

        Raises PolicyError, and then the policy stays as it was.
        """
        if self.policies is None:
            return None
        previous, policy = self.policies.current, self.policies.reload()
        self.log.info("policy_reloaded", policy_hash=policy.hash, was=previous.hash)
        self._warn_of_policy(policy)
        return policy

    def _warn_of_policy(self, policy: Policy) -> None:
        """Say what the policy in force gives up."""
        if weakened := policy.weakened():
            hint = "less is refused or watched than by the built-in policy"
            self.log.warning("policy_loosened", gives_up=weakened, policy_hash=policy.hash, hint=hint)

    async def drain(self) -> None:
        """Take nothing new, give live streams `drain_timeout_s` to finish, and suspend the others."""
        self.phase = "draining"
        self.log.info("draining", live_streams=self.streams.num_live, hint="a second signal ends the wait")
        for backend in self.backends:
            backend.admission.refuse_waiting(
                lambda: Draining("The server is stopping; send the request again.", retry_after_s=5)
            )
        reason = SUSPENDED if self.settings.suspend_timeout_s else SHUTDOWN
        await self.streams.drain(self.settings.drain_timeout_s, reason)
        await self.suspensions.drained()

    async def _run_admission(self, admission: Admission) -> None:
        """Run admission again after any failure: without it no request would be admitted."""
        while True:
            try:
                await admission.run()
            except Exception as exc:  # noqa: BLE001  # deadlines must be kept
                self.log.error("admission_broke", error=safe_traceback(exc))

    async def aclose(self) -> None:
        """Close streams, engines, safety, journal, and the store last, as all others write to it."""
        for task in (*self._background, self._watching):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        guards = [g.aclose for g in (self.guard, self.guard_engine) if g is not None]
        small = [] if self.small_engine is None else [self.small_engine.aclose]
        engines = [*guards, *small, self.engine.aclose]
        safety = [] if self.safety is None else [self.safety.aclose]
        spans = [] if self.spans is None else [self.spans.aclose]
        stores = (self.journal.aclose, self.database.aclose)
        for close in (self.streams.aclose, *engines, *safety, *spans, *stores):
            try:
                await close()
            except Exception as exc:  # noqa: BLE001  # the rest must be closed all the same
                self.log.error("close_failed", error=safe_traceback(exc))
