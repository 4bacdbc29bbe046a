"""The chat completion routes: create, attach, stop."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.http.answer_format import CHAT_FORMAT
from app.api.http.auth import Caller, Gatekeeper
from app.api.http.bodies import BodyReader
from app.api.http.client import Client
from app.api.http.continuations import Continuations
from app.api.http.errors import RESPONSE_HEADERS
from app.api.http.plain_events import wants_plain
from app.api.http.rate_limit_headers import STREAM_ID
from app.api.http.sse import CONNECTION, EventStream
from app.api.http.stream_headers import (
    check_fresh,
    idempotency_key,
    last_event_id,
    may_resume,
    stream_headers,
)
from app.api.routes.model_selection import ModelSelector, RoutingHeaders
from app.api.routes.several_prompts import SeveralPrompts
from app.api.schema.wire import parse_chat_request
from app.core import ChatRequest, IdempotencyKey, Key, Placement
from app.errors import (
    Forbidden,
    NotFound,
    Overloaded,
    ServingError,
    StorageUnavailable,
    Unavailable,
)
from app.metering.abuse import Addresses
from app.metering.budgets import Allowance, Budgets
from app.metering.limits import UNLIMITED, Lease, Limiter
from app.metering.reads import Reads
from app.pipeline import Pipeline
from app.routing.backend import with_priority_and_salt
from app.settings import Settings
from app.stream.archive import Archive
from app.stream.registry import StreamRegistry
from app.stream.token_stream import ABANDONED, TokenStream


class ChatRoutes:
    """Handlers of `/api/chat/completions` and `/v1/chat/completions`."""

    format = CHAT_FORMAT

    def __init__(
        self,
        settings: Settings,
        gatekeeper: Gatekeeper,
        *,
        bodies: BodyReader,
        selector: ModelSelector,
        pipeline: Pipeline,
        streams: StreamRegistry,
        archive: Archive,
        continuations: Continuations,
        limiter: Limiter,
        reads: Reads,
        budgets: Budgets,
        addresses: Addresses,
        check_ready: Callable[[], None],
        check_model: Callable[[str, Collection[str] | None], None],
        whole_bytes: int,
    ) -> None:
        """`check_ready` raises EngineNotReady while nothing is served, `check_model` UnknownModel.

        An answer in one piece may take `whole_bytes`.
        """
        self._settings = settings
        self._gatekeeper = gatekeeper
        self._bodies = bodies
        self._selector = selector
        self._pipeline = pipeline
        self._streams = streams
        self._archive = archive
        self._continuations = continuations
        self._limiter = limiter
        self._reads = reads
        self._budgets = budgets
        self._addresses = addresses
        self._check_ready = check_ready
        self._check_model = check_model
        self._whole_bytes = whole_bytes

    async def create(self, request: Request) -> Response | EventStream:
        """POST: start a generation, or attach to the one of the same Idempotency-Key."""
        caller = self._gatekeeper.caller(request)
        if caller.key is not None and request.client is not None:
            self._addresses.saw(caller.key, request.client.host)
        self._check_ready()
        lease = await self._charge(request, caller)
        client = Client(request.receive)
        try:
            resumable = may_resume(request, caller.key)
            stream, streaming, others = await self._stream_of(
                request, client, caller, lease, resumable=resumable
            )
        except Unavailable:
            lease.withdraw()
            raise
        except BaseException:
            lease.settle({})
            raise
        request.scope[STREAM_ID], request.scope[RESPONSE_HEADERS] = (
            stream.request_id,
            stream.request.placement.response_headers,
        )
        patient = bool(resumable)  # a conversation alone is none to who has not been told of the stream
        try:
            if streaming:
                return await self._follow(request, client, stream, patient=patient)
            if others:
                return await self._answer_all(client, caller, stream, others)
            return await self._answer(client, stream, patient=patient)
        except Overloaded:
            request.scope[RESPONSE_HEADERS] = {
                **stream.request.placement.response_headers,
                **self._selector.refused(stream.request.model),
            }
            raise
        except ServingError as error:
            if not others:  # else it is that of a prompt, which names itself
                error.respell(stream.request.spelled)
            raise

    async def _charge(self, request: Request, caller: Caller) -> Lease:
        """Charge the request, of which only the head was read. Raises RateLimited.

        Where the limit is reached, a request with a known Idempotency-Key is let in uncharged: it attaches.
        """
        limiter, key = self._limiter, request.headers.get("idempotency-key")
        if key is not None and not limiter.has_room(caller.key) and await self._is_known(caller, key):
            return UNLIMITED
        return limiter.begin(caller.key)

    async def _is_known(self, caller: Caller, key: str) -> bool:
        """Whether a stream was made with this Idempotency-Key. Raises RateLimited."""
        self._reads.charge(caller.owner, caller.key)
        if self._streams.has_key(caller.owner, key):
            return True
        async with self._reads.turn(caller.owner):
            return await self._archive.has_key(caller.owner, key)

    async def _stream_of(
        self, request: Request, client: Client, caller: Caller, lease: Lease, *, resumable: bool | None
    ) -> tuple[TokenStream, bool, Sequence[ChatRequest]]:
        """The stream that answers the request, whether it is to be sent as one, and its other prompts.

        See `may_resume` for `resumable`; where it is None, a stored answer is resumable and no other is.
        The lease is withdrawn where the stream was there already, and is the generation's where it was not.
        """
        owner = caller.owner
        raw = await self._bodies.read(request, client, owner, self._bodies.limit_bytes)
        unread_s = request.scope["extensions"][CONNECTION].unread_s()
        placement = Placement(socket_wait_s=unread_s, body_bytes=len(raw))
        routing = RoutingHeaders.of(request)
        wants_plain(request)  # a wrong value is refused now, before anything is begun
        key, after = await idempotency_key(request, raw), last_event_id(request)
        # Before the body is parsed: who was let in uncharged for a known key may send no other one under it.
        made = None if key is None else await self._made_before(owner, key, after)
        parsed, streaming = await self._parsed(request, raw, caller, key, placement)
        del raw
        isolated = self._settings.isolation == "owner"
        chats = [
            dataclasses.replace(
                with_priority_and_salt(chat, caller.key, isolated=isolated),
                resumable=chat.conversation_id is not None if resumable is None else resumable,
            )
            for chat in parsed
        ]
        self._check_grammars(caller, chats[0])  # the prompts of a request share it
        if made is not None:
            if lease is not UNLIMITED:  # else it was charged before its body was read
                self._reads.charge(owner, caller.key)
            lease.withdraw()
            return made, streaming, ()
        check_fresh(after)
        chat, *others = [await self._selector.select(chat, caller, routing) for chat in chats]
        request.scope[RESPONSE_HEADERS] = chat.placement.response_headers
        return await self._begin(caller, chat, lease, streaming=streaming), streaming, others

    async def _parsed(
        self, request: Request, raw: bytes, caller: Caller, key: IdempotencyKey | None, placement: Placement
    ) -> tuple[Sequence[ChatRequest], bool]:
        """The checked request, once for each prompt, and whether its answer is to be a stream.

        Raises BadRequest, UnknownModel.
        """
        # Under /v1 nothing is stored unless the request says so, as it is with OpenAI.
        store = request.url.path.startswith("/api/")

        def checked(body: Mapping[str, Any]) -> tuple[ChatRequest, bool]:
            chat = parse_chat_request(
                self._selector.with_model(body),
                self._new_id(),
                caller.owner,
                store=store,
                strict=self._settings.strict_parameters,
                idempotency=key,
                placement=placement,
            )
            return chat, bool(body.get("stream"))

        chat, streaming = await self._bodies.parse_as(request, raw, checked)
        self._check_model(chat.model, caller.models)
        return [chat], streaming

    def _new_id(self) -> str:
        """A fresh id: of fixed length, and not to be guessed."""
        return self.format.id_prefix + secrets.token_hex(14)

    def _check_grammars(self, caller: Caller, chat: ChatRequest) -> None:
        """Raise Forbidden, naming the caller's own parameter, for a grammar that the key may not send."""
        try:
            caller.check_grammars(chat.body)
        except Forbidden as error:
            error.respell(chat.spelled)
            raise

    async def _made_before(self, owner: str, key: IdempotencyKey, after: int) -> TokenStream | None:
        """The stream that this key made, in memory or in the store."""
        stream = self._streams.find_by_key(owner, key)
        if stream is not None:
            return stream
        stored_id = await self._archive.made_with(owner, key)
        # Another request with this key may have begun meanwhile.
        stream = self._streams.find_by_key(owner, key)
        if stream is None and stored_id is not None:
            async with self._reads.turn(owner):
                stream = await self._continuations.find(owner, stored_id, self.format.make_wire, after)
        return stream

    async def _begin(
        self, caller: Caller, chat: ChatRequest, lease: Lease, *, streaming: bool
    ) -> TokenStream:
        """A new generation within the limits of the caller's key. Raises RateLimited."""
        key = caller.key
        allowance = await self._budgets.check(key, chat.request_id)
        if chat.idempotency is not None:
            # Another request with this key may have begun meanwhile.
            stream = self._streams.find_by_key(caller.owner, chat.idempotency)
            if stream is not None:
                lease.withdraw()
                return stream
        if lease is UNLIMITED:  # let in to attach to what has been forgotten since, or it has no limits
            lease = self._limiter.begin(key)
        try:
            lease.reserve(chat)
            return self._start(chat, lease, allowance, key, streaming=streaming)
        except Unavailable:
            lease.withdraw()
            raise
        except BaseException:
            lease.settle({})
            raise

    def _start(
        self,
        chat: ChatRequest,
        lease: Lease,
        allowance: Allowance | None,
        key: Key | None,
        *,
        streaming: bool,
    ) -> TokenStream:
        # An answer in one piece needs its beginning too, and has nobody who reads along.
        limit_bytes = None if streaming else self._whole_bytes
        stream = self._streams.create(chat, self.format.make_wire(chat), limit_bytes=limit_bytes)
        serving = self._pipeline.serve(chat, stream, key=key, lease=lease, allowance=allowance)
        self._streams.run(stream, serving)
        return stream

    async def _answer_all(
        self, client: Client, caller: Caller, first: TokenStream, others: Sequence[ChatRequest]
    ) -> Response:
        """The whole answer to several prompts. Raises what one of them was refused with.

        Each is a request of its own in the key's limits and in the ledger. At the end their streams are
        forgotten, because their caller knows the id of the first alone.
        """

        async def begin(chat: ChatRequest) -> TokenStream:
            return await self._begin(caller, chat, UNLIMITED, streaming=False)

        prompts = SeveralPrompts(first, others, begin, self._new_id)
        client.on_gone(prompts.leave)
        try:
            streams = await prompts.answered()
            return JSONResponse(self.format.whole(streams), headers=stream_headers(first))
        finally:
            client.stop()
            for stream in prompts.begun:
                self._streams.delete(stream)
                with contextlib.suppress(StorageUnavailable):  # the retention's end erases them too
                    await self._archive.erase(caller.owner, stream.request_id)

    async def _follow(
        self, request: Request, client: Client, stream: TokenStream, *, patient: bool
    ) -> Response | EventStream:
        """The event stream after the last event that the client has, once the request is admitted."""
        after, plain = last_event_id(request), wants_plain(request)
        if not patient:
            client.on_gone(lambda: stream.cancel(ABANDONED))
        try:
            await stream.opened()
            client.on_gone(lambda: None)  # from here on, to leave is not to stop
            if after and stream.done and after == stream.last_id:
                client.stop()
                return Response(status_code=204)
            reader = stream.attach(after)
        except BaseException:
            client.stop()
            raise
        return EventStream(
            reader,
            client,
            stream_headers(stream),
            on_end=lambda: self._streams.leave(stream, reader),
            plain=plain,
        )

    async def _answer(self, client: Client, stream: TokenStream, *, patient: bool) -> Response:
        """The whole answer in one piece; a client that leaves stops it, unless it can return."""
        reader = stream.attach()
        grace_s = None if patient else 0.0
        client.on_gone(lambda: self._streams.leave(stream, reader, grace_s=grace_s))
        try:
            await _ended(stream)
        finally:
            client.stop()
            self._streams.leave(stream, reader, grace_s=grace_s)
        return JSONResponse(self.format.whole([stream]), headers=stream_headers(stream))

    async def attach(self, request: Request) -> Response | EventStream:
        """GET {id}: replay after `Last-Event-ID`, then follow."""
        after = last_event_id(request)
        wants_plain(request)  # as in `create`: finding a suspended stream has its answer go on
        await self._bodies.turn(self._gatekeeper.caller(request).owner)
        stream = await self._find(request, after)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=stream_headers(stream))
        stream.expect_return()
        return await self._follow(request, Client(request.receive), stream, patient=True)

    async def retrieve(self, request: Request) -> Response | EventStream:
        """GET /v1/…/{id}: the finished answer as JSON, or the stream to those who accept one."""
        if "text/event-stream" in request.headers.get("accept", ""):
            return await self.attach(request)
        caller = self._gatekeeper.caller(request)
        self._reads.charge(caller.owner, caller.key)  # the whole answer is built each time
        stream = await self._find(request)
        if request.method == "HEAD":
            return Response(media_type="application/json", headers=stream_headers(stream))
        stream.expect_return()
        return await self._answer(Client(request.receive), stream, patient=True)

    async def cancel(self, request: Request) -> Response:
        """DELETE {id} and POST {id}/cancel: stop; what was generated stays attachable."""
        stream = await self._find(request)
        stream.cancel("cancelled")
        cancelled = stream.cancelled is not None
        return JSONResponse({"id": stream.request_id, "object": self.format.object, "cancelled": cancelled})

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/…/{id}: stop and forget, in OpenAI's shape."""
        stream = await self._find(request)
        self._streams.delete(stream)
        await self._archive.erase(stream.request.owner, stream.request_id)
        deleted = f"{self.format.object}.deleted"
        return JSONResponse({"id": stream.request_id, "object": deleted, "deleted": True})

    async def _find(self, request: Request, after: int = 0) -> TokenStream:
        """The stream in memory, or as it was stored. Raises NotFound."""
        caller, request_id = self._gatekeeper.caller(request), request.path_params["id"]
        owner = caller.owner
        mine = request_id.startswith(self.format.id_prefix)
        stream = self._streams.find(request_id, owner) if mine else None
        if stream is None and mine:
            self._reads.charge(owner, caller.key)
            async with self._reads.turn(owner):
                begin = request.method != "HEAD"
                stream = await self._continuations.find(
                    owner, request_id, self.format.make_wire, after, begin=begin
                )
        if stream is None:
            raise NotFound(
                f"No stream {request_id!r}: it does not exist, is not yours, or was not stored and ended"
                f" more than {self._settings.retention_s:g} s ago.",
                code="stream_not_found",
            )
        return stream


async def _ended(stream: TokenStream) -> None:
    """Wait for the end of a stream. Raises what it was refused with."""
    await stream.opened()
    await stream.ended()
