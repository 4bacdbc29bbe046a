"""A pipeline over a real store, whose engine, admission and screens a test moves by hand."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import structlog

from app.admission.admit import Admission
from app.api.openai.chat_completion import ChunkWire
from app.core import ChatRequest, Counts, Delta, Engine, FinishReason, Health, Key, ModelCard, Prompt
from app.errors import Cancelled, ServingError
from app.journal.history import History
from app.journal.journal import Journal
from app.journal.retention import Retention
from app.metering.audit import LedgerAudit
from app.metering.budgets import Allowance
from app.metering.limits import UNLIMITED, Lease
from app.metering.pricing import PriceTable
from app.metering.traffic import Traffic
from app.pipeline.live import LiveRequests
from app.pipeline.serve import Pipeline
from app.prefix_report.report import PrefixReport
from app.resume.continue_answer import ContinuedStart
from app.resume.suspensions import Suspensions
from app.routing.backend import Backend, Backends
from app.safety.session.screened import session_of as of_service
from app.safety.session.service import SafetyService
from app.safety.session.session import AnswerScreen, PassThrough, PastTurns, SafetySession, SessionOf
from app.safety.verdict import Verdict
from app.store.conversations import NewTurn
from app.store.database import Database
from app.store.ledger import BillingTerms
from app.stream.ring import Ring
from app.stream.token_stream import TokenStream
from app.stream.transcript import ChoiceMessage, build_messages
from tests.support.sse_client import until

MODEL = "llama"
PRICES = PriceTable.parse([{"model": MODEL, "input": "0.001", "cached_input": "0.0005", "output": "0.01"}])
"""Micro-dollars a token: 1 of a prompt, 0.5 where it was cached, 10 of an answer."""
TERMS = BillingTerms(20260921, MODEL, "local", PRICES.price_of(MODEL, 1_790_000_000_000_000))
"""The terms of a request that was reserved on that day."""
LONG_S = 60.0


class HandEngine:
    """An engine that generates what a test says, when the test says it."""

    def __init__(self) -> None:
        self.prompt = Prompt(range(10), 100, None)
        self.model = ModelCard(MODEL, 1000, 1000, 900, frozenset())
        self.health_now = Health.READY
        self.render_errors: list[ServingError] = []
        self.rendered: list[ChatRequest] = []
        self.generated: list[str] = []
        self.aborted: list[str] = []
        self.late_tokens = 0
        """Tokens that an aborted choice has made when it ends, beyond those that the test said."""
        self.lost_tokens = 0
        """Tokens that were handed over and never came out."""
        self._deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self._counts: dict[int, Counts] = {}
        self._choices = range(1)
        self._finished: set[int] = set()

    def say(self, text: str, choice: int = 0, *, tokens: int = 1) -> None:
        """Generate a text of so many tokens."""
        self._put(text, choice, tokens, None)

    def finish(self, reason: FinishReason = "stop", choice: int = 0, text: str = "") -> None:
        """End a choice, with a last token where there is text."""
        self._finished.add(choice)
        self._put(text, choice, int(bool(text)), reason)

    def fail(self, error: Exception) -> None:
        """Raise where the next delta is read."""
        self._deltas.put_nowait(error)

    def _put(self, text: str, choice: int, tokens: int, reason: FinishReason | None) -> None:
        counts = self._counts.get(choice, Counts(len(self.prompt.token_ids), 0, 4, 0))
        counts = counts._replace(completion_tokens=counts.completion_tokens + tokens)
        self._counts[choice] = counts
        self._deltas.put_nowait(Delta(choice, "text", text, (7,) * tokens, counts, reason))

    @property
    def _unfinished(self) -> list[int]:
        return [choice for choice in self._choices if choice not in self._finished]

    def health(self) -> Health:
        """See Engine."""
        return self.health_now

    async def render(self, request: ChatRequest) -> Prompt:
        """See Engine."""
        self.rendered.append(request)
        self._choices = range(request.n)
        if self.render_errors:
            raise self.render_errors.pop(0)
        return self.prompt

    def generate(self, rid: str, prompt: Prompt) -> AsyncIterator[Delta]:
        """See Engine."""
        del prompt
        self.generated.append(rid)
        return self._read()

    async def _read(self) -> AsyncIterator[Delta]:
        while self._unfinished or not self._deltas.empty():
            delta = await self._deltas.get()
            if isinstance(delta, Exception):
                raise delta
            yield delta

    def abort(self, rid: str) -> None:
        """See Engine."""
        self.aborted.append(rid)
        for choice in self._unfinished:
            self._put("", choice, self.late_tokens, "abort")
            self._finished.add(choice)

    def pop_emitted_tokens(self, rid: str) -> int:
        """See Engine."""
        assert rid in self.generated
        return sum(counts.completion_tokens for counts in self._counts.values()) + self.lost_tokens


class NotedLease(Lease):
    """A lease that notes what it is told; an answer ends at its token number `limit`."""

    metered = True

    def __init__(self, limit: int = 1000) -> None:
        self._limit = limit
        self.corrected: list[int] = []
        self.settled: list[Mapping[int, Counts]] = []
        self.withdrawn = False

    def correct(self, prompt: Prompt) -> None:
        """See Lease."""
        self.corrected.append(prompt.billed_tokens)

    def on_delta(self, choice: int, completion_tokens: int) -> bool:
        """See Lease."""
        del choice
        return completion_tokens >= self._limit

    def as_notice(self) -> dict[str, str]:
        """See Lease."""
        return {"code": "rate_limit_exceeded", "message": "The tokens are used up."}

    def release(self, counts: Mapping[int, Counts]) -> None:
        """See Lease."""
        self.settled.append(dict(counts))

    def withdraw(self, counts: Mapping[int, Counts] | None = None) -> None:
        """See Lease."""
        del counts
        self.withdrawn = True


class HandTicket:
    """Room in the engine; `released` once it was given back."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Completion tokens of each delta that came."""
        self.released = False

    def on_delta(self, delta: Delta) -> None:
        """See Ticket."""
        self.tokens.append(delta.counts.completion_tokens)

    def with_replica(self, prompt: Prompt) -> Prompt:
        """See Ticket."""
        return prompt

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """See Ticket."""
        self.released = True


class HandAdmission:
    """Admission that lets in at once, or refuses, or has requests wait until a test says otherwise."""

    def __init__(self) -> None:
        self.ticket = HandTicket()
        self.precheck_error: ServingError | None = None
        self.waits: asyncio.Future[None] | None = None
        """Where there is one, `admit` waits for it."""
        self.entered = asyncio.Event()
        self.withdrawn: list[str] = []

    def precheck(self, request: ChatRequest, key: Key | None) -> None:
        """See Admission."""
        del request, key
        if self.precheck_error is not None:
            raise self.precheck_error

    async def admit(self, request: ChatRequest, prompt: Prompt, key: Key | None) -> HandTicket:
        """See Admission."""
        del request, prompt, key
        self.entered.set()
        if self.waits is not None:
            await self.waits
        return self.ticket

    def withdraw(self, request_id: str) -> None:
        """See Admission."""
        self.withdrawn.append(request_id)
        if self.waits is not None and not self.waits.done():
            self.waits.set_exception(Cancelled("withdrawn"))


class HandSession(SafetySession):
    """Safety along one request, as a test sets it; without settings, nothing is held back."""

    undecided_until: asyncio.Future[None] | None = None
    """The verdict on the prompt, where it comes later."""

    def __init__(self, request_id: str = "chatcmpl-1") -> None:
        super().__init__(ChatRequest(request_id, "local", MODEL, {}, 0))
        self.refusal: ServingError | None = None
        """Raised by the first look at the prompt."""
        self.screen: AnswerScreen = PassThrough()
        self.moderation: Mapping[str, Any] | None = None
        self.withheld_tokens: int | None = None
        """What `conclude` was given."""
        self.closed = False

    @property
    def undecided(self) -> bool:
        """See SafetySession."""
        return self.undecided_until is not None and not self.undecided_until.done()

    async def prescreen(self, request: ChatRequest, past: PastTurns, turn: NewTurn | None) -> None:
        """See SafetySession."""
        del request, past, turn
        if self.refusal is not None:
            raise self.refusal

    def state(self) -> Mapping[str, Any]:
        """See SafetySession."""
        return {"seen": True}

    async def restore(self, request: ChatRequest, past: PastTurns, state: Mapping[str, Any]) -> None:
        """See SafetySession. A new prompt's refusal does not refuse this one."""
        del request, past
        assert state == {"seen": True}

    async def await_verdict(self) -> None:
        """See SafetySession."""
        if self.undecided_until is not None:
            await asyncio.shield(self.undecided_until)

    def open_screen(self) -> AnswerScreen:
        """See SafetySession."""
        return self.screen

    def conclude(
        self, screen: AnswerScreen | None, counts: Mapping[int, Counts], withheld_tokens: int
    ) -> Mapping[str, Any] | None:
        """See SafetySession."""
        del screen, counts
        self.withheld_tokens = withheld_tokens
        return self.moderation

    def close(self, released: Iterable[Mapping[str, Any]]) -> None:
        """See SafetySession."""
        del released
        self.closed = True


class HoldingScreen:
    """Holds what begins with "held" until something else comes; halts at "harm"; breaks at "broken"."""

    in_review = False

    def __init__(self, error: ServingError | None = None, held: Sequence[Delta] = ()) -> None:
        self.halted: Verdict | None = None
        self._error = error
        self._held = list(held)

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """See AnswerScreen."""
        if delta.text == "broken" and self._error is not None:
            raise self._error
        if delta.text == "harm":
            self.halted = Verdict("block", "S2", 1.0, 0.5, "stream", "policy")
            return ()
        self._held.append(delta)
        return () if delta.text.startswith("held") else self.take_releasable()

    async def review(self) -> Sequence[Delta]:
        """See AnswerScreen."""
        return ()

    def take_releasable(self) -> Sequence[Delta]:
        """See AnswerScreen."""
        released, self._held = self._held, []
        return released


@dataclasses.dataclass
class Generations:
    """A pipeline and what stands around it; `serve` runs one request through it."""

    database: Database
    engine: HandEngine
    admission: HandAdmission
    check: HandSession
    journal: Journal
    history: History
    traffic: Traffic
    balance: LedgerAudit
    pipeline: Pipeline
    log: list[dict[str, Any]]
    suspensions: Suspensions
    retention: Retention

    def stream(self, request: ChatRequest) -> TokenStream:
        """The pending stream of a request."""
        counts = request.continuous_usage
        return TokenStream(request, ChunkWire(request), Ring(1 << 20, logprobs=False, counts=counts))

    def begin(
        self,
        stream: TokenStream,
        *,
        key: Key | None = None,
        lease: Lease = UNLIMITED,
        allowance: Allowance | None = None,
    ) -> asyncio.Task[None]:
        """The generation of a stream, as a task of its own."""
        serving = self.pipeline.serve(stream.request, stream, key=key, lease=lease, allowance=allowance)
        return asyncio.create_task(serving)

    async def continue_(
        self, request_id: str = "chatcmpl-1", *, check_model: Callable[[str], None] = lambda _model: None
    ) -> tuple[TokenStream, asyncio.Task[None]]:
        """A suspended stream as the next process has it, and its generation."""
        await self.suspensions.drained()
        loaded = await self.suspensions.load("local", request_id)
        assert loaded is not None
        stored, suspended = loaded
        assert suspended is not None
        request = suspended.turn.request
        ring = Ring.restore(stored.segments, 1 << 20)
        stream = TokenStream.continued(request, ChunkWire(request), ring, suspended.progress.released)
        start = ContinuedStart(suspended, self.journal, self.suspensions, check_model)
        return stream, asyncio.create_task(self.pipeline.serve(request, stream, start=start))

    async def serve(self, request: ChatRequest, **options: Any) -> TokenStream:
        """A request from its beginning to its end."""
        stream = self.stream(request)
        await self.begin(stream, **options)
        return stream

    async def row(self, request_id: str = "chatcmpl-1") -> dict[str, Any] | None:
        """The request's row in the ledger; None where nothing was reserved."""

        def query(c: Any) -> dict[str, Any] | None:
            cursor = c.execute("SELECT * FROM requests WHERE id = ?", (request_id,))
            names = [column[0] for column in cursor.description]
            row = cursor.fetchone()
            return None if row is None else dict(zip(names, row, strict=True))

        await self.committed()
        return await self.database.read(query)

    async def committed(self) -> None:
        """Wait until reservations that were queued, and the settlements that follow them, are committed."""
        for _ in range(3):  # a settlement is queued by a task that its reservation wakes
            await self.database.write(lambda _c: None)

    async def count(self, table: str) -> int:
        """The rows of a table."""
        await self.committed()
        count: int = await self.database.read(
            lambda c: c.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        )
        return count


@contextlib.asynccontextmanager
async def generations(
    data_dir: Path,
    *,
    session_of: SessionOf | None = None,
    service: Callable[[Database, Any], SafetyService] | None = None,
    engine: Any = None,
    suspend_timeout_s: float = LONG_S,
    clock_s: Callable[[], float] = time.monotonic,
    **journal: Any,
) -> AsyncIterator[Generations]:
    """A pipeline over a new store; its journal keeps no time unless it is started.

    Requests are screened by `service`, or as `session_of` says, or by the one check that a test moves.
    """
    capture = structlog.testing.LogCapture()
    log = structlog.wrap_logger(None, processors=[capture])
    database = Database(data_dir)
    await database.open()
    engine, admission, made = engine or HandEngine(), HandAdmission(), HandSession()
    traffic, balance, history = Traffic(), LedgerAudit(log), History(database)
    screens = None if service is None else service(database, log)
    if screens is not None:
        await screens.start()
        session_of = of_service(screens)
    retention = Retention(database, LONG_S)
    kept = Journal(database, PRICES, balance, traffic, log=log, retention=retention, **journal)
    suspensions = Suspensions(
        database, kept, log, suspend_timeout_s, is_live=lambda _id: False, clock_s=clock_s
    )
    pipeline = Pipeline(
        backends=Backends(Backend(cast("Engine", engine), cast("Admission", admission), MODEL)),
        history=history,
        journal=kept,
        suspensions=suspensions,
        traffic=traffic,
        session_of=session_of or (lambda _request, _key: made),
        prefixes=PrefixReport(log),
        live=LiveRequests(),
        log=log,
    )
    try:
        yield Generations(
            database,
            engine,
            admission,
            made,
            kept,
            history,
            traffic,
            balance,
            pipeline,
            capture.entries,
            suspensions,
            retention,
        )
        await kept.aclose()
    finally:  # the threads of a test that failed would keep the run from its end
        await database.aclose()
        if screens is not None:
            screens.prompts.close()


def asked(content: str = "hello", **fields: Any) -> ChatRequest:
    """A request as the routes make it."""
    body = {"messages": [{"role": "user", "content": content}]}
    return ChatRequest("chatcmpl-1", "local", MODEL, body, 1_790_000_000, **fields)


def conversing(content: str = "hello", **fields: Any) -> ChatRequest:
    """A request that begins a conversation."""
    stored = {"conversation_id": "conv_1", "message_id": "msg_1", "new_conversation": True}
    return asked(content, **stored | fields)


def answer_of(stream: TokenStream, choice: int = 0) -> ChoiceMessage:
    """What was released of a choice."""
    return build_messages(*stream.in_ring()).get(choice, ChoiceMessage())


def text_of(stream: TokenStream, choice: int = 0) -> str:
    """The released text of a choice."""
    content: str = answer_of(stream, choice).message.get("content", "")
    return content


def controls(stream: TokenStream, kind: type[Any]) -> list[Any]:
    """The stream's control events of one kind."""
    return [event for event in stream.in_ring()[1] if isinstance(event, kind)]


async def refuse_writes(database: Database, *, refused: bool = True) -> None:
    """From now on no commit succeeds, as on a disk that is read-only; or each does again."""
    await database._between_batches(lambda c: c.execute(f"PRAGMA query_only={int(refused)}"))


@contextlib.contextmanager
def busy_writer(database: Database) -> Iterator[None]:
    """Keep the store's writer busy meanwhile: nothing is committed."""
    over = threading.Event()
    database.submit(lambda _c: over.wait(LONG_S))
    try:
        yield
    finally:
        over.set()


async def running(world: Generations, **options: Any) -> tuple[Any, asyncio.Task[None]]:
    """A stream that has released a word, and its generation. `unseen`: its client waits for all of it."""
    stream = world.stream(options.pop("request", asked()))
    stream.unseen = options.pop("unseen", False)
    serving = world.begin(stream, **options)
    world.engine.say("word")
    await until(lambda: text_of(stream))
    return stream, serving
