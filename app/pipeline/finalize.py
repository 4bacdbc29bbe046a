"""The exit of a request from `Pipeline.serve`: its stream has ended then, and all is settled.

success ──▶ `Pipeline.serve` itself has settled the entry and closed the stream
refused or failed ──▶ the error ends the stream: a status before it was opened, an event after
cancelled task ──▶ the same, and the cancellation is raised again
suspended ──▶ another process continues the stream, and its row stays open
in every case ──▶ the lease, the ledger where it is still open, the metrics, one log line

`EngineRun.end` (app.pipeline.engine_run) decides which end a generation has, an `Outcome` of
app.journal.entry.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from structlog.typing import FilteringBoundLogger

from app.errors import Draining, InternalError, ReplayExpired, ServingError, Unavailable
from app.journal.entry import JournalEntry
from app.journal.journal import Journal
from app.log import safe_traceback
from app.metering.limits import Lease
from app.metering.traffic import Traffic
from app.pipeline.engine_run import Suspended
from app.pipeline.trace import Trace
from app.resume.continue_answer import AnswerStart
from app.resume.suspensions import Suspensions
from app.safety.session.session import SafetySession
from app.stream.token_stream import TokenStream
from app.stream.transcript import build_messages

_STOPPING = (
    "The server is stopping, and continues this answer when it is back; send the request again with its"
    " Idempotency-Key, or ask for the stream by its id."
)


class Finalizer:
    """Ends what `Pipeline.serve` leaves open of one request."""

    def __init__(
        self,
        journal: Journal,
        suspensions: Suspensions,
        traffic: Traffic,
        log: FilteringBoundLogger,
        trace: Trace,
        lease: Lease,
        start: AnswerStart,
        on_ended: Callable[[Trace], None] | None = None,
    ) -> None:
        """`on_ended` is called with the trace of the request at its end."""
        self._journal = journal
        self._suspensions = suspensions
        self._traffic = traffic
        self._log = log
        self._trace = trace
        self._lease = lease
        self._start = start
        self._on_ended = on_ended
        self._entry: JournalEntry | None = None

    def attach_reservation(self, entry: JournalEntry) -> None:
        """Settle or suspend a reservation at the end."""
        self._entry = entry

    @contextlib.contextmanager
    def settle_on_exit(self, stream: TokenStream, session: SafetySession) -> Iterator[None]:
        """Run a request, then release its lease. No error leaves but the cancellation of its task."""
        trace = self._trace
        try:
            yield
        except Suspended:
            self._suspend(stream, session, Draining(_STOPPING, retry_after_s=5))
        except ServingError as error:
            is_status = self._entry is None or stream.status_unsent or stream.unseen
            if is_status and isinstance(error, Unavailable):
                self._lease.withdraw(trace.counts)  # a 503 is no request of its key's limit
            trace.failed(error.code)
            self._fail(stream, session, error)
        except asyncio.CancelledError:
            trace.failed("cancelled")
            stopped = Draining("The server stopped before the answer was complete; ask again.")
            if stream.suspending and self._entry is not None and not stream.status_unsent:
                self._suspend(stream, session, stopped)  # with the tokens generated so far
            else:
                self._fail(stream, session, stopped)
            raise
        except Exception as exc:  # noqa: BLE001  # any error: the client gets a truthful end
            trace.failed("internal_error")
            self._log.error("pipeline_broke", request_id=stream.request_id, error=safe_traceback(exc))
            broken = InternalError("The server failed to answer this request; it may be sent again.")
            self._fail(stream, session, broken)
        finally:
            self._lease.release(trace.counts)
            if self._entry is not None:
                self._journal.settle_later(self._entry, trace.finish)
            self._traffic.ended(stream.request.model, trace.finish, trace.timings())
            self._log.info("request", cancelled=stream.cancelled, **trace.fields())
            if self._on_ended is not None:
                self._on_ended(trace)
            session.close(_released(stream))  # last: nothing above may depend on it

    def _fail(self, stream: TokenStream, session: SafetySession, error: ServingError) -> None:
        """End the stream in an error, or suspend it."""
        if self._start.should_suspend(stream, error):
            self._suspend(stream, session, error)
        elif self._entry is None:
            self._entry = self._start.fail(stream, error, self._trace.counts)
            if stream.error is None:
                self._trace.failed("abort")  # a suspended answer was cancelled: no error
        else:
            stream.fail(error)

    def _suspend(self, stream: TokenStream, session: SafetySession, error: ServingError) -> None:
        """Leave the stream to another process."""
        self._trace.failed("suspended")
        entry, self._entry = self._entry, None
        if entry is None:
            stream.suspend(error)  # the stored suspension was never taken up, so nothing is written
        else:
            self._suspensions.suspend_later(entry, session.state(), error)


def _released(stream: TokenStream) -> Iterator[Mapping[str, Any]]:
    """The messages of the answer so far. A generator: the stream is read where they are asked for."""
    with contextlib.suppress(ReplayExpired):  # the beginning of a very long one is not held any more
        for answer in build_messages(*stream.whole()).values():
            yield answer.message
