"""One request's whole way, top to bottom, in `Pipeline.serve`.

The generation runs in a task of its own and writes into its `TokenStream`; HTTP handlers
only attach readers. Whatever can refuse a request comes before `stream.open()`, which lets
the status line out; after it there are only events.
"""

from __future__ import annotations

import asyncio

from structlog.typing import FilteringBoundLogger

from app.core import ChatRequest, Engine, Health
from app.errors import Draining, EngineNotReady, InternalError, ServingError
from app.log import where
from app.stream import SHUTDOWN, TokenStream, usage_of
from app.trace import Trace


class Pipeline:
    """The stages of a request, each one object with one verb."""

    def __init__(self, engine: Engine, log: FilteringBoundLogger) -> None:
        self._engine = engine
        self._log = log

    async def serve(self, request: ChatRequest, stream: TokenStream) -> None:
        """Take `request` from validated to answered; every outcome ends in `stream`."""
        trace = Trace(request)
        try:
            self._check_ready()
            prompt = await self._engine.render(request)
            trace.rendered(prompt)
            stream.open(request.n)
            deltas = self._engine.generate(request.request_id, prompt)
            stream.on_cancel(lambda: self._engine.abort(request.request_id))
            async for delta in deltas:
                trace.saw(delta)
                stream.append(delta)
            stream.usage = usage_of(trace.counts)
            if request.include_usage:
                stream.notice("usage", stream.usage)
            _check_not_cut(stream)
            stream.close()
        except ServingError as error:
            trace.failed(error.code)
            stream.fail(error)
        except asyncio.CancelledError:
            trace.failed("cancelled")
            self._engine.abort(request.request_id)
            stream.fail(Draining("The server stopped before the answer was complete; ask again."))
            raise
        except Exception as exc:  # noqa: BLE001  # whatever it is, the client gets a truthful end
            trace.failed("internal_error")
            self._log.error("pipeline_broke", request_id=request.request_id, error=where(exc))
            self._engine.abort(request.request_id)
            stream.fail(InternalError("The server failed to answer this request; it may be sent again."))
        finally:
            self._log.info("request", cancelled=stream.cancelled, **trace.fields())

    def _check_ready(self) -> None:
        if self._engine.health() is not Health.READY:
            raise EngineNotReady(
                f"The engine is {self._engine.health().value}; see /readyz.", retry_after_s=5
            )


def _check_not_cut(stream: TokenStream) -> None:
    if stream.cancelled == SHUTDOWN:
        raise Draining("The server stopped before the answer was complete; ask again.")
