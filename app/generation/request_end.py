"""The end of a request, the same for success, refusal and failure: its stream ends, and all is settled.

refused or failed ──▶ the error is the stream's end: a status before it was opened, an event after
cancelled task ──▶ the same, and the cancellation goes on
suspended ──▶ the stream goes on in another process, and its row stays open
in every case ──▶ the lease, the ledger, the metrics, one log line
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from structlog.typing import FilteringBoundLogger

from app.core import Engine
from app.errors import Draining, InternalError, ServingError, Unavailable
from app.generation.answer_start import AnswerStart
from app.generation.engine_run import Suspended
from app.generation.journal import Journal
from app.generation.journal_entry import JournalEntry
from app.generation.request_safety import RequestSafety
from app.generation.trace import Trace
from app.log import safe_traceback
from app.metering.limiter import Lease
from app.metering.traffic import Traffic
from app.stream.token_stream import TokenStream


class RequestEnd:
    """The end of one request, whichever it is."""

    def __init__(
        self,
        journal: Journal,
        traffic: Traffic,
        log: FilteringBoundLogger,
        trace: Trace,
        *,
        lease: Lease,
        start: AnswerStart,
    ) -> None:
        self._journal = journal
        self._traffic = traffic
        self._log = log
        self._trace = trace
        self._lease = lease
        self._start = start
        self._entry: JournalEntry | None = None

    def settles(self, entry: JournalEntry) -> JournalEntry:
        """From now on there is a reservation, which is settled at the end."""
        self._entry = entry
        return entry

    @contextlib.contextmanager
    def of(self, stream: TokenStream, check: RequestSafety, engine: Engine) -> Iterator[None]:
        """Runs a request. Lets no error through but the cancellation of its task."""
        trace = self._trace
        try:
            yield
        except Suspended:
            self._suspend(stream, check)
        except ServingError as error:
            if self._entry is None and isinstance(error, Unavailable):
                self._lease.withdraw()  # refused for lack of room: none of those that its key may make
            trace.failed(error.code)
            self._fail(stream, check, error)
        except asyncio.CancelledError:
            trace.failed("cancelled")
            engine.abort(check.rid)
            self._cut_off(stream, check)
            raise
        except Exception as exc:  # noqa: BLE001  # whatever it is, the client gets a truthful end
            trace.failed("internal_error")
            self._log.error("pipeline_broke", request_id=stream.request_id, error=safe_traceback(exc))
            engine.abort(check.rid)
            broken = InternalError("The server failed to answer this request; it may be sent again.")
            self._fail(stream, check, broken)
        finally:
            self._lease.settle(trace.counts)
            if self._entry is not None:
                self._journal.settle_later(self._entry, trace.finish)
            self._traffic.ended(stream.request.model, trace.finish, trace.timings())
            self._log.info("request", cancelled=stream.cancelled, **trace.fields())
            check.close(stream)  # last: it reads the whole answer, and nothing above may depend on that

    def _fail(self, stream: TokenStream, check: RequestSafety, error: ServingError) -> None:
        """End the stream in an error, but for one that goes on later."""
        if self._start.stays(stream, error):
            self._suspend(stream, check, error)
        elif self._entry is None:
            self._entry = self._start.failed(stream, error, self._trace)
        else:
            stream.fail(error)

    def _cut_off(self, stream: TokenStream, check: RequestSafety) -> None:
        """End the stream of a task that was cancelled while the server stops."""
        error = Draining("The server stopped before the answer was complete; ask again.")
        if stream.suspending and self._entry is not None and not stream.pending:
            self._suspend(stream, check, error)  # with what the engine has handed over so far
        else:
            self._fail(stream, check, error)

    def _suspend(self, stream: TokenStream, check: RequestSafety, error: ServingError | None = None) -> None:
        """Let another process go on with the stream."""
        self._trace.failed("suspended")
        error = error or Draining(
            "The server stops, and goes on with this answer when it is back; send the request again with"
            " its Idempotency-Key, or ask for the stream by its id.",
            retry_after_s=5,
        )
        entry, self._entry = self._entry, None
        if entry is None:
            stream.suspend(error)  # as it was suspended before
        else:
            self._journal.suspend_later(entry, check.state(), error)
