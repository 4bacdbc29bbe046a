"""The conversation routes: list and search, look at, rename, delete, restore, take away, bring in."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from app.api.openai.listing import check_names, json_response, limit_of, page_of
from app.api.schema.fields import check_size, missing, read
from app.api.schema.imported import TITLE, parse_import
from app.errors import BadRequest, StorageUnavailable, unknown_parameter
from app.intake.bodies import BodyReader
from app.intake.caller import Caller
from app.runtime import Runtime
from app.store import conversation_list, imported, indexing
from app.store.conversation_view import MessagePage, Outline, page
from app.store.export import FORMATS, VIEW, Format, file_name
from app.stream.transcript import build_messages

MAX_QUERY = 1000
"""Characters of a search."""


class ConversationRoutes:
    """Handlers of `/api/conversations`. Another owner's conversation is not found."""

    def __init__(self, runtime: Runtime, bodies: BodyReader) -> None:
        self._database = runtime.database
        self._streams = runtime.streams
        self._reads = runtime.reads
        self._settle_suspended = runtime.suspensions.settle_conversation
        self._bodies = bodies

    async def list(self, request: Request, caller: Caller) -> Response:
        """GET: newest first, a page at a time, those that match `q` if it says something."""
        check_names(request, ("limit", "cursor", "q"))
        query = request.query_params
        limit, cursor, words = limit_of(request), query.get("cursor"), query.get("q", "")
        check_size("q", len(words), 0, MAX_QUERY, "characters")
        words = words.strip()
        if words:
            with contextlib.suppress(StorageUnavailable):  # then what is in the index is found
                await indexing.index_all(self._database)
        listed = await self._database.read(
            lambda c: conversation_list.page(c, caller.owner, limit, cursor, words=words)
        )
        in_progress = self._streams.conversations_in_progress(caller.owner)
        for entry in listed.conversations:
            entry["in_progress"] = entry["id"] in in_progress
        return json_response(page_of(listed.conversations, listed.next_cursor))

    async def view(self, request: Request, caller: Caller) -> Response:
        """GET {id}: all messages of all branches, with what a live answer has said so far."""
        outline = await self._outline(request, caller, VIEW)
        return await self._written(caller.owner, outline, VIEW)

    async def create(self, request: Request, caller: Caller) -> Response:
        """POST: store a conversation that was held elsewhere, as large as one that a request may hold."""
        owner = caller.owner
        body = await self._bodies.read(request, owner, self._bodies.limit_bytes)  # its turns are screened
        conversation = await body.parse_as(lambda sent: parse_import(sent, owner))
        async with self._reads.slot(owner):  # so that nobody's imports fill the writer's queue
            stored = await self._database.write(lambda c: imported.add(c, conversation))
        return json_response(stored, 201)

    async def rename(self, request: Request, caller: Caller) -> Response:
        """PATCH {id}: another title."""
        owner, conversation_id = caller.owner, request.path_params["id"]
        body = await self._bodies.read(request, owner)
        title = _new_title(await body.parse())
        at_us = time.time_ns() // 1000
        return json_response(
            await self._database.write(
                lambda c: conversation_list.rename(c, owner, conversation_id, title, at_us=at_us)
            )
        )

    async def delete(self, request: Request, caller: Caller) -> Response:
        """DELETE {id}: hide it at once, and stop what is being answered in it."""
        owner, conversation_id = caller.owner, request.path_params["id"]
        at_us = time.time_ns() // 1000
        await self._database.write(lambda c: conversation_list.delete(c, owner, conversation_id, at_us))
        self._streams.delete_conversation(conversation_id)
        await self._settle_suspended(owner, conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def restore(self, request: Request, caller: Caller) -> Response:
        """POST {id}/restore: undo the deletion."""
        owner, conversation_id = caller.owner, request.path_params["id"]
        return json_response(
            await self._database.write(lambda c: conversation_list.restore(c, owner, conversation_id))
        )

    async def export(self, request: Request, caller: Caller) -> Response:
        """GET {id}/export: a file, JSON with all branches or Markdown of the newest."""
        check_names(request, ("format",))
        form = request.query_params.get("format", "json")
        if form not in FORMATS:
            raise BadRequest(f"format must be one of {', '.join(FORMATS)}, got {form!r}.", param="format")
        outline = await self._outline(request, caller, FORMATS[form])
        name = file_name(outline.conversation, form)
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return await self._written(caller.owner, outline, FORMATS[form], headers)

    async def _outline(self, request: Request, caller: Caller, layout: Format) -> Outline:
        owner, conversation_id = caller.owner, request.path_params["id"]
        return await self._database.read(lambda c: layout.outline(c, owner, conversation_id))

    async def _written(
        self, owner: str, outline: Outline, layout: Format, headers: Mapping[str, str] | None = None
    ) -> Response:
        """A whole response where a page holds all; else a page is read once the last was sent.

        Each of these pages waits for its own slot at the store: the handler's ends with the first.
        """
        first = await self._page(owner, outline, 0)
        chunks = self._chunks(owner, outline, layout, first)
        if first.next_start is not None:
            return StreamingResponse(chunks, media_type=layout.media_type, headers=headers)
        body = b"".join([chunk async for chunk in chunks])
        return Response(body, media_type=layout.media_type, headers=headers)

    async def _chunks(
        self, owner: str, outline: Outline, layout: Format, page: MessagePage
    ) -> AsyncIterator[bytes]:
        yield layout.head(outline)
        separator = b""
        while True:
            if page.messages:
                yield separator + await asyncio.to_thread(layout.render, page.messages)
                separator = layout.separator
            if page.next_start is None:
                break
            async with self._reads.slot(owner):  # the first page's, where it had one, is over
                page = await self._page(owner, outline, page.next_start)
        yield layout.tail

    async def _page(self, owner: str, outline: Outline, start: int) -> MessagePage:
        shown = await self._database.read(lambda c: page(c, outline, start))
        for message in shown.messages:
            if message["status"] == "in_progress":
                self._fill(message, owner)
        return shown

    def _fill(self, message: dict[str, Any], owner: str) -> None:
        """Put in what a live answer has said."""
        stream = self._streams.find(message["request_id"], owner)
        if stream is not None:
            live = build_messages(*stream.in_ring()).get(message["choice"])
            message |= live.message if live is not None else {}


def _new_title(body: Mapping[str, Any]) -> str:
    """The title in a body. Raises BadRequest."""
    for name in body.keys() - {"title"}:
        raise unknown_parameter(name, advice="only title can be changed")
    if "title" not in body:
        raise missing("title")
    title: str = read(body["title"], "title", TITLE)
    if not title.strip():
        raise BadRequest("title must not be empty.", param="title")
    return title
