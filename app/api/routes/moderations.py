"""POST /api/moderations and /v1/moderations: texts classified by this server's screens, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.http.auth import Caller, Gatekeeper
from app.api.http.bodies import ROOM_BYTES, BodyReader
from app.api.http.client import Client
from app.api.schema.parameters import check_kind, quoted
from app.api.schema.values import check_moderation_model
from app.errors import BadRequest, SafetyUnavailable, Unavailable, UnsupportedParameter
from app.messages import content_text
from app.metering.estimate import texts_estimate
from app.metering.limiter import Lease, Limiter
from app.metering.lines import Lines
from app.safety import moderation
from app.safety.prompt.moderator import Moderator
from app.safety.prompt.prompt_screen import QUICK_CHARS

MAX_INPUTS = 1_024
MAX_CHARS = 1_000_000
"""Characters of all inputs together; a thread screens as many in some ten seconds."""
MAX_BYTES = ROOM_BYTES + 6 * MAX_CHARS
"""Bytes of a body: in JSON's ASCII a letter takes up to six."""
LONG_AT_ONCE = 1
SHORT_AT_ONCE = 2
"""Texts at the screen at the same time. Chat shares its thread, and waits for so many slices at most, of
different callers; what is read whole in a slice or two does not wait for what takes seconds."""
MAX_WAITING = 256
"""Requests of a caller in progress: pipelines send hundreds of short ones at once."""
MAX_WAITING_TOTAL = 1_024


class ModerationRoutes:
    """The handler of both routes."""

    def __init__(
        self, moderator: Moderator | None, limiter: Limiter, bodies: BodyReader, gatekeeper: Gatekeeper
    ) -> None:
        """`moderator` is None with `safety` off."""
        self._moderator = moderator
        self._limiter = limiter
        self._bodies = bodies
        self._gatekeeper = gatekeeper
        self._lines = Lines("moderations", MAX_WAITING, MAX_WAITING_TOTAL)
        self._long, self._short = asyncio.Semaphore(LONG_AT_ONCE), asyncio.Semaphore(SHORT_AT_ONCE)

    async def create(self, request: Request) -> Response:
        """Classify each input as the prompt that it would be.

        Raises RateLimited, SafetyUnavailable where nothing can be classified.
        """
        caller = self._gatekeeper.caller(request)
        lease = self._limiter.begin(caller.key, generates=False)
        try:
            results = await self._read_and_classify(request, caller, lease)
        except Unavailable:
            lease.withdraw()
            raise
        answer_id = f"modr-{secrets.token_hex(14)}"
        return JSONResponse({"id": answer_id, "model": moderation.MODEL, "results": results})

    async def _read_and_classify(
        self, request: Request, caller: Caller, lease: Lease
    ) -> list[moderation.Result]:
        client = Client(request.receive)
        raw = await self._bodies.read(request, client, caller.owner, MAX_BYTES)
        texts = await self._bodies.parse_as(request, raw, parse_moderation)
        if self._moderator is None:
            raise SafetyUnavailable("This server runs with safety off: nothing is classified.")
        lease.reserve_tokens(texts_estimate(texts, self._limiter.count_text))
        level = None if caller.key is None else caller.key.terms.safety
        judge = partial(self._moderator.result, level=level, owner=caller.owner)
        with self._lines.enter(caller.owner) as turn:
            return await client.while_here(self._results(judge, texts, turn), "moderation")

    async def _results(
        self,
        judge: Callable[[str], Awaitable[moderation.Result]],
        texts: Sequence[str],
        turn: asyncio.Lock,
    ) -> list[moderation.Result]:
        """A result for each text; callers take turns, text by text."""
        results = []
        for text in texts:
            slots = self._short if len(text) <= QUICK_CHARS else self._long
            async with turn, slots:
                results.append(await judge(text))
            await asyncio.sleep(0)  # what is known already is found without waiting
        return results


def parse_moderation(body: Mapping[str, Any]) -> list[str]:
    """The texts to classify. Raises BadRequest, UnknownModel, UnsupportedParameter naming the place."""
    values = {name: value for name, value in body.items() if value is not None}
    for name in values.keys() - {"input", "model"}:
        raise UnsupportedParameter(
            f"Unknown parameter {quoted(name)}; remove it.", code="unknown_parameter", param=name
        )
    check_moderation_model(values.get("model", moderation.MODEL), "model")
    if "input" not in values:
        raise BadRequest("input is required.", code="missing_parameter", param="input")
    texts = _texts(values["input"])
    total = sum(map(len, texts))
    if total > MAX_CHARS:
        raise BadRequest(
            f"input has {total:,} characters, and at most {MAX_CHARS:,} are taken; send several requests.",
            param="input",
        )
    return texts


def _texts(values: Any) -> list[str]:
    """A string, an array of them, or the parts of one message, which are one text."""
    check_kind("input", values, str, list)
    if isinstance(values, str):
        return [values]
    if not values:
        raise BadRequest("input must hold at least one text.", param="input")
    if len(values) > MAX_INPUTS:
        raise BadRequest(f"input takes at most {MAX_INPUTS:,} entries, got {len(values):,}.", param="input")
    if isinstance(values[0], dict):
        for i, content_part in enumerate(values):
            _check_part(f"input[{i}]", content_part)
        return [content_text(values)]
    for i, text in enumerate(values):
        check_kind(f"input[{i}]", text, str)
    return list(values)


def _check_part(where: str, content_part: Any) -> None:
    """Raise BadRequest for a part that is no text."""
    check_kind(where, content_part, dict)
    check_kind(f"{where}.type", content_part.get("type"), str)
    if content_part["type"] != "text":
        raise BadRequest(
            f"{where}.type is {quoted(content_part['type'])}: this server classifies text, and no images;"
            " send text parts.",
            code="unsupported_content",
            param=f"{where}.type",
        )
    check_kind(f"{where}.text", content_part.get("text"), str)
