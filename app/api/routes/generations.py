"""The routes of generations, the same for every endpoint: create, attach, stop, delete."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.http.sse import EventStream
from app.intake.caller import Caller
from app.intake.client import Client
from app.intake.endpoint import AnswerEndpoint
from app.intake.head import last_event_id, wants_data_lines_only
from app.intake.open_stream import Intake, OpenedStream
from app.stream.token_stream import TokenStream


class GenerationRoutes:
    """Handlers of an endpoint's routes."""

    def __init__(self, endpoint: AnswerEndpoint, intake: Intake) -> None:
        self._endpoint = endpoint
        self._intake = intake

    async def create(self, request: Request, caller: Caller) -> Response | EventStream:
        """POST: start a generation, or attach to the one of the same Idempotency-Key."""
        return self._response(request, await self._intake.open_stream(request, caller, self._endpoint))

    async def attach(self, request: Request, caller: Caller) -> Response | EventStream:
        """GET {id}: replay after `Last-Event-ID`, then follow."""
        after = last_event_id(request)
        wants_data_lines_only(request.headers)  # a wrong value is refused before an answer is continued
        await self._intake.wait_for_tick(caller)
        stream = await self._find(request, caller, after)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=_headers(stream))
        stream.expect_return()
        client = Client(request)
        return self._response(request, await self._intake.events(stream, client, after, resumable=True))

    async def retrieve(self, request: Request, caller: Caller) -> Response | EventStream:
        """GET /v1/…/{id}: the ended answer as JSON, or the stream to those who accept one."""
        if "text/event-stream" in request.headers.get("accept", ""):
            return await self.attach(request, caller)
        self._intake.charge_read(caller)  # the whole answer is built each time
        stream = await self._find(request, caller)
        if request.method == "HEAD":
            return Response(media_type="application/json", headers=_headers(stream))
        stream.expect_return()
        client = Client(request)
        return self._response(
            request, await self._intake.answer(stream, client, self._endpoint, resumable=True)
        )

    async def cancel(self, request: Request, caller: Caller) -> Response:
        """DELETE {id} and POST {id}/cancel: stop; what was generated stays attachable."""
        stream = await self._find(request, caller)
        stream.cancel("cancelled")
        cancelled = stream.cancelled is not None
        return JSONResponse(
            {"id": stream.request_id, "object": self._endpoint.object, "cancelled": cancelled}
        )

    async def delete(self, request: Request, caller: Caller) -> Response:
        """DELETE /v1/…/{id}: stop and forget, in OpenAI's shape."""
        stream = await self._find(request, caller)
        await self._intake.forget(stream)
        deleted = f"{self._endpoint.object}.deleted"
        return JSONResponse({"id": stream.request_id, "object": deleted, "deleted": True})

    async def _find(self, request: Request, caller: Caller, after: int = 0) -> TokenStream:
        continues = request.method != "HEAD"
        return await self._intake.find(
            caller, request.path_params["id"], self._endpoint, after, continues=continues
        )

    def _response(self, request: Request, opened: OpenedStream) -> Response | EventStream:
        """The whole answer, or its events; 204 where the client has received all of them."""
        headers, reader = _headers(opened.stream), opened.reader
        if reader is None:
            return JSONResponse(opened.answer, headers=headers)
        if reader.cursor and reader.at_end():
            opened.client.stop()
            self._intake.leave(opened)
            return Response(status_code=204)
        return EventStream(
            reader,
            opened.client,
            headers,
            on_end=lambda: self._intake.leave(opened),
            data_lines_only=wants_data_lines_only(request.headers),
        )


def _headers(stream: TokenStream) -> dict[str, str]:
    """The headers of an answer: its id, its conversation, how it was served."""
    headers = {"x-request-id": stream.request_id, **stream.request.placement.response_headers}
    if stream.request.conversation_id is not None:
        headers["x-conversation-id"] = stream.request.conversation_id
    return headers
