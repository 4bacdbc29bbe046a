"""The way of a request from its head to the stream that answers it, top to bottom in `Intake.open_stream`.

An endpoint (app.intake.endpoint) parses the body and renders the answer; all else is the same for every
endpoint. The generation itself runs in a task of its own (app.pipeline). `Intake.find` is for clients that
return, `StreamRegistry.leave` (app.stream.registry) for those that leave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from app.core import ChatRequest, Key
from app.errors import NotFound, Overloaded, ServingError, StorageUnavailable, Unavailable
from app.intake.bodies import BodyReader
from app.intake.caller import Caller
from app.intake.client import Client
from app.intake.continued_streams import ContinuedStreams
from app.intake.endpoint import AnswerEndpoint, ParseContext
from app.intake.head import Head
from app.intake.idempotency import IdempotencyKeys
from app.intake.scope import RESPONSE_HEADERS, STREAM_ID
from app.intake.select import ModelSelector
from app.intake.several_prompts import SeveralPrompts
from app.metering.limits import UNLIMITED, Lease
from app.routing.backend import with_priority_and_salt
from app.runtime import NONSTREAM_RING_FACTOR, Runtime
from app.stream.reader import Reader
from app.stream.token_stream import TokenStream


@dataclass(frozen=True, slots=True)
class OpenedStream:
    """A stream that was admitted: with a `reader` of its events, or with the whole `answer`."""

    stream: TokenStream
    client: Client
    reader: Reader | None = None
    answer: Mapping[str, Any] | None = None


class Intake:
    """The one way in."""

    def __init__(self, runtime: Runtime, bodies: BodyReader) -> None:
        self._runtime = runtime
        self._bodies = bodies
        self._nonstream_bytes = NONSTREAM_RING_FACTOR * runtime.settings.stream_bytes
        self._selector = ModelSelector(runtime)
        self._continued = ContinuedStreams(runtime, self._nonstream_bytes)
        self._keys = IdempotencyKeys(runtime.streams, runtime.archive, self._continued, runtime.reads)

    async def open_stream(self, request: Request, caller: Caller, endpoint: AnswerEndpoint) -> OpenedStream:
        """The stream of a request, once it is admitted, or its answer, once it has ended.

        A request whose Idempotency-Key has made a stream before gets that one, and is not charged.
        Raises ServingError.
        """
        if caller.key is not None and request.client is not None:
            self._runtime.abuse.addresses.record(caller.key, request.client.host)
        self._runtime.check_ready()
        lease = await self._charge(caller, request.headers.get("idempotency-key"))
        with _returned_on_error(lease):
            head = Head.of(request, caller.key)
            body = await self._bodies.read(request, caller.owner, self._bodies.limit_bytes)
            key = await body.idempotency(head.idempotency_key)
            async with self._keys.lock(caller.owner, key):
                # With the body's fingerprint, before parsing: an uncharged request that has another body than
                # its key's first is refused without the cost of parsing.
                stream = await self._keys.find_stream(
                    caller.owner, key, endpoint.make_wire, head.last_event_id
                )
                context = ParseContext(caller.owner, key, body.placement())
                chats, streaming = await body.parse_as(lambda sent: self._parse(endpoint, context, sent))
                del body
                chats = await self._selector.authorized_with_text(chats, caller)
                if stream is not None:
                    self._withdraw(lease, caller)
                    extra_prompts: Sequence[ChatRequest] = ()
                else:
                    head.check_nothing_received()
                    chats = [self._placed(chat, caller, head) for chat in chats]
                    chat, *extra_prompts = [await self._selector.select(c, caller, head) for c in chats]
                    request.scope[RESPONSE_HEADERS] = chat.placement.response_headers
                    stream = await self._begin(chat, caller.key, lease, endpoint, streaming=streaming)
        client = Client(request)
        with self._named(request, stream, several=bool(extra_prompts)):
            if streaming:
                return await self.events(stream, client, head.last_event_id, resumable=bool(head.resumable))
            if extra_prompts:
                return await self._answer_all(stream, extra_prompts, client, caller, endpoint)
            return await self.answer(stream, client, endpoint, resumable=bool(head.resumable))

    async def _charge(self, caller: Caller, key: str | None) -> Lease:
        """The lease of a request of which only the head was read. Raises RateLimited.

        Where the limit is reached, one with a known Idempotency-Key is admitted uncharged: it attaches.
        """
        limiter = self._runtime.limiter
        if key is not None and not limiter.has_room(caller.key):
            self.charge_read(caller)
            if await self._keys.is_known(caller.owner, key):
                return UNLIMITED
        return limiter.begin(caller.key)

    def _parse(
        self, endpoint: AnswerEndpoint, context: ParseContext, sent: Mapping[str, Any]
    ) -> tuple[Sequence[ChatRequest], bool]:
        return endpoint.parse(self._selector.with_model(sent), context), bool(sent.get("stream"))

    def _withdraw(self, lease: Lease, caller: Caller) -> None:
        """Give back the charge of a request that attaches: it counts as a read. Raises RateLimited."""
        if lease is not UNLIMITED:  # else its read was charged by its head, or it has no limits
            self.charge_read(caller)
        lease.withdraw()

    def _placed(self, chat: ChatRequest, caller: Caller, head: Head) -> ChatRequest:
        isolated = self._runtime.settings.isolation == "owner"
        resumable = chat.conversation_id is not None if head.resumable is None else head.resumable
        placed = with_priority_and_salt(chat, caller.key, isolated=isolated, resumable=resumable)
        return replace(placed, traceparent=head.traceparent) if head.traceparent else placed

    async def _begin(
        self, chat: ChatRequest, key: Key | None, lease: Lease, endpoint: AnswerEndpoint, *, streaming: bool
    ) -> TokenStream:
        """The stream of a new generation within the limits of its key. Raises RateLimited, Unavailable."""
        runtime = self._runtime
        allowance = await runtime.budgets.check(key, chat.request_id)
        # Admitted uncharged to attach to a stream that is gone by now, or its key has no limits.
        if lease is UNLIMITED:
            lease = runtime.limiter.begin(key)
        with _returned_on_error(lease):
            lease.charge(chat)
            # A whole answer needs its beginning too, and no reader frees its ring.
            limit_bytes = None if streaming else self._nonstream_bytes
            wire = endpoint.make_wire(chat)
            stream = runtime.streams.create(chat, wire, limit_bytes=limit_bytes, unseen=not streaming)
        serving = runtime.pipeline.serve(chat, stream, key=key, lease=lease, allowance=allowance)
        runtime.streams.run(stream, serving)
        return stream

    @contextlib.contextmanager
    def _named(self, request: Request, stream: TokenStream, *, several: bool) -> Iterator[None]:
        """Errors of a stream say whose they are: its id, how it was served, the caller's own parameter."""
        scope, sent = request.scope, stream.request
        scope[STREAM_ID], scope[RESPONSE_HEADERS] = sent.request_id, sent.placement.response_headers
        try:
            yield
        except Overloaded:
            scope[RESPONSE_HEADERS] = {**scope[RESPONSE_HEADERS], **self._selector.note_refusal(sent.model)}
            raise
        except ServingError as error:
            if not several:  # else it is that of a prompt, which names itself
                error.with_caller_param(sent.caller_names)
            raise

    async def _answer_all(
        self,
        first: TokenStream,
        extra_prompts: Sequence[ChatRequest],
        client: Client,
        caller: Caller,
        endpoint: AnswerEndpoint,
    ) -> OpenedStream:
        """The whole answer to several prompts. Raises what one of them was refused with.

        Each is a request of its own in the key's limits and in the ledger. At the end their streams are
        forgotten, because their caller knows the id of the first alone.
        """

        async def begin(chat: ChatRequest) -> TokenStream:
            return await self._begin(chat, caller.key, UNLIMITED, endpoint, streaming=False)

        prompts = SeveralPrompts(first, extra_prompts, begin, endpoint.new_id)
        client.on_gone(prompts.leave)
        try:
            return OpenedStream(first, client, answer=endpoint.render(await prompts.answered()))
        finally:
            client.stop()
            for stream in prompts.begun:
                with contextlib.suppress(StorageUnavailable):  # the retention's end erases them too
                    await self.forget(stream)

    # Clients that return

    async def wait_for_tick(self, caller: Caller) -> None:
        """Wait as a request does whose body has arrived."""
        await self._bodies.wait_for_tick(caller.owner)

    def charge_read(self, caller: Caller) -> None:
        """Charge a read of the store. Raises RateLimited."""
        self._runtime.reads.charge(caller.owner, caller.key)

    async def find(
        self,
        caller: Caller,
        request_id: str,
        endpoint: AnswerEndpoint,
        after: int = 0,
        *,
        continues: bool = True,
    ) -> TokenStream:
        """The caller's stream, in memory, continued or as stored.

        Raises NotFound, and as `ContinuedStreams.find_or_continue`.
        """
        owner = caller.owner
        if request_id.startswith(endpoint.id_prefix):
            if (stream := self._runtime.streams.find(request_id, owner)) is not None:
                return stream
            self.charge_read(caller)
            async with self._runtime.reads.slot(owner):
                stream = await self._continued.find_or_continue(
                    owner, request_id, endpoint.make_wire, after, continues=continues
                )
            if stream is not None:
                return stream
        raise NotFound(
            f"No stream {request_id!r}: it does not exist, is not yours, or was not stored and ended"
            f" more than {self._runtime.settings.retention_s:g} s ago.",
            code="stream_not_found",
        )

    async def events(
        self, stream: TokenStream, client: Client, after: int = 0, *, resumable: bool
    ) -> OpenedStream:
        """A reader of the events after `after`, once the request is admitted.

        Until then a client that leaves, and cannot return, stops the request, unless others wait for it too.
        """
        reader = stream.attach(after)
        stream.note_seen()
        if not resumable:
            client.on_gone(lambda: self._runtime.streams.leave(stream, reader, grace_s=0.0))
        try:
            await stream.status_sent()
        except BaseException:
            reader.close()
            client.stop()
            raise
        # Once admitted, a client that leaves has its grace (app.stream.registry).
        client.on_gone(lambda: None)
        return OpenedStream(stream, client, reader)

    async def answer(
        self, stream: TokenStream, client: Client, endpoint: AnswerEndpoint, *, resumable: bool
    ) -> OpenedStream:
        """The whole answer, once it has ended; a client that leaves for good stops it at once."""
        reader, streams = stream.attach(), self._runtime.streams
        grace_s = None if resumable else 0.0
        client.on_gone(lambda: streams.leave(stream, reader, grace_s=grace_s))
        try:
            await stream.status_sent()
            await stream.ended()
        finally:
            client.stop()
            streams.leave(stream, reader, grace_s=grace_s)
        return OpenedStream(stream, client, answer=endpoint.render([stream]))

    def leave(self, opened: OpenedStream) -> None:
        """Note that the client of an event stream has left it, or has received all of it."""
        if opened.reader is not None:
            self._runtime.streams.leave(opened.stream, opened.reader)

    async def forget(self, stream: TokenStream) -> None:
        """Stop a stream and delete its text. Raises StorageUnavailable."""
        self._runtime.streams.delete(stream)
        await self._runtime.archive.erase(stream.request.owner, stream.request_id)


@contextlib.contextmanager
def _returned_on_error(lease: Lease) -> Iterator[None]:
    """If a request fails, its tokens are given back and it still counts in requests a minute.

    If the server has no room (Unavailable), it does not count.
    """
    try:
        yield
    except Unavailable:
        lease.withdraw()
        raise
    except BaseException:
        lease.release({})
        raise
